"""What a proxy costs: kvmig's and nginx, side by side in one run.

Upstream of each is `bench.proxy.upstream`, a deployment that only writes; `direct` is a client
without any proxy. `us a token`: processor time of the proxy's processes for each token that the
client has read, at a pace that all of them keep. `most`: tokens a second when upstream writes as
fast as it can, which is bounded by this machine's cores: upstream, proxy and client share them.
`first`: milliseconds to the first token of a call beside 100 streams, over a new connection.
`KiB`: memory of the proxy for each of 1,000 open streams.

`front` and `front + kvmig` are kvmig's front end on engines that compute nothing, alone and behind
the proxy, with tokens for 1,000 streams at more than it can do: what the proxy takes from a server.

nginx, the least that a proxy can cost, is a program that `--nginx` names (Debian's package needs
not be installed: `dpkg -x` unpacks it).
"""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from bench import report
from bench.load import process
from bench.load.drive import Driver
from bench.load.latency import quantile
from bench.load.orders import SetRate
from bench.load.rounds import BODY, IN_FLIGHT
from bench.load.sites import Setup, Site
from kvmig.accounts.keys import KeyGrant, new_key
from kvmig.proxy.messages import ProxyLaunch, Route, Snapshot
from kvmig_tools.served import free_port

Make = Callable[[int, str, Path], AbstractContextManager[list[int]]]
"""Starts a proxy at a port, for an upstream at a path or port; gives its processes."""
PEPPER = bytes(32)
KEY = new_key(PEPPER)
START_S = 120.0
PROBES = 200
STREAMS, BESIDE = 1000, 100
"""Of the throughput and the memory, and beside the calls whose first token is timed."""
PACE, BESIDE_PACE, MOST, FRONT_PACE = 5_000, 2_000, 1_000_000, 50_000
"""Tokens a second of all streams; of front ends far more than they can do."""
INSTANCES = 10
NGINX = """\
user {user}; worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;
  fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream up {{ server unix:{path}; }}
  server {{ listen 127.0.0.1:{port} backlog=4096;
    location / {{ proxy_pass http://up; proxy_http_version 1.1; proxy_buffering off; }} }}
}}
"""


@dataclass
class Sample:
    """One proxy, in one round."""

    proxy: str
    round: int
    us_per_token: float
    delivered: float
    """Tokens a second, at PACE."""
    most: float
    first_p50_ms: float
    first_p99_ms: float
    kib_per_stream: float


# -- proxies. Each is started for an upstream, and gives its processes.


@contextmanager
def direct(port: int, upstream: str, folder: Path) -> Iterator[list[int]]:
    """None."""
    yield []


@contextmanager
def kvmig(port: int, upstream: str, folder: Path) -> Iterator[list[int]]:
    grant = KeyGrant(
        key_id="k1", origin="k1", user_id="u1", user="bench", prefix=KEY.prefix, hash=KEY.hash
    )
    route = Route(name="count", state="ready", socket=upstream, served="count")
    known = Snapshot(version=1, pepper=PEPPER, keys=(grant,), routes=(route,))
    (folder / "snapshot").write_bytes(msgspec.msgpack.encode(known))
    with socket.create_server(("127.0.0.1", port), backlog=4096) as listening:
        descriptor = listening.fileno()
        launch = ProxyLaunch(
            name="proxy", links=str(folder / "links"), api=str(folder / "api"),
            snapshot=str(folder / "snapshot"), shutdown_timeout_s=0.0,
        )  # fmt: skip
        heard, told = os.pipe()
        with (folder / "log").open("ab") as log:
            passed = [told, descriptor, told]
            one = process.start("kvmig.proxy", *passed, log=log, descriptors=passed)
        os.close(told)
    assert one.stdin is not None
    one.stdin.write(msgspec.json.encode(launch) + b"\n")
    one.stdin.flush()
    try:
        yield [one.pid]
    finally:
        process.end(one)
        os.close(heard)


