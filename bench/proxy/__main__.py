"""What a proxy costs: kvmig's and nginx, side by side in one run.

Upstream of each is `bench.proxy.upstream`, a deployment that only writes; `direct` is a client
without any proxy. `us a token`: processor time of the proxy's processes for each token that the
client has read, at a pace that all of them keep. `most`: tokens a second when upstream writes as
fast as it can, which is bounded by this machine's cores: upstream, proxy and client share them.
`first`: milliseconds to the first token of a call beside 100 streams, over a new connection.
`KiB`: memory of the proxy for each of 1,000 open streams (`--streams`: of any other number, which
have the same tokens a second together; `--proxies`: kvmig's proxies on one port, and nginx's
worker processes, since each may open so many files only).

`front` and `front + kvmig` are kvmig's front end on engines that compute nothing, alone and behind
the proxy, with tokens for 1,000 streams at more than it can do: what the proxy takes from a server.

nginx, the least that a proxy can cost, is a program that `--nginx` names (Debian's package needs
not be installed: `dpkg -x` unpacks it). LiteLLM's proxy is installed from PyPI into a virtual
environment of its own, at `--litellm FOLDER`; it runs without a database, with one worker, knows
one key, and reaches its upstream by TCP, for it can't by a Unix socket. The pace of its streams is
a tenth of the others', and its `most` is not measured: it takes minutes to open streams where it
has more to do than it can. It adds five minutes to a round.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from bench import report
from bench.load import process
from bench.load.drive import Driver
from bench.load.latency import quantile
from bench.load.orders import SetRate
from bench.load.rounds import BODY, IN_FLIGHT
from bench.load.sites import Setup, Site
from bench.proxy.others import Make, install_litellm, litellm, nginx, wait_for
from kvmig.accounts.keys import KeyGrant, new_key
from kvmig.asgi.connection import most_clients
from kvmig.process.sockets import free_port
from kvmig.proxy.call import DoorConnection
from kvmig.proxy.messages import FleetSnapshot, ModelRoute, ProxyLaunch

PEPPER = bytes(32)
KEY = new_key(PEPPER)
PROBES = 200
BESIDE = 100
"""Streams beside the calls whose first token is timed."""
FILES = 1 << 17
"""That a process may have open: the proxy two a stream."""
LONG_RUN = ("kvmig.us_per_token", "kvmig.added_first_*", "front_behind_over_alone")
"""What one round of 3 s is too short for."""
FRONT_PACE = 50_000
"""Tokens a second of all streams: far more than front ends can do."""
INSTANCES = 10
AT_PORTS = ("direct", "litellm")
"""Whose upstream is at a port, not on a Unix socket."""


class Paces(NamedTuple):
    """Tokens a second of all streams. most: far more than can be done; None: not tried."""

    usual: int = 5_000
    beside: int = 2_000
    most: int | None = 1_000_000


LITELLM_PACES = Paces(500, 200, None)
"""With 3,000 a second on 20 streams it took no further call for more than a minute."""


@dataclass
class Sample:
    """One proxy, in one round."""

    proxy: str
    round: int
    us_per_token: float
    kernel_us_per_token: float
    """Of it, in system calls."""
    delivered: float
    """Tokens a second, at its usual pace."""
    most: float | None
    first_p50_ms: float
    first_p99_ms: float
    kib_per_stream: float


# -- proxies. Each is started for an upstream, and gives its processes.


@contextmanager
def direct(port: int, upstream: str, folder: Path) -> Iterator[list[int]]:
    """None."""
    yield []


def kvmig(proxies: int) -> Make:
    """So many processes, which listen on one port."""

    @contextmanager
    def make(port: int, upstream: str, folder: Path) -> Iterator[list[int]]:
        keep_snapshot(upstream, folder)
        with ExitStack() as stack:
            with socket.create_server(("127.0.0.1", port), backlog=4096) as listening:
                began = [
                    stack.enter_context(kvmig_proxy(listening, number, folder))
                    for number in range(proxies)
                ]
            yield [one.pid for one in began]

    return make


def keep_snapshot(upstream: str, folder: Path) -> None:
    """What a proxy knows that has never met its server."""
    grant = KeyGrant(
        key_id="k1", origin="k1", user_id="u1", user="bench", prefix=KEY.prefix, hash=KEY.hash
    )
    route = ModelRoute(name="count", state="ready", socket=upstream, served="count")
    known = FleetSnapshot(version=1, pepper=PEPPER, keys=(grant,), routes=(route,))
    (folder / "snapshot").write_bytes(msgspec.msgpack.encode(known))


@contextmanager
def kvmig_proxy(
    listening: socket.socket, number: int, folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    launch = ProxyLaunch(
        name=f"proxy-{number}", number=number, tallies=str(folder / "limits"),
        links=str(folder / "links"), api=str(folder / "api"),
        snapshot=str(folder / "snapshot"), shutdown_timeout_s=0.0,
    )  # fmt: skip
    heard, told = os.pipe()
    with (folder / "log").open("ab") as log:
        passed = [told, listening.fileno(), told]
        one = process.start("kvmig.proxy", *passed, log=log, descriptors=passed)
    os.close(told)
    assert one.stdin is not None
    one.stdin.write(msgspec.json.encode(launch) + b"\n")
    one.stdin.flush()
    try:
        yield one
    finally:
        process.end(one)
        os.close(heard)


# -- measured


def first_ms(port: int) -> list[float]:
    """Of calls one after the other, each over a connection of its own."""
    body = json.dumps({**BODY, "max_tokens": 1}).encode()
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        b"Authorization: Bearer %s\r\nContent-Length: %d\r\n\r\n%s"
        % (KEY.shown.encode(), len(body), body)
    )
    found = []
    for _ in range(PROBES):
        began = time.monotonic()
        with socket.create_connection(("127.0.0.1", port), 30) as sock:
            sock.sendall(request)
            came = b""
            while b"~" not in came:
                more = sock.recv(1 << 16)
                if not more:
                    raise RuntimeError(f"no token came: {came[-500:]!r}")
                came += more
        found.append((time.monotonic() - began) * 1e3)
        time.sleep(0.01)
    return found


class Bench:
    """One proxy at a time, each in a folder of its own."""

    def __init__(self, seconds: float, streams: int, logs: Path, makes: Mapping[str, Make]) -> None:
        self._seconds = seconds
        self._streams = streams
        self._logs = logs
        self._makes = makes

    @contextmanager
    def _up(self, name: str, rate: int) -> Iterator[tuple[Driver, int, list[int]]]:
        """A proxy before an upstream of this pace; its client, port and processes."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self._logs)))
            port = free_port()
            address = str(folder / "up")
            if name in AT_PORTS:
                address = str(port if name == "direct" else free_port())
            log = stack.enter_context((folder / "upstream.log").open("wb"))
            upstream = process.start("bench.proxy.upstream", address, rate, log=log)
            stack.callback(process.end, upstream)
            time.sleep(0.5)
            pids = stack.enter_context(self._makes[name](port, address, folder))
            wait_for(port, folder)
            time.sleep(1.0)
            client = stack.enter_context(Driver(port, folder / "client"))
            client.ask("open", streams=20, watched=0, in_flight=8, body=BODY, key=KEY.shown)
            client.ask("close")
            yield client, port, pids

    def _open(self, client: Driver, streams: int) -> None:
        client.ask(
            "open", streams=streams, watched=0, in_flight=IN_FLIGHT, body=BODY, key=KEY.shown
        )

    def sample(self, name: str, number: int) -> Sample:
        paces = LITELLM_PACES if name == "litellm" else Paces()
        with self._up(name, paces.usual) as (client, _, pids):
            memory = process.pss_bytes(pids)
            self._open(client, self._streams)
            taken = process.pss_bytes(pids) - memory
            client.ask("measure", seconds=1.0)
            before = process.cpu_s(pids), process.kernel_s(pids)
            told = client.ask("measure", seconds=self._seconds)
            spent, kernel = process.cpu_s(pids) - before[0], process.kernel_s(pids) - before[1]
        most = None if paces.most is None else self._most(name, paces.most)
        with self._up(name, paces.beside) as (client, port, _):
            self._open(client, BESIDE)
            first = first_ms(port)
        return Sample(
            proxy=name,
            round=number,
            us_per_token=spent / max(1, told["tokens"]) * 1e6,
            kernel_us_per_token=kernel / max(1, told["tokens"]) * 1e6,
            delivered=told["tokens"] / told["seconds"],
            most=most,
            first_p50_ms=median(first),
            first_p99_ms=quantile(sorted(first), 0.99),
            kib_per_stream=taken / self._streams / 1024,
        )

    def _most(self, name: str, offered: int) -> float:
        with self._up(name, offered) as (client, _, _):
            self._open(client, self._streams)
            client.ask("measure", seconds=1.0)
            told = client.ask("measure", seconds=self._seconds)
        return float(told["tokens"] / told["seconds"])

    def front(self, behind: bool, number: int) -> dict[str, Any]:
        """kvmig's front end on engines that compute nothing, alone or behind the proxy."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self._logs)))
            path = str(folder / "up") if behind else ""
            site = stack.enter_context(Site(Setup("kvmig", 1, INSTANCES, path), folder / "front"))
            proxy = self._makes["kvmig"]
            pids = stack.enter_context(proxy(site.port, path, folder)) if behind else []
            wait_for(site.port, folder)
            time.sleep(1.0)
            client = stack.enter_context(Driver(site.port, folder / "client"))
            self._open(client, self._streams)
            site.orders.give(SetRate(FRONT_PACE / self._streams))
            client.ask("measure", seconds=2.0)
            before = process.cpu_s(pids), process.cpu_s(site.front_ends)
            told = client.ask("measure", seconds=self._seconds)
            spent = process.cpu_s(pids) - before[0], process.cpu_s(site.front_ends) - before[1]
        tokens = max(1, told["tokens"])
        return {
            "proxy": "front + kvmig" if behind else "front",
            "round": number,
            "delivered": told["tokens"] / told["seconds"],
            "proxy_us_per_token": spent[0] / tokens * 1e6,
            "front_us_per_token": spent[1] / tokens * 1e6,
        }


def allow_files() -> int:
    """As many open files as can be had, for this process and those that it starts; how many."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, max(most, FILES)))
    except (ValueError, PermissionError):  # more is for root alone
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def makes_of(root: argparse.ArgumentParser, options: argparse.Namespace) -> dict[str, Make]:
    """Of the proxies that the flags name."""
    makes: dict[str, Make] = {"direct": direct, "kvmig": kvmig(options.proxies)}
    if options.nginx:
        makes["nginx"] = nginx(options.nginx, options.proxies)
    if options.litellm is not None:
        try:
            program = install_litellm(options.litellm.absolute())
        except subprocess.CalledProcessError as error:
            root.error(f"LiteLLM can't be installed: {error.output or error}")
        makes["litellm"] = litellm(program, KEY.shown)
    return makes


