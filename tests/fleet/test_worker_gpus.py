"""The bytes of workers' GPUs, which Ray gives out and the fleet counts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from kvmig.core.devices import DeviceRecord
from kvmig.core.errors import ConfigError
from kvmig.fleet.instance_orders import PAUSE_S
from kvmig.fleet.spec import InstanceCounts, ModelSpec
from kvmig.launcher.node_reports import NodeMeasure, NodeReport
from tests.support.made_up_nodes import GIB, made_up_node
from tests.support.model_bench import silence
from tests.support.worker_bench import A, B, WorkerBench, row

ENGINE: dict[str, Any] = {"engine": "vllm", "gpu_memory": 20 * GIB}


def node(letter: str, *used: int, total: int = 40 * GIB, memory: int = 4 * GIB) -> NodeReport:
    """A node whose GPUs have so many bytes taken."""
    uuids = [f"GPU-{letter}{at}" for at in range(len(used))]
    devices = tuple(
        DeviceRecord(
            id=str(at), index=at, uuid=uuids[at], name="GPU", total=total, used=size,
            peers=tuple(one for one in uuids if one != uuids[at]),
        )
        for at, size in enumerate(used)
    )  # fmt: skip
    amounts = {"CPU": 4.0, "GPU": float(len(used))}
    measured = NodeMeasure(memory_total=memory, memory_free=memory, devices=devices)
    return made_up_node(letter, measured=measured, total=amounts, free=amounts)


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[WorkerBench]:
    silence(monkeypatch)  # what a deployment tells, the test says
    made = WorkerBench(tmp_path)
    yield made
    await made.models.close()


async def test_a_worker_whose_gpu_others_have_filled_is_refused_in_bytes(
    bench: WorkerBench,
) -> None:
    bench.see(node("a", 30 * GIB), node("b", 10 * GIB))
    bench.add(**ENGINE)
    assert f"--instance-node=i0: {B}" in bench.start.words
    (refused,) = (one for one in bench.models.why_not(bench.model).nodes if one.node == "worker-a")
    (why,) = refused.refusals
    assert (why.filter, why.need_bytes, why.free_bytes) == ("gpu_memory", 20 * GIB, 10 * GIB)


async def test_weights_and_kv_cache_are_not_counted_in_the_nodes_memory(
    bench: WorkerBench,
) -> None:
    """A node of 4 GiB would be refused for a KV cache of 30 GiB."""
    bench.see(node("a", 0))
    bench.add(engine="vllm", flags=("--kv-cache-memory-bytes", str(30 * GIB)))
    assert f"--instance-node=i0: {A}" in bench.start.words


async def test_the_launcher_gets_no_gpu_by_name_and_ray_its_number(bench: WorkerBench) -> None:
    bench.see(node("a", 0, 0))
    bench.add(**ENGINE)
    words = bench.start.words
    assert '--ray-resources={"GPU":1.0}' in words
    assert not [one for one in words if one.startswith("--instance-gpus")]


async def test_the_gpu_that_ray_gave_counts_and_not_the_one_that_was_expected(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.see(node("a", 0, 0))
    bench.add(**ENGINE)
    assert list(bench.model.held) == ["GPU-a0"]
    bench.serve(monkeypatch, replace(row("i0", A), gpus=("1",)))
    assert bench.model.held == {"GPU-a1": 20 * GIB}


@pytest.mark.parametrize("seen", ["lost", "silent", "joining", "none"])
async def test_an_instance_whose_worker_is_not_seen_now_is_not_measured(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch, seen: str
) -> None:
    bench.see(node("a", 0))
    bench.add(**ENGINE)
    bench.serve(monkeypatch, replace(row("i0", A), gpus=("0",), pid=7))
    bench.turn()
    later = {
        "lost": [replace(node("a", 0), alive=False)],
        "silent": [replace(node("a", 0), silent_s=60.0)],
        "joining": [replace(node("a"), measured=None)],
        "none": [],
    }
    bench.see(*later[seen])
    bench.turn()
    assert bench.model.held == {"GPU-a0": 20 * GIB}


async def test_a_claim_is_the_same_bytes_on_workers_whose_gpus_differ_in_size(
    bench: WorkerBench,
) -> None:
    bench.see(node("a", 0, total=80 * GIB), node("b", 0, total=24 * GIB))
    bench.add(**ENGINE, instances=InstanceCounts(min=2, max=2))
    assert f"--instance-gpu-memory={20 * GIB}" in bench.start.words
    assert not [one for one in bench.start.words if one.startswith("--gpu-memory-utilization")]
    assert bench.model.held == {"GPU-a0": 20 * GIB, "GPU-b0": 20 * GIB}


async def test_another_instance_is_added_where_a_gpu_has_the_bytes(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.see(node("a", 0), node("b", 25 * GIB))
    bench.add(**ENGINE, instances=InstanceCounts(min=2, max=2))
    bench.turn()
    assert bench.model.life.state == "waiting"
    bench.see(node("a", 0), node("b", 15 * GIB))
    bench.turn(PAUSE_S)
    assert {f"--instance-node=i{at}: {one}" for at, one in enumerate((A, B))} <= {
        *bench.start.words
    }


OPEN: dict[str, Any] = {"tensor_parallel": "auto", "engine": "vllm"}


@pytest.mark.parametrize(("whole", "gpus"), [(30 * GIB, 1), (60 * GIB, 2), (130 * GIB, 4)])
async def test_the_fleet_chooses_how_many_gpus_of_a_worker_an_instance_has(
    bench: WorkerBench, whole: int, gpus: int
) -> None:
    used = 5 * GIB
    bench.see(node("a", used), node("b", used, used, used, used, memory=16 * GIB))
    bench.add(**OPEN, gpu_memory=whole)
    words = bench.start.words
    assert f"--tensor-parallel-size={gpus}" in words
    assert f'--ray-resources={{"GPU":{float(gpus)}}}' in words
    assert f"--instance-gpu-memory={whole // gpus}" in words
    assert gpus == 1 or f"--instance-node=i0: {B}" in words
    assert list(bench.model.held.values()) == [whole // gpus] * gpus


async def test_the_number_is_one_that_a_worker_with_the_models_labels_can_have(
    bench: WorkerBench,
) -> None:
    bench.see(node("a", 0, 0), node("b", 0, 0, 0, 0))
    own = {"worker": "worker-a"}
    bench.add(**OPEN, gpu_memory=60 * GIB, worker_selector=own)
    assert "--tensor-parallel-size=2" in bench.start.words
    assert f"--instance-node=i0: {A}" in bench.start.words


async def test_gpus_that_ray_has_given_to_others_are_no_room_for_the_number(
    bench: WorkerBench,
) -> None:
    busy = replace(node("a", 0, 0), free={"CPU": 4.0, "GPU": 1.0})
    used = 25 * GIB
    bench.see(busy, node("b", used, used, used, used, memory=16 * GIB))
    bench.add(**OPEN, gpu_memory=60 * GIB)
    assert "--tensor-parallel-size=4" in bench.start.words
    assert f"--instance-node=i0: {B}" in bench.start.words


async def test_a_model_that_no_number_has_room_for_says_why_of_each_worker(
    bench: WorkerBench,
) -> None:
    bench.see(node("a", 30 * GIB), node("b", 30 * GIB, 30 * GIB))
    bench.add(**OPEN, gpu_memory=60 * GIB)
    assert bench.model.life.state == "waiting"
    found = {one.node: one.refusals for one in bench.models.why_not(bench.model).nodes}
    assert [one.why for one in found["worker-a"]] == [
        "it has 1 GPU free of 2 GPU",
        "1 GPUs are there, it needs 2",
    ]
    (why,) = found["worker-b"]
    assert (why.filter, why.need_bytes, why.free_bytes) == ("gpu_memory", 30 * GIB, 10 * GIB)
    bench.see(node("a", 30 * GIB), node("b", 5 * GIB, 5 * GIB))
    bench.turn()
    assert "--tensor-parallel-size=2" in bench.start.words


async def test_the_number_of_gpus_and_rays_resources_are_not_given_both(
    bench: WorkerBench,
) -> None:
    bench.see(node("a", 0, 0))
    flags = ("--ray-resources", '{"GPU": 1}')
    open_spec = ModelSpec(name="a", source="path:/a", **OPEN, flags=flags)
    with pytest.raises(ConfigError, match=r"flags has --ray-resources .*, must not with tens"):
        bench.pool.check(open_spec)
    bench.pool.check(replace(open_spec, flags=()))


async def test_a_model_that_takes_no_gpu_needs_none(bench: WorkerBench) -> None:
    bench.see(node("a", 40 * GIB))
    bench.add(flags=("--ray-resources", '{"CPU": 1}'))
    assert f"--instance-node=i0: {A}" in bench.start.words


async def test_claims_are_computed_again_when_a_worker_with_gpus_joins(bench: WorkerBench) -> None:
    kv = ("--kv-cache-memory-bytes", str(30 * GIB), "--ray-resources", '{"GPU": 1}')
    bench.add(engine="vllm", flags=kv)
    assert bench.model.claim > 30 * GIB
    bench.see(node("a", 0))
    bench.turn()
    assert bench.model.claim < 4 * GIB
