"""What a proxy could save by handing its client's descriptor over: a bound, beside today's.

A deployment that wrote to the client itself would take what it takes without any proxy, so `direct`
is the least that handing over can cost. `sum`: processor time of who writes and who relays, for
each token that the client has read, at one pace that all of them keep. Who writes is
`bench.proxy.upstream`, or kvmig's front end on engines that compute nothing.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from bench import report
from bench.load import process
from bench.load.drive import Driver
from bench.load.orders import SetRate
from bench.load.rounds import BODY, IN_FLIGHT
from bench.load.sites import Setup, Site
from bench.proxy.__main__ import INSTANCES, KEY, direct, kvmig
from bench.proxy.others import Make, nginx, wait_for
from kvmig.process.sockets import free_port

STREAMS = 1000
PACE = 2_000
"""Tokens a second of all streams: so few that a front end keeps up beside all others here, and each
comes in a read of its own."""
WRITERS = ("upstream", "front")


@dataclass
class Sample:
    """One way from one writer, in one round. Microseconds of processor a token."""

    writer: str
    way: str
    round: int
    delivered: float
    """Tokens a second."""
    reads: float
    """Of the client, a token."""
    writer_us: float
    proxy_us: float
    sum_us: float
    kernel_us: float
    """Of the sum, in system calls."""


@contextmanager
def writing(writer: str, way: str, folder: Path) -> Iterator[tuple[str, list[int], list[Site]]]:
    """Who writes, at a port if nobody relays; its address, processes and, if it has one, site."""
    with ExitStack() as stack:
        path = "" if way == "direct" else str(folder / "up")
        if writer == "front":
            site = stack.enter_context(Site(Setup("kvmig", 1, INSTANCES, path), folder / "front"))
            yield path or str(site.port), site.front_ends, [site]
        else:
            address = path or str(free_port())
            log = stack.enter_context((folder / "upstream.log").open("wb"))
            upstream = process.start("bench.proxy.upstream", address, PACE, log=log)
            stack.callback(process.end, upstream)
            time.sleep(0.5)
            yield address, [upstream.pid], []


def sample(writer: str, way: str, make: Make, number: int, seconds: float) -> Sample:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        address, writers, sites = stack.enter_context(writing(writer, way, folder))
        port = int(address) if way == "direct" else free_port()
        relays = stack.enter_context(make(port, address, folder))
        wait_for(port, folder)
        time.sleep(1.0)
        client = stack.enter_context(Driver(port, folder / "client"))
        client.ask(
            "open", streams=STREAMS, watched=0, in_flight=IN_FLIGHT, body=BODY, key=KEY.shown
        )
        for site in sites:
            site.orders.give(SetRate(PACE / STREAMS))
        client.ask("measure", seconds=2.0)
        before = [f(pids) for f in (process.cpu_s, process.kernel_s) for pids in (writers, relays)]
        told = client.ask("measure", seconds=seconds)
        after = [f(pids) for f in (process.cpu_s, process.kernel_s) for pids in (writers, relays)]
    spent = [
        (now - then) / max(1, told["tokens"]) * 1e6 for now, then in zip(after, before, strict=True)
    ]
    return Sample(
        writer=writer,
        way=way,
        round=number,
        delivered=told["tokens"] / told["seconds"],
        reads=told["reads"] / max(1, told["tokens"]),
        writer_us=spent[0],
        proxy_us=spent[1],
        sum_us=spent[0] + spent[1],
        kernel_us=spent[2] + spent[3],
    )


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--nginx", default=shutil.which("nginx") or "", help="the program")
    root.add_argument("--rounds", type=int, help="instead of 2")
    options = root.parse_args(argv)
    seconds, rounds = (3.0, 1) if options.quick else (10.0, options.rounds or 2)
    makes: dict[str, Make] = {"direct": direct, "kvmig": kvmig(1)}
    if options.nginx:
        makes["nginx"] = nginx(options.nginx, 1)
    result = report.begin(
        "proxy_handed", {"seconds": seconds, "rounds": rounds, "streams": STREAMS, "pace": PACE}
    )
    samples: list[Sample] = []
    for number in range(rounds):
        for writer in WRITERS:
            for way in makes if number % 2 == 0 else reversed(makes):
                report.say(f"round {number + 1}: {writer}, {way}")
                samples.append(sample(writer, way, makes[way], number, seconds))
    result.samples = [*map(asdict, samples)]
    for writer in WRITERS:
        for way in makes:
            mine = [one for one in samples if (one.writer, one.way) == (writer, way)]
            for field in ("writer_us", "proxy_us", "sum_us", "kernel_us"):
                result.summary[f"{writer}.{way}.{field}"] = median(
                    getattr(one, field) for one in mine
                )
        pairs = zip(
            (one.sum_us for one in samples if (one.writer, one.way) == (writer, "direct")),
            (one.sum_us for one in samples if (one.writer, one.way) == (writer, "kvmig")),
            strict=True,
        )
        result.summary[f"{writer}.direct_over_kvmig"] = median(low / high for low, high in pairs)
    columns = ("writer", "way", "round", "delivered", "reads", "writer", "proxy", "sum", "kernel's")
    rows = [tuple(asdict(one).values()) for one in samples]
    return report.finish(result, options, [report.table("Ways", columns, rows)])


if __name__ == "__main__":
    sys.exit(main())
