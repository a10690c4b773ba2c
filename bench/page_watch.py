"""What an open page of a fleet costs: processor time of the server and of a model's front end.

`kvmig up` with a model of toy instances and 1,000 streams, a token each a second, through the
proxy; each ends after 40 s, and another one begins. Of each leg: the processor time that the
server, the proxy, the launcher, the front end and the instances take, in percent of one core.
First no page follows the live picture, then one, then several, then none again: a closed page must
cost nothing.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench import report
from bench.client import session
from kvmig_tools.fleet import FleetUp

NAME = "m"
INSTANCES = 4
FLAGS = ("--step-ms=1000", "--max-num-seqs=2000", "--num-blocks=40000", "--migrate-below=-1000000")
TOKENS = 40
"""Tokens of a stream, one a second."""
SETTLE_S = 6.0
PARTS = {
    "server": "kvmig.fleet.server",
    "proxy": "kvmig.proxy",
    "launcher": "kvmig.serve ",
    "front_end": "kvmig.frontend.process_main",
    "instances": "llumlet",
}
"""Words in the command lines of the processes."""


@dataclass(frozen=True)
class Leg:
    """One measurement, in percent of a core."""

    pages: int
    streams: int
    """Requests that ran at its end."""
    server: float
    proxy: float
    launcher: float
    front_end: float
    instances: float
    events_per_s: float
    """Of each page."""
    bytes_per_s: float


class Counters:
    """What pages have got."""

    def __init__(self) -> None:
        self.events = 0
        self.bytes = 0


async def stream(client: aiohttp.ClientSession, url: str, first: int) -> None:
    """One stream after the other, until it is cancelled. first: tokens of the first one, so that
    they end one after the other."""
    body = {"model": NAME, "prompt": "Count: 0017 0018", "max_tokens": first, "stream": True}
    while True:
        async with client.post(f"{url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for _ in answer.content.iter_any():
                pass
        body["max_tokens"] = TOKENS


async def log_in(client: aiohttp.ClientSession, fleet: FleetUp) -> None:
    """Let the client have a session, as a browser."""
    form = {"key": fleet.key, "next": "/ui/"}
    async with client.post(f"{fleet.url}/ui/login", data=form) as answer:
        answer.raise_for_status()


async def follow(client: aiohttp.ClientSession, url: str, counters: Counters) -> None:
    """An open page, until it is cancelled."""
    async with client.get(f"{url}/ui/live") as answer:
        answer.raise_for_status()
        async for part in answer.content.iter_any():
            counters.events += part.count(b"event: ")
            counters.bytes += len(part)


@asynccontextmanager
async def running(*works: Any) -> AsyncIterator[None]:
    """Tasks for the time of the block. An error of one is raised at its end."""
    tasks = [asyncio.create_task(one) for one in works]
    try:
        yield
        for one in tasks:
            if one.done():
                one.result()
    finally:
        for one in tasks:
            one.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def used_s(fleet: FleetUp) -> dict[str, float]:
    """Processor seconds so far, by part."""
    found = dict.fromkeys(PARTS, 0.0)
    assert fleet.process is not None
    for one in psutil.Process(fleet.process.pid).children(recursive=True):
        words = " ".join(one.cmdline())
        for part, word in PARTS.items():
            if word in words:
                times = one.cpu_times()
                found[part] += times.user + times.system
                break
    return found


async def measure(fleet: FleetUp, pages: int, counters: Counters, seconds: float) -> Leg:
    """One leg."""
    await asyncio.sleep(SETTLE_S)
    before, since = used_s(fleet), time.monotonic()
    events, size = counters.events, counters.bytes
    await asyncio.sleep(seconds)
    took = time.monotonic() - since
    after = used_s(fleet)
    percent = {part: 100 * (after[part] - before[part]) / took for part in PARTS}
    each = max(1, pages) * took
    return Leg(
        pages=pages,
        streams=fleet.get(f"models/{NAME}")["running"],
        events_per_s=(counters.events - events) / each,
        bytes_per_s=(counters.bytes - size) / each,
        **percent,
    )


async def run(options: Any) -> list[Leg]:
    """All legs."""
    legs = []
    with tempfile.TemporaryDirectory() as folder, FleetUp(Path(folder)) as fleet:
        fleet.add(
            {
                "name": NAME, "source": "path:/toy", "engine": "toy", "flags": list(FLAGS),
                "instances": {"min": INSTANCES, "max": INSTANCES},
            }
        )  # fmt: skip
        fleet.until(f"models/{NAME}", serving=INSTANCES)
        jar = aiohttp.CookieJar(unsafe=True)  # the fleet's address has no name
        async with session(fleet.key) as calls, aiohttp.ClientSession(cookie_jar=jar) as browser:
            await log_in(browser, fleet)
            streams = [
                stream(calls, fleet.url, 1 + number % TOKENS) for number in range(options.streams)
            ]
            async with running(*streams):
                for pages in (0, 1, options.pages, 0):
                    counters = Counters()
                    opened = [follow(browser, fleet.url, counters) for _ in range(pages)]
                    async with running(*opened):
                        legs.append(await measure(fleet, pages, counters, options.seconds))
                        print(json.dumps(asdict(legs[-1])), file=sys.stderr)
    return legs


def summarise(legs: Sequence[Leg]) -> dict[str, float]:
    """What pages add to the leg without any. legs: without a page, one, several, closed again."""
    none, one, several, closed = legs
    return {
        "server_percent": one.server - none.server,
        "front_end_percent": one.front_end - none.front_end,
        "server_percent_each_of_several": (several.server - none.server) / several.pages,
        "server_percent_closed": closed.server - none.server,
        "kb_per_s": one.bytes_per_s / 1000,
    }


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--streams", type=int, default=1000)
    root.add_argument("--pages", type=int, default=10, help="pages at once in the third leg")
    root.add_argument("--seconds", type=float, help="of each leg: 20, or 8 with --quick")
    options = root.parse_args(argv)
    options.seconds = options.seconds or (8.0 if options.quick else 20.0)
    settings = {"streams": options.streams, "pages": options.pages, "seconds": options.seconds}
    result = report.begin("page_watch", settings)
    legs = asyncio.run(run(options))
    result.samples = [asdict(leg) for leg in legs]
    result.summary = summarise(legs)
    result.targets = {"server_percent": {"max": 5.0}, "server_percent_closed": {"max": 1.0}}
    columns = ("pages", "server %", "front end %", "instances %", "proxy %", "events/s", "kB/s")
    rows = [
        (
            leg.pages, leg.server, leg.front_end, leg.instances, leg.proxy, leg.events_per_s,
            leg.bytes_per_s / 1000,
        )
        for leg in legs
    ]  # fmt: skip
    return report.finish(result, options, [report.table("An open page", columns, rows)])


if __name__ == "__main__":
    sys.exit(main())
