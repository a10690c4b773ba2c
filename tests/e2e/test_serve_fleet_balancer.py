"""Two hosts of one fleet behind HAProxy, unmodified, as docs/high-availability.md shows it."""

from __future__ import annotations

import asyncio
import csv
import os
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from kvmig.process.sockets import free_port
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.e2e.test_serve_fleet_quotas import new_key
from tests.e2e.test_serve_fleet_standby import two_hosts, until_counted
from tests.support import postgres
from tests.support.fleets import PATH, ToyFleet, ask, counted
from tests.support.waiting import until, until_yes, wait_until

pytestmark = [pytest.mark.server, pytest.mark.long]

CONFIG = """
global
    stats socket {socket}
defaults
    mode tcp
    timeout connect 2s
    timeout client 120s
    timeout server 120s
frontend door
    bind 127.0.0.1:{port}
    default_backend kvmig
backend kvmig
    mode tcp
    balance roundrobin
    server one 127.0.0.1:{one} check inter 500ms
    server two 127.0.0.1:{two} check inter 500ms
"""


class Balancer:
    """HAProxy in front of two hosts."""

    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._socket = str(folder / "stats")

    def taken(self) -> dict[str, int]:
        """Connections that each host has had."""
        with socket.socket(socket.AF_UNIX) as link:
            link.connect(self._socket)
            link.sendall(b"show stat\n")
            said = b"".join(iter(lambda: link.recv(1 << 16), b"")).decode()
        rows = csv.DictReader(said.lstrip("# ").splitlines())
        return {
            row["svname"]: int(row["stot"])
            for row in rows
            if row["pxname"] == "kvmig" and row["svname"] in ("one", "two")
        }

    def client(self, key: str) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.url, headers=headers, timeout=SERVER_PATIENCE_S)

    async def call(self, key: str, tokens: int = 20) -> int:
        """The status of one call from a connection of its own; 0: it broke off."""
        async with self.client(key) as client:
            try:
                answer = await client.post(PATH, json=ask("count", tokens))
            except httpx.TransportError:
                return 0
        if answer.status_code == 200:
            assert answer.json()["choices"][0]["text"] == counted(tokens)
        return answer.status_code


@contextmanager
def balanced(folder: Path, a: ToyFleet, b: ToyFleet) -> Iterator[Balancer]:
    """One that knows both hosts."""
    haproxy = shutil.which("haproxy") or "/usr/sbin/haproxy"
    if not Path(haproxy).exists():
        pytest.skip("no HAProxy here (apt-get install haproxy)")
    port, config = free_port(), folder / "haproxy.cfg"
    config.write_text(CONFIG.format(socket=folder / "stats", port=port, one=a.port, two=b.port))
    made = Balancer(folder, port)
    process = subprocess.Popen([haproxy, "-db", "-f", config], stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: (folder / "stats").exists())
        yield made
    finally:
        process.terminate()
        process.wait(10)


def output(fleet: ToyFleet) -> int:
    """Tokens of all answers, by the ledger."""
    return sum(row["output"] for row in fleet.get("usage?by=model")["data"])


async def test_keys_limits_and_usage_are_those_of_one_host_behind_a_balancer(
    postgres_cluster: postgres.Cluster, tmp_path: Path
) -> None:
    with (
        two_hosts(postgres_cluster, tmp_path) as (a, b, key),
        balanced(tmp_path, a, b) as balancer,
    ):
        assert [await balancer.call(key) for _ in range(12)] == [200] * 12
        # A quota, to the token: each call has 3 of prompt and 20 of output.
        (row,) = await until_counted(a, 12)
        each = (row["prompt"] + row["output"]) // 12
        quota = await asyncio.to_thread(new_key, a, quota=5 * each, period="day")
        statuses = Counter([await balancer.call(quota) for _ in range(9)])
        assert statuses == {200: 5, 429: 4}
        # Calls at once.
        parallel = await asyncio.to_thread(new_key, a, parallel=3)
        a.hold(2)
        calls = [asyncio.create_task(balancer.call(parallel)) for _ in range(10)]
        await until(lambda: sum(one.done() for one in calls) == 7)
        a.hold(None)
        assert Counter(await asyncio.gather(*calls)) == {200: 3, 429: 7}
        # What was used is counted once, whichever host took the call.
        await until_yes(lambda: output(a) >= (12 + 5 + 3) * 20)
        assert output(a) == (12 + 5 + 3) * 20
        # A key that is revoked is good at neither.
        prefix = parallel.split("-")[1]
        revoked = await asyncio.to_thread(a.ask, "DELETE", f"keys/{prefix}")
        assert revoked.is_success, revoked.text
        assert {await balancer.call(parallel) for _ in range(4)} == {401}
        taken = balancer.taken()
        assert min(taken.values()) > 15, "both hosts have taken calls"
        assert abs(taken["one"] - taken["two"]) <= 6


async def test_clients_of_the_balancer_are_served_while_the_other_host_takes_over(
    postgres_cluster: postgres.Cluster, tmp_path: Path
) -> None:
    with (
        two_hosts(postgres_cluster, tmp_path) as (a, b, key),
        balanced(tmp_path, a, b) as balancer,
    ):
        assert await balancer.call(key) == 200
        assert a.process is not None
        began = time.monotonic()
        for pid in [a.process.pid, *a.processes("")]:  # all at once, as a host without power
            os.kill(pid, signal.SIGKILL)
        statuses = [await balancer.call(key) for _ in range(6)]
        assert statuses[-3:] == [200, 200, 200]
        assert set(statuses) <= {0, 200, 503}, "a call that broke off, or that was told"
        assert time.monotonic() - began < 60
        await asyncio.to_thread(a.process.wait, 10)
        a.begin()
        await asyncio.to_thread(a.says, f"{b.folder} leads, this host takes over")
        await asyncio.sleep(2)  # HAProxy sees it again
        assert [await balancer.call(key) for _ in range(6)] == [200] * 6
