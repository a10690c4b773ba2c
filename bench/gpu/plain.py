"""kvmig.serve with one instance beside plain vLLM, both up on one GPU: a model in the shape of
Llama-3-8B with dummy weights, 64 streams of 256 + 256 tokens to one after the other in turns.

throughput, itl_p99, ttft: kvmig over plain, the median of the rounds' ratios, which
`bench.front_end_cost` has without a GPU. It needs a vLLM that kvmig supports, with CUDA; without
vLLM it is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.gpu.device import Deadline, note_gpu, options_of
from bench.gpu.serving import missing, skipped, write
from bench.report import Result, begin, finish, say, table
from kvmig.core.errors import KvmigError

MOST_S = 100.0
"""Without the starts of the servers."""
STREAMS, TOKENS, ROUNDS = 64, 256, 8
ON_GPU = (
    "--load-format=dummy", "--max-model-len=8192", "--kv-cache-memory-bytes=8G",
    "--gpu-memory-utilization=0.45", "--no-enable-prefix-caching",
)  # fmt: skip
ON_CPU = (
    "--enforce-eager", "--block-size=32", "--dtype=float32", "--kv-cache-memory-bytes=64M",
    "--no-enable-prefix-caching",
)  # fmt: skip
TARGETS = {
    "throughput_ratio": {"min": 0.99}, "itl_p99_ratio": {"max": 1.1}, "ttft_ratio": {"max": 1.05},
}  # fmt: skip


def measure(result: Result, options: argparse.Namespace, flags: Sequence[str]) -> None:
    """Into the result, whose file is written after each round at each server. Raises KvmigError."""
    import uvloop

    from bench.client import session
    from bench.front_end_cost import Round, one_round, summarise
    from bench.models import LLAMA3_8B, model_folder, shape_folder
    from bench.overhead import PLAIN_VLLM
    from kvmig_tools.served import Served

    settings = result.settings
    on_gpu = settings["model"] == "llama-3-8b"
    model = shape_folder("llama-3-8b", LLAMA3_8B) if on_gpu else model_folder("count")

    async def take(servers: dict[str, Served]) -> None:
        deadline, found, names = Deadline(MOST_S), list[Round](), list(servers)
        async with session() as http:
            for number in range(-1, settings["rounds"]):  # the first finds caches cold
                for name in names if number % 2 else reversed(names):
                    one = await one_round(
                        http, servers[name], name, number, settings["streams"], settings["tokens"]
                    )
                    if number < 0:
                        continue
                    found.append(one)
                    result.samples.append(asdict(one))
                    say(f"{name}, round {number}: {one.tokens_per_s:.0f} tokens/s")
                    if len(found) % 2 == 0:
                        result.summary = summarise(found)
                    write(result, options)
                if deadline.over(result):
                    return

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        logs = Path(folder)
        ours = [*flags, "--instances=1", "--shutdown-timeout=2"]
        servers = {
            "kvmig": Served(ours, model=model, log=logs / "kvmig"),
            "plain": Served(
                flags, model=model, command=PLAIN_VLLM, environment=environment(on_gpu),
                log=logs / "plain",
            ),
        }  # fmt: skip
        for served in servers.values():  # one after the other: each measures the GPU's memory
            stack.enter_context(served)
        uvloop.run(take(servers))


def environment(on_gpu: bool) -> dict[str, str]:
    """What plain vLLM needs to run as kvmig's engines do."""
    from bench.overhead import plain_environment
    from kvmig.engines.kind import OFFLINE

    if not on_gpu:
        return plain_environment()
    return {**OFFLINE, "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}


def main(arguments: list[str] | None = None, flags: Sequence[str] = ()) -> int:
    """flags: of both servers, in place of those for the device."""
    options = options_of(__doc__, arguments)
    on_gpu = options.device == "cuda" and not options.quick
    settings: dict[str, Any] = {
        "device": options.device,
        "model": "llama-3-8b" if on_gpu else "count",
        "streams": STREAMS if on_gpu else 4,
        "tokens": TOKENS if on_gpu else 16,
        "rounds": ROUNDS if on_gpu else 1,
        "flags": list(flags or (ON_GPU if options.device == "cuda" else ON_CPU)),
    }
    result = begin("gpu plain", settings)
    note_gpu(result)
    if reason := missing():
        return skipped(result, options, reason)
    result.targets = dict(TARGETS) if on_gpu else {}
    failed = False
    try:
        measure(result, options, settings["flags"])
    except (KvmigError, RuntimeError, OSError) as error:
        failed = True
        result.samples.append({"failed": f"{type(error).__name__}: {error}"})
        say(str(error))
    names = ("server", "number", "tokens_per_s", "itl_p50_ms", "itl_p99_ms", "alone_ttft_ms")
    rows = [tuple(one[name] for name in names) for one in result.samples if "server" in one]
    columns = ("", "round", "tokens/s", "between tokens p50", "p99", "TTFT alone")
    shown = table("kvmig and plain vLLM on one GPU, ms", columns, rows)
    return finish(result, options, [shown]) or int(failed)


if __name__ == "__main__":
    sys.exit(main())
