"""What kvmig's front end costs beside plain vLLM's, where tokens come as fast as from a GPU.

kvmig.serve with one instance and `vllm serve`, both up, each with the same stand-in for an engine's
worker (bench/token_source.py): vLLM's scheduler is real, and every step gives a token to each
request. The same streams go to one after the other, the order turns. Ratios are made per round:

throughput: output tokens a second, kvmig over plain; itl_p99: between two arrivals of a stream,
  kvmig over plain; ttft: of a call alone, kvmig over plain; cpu: processor time (user and system)
  of the process that has the front end, for 1,000 tokens, kvmig over plain. That one says little of
  the machine's other load; the others need a quiet machine.

With `--pin` each front end has the first core for itself, and engines and clients the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import psutil
import uvloop

from bench import report
from bench.client import Stream, prompt_of, session
from bench.overhead import PLAIN_VLLM, plain_environment
from bench.site import all_up
from kvmig.models import BUNDLED
from kvmig_tools.served import Served

PROMPT, ALONE = 256, 5
"""Tokens of a prompt; calls alone, whose times to the first token count."""
LONG_RUN = ("itl_p99_ratio", "ttft_ratio", "cpu_ratio")
"""Two short rounds are too few to tell a tenth apart."""
FLAGS = (
    "--enforce-eager", "--block-size=32", "--dtype=float32", "--kv-cache-memory-bytes=536870912",
    "--max-model-len=1024", "--max-num-batched-tokens=16384", "--no-enable-prefix-caching",
    "--no-async-scheduling", "--distributed-executor-backend=uni",
    "--worker-cls=bench.token_source.TokenSource",
)  # fmt: skip


@dataclass(frozen=True)
class Round:
    """The same streams at one server. Milliseconds; cpu_ms: of the front end, for 1,000 tokens."""

    server: str
    number: int
    tokens_per_s: float
    itl_p50_ms: float
    itl_p99_ms: float
    ttft_p50_ms: float
    alone_ttft_ms: float
    cpu_ms: float
    engine_cpu_ms: float


def cpu_s(served: Served) -> tuple[float, float]:
    """(of the server's main process, of all others of it), in seconds."""
    assert served.process is not None
    main = psutil.Process(served.process.pid)
    own, rest = _spent(main), 0.0
    for one in main.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            rest += _spent(one)
    return own, rest


def _spent(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def pin(served: Served) -> None:
    """Give the main process's threads the first core, and the others' the rest."""
    assert served.process is not None
    first, *rest = sorted(os.sched_getaffinity(0))
    main = psutil.Process(served.process.pid)
    for process in (main, *main.children(recursive=True)):
        cores = {first} if process == main else set(rest)
        for thread in process.threads():
            os.sched_setaffinity(thread.id, cores)


async def one_round(
    http: aiohttp.ClientSession, served: Served, name: str, number: int, streams: int, tokens: int
) -> Round:
    """Calls alone, then all streams at once."""

    async def call(*names: object, most: int) -> Stream:
        stream = Stream(
            http, served.url, served.model, prompt_of(PROMPT, number, *names), most,
            salt=f"{number} {names}",
        )  # fmt: skip
        async with stream:
            await stream.reach(most)
        return stream

    alone = [await call("alone", index, most=8) for index in range(ALONE)]
    before = cpu_s(served)
    began = time.monotonic()
    done = await asyncio.gather(*(call(index, most=tokens) for index in range(streams)))
    took = time.monotonic() - began
    own, rest = (now - then for now, then in zip(cpu_s(served), before, strict=True))
    gaps = np.concatenate([np.diff([one.at for one in stream.arrivals]) for stream in done]) * 1e3
    thousands = streams * tokens / 1e3
    return Round(
        name, number, 1e3 * thousands / took,
        float(np.percentile(gaps, 50)), float(np.percentile(gaps, 99)),
        median(_ttft_ms(one) for one in done), median(_ttft_ms(one) for one in alone),
        own / thousands * 1e3, rest / thousands * 1e3,
    )  # fmt: skip


def _ttft_ms(stream: Stream) -> float:
    return (stream.arrivals[0].at - stream.sent_at) * 1e3


async def measure(
    servers: dict[str, Served], rounds: int, streams: int, tokens: int
) -> list[Round]:
    """The first round finds caches cold and is dropped."""
    done: list[Round] = []
    names = list(servers)
    async with session() as http:
        with report.progress() as bar:
            for number in bar.track(range(-1, rounds), description="rounds"):
                for name in names if number % 2 else reversed(names):
                    one = await one_round(http, servers[name], name, number, streams, tokens)
                    done += [one] if number >= 0 else []
    return done


def servers_of(step_ms: float, front_ends: int, logs: Path) -> dict[str, Served]:
    """Not started."""
    paced = f'--additional-config={{"step_ms": {step_ms:g}}}'
    environment = plain_environment()
    ours = [*FLAGS, paced, "--instances=1", "--shutdown-timeout=2"]
    if front_ends:
        ours.append(f"--front-ends={front_ends}")
    return {
        "kvmig": Served(ours, model=BUNDLED, environment=environment, log=logs / "kvmig"),
        "plain": Served(
            [*FLAGS, paced],
            model=BUNDLED,
            command=PLAIN_VLLM,
            environment=environment,
            log=logs / "plain",
        ),
    }


def summarise(rounds: Sequence[Round]) -> dict[str, float]:
    """Medians of the rounds' ratios, kvmig over plain, and of each server's figures."""
    kvmig, plain = ([one for one in rounds if one.server == name] for name in ("kvmig", "plain"))
    names = {
        "throughput": "tokens_per_s", "itl_p50": "itl_p50_ms", "itl_p99": "itl_p99_ms",
        "ttft": "alone_ttft_ms", "ttft_together": "ttft_p50_ms", "cpu": "cpu_ms",
        "engine_cpu": "engine_cpu_ms",
    }  # fmt: skip
    summary: dict[str, float] = {}
    for name, figure in names.items():
        pairs = [
            (getattr(a, figure), getattr(b, figure)) for a, b in zip(kvmig, plain, strict=True)
        ]
        summary[f"{name}_ratio"] = median(
            ours / theirs if theirs else math.nan for ours, theirs in pairs
        )
        summary[f"kvmig_{figure}"] = median(ours for ours, _ in pairs)
        summary[f"plain_{figure}"] = median(theirs for _, theirs in pairs)
    return summary


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, LONG_RUN)
    root.add_argument("--step-ms", type=float, default=6.0, help="time of an engine's step")
    root.add_argument("--streams", type=int, default=64, help="at once")
    root.add_argument("--tokens", type=int, default=256, help="of each answer")
    root.add_argument("--rounds", type=int, default=0, help="0: 2 with --quick, else 8")
    root.add_argument("--front-ends", type=int, default=0, help="of kvmig; 0: as it decides")
    root.add_argument("--pin", action="store_true", help="each front end alone on the first core")
    options = root.parse_args(argv)
    rounds = options.rounds or (2 if options.quick else 8)
    tokens = min(options.tokens, 128) if options.quick else options.tokens
    settings: dict[str, Any] = {
        "step_ms": options.step_ms, "streams": options.streams, "tokens": tokens,
        "rounds": rounds, "pin": options.pin, "front_ends": options.front_ends,
    }  # fmt: skip
    result = report.begin("front_end_cost", settings)
    with tempfile.TemporaryDirectory() as folder:
        report.say("starting kvmig and plain vLLM")
        servers = servers_of(options.step_ms, options.front_ends, Path(folder))
        with all_up(list(servers.values())):
            if options.pin:
                for served in servers.values():
                    pin(served)
                os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[1:]))
            found = uvloop.run(measure(servers, rounds, options.streams, tokens))
    result.samples = [asdict(one) for one in found]
    result.summary = summarise(found)
    result.targets = {
        "throughput_ratio": {"min": 0.99},
        "itl_p99_ratio": {"max": 1.1},
        "ttft_ratio": {"max": 1.05},
        "cpu_ratio": {"max": 1.1},
    }
    columns = ("", *(name for name in Round.__dataclass_fields__ if name != "server"))
    rows = [tuple(asdict(one).values()) for one in found]
    return report.finish(result, options, [report.table("Rounds", columns, rows)])


if __name__ == "__main__":
    sys.exit(main())
