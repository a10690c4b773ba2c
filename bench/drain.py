"""The longest wait that any client sees while its instance is drained.

Three real vLLM instances behind the real HTTP server. All streams run on one of them; it is
drained, and all of them go on at the other two. Of each stream: the median time between two
tokens just before (a step of the full batch), the longest one before, in a window as long as
the drain was, and the longest one while it lasted. Then the instance serves again, and the
next run begins with streams of its own.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import uvloop

from bench import report
from bench.arrivals import intervals_ms, longest_ms
from bench.client import Stream, StreamFailed, prompt_of, session
from bench.models import NAMES, model_flags, model_folder
from bench.site import SETTLE
from kvmig_tools.served import Served

FLAGS = (
    "--enforce-eager",
    "--block-size=32",
    "--max-num-seqs=32",
    "--kv-cache-memory-bytes=536870912",
    "--instances=3",
    "--scheduler-interval-ms=50",
    # Nothing moves but by the drain.
    "--migrate-below=-1000000",
    "--shutdown-timeout=2",
)
STREAMS = 20
PROMPT = 64
TOKENS = 6000
BEFORE_S = 5.0
"""How long all streams run before the drain."""
TIMEOUT_S = 120.0
LONG_RUN = ("ratio_max",)
"""The worst of 200 streams in the whole run; two drains say little of it."""


@dataclass(frozen=True)
class Sample:
    """One stream in one run. Times in milliseconds."""

    run: int
    drain_ms: float
    inter_token_ms: float
    longest_before_ms: float
    longest_ms: float

    @property
    def ratio(self) -> float:
        """The longest wait over the time between two tokens."""
        return self.longest_ms / self.inter_token_ms


class Admin:
    """The instances of a server."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self._url = f"{url}/kvmig/v1/instances"
        self._http = http

    async def rows(self) -> list[dict[str, Any]]:
        """Of all that it has."""
        async with self._http.get(self._url) as answer:
            rows: list[dict[str, Any]] = (await answer.json())["data"]
            return rows

    async def drain(self, instance: str, wanted: bool = True) -> None:
        """Let it drain, or serve again."""
        await self._order("POST" if wanted else "DELETE", f"{instance}/drain")

    async def remove(self, instance: str) -> None:
        """Let it drain, then end."""
        await self._order("DELETE", instance)

    async def _order(self, method: str, what: str) -> None:
        async with self._http.request(method, f"{self._url}/{what}") as answer:
            if answer.status not in (200, 202):
                raise StreamFailed(await answer.text())

    async def until(self, instance: str, **fields: Any) -> None:
        """Wait until its row says so."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            rows = {row["id"]: row for row in await self.rows()}
            if all(rows[instance][field] == value for field, value in fields.items()):
                return
            await asyncio.sleep(0.02)
        raise StreamFailed(f"instance {instance} was never {fields}: {rows[instance]}")


async def measure(served: Served, runs: int, streams: int) -> list[Sample]:
    """All samples."""
    samples = []
    async with session() as http:
        admin = Admin(served.url, http)
        for run in range(runs):
            samples += await one_drain(served, http, admin, run, streams)
            report.say(f"drain {run + 1} of {runs}: {samples[-1].drain_ms:.0f} ms")
    return samples


async def one_drain(
    served: Served, http: aiohttp.ClientSession, admin: Admin, run: int, count: int
) -> list[Sample]:
    """Put all streams on i0, drain it, and let it serve again."""
    for name in ("i1", "i2"):
        await admin.drain(name)
        await admin.until(name, state="draining", running=0)
    async with AsyncExitStack() as stack:
        streams: list[Stream] = []
        for number in range(count):
            prompt = prompt_of(PROMPT, run, number)
            stream = Stream(http, served.url, served.model, prompt, TOKENS)
            streams.append(await stack.enter_async_context(stream))
        for stream in streams:
            await stream.reach(SETTLE)
        await admin.until("i0", running=count)
        for name in ("i1", "i2"):
            await admin.drain(name, wanted=False)
        await asyncio.sleep(BEFORE_S)
        begin = time.monotonic()
        await admin.drain("i0")
        await admin.until("i0", running=0, waiting=0, migrations_out=0)
        end = time.monotonic()
        for stream in streams:
            await stream.reach(len(stream.tokens) + SETTLE)
        samples = [sample(run, stream, begin, end) for stream in streams]
        await admin.drain("i0", wanted=False)
    for name in ("i0", "i1", "i2"):
        await admin.until(name, state="serving", running=0, blocks_used=0)
    return samples


def sample(run: int, stream: Stream, begin: float, end: float) -> Sample:
    """What one stream saw of a drain in [begin, end] (s)."""
    before = [one for one in stream.arrivals if begin - BEFORE_S < one.at < begin]
    return Sample(
        run=run,
        drain_ms=round((end - begin) * 1e3, 1),
        inter_token_ms=round(median(intervals_ms(before)), 3),
        longest_before_ms=round(longest_ms(before, begin - (end - begin), begin), 3),
        longest_ms=round(longest_ms(stream.arrivals, begin, end), 3),
    )


def summarise(samples: list[Sample]) -> dict[str, float]:
    """The figures."""
    return {
        "inter_token_ms": median(one.inter_token_ms for one in samples),
        "longest_before_ms": median(one.longest_before_ms for one in samples),
        "longest_ms": median(one.longest_ms for one in samples),
        "longest_of_all_ms": max(one.longest_ms for one in samples),
        "drain_ms": median({one.run: one.drain_ms for one in samples}.values()),
        "ratio_median": median(one.ratio for one in samples),
        "ratio_max": max(one.ratio for one in samples),
    }


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, LONG_RUN)
    root.add_argument("--model", default="step10ms", help=f"{', '.join(NAMES)} or a folder")
    root.add_argument("--runs", type=int, help="drains: 10, or 2 with --quick")
    root.add_argument("--streams", type=int, default=STREAMS, help="on the drained instance")
    options = root.parse_args(argv)
    runs = options.runs or (2 if options.quick else 10)
    flags = [*FLAGS, *model_flags(options.model)]
    settings = {
        "model": options.model, "runs": runs, "streams": options.streams, "flags": flags,
    }  # fmt: skip
    result = report.begin("drain", settings)
    with tempfile.TemporaryDirectory() as logs:
        report.say("starting three instances")
        model = model_folder(options.model)
        with Served(flags, model=model, log=Path(logs) / "log") as served:
            samples = uvloop.run(measure(served, runs, options.streams))
    result.samples = [asdict(one) for one in samples]
    result.summary = summarise(samples)
    result.targets = {"ratio_max": {"max": 3.0}}
    rows = [
        (
            str(run),
            median(one.drain_ms for one in of),
            median(one.inter_token_ms for one in of),
            max(one.longest_before_ms for one in of),
            median(one.longest_ms for one in of),
            max(one.longest_ms for one in of),
        )
        for run in range(runs)
        if (of := [one for one in samples if one.run == run])
    ]
    columns = ("run", "drain", "inter-token", "longest before", "longest, median", "of all")
    return report.finish(result, options, [report.table("Milliseconds", columns, rows)])


if __name__ == "__main__":
    sys.exit(main())
