"""The bytes that vLLM may take by the fleet's order, on a host whose GPUs differ in size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvmig.core.devices import GIB, DeviceInventory, DeviceRecord
from kvmig.fleet.deployment_words import gpu_words
from kvmig.fleet.device_budget import DeviceBudget
from kvmig.fleet.device_watch import DeviceWatch
from kvmig.fleet.spec import ModelSpec
from kvmig.launcher.flags import parse
from kvmig.launcher.gpu_division import OUTSIDE, divide
from kvmig.launcher.gpu_starts import EngineMemory, GpuStarts
from kvmig.launcher.launch import LlumletLaunch
from kvmig.launcher.shapes import own_gpus

SMALL, LARGE = 24 * GIB, 80 * GIB
WORKING = 2 * GIB
"""What such an engine takes beside its KV cache."""
STEP = LARGE // 10_000
"""A share has four digits."""
GPUS = tuple(
    DeviceRecord(id=str(at), index=at, uuid=f"GPU-{at}", name="GPU", total=total)
    for at, total in enumerate((SMALL, LARGE))
)


class FakeEngine:
    """Takes of a GPU what vLLM takes by its flags, in bytes."""

    def __init__(self, words: list[str], total: int) -> None:
        pairs = "=".join(["", *words]).split("=--")[1:]
        given = dict(one.split("=") for one in pairs)
        self.share = float(given.get("gpu-memory-utilization", 0.92))
        size = given.get("kv-cache-memory-bytes")
        self.kv = int(self.share * total) - WORKING if size is None else int(size)
        self.bytes = WORKING + self.kv + OUTSIDE


async def taken(tmp_path: Path, **more: Any) -> tuple[int, list[FakeEngine]]:
    """The claim of a model, and what its two instances take, one on each GPU."""
    watch = DeviceWatch(read=lambda: DeviceInventory(devices=GPUS))
    watch.read_sample()
    spec = ModelSpec(name="a", source="path:/a", **more)
    claim = DeviceBudget(watch).claim(spec)
    assert claim is not None
    words = gpu_words(spec, claim, [["0"], ["1"]])
    config, rest, _ = parse([*words, "--instances=2"])
    lifecycle = config.lifecycle
    division = divide(
        GPUS, {"i0": 1, "i1": 1}, lifecycle.gpu_memory, own_gpus(config.instance_gpus, 2),
        each=lifecycle.instance_gpu_memory,
    )  # fmt: skip
    read = DeviceInventory(devices=GPUS)
    starts = GpuStarts(division, EngineMemory(divides=True), read=lambda: read, turns=tmp_path)
    found = []
    for at, gpu in enumerate(GPUS):
        launch = LlumletLaunch(
            cluster="c", instance=f"i{at}", secret=b"s", config=config, engine_argv=rest
        )
        start = await starts.begin(launch, 1)
        engine = FakeEngine([*start.flags, *rest], gpu.total)
        start.serves(engine.kv)
        start.end()
        found.append(engine)
    return claim.each, found


@pytest.mark.parametrize("each", [10 * GIB, 20 * GIB])
async def test_an_instance_takes_the_bytes_that_it_claims_on_a_small_gpu_as_on_a_large_one(
    tmp_path: Path, each: int
) -> None:
    claim, engines = await taken(tmp_path, gpu_memory=each)
    assert claim == each
    for one in engines:
        assert each - STEP <= one.bytes <= each


async def test_an_estimate_is_the_same_bytes_on_each_gpu_too(tmp_path: Path) -> None:
    claim, engines = await taken(tmp_path)
    assert claim == LARGE // 4 + 3 * GIB
    assert all(claim - STEP <= one.bytes <= claim for one in engines)
