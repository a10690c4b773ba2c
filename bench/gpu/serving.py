"""Streams that move while they decode, between two vLLM engines of one `kvmig.serve` on one GPU, or
on two where there are two: a Qwen3-0.6B with random weights, blocks by CUDA IPC, as `auto` chooses;
alone, then with 8 more streams on each engine.

Each stream goes to the other instance and back, some times; then the same one stays. wrong: tokens
or log-probabilities of the two differ. switch: how long the client waits for the first token of
the destination, beside the usual time between two tokens.

$VLLM_USE_V2_MODEL_RUNNER chooses vLLM's model runner (0: V1, 1: V2). It needs a vLLM that kvmig
supports, with CUDA; without vLLM it is skipped.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from bench.gpu.device import SKIPPED, Deadline, note_gpu, options_of
from bench.report import Result, begin, dumps, finish, say, table
from kvmig.core.errors import KvmigError, StartupError

if TYPE_CHECKING:
    from kvmig_tools.nursery import Nursery

TOKENS = (512, 8192, 16384)
LOADS = (0, 8)
MOVES = 6
MOST_S = 130.0
"""Without the start of the server."""
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
FLAGS = (
    "--instances=2",
    "--policy=round-robin",  # nothing moves by itself
    "--no-enable-prefix-caching",  # else nothing of a prompt moves a second time
    "--shutdown-timeout=2",
)
ON_GPU = ("--max-model-len=24576", "--kv-cache-memory-bytes=4G")
TARGETS = {
    "wrong": {"max": 0.0},
    "by_cuda_ipc": {"min": 1.0},
    "switch_over_inter_token_most": {"max": 2.0},
}


def missing() -> str:
    """Why there is no vLLM; empty if there is one."""
    if find_spec("vllm") is None:
        return "vLLM is not installed"
    # Not before: they import msgspec, which comes with vLLM.
    from kvmig.engines.vllm.kind import check_version

    try:
        check_version()
    except StartupError as error:
        return str(error)
    return ""


def measure(
    result: Result, options: argparse.Namespace, flags: Sequence[str], nursery: Nursery | None
) -> None:
    """Into the result, whose file is written after each length. Raises KvmigError, StreamFailed."""
    import uvloop

    from bench.gpu.streams import compared
    from bench.models import model_folder
    from kvmig_tools.served import SMALL, Served

    settings = result.settings
    settings["flags"] = [*FLAGS, *(flags or (ON_GPU if options.device == "cuda" else SMALL))]

    async def take(served: Served) -> None:
        deadline = Deadline(MOST_S)
        async for sample in compared(
            served, settings["lengths"], settings["moves"], settings["loads"]
        ):
            result.samples.append(sample)
            say(f"{sample['tokens']} tokens, {sample['load']} more streams: {sample}")
            record(result, options)
            if deadline.over(result):
                return

    with tempfile.TemporaryDirectory() as logs:
        model, log = model_folder(settings["model"]), Path(logs, "served")
        with Served(settings["flags"], model=model, log=log, nursery=nursery) as served:
            uvloop.run(take(served))


def record(result: Result, options: argparse.Namespace) -> None:
    """The summary of what is there, and the file."""
    found = [sample for sample in result.samples if "switch_ms" in sample]
    alone = [sample for sample in found if not sample["load"]]
    by_cuda_ipc = [sample["transport"] == "cuda-ipc" for sample in found]
    result.summary = {
        "wrong": float(sum(sample["wrong"] for sample in found)),
        "by_cuda_ipc": fmean(by_cuda_ipc),
        "switch_over_inter_token_most": max(
            sample["switch_ms"] / sample["inter_token_ms"] for sample in alone
        ),
        "switch_ms_longest": alone[-1]["switch_ms"],
        "inter_token_ms": found[0]["inter_token_ms"],
    }
    write(result, options)


def write(result: Result, options: argparse.Namespace) -> None:
    """The file, of what is there so far."""
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(dumps(result))


def skipped(result: Result, options: argparse.Namespace, reason: str) -> int:
    """Exit status of a part for which something isn't installed, which its file says."""
    say(f"skipped: {reason}")
    result.samples.append({"skipped": reason})
    return finish(result, options) or SKIPPED


def main(
    arguments: list[str] | None = None,
    flags: Sequence[str] = (),
    nursery: Nursery | None = None,
) -> int:
    """flags: of the server, in place of those for its device; nursery: where it is forked."""
    options = options_of(__doc__, arguments)
    on_gpu = options.device == "cuda"
    quick = options.quick or not on_gpu
    settings = {
        "device": options.device,
        "model": "count" if quick else "qwen3-0.6b",
        "runner": os.environ.get(RUNNER, ""),
        "lengths": [64, 256] if quick else list(TOKENS),
        "moves": 2 if options.quick else MOVES,
        "loads": [0, 2] if quick else list(LOADS),
    }
    result = begin("gpu serving", settings)
    note_gpu(result)
    if reason := missing():
        return skipped(result, options, reason)
    result.targets = dict(TARGETS) if on_gpu else {"wrong": TARGETS["wrong"]}
    failed = False
    try:
        measure(result, options, flags, nursery)
    except (KvmigError, RuntimeError, OSError) as error:
        failed = True
        result.samples.append({"failed": f"{type(error).__name__}: {error}"})
        say(str(error))
    names = ("tokens", "load", "inter_token_ms", "wrong", "switch_ms", "total_ms", "transport")
    found = [sample for sample in result.samples if "switch_ms" in sample]
    rows = [tuple(one[name] for name in names) for one in found]
    columns = ("tokens", "more", "a token", "wrong", "the switch", "whole migration", "by")
    shown = table("streams that move between two vLLM engines, ms", columns, rows)
    return finish(result, options, [shown]) or int(failed)


if __name__ == "__main__":
    sys.exit(main())