@contextmanager
def running(words: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program of others, and all that it starts."""
    with (folder / "log").open("ab") as log:
        one = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=folder)
    try:
        yield one
    finally:
        one.terminate()
        try:
            one.wait(process.END_S)
        except subprocess.TimeoutExpired:
            one.kill()
            one.wait()


def nginx(program: str) -> Make:
    """Started for an upstream."""

    @contextmanager
    def make(port: int, upstream: str, folder: Path) -> Iterator[list[int]]:
        user = getpass.getuser()
        text = NGINX.format(user=user, folder=folder, path=upstream, port=port)
        (folder / "nginx.conf").write_text(text)
        words = [program, "-p", str(folder), "-c", str(folder / "nginx.conf")]
        with running(words, folder) as one:
            wait_for(port, folder)
            yield [one.pid, *process.descendants(one.pid)]

    return make


def wait_for(port: int, folder: Path) -> None:
    """Until somebody takes connections."""
    deadline = time.monotonic() + START_S
    while True:
        try:
            with socket.create_connection(("127.0.0.1", port)):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise RuntimeError((folder / "log").read_text()[-2000:]) from None
            time.sleep(0.1)


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

    def __init__(self, seconds: float, logs: Path, nginx: str) -> None:
        self._seconds = seconds
        self._logs = logs
        self._nginx = nginx

    @contextmanager
    def _up(self, name: str, rate: int) -> Iterator[tuple[Driver, int, list[int]]]:
        """A proxy before an upstream of this pace; its client, port and processes."""
        make = {"direct": direct, "kvmig": kvmig, "nginx": nginx(self._nginx)}[name]
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self._logs)))
            port = free_port()
            address = str(port) if name == "direct" else str(folder / "up")
            log = stack.enter_context((folder / "upstream.log").open("wb"))
            upstream = process.start("bench.proxy.upstream", address, rate, log=log)
            stack.callback(process.end, upstream)
            time.sleep(0.5)
            pids = stack.enter_context(make(port, address, folder))
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
        with self._up(name, PACE) as (client, _, pids):
            memory = process.pss_bytes(pids)
            self._open(client, STREAMS)
            taken = process.pss_bytes(pids) - memory
            client.ask("measure", seconds=1.0)
            before = process.cpu_s(pids)
            told = client.ask("measure", seconds=self._seconds)
            spent = process.cpu_s(pids) - before
        with self._up(name, MOST) as (client, _, _):
            self._open(client, STREAMS)
            client.ask("measure", seconds=1.0)
            most = client.ask("measure", seconds=self._seconds)
        with self._up(name, BESIDE_PACE) as (client, port, _):
            self._open(client, BESIDE)
            first = first_ms(port)
        return Sample(
            proxy=name,
            round=number,
            us_per_token=spent / max(1, told["tokens"]) * 1e6,
            delivered=told["tokens"] / told["seconds"],
            most=most["tokens"] / most["seconds"],
            first_p50_ms=median(first),
            first_p99_ms=quantile(sorted(first), 0.99),
            kib_per_stream=taken / STREAMS / 1024,
        )

    def front(self, behind: bool, number: int) -> dict[str, Any]:
        """kvmig's front end on engines that compute nothing, alone or behind the proxy."""
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=self._logs)))
            path = str(folder / "up") if behind else ""
            site = stack.enter_context(Site(Setup("kvmig", 1, INSTANCES, path), folder / "front"))
            pids = stack.enter_context(kvmig(site.port, path, folder)) if behind else []
            wait_for(site.port, folder)
            time.sleep(1.0)
            client = stack.enter_context(Driver(site.port, folder / "client"))
            self._open(client, STREAMS)
            site.orders.give(SetRate(FRONT_PACE / STREAMS))
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


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--nginx", default=shutil.which("nginx") or "", help="the program")
    root.add_argument("--rounds", type=int, help="instead of 3")
    options = root.parse_args(argv)
    seconds, rounds = (3.0, 1) if options.quick else (8.0, options.rounds or 3)
    names = ["direct", "kvmig", *(["nginx"] if options.nginx else [])]
    result = report.begin(
        "proxy", {"seconds": seconds, "rounds": rounds, "streams": STREAMS, "pace": PACE}
    )
    samples: list[Sample] = []
    fronts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as logs:
        bench = Bench(seconds, Path(logs), options.nginx)
        for number in range(rounds):
            for name in names if number % 2 == 0 else reversed(names):
                report.say(f"round {number + 1}: {name}")
                samples.append(bench.sample(name, number))
            for behind in (False, True) if number % 2 == 0 else (True, False):
                report.say(f"round {number + 1}: front end, {behind=}")
                fronts.append(bench.front(behind, number))
    result.samples = [*map(asdict, samples), *fronts]
    for name in names:
        mine = [one for one in samples if one.proxy == name]
        for field in Sample.__dataclass_fields__:
            if field not in ("proxy", "round"):
                result.summary[f"{name}.{field}"] = median(getattr(one, field) for one in mine)
    for name in names[1:]:
        for field in ("first_p50_ms", "first_p99_ms"):
            added = result.summary[f"{name}.{field}"] - result.summary[f"direct.{field}"]
            result.summary[f"{name}.added_{field}"] = added
    alone, behind_it = (
        [one["delivered"] for one in fronts if one["proxy"] == name]
        for name in ("front", "front + kvmig")
    )
    result.summary["front.delivered"] = median(alone)
    result.summary["front_behind.delivered"] = median(behind_it)
    result.summary["front_behind_over_alone"] = median(
        there / here for there, here in zip(behind_it, alone, strict=True)
    )
    result.targets = {
        "kvmig.us_per_token": {"max": 10.0},
        "kvmig.added_first_p50_ms": {"max": 1.0},
        "kvmig.added_first_p99_ms": {"max": 5.0},
        "kvmig.kib_per_stream": {"max": 20.0},
        "front_behind_over_alone": {"min": 0.9},
    }
    columns = ("proxy", "round", "us a token", "delivered", "most", "first p50", "p99", "KiB")
    rows = [tuple(asdict(one).values()) for one in samples]
    return report.finish(result, options, [report.table("Proxies", columns, rows)])


if __name__ == "__main__":
    sys.exit(main())
