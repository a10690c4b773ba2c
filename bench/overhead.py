"""What kvmig costs those who aren't moved, and what it costs where nothing moves at all.

others: two instances with streams on each, and one more with a long prompt that is moved to
  and fro. For each migration the time a token of the other streams takes while it runs, over
  that in a window of the same length right after it, in which nothing moves. Prefix caches
  are off, so that every migration copies all blocks.
alone: kvmig.serve with one instance, and plain `vllm serve` with the same engine flags and
  the same number of threads. Both are up; the same calls go to one, then to the other, who
  goes first alternates. Throughput: output tokens a second of the round; TTFT: median of
  its calls. Ratios are made per pair of rounds; above 1 kvmig is the better one.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
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
from bench.models import NAMES, model_folder
from bench.served import Served
from bench.site import ENGINE_FLAGS, SERVED_FLAGS, SETTLE, Site
from kvmig.engines.vllm.flags import OFFLINE

OTHERS = 4
"""Streams an instance beside the one that moves."""
MOVED_PROMPT = 2048
BATCH = 12
"""Migrations of one set of streams: their contexts have an end."""
PAUSE_S = 0.2
"""Between the windows."""
CALLS, AT_ONCE, OUTPUT_TOKENS = 16, 4, 96
"""Of one round."""
PLAIN_VLLM = ("-m", "vllm.entrypoints.cli.main", "serve")


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
    """The same calls to both, one after the other."""

    kind: str
    kvmig_tokens_per_s: float
    plain_tokens_per_s: float
    kvmig_ttft_ms: float
    plain_ttft_ms: float


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


async def alone(kvmig: Served, plain: Served, rounds: int) -> list[Round]:
    """Pairs of rounds of the same calls; the first pair finds caches cold and is dropped."""
    pairs: list[Round] = []
    async with session() as http:
        with report.progress() as bar:
            for number in bar.track(range(-1, rounds), description="pairs of rounds"):
                found: dict[str, tuple[float, float]] = {}
                for served in (kvmig, plain) if number % 2 else (plain, kvmig):
                    found[served.url] = await _round(http, served, number)
                if number >= 0:
                    (ours, our_ttft), (theirs, their_ttft) = found[kvmig.url], found[plain.url]
                    pairs.append(Round("alone", ours, theirs, our_ttft, their_ttft))
    return pairs


async def _round(http: aiohttp.ClientSession, served: Served, number: int) -> tuple[float, float]:
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
        for index in range(CALLS):
            calls.create_task(call(index))
    return CALLS * OUTPUT_TOKENS / (time.monotonic() - begin), median(ttfts)


def summarise(
    windows: list[Window], rounds: list[Round]
) -> tuple[dict[str, float], dict[str, report.Target]]:
    """The figures, and what they should be: medians."""
    summary = {
        "step_time_during_migration_ratio": median(one.ratio for one in windows),
        "step_ms_during_migration": median(one.moving_step_ms for one in windows),
        "step_ms_without": median(one.still_step_ms for one in windows),
        "throughput_ratio": median(
            one.kvmig_tokens_per_s / one.plain_tokens_per_s for one in rounds
        ),
        "ttft_ratio": median(one.plain_ttft_ms / one.kvmig_ttft_ms for one in rounds),
        "kvmig_tokens_per_s": median(one.kvmig_tokens_per_s for one in rounds),
        "plain_tokens_per_s": median(one.plain_tokens_per_s for one in rounds),
        "kvmig_ttft_ms": median(one.kvmig_ttft_ms for one in rounds),
        "plain_ttft_ms": median(one.plain_ttft_ms for one in rounds),
    }
    return summary, {
        "step_time_during_migration_ratio": {"max": 1.05},
        "throughput_ratio": {"min": 0.97},
        "ttft_ratio": {"min": 0.97},
    }


def tables(windows: list[Window], rounds: list[Round]) -> list[Table]:
    """The spread of what was measured."""

    def row(name: str, values: list[float]) -> tuple[object, ...]:
        return name, len(values), median(values), min(values), max(values)

    return [
        report.table(
            "Ratios",
            ("", "samples", "median", "least", "most"),
            (
                row("others' step time, moving / still", [one.ratio for one in windows]),
                row(
                    "throughput, kvmig / plain vLLM",
                    [one.kvmig_tokens_per_s / one.plain_tokens_per_s for one in rounds],
                ),
                row(
                    "TTFT, plain vLLM / kvmig",
                    [one.plain_ttft_ms / one.kvmig_ttft_ms for one in rounds],
                ),
            ),
        )
    ]


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--model", default="step10ms", help=f"{', '.join(NAMES)} or a folder")
    options = root.parse_args(argv)
    batches, pairs = (1, 2) if options.quick else (12, 12)
    settings = {"model": options.model, "migrations": batches * BATCH, "rounds": pairs}
    result = report.begin("overhead", settings)
    model = model_folder(options.model)
    threads = {
        # As kvmig.cli.environment gives them to its one instance.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        "VLLM_LOGGING_LEVEL": "ERROR",
        **OFFLINE,
    }
    with tempfile.TemporaryDirectory() as logs:
        flags = [*SERVED_FLAGS, "--no-enable-prefix-caching"]
        with Served(flags, model=model, log=Path(logs) / "two") as two:
            windows = uvloop.run(others(two, batches))
        with ExitStack() as stack:
            kvmig = Served(
                [*ENGINE_FLAGS, "--instances=1", "--drain-timeout=2"],
                model=model, environment=threads, log=Path(logs) / "kvmig",
            )  # fmt: skip
            plain = Served(
                ENGINE_FLAGS,
                model=model, command=PLAIN_VLLM, environment=threads, log=Path(logs) / "plain",
            )  # fmt: skip
            stack.enter_context(kvmig)
            stack.enter_context(plain)
            rounds = uvloop.run(alone(kvmig, plain, pairs))
    result.samples = [*map(asdict, windows), *map(asdict, rounds)]
    result.summary, result.targets = summarise(windows, rounds)
    return report.finish(result, options, tables(windows, rounds))


if __name__ == "__main__":
    sys.exit(main())
