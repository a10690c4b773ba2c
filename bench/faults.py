"""What clients see when an instance goes, and how soon a new scheduler decides.

    python -m bench.faults [--quick] [--out FILE.json]

Streams run on two instances of the bundled model. Then one instance is stopped (SIGSTOP) or
killed (SIGKILL). Measured: until the front end knows (seen at /kvmig/v1/instances, asked
every 20 ms), and the gap in each stream that ran there, up to its first token from the
other instance. Every stream must equal the one that was left alone. For the scheduler: from
the list of members to its first pair, by the real process on sixteen llumlets without engines.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import psutil
import uvloop

from bench import report
from bench.client import Stream, prompt_of, session
from bench.scheduler_start import seconds_to_first_pair
from bench.site import SERVED_FLAGS, Site
from kvmig_tools.served import Served

STREAMS = 6
TOKENS = 1200
AT = 100
"""Tokens of each stream when the fault comes."""
PATIENCE_S = 120.0
Fault = Literal["stopped", "killed"]
SIGNALS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}


@dataclass(frozen=True)
class Sample:
    """One fault. Times in seconds from the signal."""

    fault: Fault
    known_s: float
    gaps_s: list[float]
    """Of the streams that ran there."""


def llumlets(served: Served) -> dict[str, psutil.Process]:
    """By instance: the process that may write the instance's shared memory."""
    assert served.process is not None
    found = {}
    for child in psutil.Process(served.process.pid).children(recursive=True):
        if "kvmig.launcher.llumlet_main" in " ".join(child.cmdline()):
            for file in child.open_files():
                name = Path(file.path).name.split("-")
                if "+" in file.mode and len(name) > 2:
                    found[name[2]] = child
    return found


async def states(served: Served) -> dict[str, str]:
    """Of all instances."""
    rows = await asyncio.to_thread(served.get, "instances")
    return {row["id"]: row["state"] for row in rows}


async def until(holds: Callable[[], Awaitable[bool]]) -> float:
    """Wait for it; the time then."""
    async with asyncio.timeout(PATIENCE_S):
        while not await holds():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
    return time.monotonic()


async def one(served: Served, site: Site, fault: Fault, run: int) -> Sample:
    """Streams, a fault among them, and the same streams left alone."""

    async def all_serve() -> bool:
        return set((await states(served)).values()) == {"serving"}

    prompts = [prompt_of(64, fault, run, number) for number in range(STREAMS)]
    await until(all_serve)
    streams = [site.stream(prompt, max_tokens=TOKENS) for prompt in prompts]
    for stream in streams:
        await stream.__aenter__()
    for stream in streams:
        await stream.reach(AT)
    places = [await site.instance_of(stream) for stream in streams]
    victim = places[0]
    process = llumlets(served)[victim]
    at = time.monotonic()
    os.kill(process.pid, SIGNALS[fault])

    async def known() -> bool:
        return (await states(served)).get(victim) not in ("serving",)

    known_at = await until(known)
    for stream in streams:
        await stream.reach(TOKENS)
    if fault == "stopped":
        process.resume()
    gaps = [gap_around(stream, at) for stream, place in zip(streams, places, strict=True)
            if place == victim]  # fmt: skip
    for stream, prompt in zip(streams, prompts, strict=True):
        async with site.stream(prompt, max_tokens=TOKENS) as alone:
            await alone.reach(TOKENS)
            if alone.tokens != stream.tokens:
                raise AssertionError("a stream that ran again differs from the one left alone")
        await stream.close()
    return Sample(fault, known_at - at, gaps)


def gap_around(stream: Stream, at: float) -> float:
    """From the last tokens before the fault, or the last that were still on their way, on."""
    times = [arrival.at for arrival in stream.arrivals]
    return max(
        (later - sooner for sooner, later in itertools.pairwise(times) if later > at),
        default=0.0,
    )


async def measure(served: Served, runs: int) -> list[Sample]:
    """All faults, one after the other."""
    async with session() as http:
        site = Site(served, http)
        faults: tuple[Fault, ...] = ("stopped", "killed")
        return [await one(served, site, fault, run) for fault in faults for run in range(runs)]


def summarise(samples: list[Sample]) -> dict[str, float]:
    """Medians and worst."""
    summary: dict[str, float] = {}
    for fault in ("stopped", "killed"):
        of = [sample for sample in samples if sample.fault == fault]
        gaps = [gap for sample in of for gap in sample.gaps_s]
        summary |= {
            f"{fault}_known_s": median(sample.known_s for sample in of),
            f"{fault}_known_s_most": max(sample.known_s for sample in of),
            f"{fault}_gap_s": median(gaps),
            f"{fault}_gap_s_most": max(gaps),
        }
    return summary


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--runs", type=int, help="of each fault: 5, or 2 with --quick")
    options = root.parse_args(argv)
    runs = options.runs or (2 if options.quick else 5)
    settings = {"runs": runs, "streams": STREAMS, "tokens": TOKENS, "flags": SERVED_FLAGS}
    result = report.begin("faults", settings)
    scheduler = [uvloop.run(seconds_to_first_pair()) for _ in range(runs)]
    with tempfile.TemporaryDirectory() as logs:
        report.say("starting a server")
        with Served(SERVED_FLAGS, log=Path(logs) / "log") as served:
            samples = uvloop.run(measure(served, runs))
    result.samples = [asdict(sample) for sample in samples]
    result.samples += [{"fault": "scheduler", "first_pair_s": seconds} for seconds in scheduler]
    result.summary = summarise(samples) | {
        "scheduler_first_pair_s": median(scheduler),
        "scheduler_first_pair_s_most": max(scheduler),
    }
    result.targets = {
        "stopped_known_s_most": {"max": 2.0},
        "killed_known_s_most": {"max": 2.0},
        "scheduler_first_pair_s_most": {"max": 1.0},
    }
    rows = [(name, f"{value:.2f}") for name, value in result.summary.items()]
    return report.finish(result, options, [report.table("Faults", ("", "s"), rows)], None)


if __name__ == "__main__":
    sys.exit(main())