def summarise(samples: Sequence[Sample], fronts: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians of the rounds, and what a proxy adds to `direct`. fronts: of `Bench.front`."""
    summary: dict[str, float] = {}
    names = list(dict.fromkeys(one.proxy for one in samples))
    for name in names:
        mine = [one for one in samples if one.proxy == name]
        for field in Sample.__dataclass_fields__:
            measured = [getattr(one, field) for one in mine if getattr(one, field) is not None]
            if field not in ("proxy", "round") and measured:
                summary[f"{name}.{field}"] = median(measured)
    for name in names:
        for field in ("first_p50_ms", "first_p99_ms"):
            if name != "direct":
                added = summary[f"{name}.{field}"] - summary[f"direct.{field}"]
                summary[f"{name}.added_{field}"] = added
    alone, behind_it = (
        [one["delivered"] for one in fronts if one["proxy"] == name]
        for name in ("front", "front + kvmig")
    )
    summary["front.delivered"] = median(alone)
    summary["front_behind.delivered"] = median(behind_it)
    summary["front_behind_over_alone"] = median(
        there / here for there, here in zip(behind_it, alone, strict=True)
    )
    return summary


TARGETS: dict[str, report.Target] = {
    "kvmig.us_per_token": {"max": 10.0},
    "kvmig.added_first_p50_ms": {"max": 1.0},
    "kvmig.added_first_p99_ms": {"max": 5.0},
    "kvmig.kib_per_stream": {"max": 20.0},
    "front_behind_over_alone": {"min": 0.9},
}


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, LONG_RUN)
    root.add_argument("--nginx", default=shutil.which("nginx") or "", help="the program")
    root.add_argument(
        "--litellm", type=Path, metavar="FOLDER",
        help="a virtual environment of LiteLLM's proxy, made there from PyPI unless it is there",
    )  # fmt: skip
    root.add_argument("--rounds", type=int, help="instead of 3")
    root.add_argument("--streams", type=int, default=1000, help="open at once")
    root.add_argument("--proxies", type=int, default=1, help="processes of kvmig's, and of nginx")
    options = root.parse_args(argv)
    files = allow_files()  # a client's end is one, a proxy has two for a stream
    served = int(0.9 * most_clients(DoorConnection.each))  # by a proxy
    most = min(files, served * options.proxies) - BESIDE
    if options.streams > most:
        root.error(
            f"--streams is {options.streams}, must be at most {most} with --proxies"
            f" {options.proxies} and {files} open files a process"
        )
    seconds, rounds = (3.0, 1) if options.quick else (8.0, options.rounds or 3)
    makes = makes_of(root, options)
    names = [*makes]
    result = report.begin(
        "proxy",
        {
            "seconds": seconds, "rounds": rounds, "streams": options.streams,
            "proxies": options.proxies, "pace": Paces().usual,
        },
    )  # fmt: skip
    samples: list[Sample] = []
    fronts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as logs:
        bench = Bench(seconds, options.streams, Path(logs), makes)
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                report.say(f"round {number + 1}: {name}")
                samples.append(bench.sample(name, number))
            for behind in (False, True) if number % 2 == 0 else (True, False):
                report.say(f"round {number + 1}: front end, {behind=}")
                fronts.append(bench.front(behind, number))
    result.samples = [*map(asdict, samples), *fronts]
    result.summary, result.targets = summarise(samples, fronts), TARGETS
    columns = (
        "proxy",
        "round",
        "us a token",
        "kernel's",
        "delivered",
        "most",
        "first p50",
        "p99",
        "KiB",
    )
    rows = [tuple(asdict(one).values()) for one in samples]
    return report.finish(result, options, [report.table("Proxies", columns, rows)])


if __name__ == "__main__":
    sys.exit(main())
