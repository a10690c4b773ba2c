"""The pause, and where a stage's time goes, between two vLLM engines of one `kvmig.serve` on one
GPU, or on two where there are two: a model in the shape of Llama-3-8B with dummy weights.

pause: `bench.pause`'s moves, alone and with 8 more streams on each engine: gaps in steps, parts of
the pause. stage: a stream of a long prompt moves once, alone, then beside the same streams: GB/s of
its largest stage, chunk by chunk in a picture beside the result (`kvmig_tools.stage_picture`).

$VLLM_USE_V2_MODEL_RUNNER chooses the model runner. With $KVMIG_BENCH_MPS=1 an MPS daemon runs
meanwhile; without `nvidia-cuda-mps-control` that is skipped, as all of it without vLLM.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.gpu.device import Deadline, note_gpu, options_of
from bench.gpu.serving import RUNNER, missing, skipped, write
from bench.gpu.sharing import MPS, MPS_CONTROL, mps
from bench.report import Result, begin, finish, say
from kvmig.core.errors import KvmigError

if TYPE_CHECKING:
    import aiohttp

    from bench.pause import PauseSample
    from kvmig_tools.nursery import Nursery
    from kvmig_tools.served import Served

MOST_S = 130.0
"""Without the start of the server."""
FLAGS = ("--instances=2", "--policy=round-robin", "--shutdown-timeout=2")
ON_GPU = (
    "--load-format=dummy", "--max-model-len=16384", "--kv-cache-memory-bytes=8G",
    "--gpu-memory-utilization=0.45",
)  # fmt: skip
STAGE_GB_S = 60.0
"""What a stage should reach beside engines that decode."""


async def largest_stage(
    served: Served, http: aiohttp.ClientSession, settings: dict[str, Any], load: int
) -> tuple[dict[str, Any], str]:
    """Move a long stream once; a sample of its largest stage, and the picture. Raises
    StreamFailed."""
    import msgspec

    from bench.client import prompt_of
    from bench.site import SETTLE, Site
    from kvmig.kvtransfer.report import StageReport
    from kvmig_tools.stage_picture import picture_of

    site = Site(served, http)
    async with AsyncExitStack() as stack:
        await site.background(stack, load, ("stage", load))
        # A salt of its own: else the destination would have its blocks from the one before.
        prompt = prompt_of(settings["long"], "stage")
        stream = site.stream(prompt, f"stage {load}", settings["tokens"])
        await stack.enter_async_context(stream)
        await stream.reach(SETTLE)
        report = await site.migrate(stream, await site.other_than(stream))
    largest = max(msgspec.convert(report["stages"], list[StageReport]), key=lambda one: one.bytes)
    title = f"{settings['long']} tokens by {report['transport']}, {load} more streams an engine"
    sample = {
        "what": "stage", "load": load, "transport": report["transport"], "bytes": largest.bytes,
        "ms": largest.ms, "gb_s": largest.bytes / largest.ms / 1e6,
        "parts": msgspec.to_builtins(largest.parts),
    }  # fmt: skip
    return sample, picture_of(largest, title)


def keep_picture(options: argparse.Namespace, load: int, text: str) -> None:
    """Beside the result; nowhere, if that has no file."""
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        name = f"{options.out.stem}-stage-{load}.svg"
        options.out.with_name(name).write_text(text, encoding="utf-8")


async def measure(served: Served, result: Result, options: argparse.Namespace) -> None:
    """Into the result, whose file is written after each stream. Raises StreamFailed."""
    from bench.client import session
    from bench.pause import COLD, HERE, MOVES, Tree

    settings, deadline = result.settings, Deadline(MOST_S)
    found: list[PauseSample] = []
    async with session() as http:
        tree = Tree(HERE, served, http)
        found += await tree.one_stream(0, -1, COLD)
        for load in settings["loads"]:
            sample, picture = await largest_stage(served, http, settings, load)
            result.samples.append(sample)
            keep_picture(options, load, picture)
            say(f"a stage of {sample['gb_s']:.2f} GB/s, {load} more streams on each engine")
        wrong = await tree.wrong(0, MOVES)
        for number in range(-(-settings["moves"] // MOVES)):
            for load in settings["loads"]:
                found += await tree.one_stream(load, number, MOVES)
                record(result, options, found, wrong)
            if deadline.over(result):
                return


def record(
    result: Result, options: argparse.Namespace, found: Sequence[PauseSample], wrong: int
) -> None:
    """The summary of what is there, and the file."""
    from bench.pause import HERE, summarise

    stages = [one for one in result.samples if one.get("what") == "stage"]
    others = [one for one in result.samples if one.get("what") != "pause"]
    result.samples = [*others, *({"what": "pause", **asdict(one)} for one in found)]
    result.summary, targets = summarise(found, {HERE: wrong})
    result.summary |= {f"stage_gb_s_{one['load']}": float(one["gb_s"]) for one in stages}
    for one in stages:
        # What the stage would do if neither GPU waited for a host.
        copies = (one["parts"][f"{what}_device"] or 0.0 for what in ("gather", "scatter"))
        if device_ms := max(copies):
            result.summary[f"stage_gpu_gb_s_{one['load']}"] = one["bytes"] / device_ms / 1e6
    if options.device == "cuda":
        stage = {f"stage_gb_s_{one['load']}": {"min": STAGE_GB_S} for one in stages}
        result.targets = targets | stage
    write(result, options)


def main(
    arguments: list[str] | None = None,
    flags: Sequence[str] = (),
    nursery: Nursery | None = None,
) -> int:
    """flags: of the server, in place of those for its device; nursery: where it is forked."""
    options = options_of(__doc__, arguments)
    on_gpu, by_mps = options.device == "cuda", os.environ.get(MPS) == "1"
    quick = options.quick or not on_gpu
    settings: dict[str, Any] = {
        "device": options.device,
        "model": "count" if quick else "llama-3-8b",
        "runner": os.environ.get(RUNNER, ""),
        "mps": by_mps,
        "long": 512 if quick else 8192,
        "tokens": 400 if quick else 4000,
        "moves": 8 if quick else 100,
        "loads": [0, 1] if quick else [0, 8],
    }
    result = begin("gpu pause", settings)
    note_gpu(result)
    if reason := missing():
        return skipped(result, options, reason)
    if by_mps and shutil.which(MPS_CONTROL) is None:
        return skipped(result, options, f"{MPS_CONTROL} is not installed")
    import uvloop

    from bench.models import LLAMA3_8B, model_folder, shape_folder
    from bench.pause import PauseSample, tables
    from kvmig_tools.served import SMALL, Served

    settings["flags"] = [*FLAGS, *(flags or (ON_GPU if on_gpu else SMALL))]
    model = model_folder("count") if quick else shape_folder("llama-3-8b", LLAMA3_8B)
    failed = False
    try:
        with tempfile.TemporaryDirectory() as logs, mps(by_mps) as environment:
            log = Path(logs, "served")
            with Served(
                settings["flags"], model=model, log=log, nursery=nursery, environment=environment
            ) as served:
                uvloop.run(measure(served, result, options))
    except (KvmigError, RuntimeError, OSError, subprocess.SubprocessError) as error:
        failed = True
        result.samples.append({"failed": f"{type(error).__name__}: {error}"})
        say(str(error))
    pauses = [one for one in result.samples if one.get("what") == "pause"]
    found = [PauseSample(**{k: v for k, v in one.items() if k != "what"}) for one in pauses]
    return finish(result, options, tables(found) if found else ()) or int(failed)


if __name__ == "__main__":
    sys.exit(main())
