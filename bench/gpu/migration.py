"""Requests that move while they decode, between two transformers engines in two processes on one
GPU: a LLaMA with the KV shape of LLaMA-7B and random weights, blocks by CUDA IPC.

live: the request decodes on while it is copied; blocking: it stands still; recompute: prompt and
outputs are computed anew at the other engine, as after a preemption. All are measured, as the
client's gap at the switch less its usual time between two tokens. Interference: gaps of other
requests at both engines while one is copied, over those just before.

It needs msgspec and a transformers that kvmig supports; without them it is skipped.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from statistics import fmean, median

import torch

from bench.gpu.device import SKIPPED, Deadline, note_gpu, options_of
from bench.report import Result, begin, dumps, finish, say, table
from kvmig.core.errors import KvmigError, StartupError
from kvmig.engines.transformers.versions import check_version

TOKENS = (256, 1024, 4096, 8192, 16384, 32768)
BLOCK_TOKENS = 16
BESIDE = 4096
"""Tokens that fit beside the longest prompt: of others, and what an engine keeps free."""
MOST_S = 90.0
"""Without the start of the engines."""
TARGETS = {
    "wrong": {"max": 0.0},
    "live_steps_most": {"max": 1.0},
    "live_steps_growth": {"max": 0.1},
    "slowdown_source": {"max": 1.01},
    "slowdown_destination": {"max": 1.01},
}
"""Pauses in decode steps; growth: the longest prompt's less the shortest's."""


def missing() -> str:
    """What isn't installed; empty if all is."""
    if find_spec("msgspec") is None:
        return "msgspec is not installed"
    try:
        check_version()
    except StartupError as error:
        return str(error)
    return ""


def lengths(wanted: tuple[int, ...], token_bytes: int) -> list[int]:
    """Those for which two engines have room on this GPU, with weights and a step's own memory."""
    free, _ = torch.cuda.mem_get_info()
    room = free / 2 - (10 << 30)
    return [tokens for tokens in wanted if (tokens + BESIDE) * token_bytes <= room]


def measure(result: Result, options: argparse.Namespace) -> None:
    """Into the result, whose file is written after each length. Raises KvmigError, RuntimeError."""
    # Not before: they import msgspec.
    from bench.gpu.engine_pair import Shape, engines
    from bench.gpu.engine_process import Setting
    from bench.gpu.moves import Moves

    on_gpu = options.device == "cuda"
    if on_gpu:
        shape = Shape("LLaMA-7B", 32, 32, 128, mlp=1024, vocabulary=1024, itemsize=2)
    else:
        shape = Shape("small", 2, 4, 16, mlp=64, vocabulary=256, itemsize=4)
    tokens = list(TOKENS) if on_gpu else [64, 256]
    if on_gpu:
        tokens = lengths((256, 1024) if options.quick else TOKENS, shape.token_bytes)
        if not tokens:
            raise KvmigError("the GPU's free memory has no room for two engines")
    block_bytes = shape.token_bytes * BLOCK_TOKENS
    setting = Setting(
        device=options.device,
        dtype="bfloat16" if on_gpu else "float32",
        num_blocks=(max(tokens) + BESIDE) // BLOCK_TOKENS,
        max_batch_tokens=2048 if on_gpu else 64,
        transport="cuda-ipc" if on_gpu else "shm",
        chunk_bytes=32 * block_bytes if on_gpu else 4 * block_bytes,
    )
    result.settings |= {
        "shape": shape.name, "token_bytes": shape.token_bytes, "dtype": setting.dtype,
        "transport": setting.transport, "chunk_bytes": setting.chunk_bytes, "lengths": tokens,
    }  # fmt: skip
    with engines(shape, setting) as (a, b):
        deadline = Deadline(MOST_S)
        moves = Moves(a, b, shape.vocabulary)
        moves.compare(min(tokens))  # the first of everything: nobody's figure
        for number in tokens:
            if deadline.over(result):
                break
            result.samples.append(moves.compare(number))
            say(f"{number} tokens: {result.samples[-1]}")
            record(result, options)
        if not deadline.over(result):
            beside = [one for one in tokens if one <= TOKENS[-2]][-1]
            result.samples += moves.interfere(beside, moves=4 if options.quick else 12)
        record(result, options)


def record(result: Result, options: argparse.Namespace) -> None:
    """The summary of what is there, and the file."""
    found = [sample for sample in result.samples if "step_ms" in sample]
    steps = [sample["live_ms"] / sample["step_ms"] for sample in found]
    result.summary = {
        **{
            name: sum(one[name] for one in found) for name in ("wrong", "differ", "controls_differ")
        },
        "live_ms_median": median(sample["live_ms"] for sample in found),
        "live_steps_most": max(steps),
        "live_steps_growth": steps[-1] - steps[0],
        "blocking_ms_longest": found[-1]["blocking_ms"],
        "recompute_ms_longest": found[-1]["recompute_ms"],
    }
    for end in ("source", "destination"):
        slowdowns = [one["slowdown"] for one in result.samples if one.get("at") == end]
        if slowdowns:
            result.summary[f"slowdown_{end}"] = fmean(slowdowns)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(dumps(result))


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, arguments)
    result = begin("gpu migration", {"device": options.device})
    note_gpu(result)
    if reason := missing():
        say(f"skipped: {reason}")
        result.samples.append({"skipped": reason})
        return finish(result, options) or SKIPPED
    if options.device == "cuda" and not torch.cuda.is_available():
        say("torch sees no GPU")
        result.samples.append({"wrong": "torch sees no GPU"})
        return finish(result, options) or 1
    result.targets = dict(TARGETS)
    failed = False
    try:
        measure(result, options)
    except (KvmigError, RuntimeError) as error:
        failed = True
        result.samples.append({"failed": f"{type(error).__name__}: {error}"})
        say(str(error))
    judged = ("wrong", "differ", "controls_differ")
    names = ("tokens", "step_ms", *judged, "live_ms", "blocking_ms", "recompute_ms", "live_gb_s")
    rows = [tuple(one[name] for name in names) for one in result.samples if "step_ms" in one]
    columns = (
        *("tokens", "step", "wrong", "differ", "controls differ"),
        *("live", "blocking", "recompute", "copied, GB/s"),
    )
    tables = [table("the client's pause at a move beyond a step, ms", columns, rows)]
    others = [tuple(sample.values()) for sample in result.samples if "slowdown" in sample]
    of_others = ("move", "at", "copying, ms", "gaps", "slowdown")
    tables.append(table("other requests' gaps while one is copied", of_others, others))
    return finish(result, options, tables) or int(failed)


if __name__ == "__main__":
    sys.exit(main())
