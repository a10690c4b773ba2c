"""Two hosts of one PostgreSQL, each with its own supervisor, proxies and models: one serves."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.support import postgres
from tests.support.fleets import Streamed, ToyFleet, answer, ask, counted, hold_streams

pytestmark = pytest.mark.server


def host(folder: Path, database: str) -> ToyFleet:
    folder.mkdir()
    return ToyFleet(folder, "--standby", f"--database={database}")


@contextmanager
def ended(*fleets: ToyFleet) -> Iterator[None]:
    """Both end, whatever happens."""
    try:
        yield
    except BaseException:
        for one in fleets:
            if one.log.exists():
                print(one.folder, one.log.read_text()[-3000:])
        raise
    finally:
        for one in fleets:
            one.end()


def stand_by(leader: ToyFleet, other: ToyFleet) -> None:
    """With the leader's pepper, as docs/high-availability.md says."""
    other.folder.mkdir(mode=0o700)
    shutil.copy(leader.folder / "pepper", other.folder / "pepper")
    other.begin()
    other.says(f"{leader.folder} leads, this host takes over when it is gone")


@contextmanager
def two_hosts(cluster: postgres.Cluster, folder: Path) -> Iterator[tuple[ToyFleet, ToyFleet, str]]:
    """One that serves the model count, one that stands by, and the first one's key."""
    database = cluster.new()
    a, b = host(folder / "a", database), host(folder / "b", database)
    with ended(a, b):
        a.start()
        a.add_toy("count")
        stand_by(a, b)
        yield a, b, a.key


async def serves(fleet: ToyFleet, key: str, seconds: float) -> float:
    """Seconds until a client of this host is answered."""
    began = time.monotonic()
    async with asyncio.timeout(seconds), fleet.client(key) as client:
        while True:
            try:
                found = await client.get("/v1/models")
            except httpx.TransportError:
                await asyncio.sleep(0.02)
                continue
            if found.status_code == 200:
                return time.monotonic() - began
            await asyncio.sleep(0.02)


async def relays(fleet: ToyFleet, key: str) -> bool:
    """Whether calls of this host's clients are answered by the host that leads."""
    async with fleet.client(key) as client:
        return await answer(client, ask("count", 20)) == counted(20)


def calls(fleet: ToyFleet) -> int:
    """Calls of all time, by the ledger."""
    return sum(row["calls"] for row in fleet.get("usage?by=model")["data"])


async def until_counted(fleet: ToyFleet, wanted: int) -> Any:
    async with asyncio.timeout(SERVER_PATIENCE_S):
        while calls(fleet) != wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return fleet.get("usage?by=model")["data"]


@pytest.mark.long
async def test_a_standby_takes_over_from_a_host_that_dies(
    postgres_cluster: postgres.Cluster, tmp_path: Path
) -> None:
    with two_hosts(postgres_cluster, tmp_path) as (a, b, key):
        (waiting,) = b.processes("kvmig.fleet.server")
        os.kill(waiting, signal.SIGKILL)
        b.says("the server died while starting (killed by SIGKILL), again in 2 s")
        assert await relays(b, key)
        async with a.client() as client:
            assert await answer(client, ask("count", 20)) == counted(20)
        await until_counted(a, 2)
        assert a.process is not None
        for pid in [a.process.pid, *a.processes("")]:  # all at once, as a host without power
            os.kill(pid, signal.SIGKILL)
        await serves(b, key, 30)
        async with b.client(key) as client:
            assert await answer(client, ask("count", 20)) == counted(20)
        (row,) = await until_counted(b, 3)
        assert row["output"] == 60
        a.process.wait(10)
        a.log.unlink()
        a.begin()
        a.says(f"{b.folder} leads, this host takes over when it is gone")
        assert await relays(a, key)
        assert a.stop() == 0


@pytest.mark.long
async def test_a_host_that_ends_in_order_finishes_its_streams_while_the_other_one_serves(
    postgres_cluster: postgres.Cluster, tmp_path: Path
) -> None:
    with two_hosts(postgres_cluster, tmp_path) as (a, b, _):
        (stream,) = await hold_streams(a, ask("count", 40))
        assert a.process is not None
        a.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(b.says, f"serving on {b.url}")
        assert not stream.task.done()
        a.hold(None)
        assert await stream.task == counted(40)
        assert await asyncio.to_thread(a.process.wait, 30) == 0
        (row,) = await until_counted(b, 1)
        assert row["output"] == 40, "the host that ended has counted its last stream"


@pytest.mark.long
async def test_a_leader_that_stands_still_is_followed_and_ends_what_it_has(
    postgres_cluster: postgres.Cluster, tmp_path: Path
) -> None:
    with two_hosts(postgres_cluster, tmp_path) as (a, b, key):
        await asyncio.sleep(1)
        (stream,) = await hold_streams(a, ask("count", 40))
        relayed = Streamed(b, ask("count", 50), key)
        await relayed.reach(8)
        (server,) = a.processes("kvmig.fleet.server")
        os.kill(server, signal.SIGSTOP)
        try:
            await asyncio.to_thread(b.says, f"serving on {b.url}")
        finally:
            os.kill(server, signal.SIGCONT)
        await asyncio.to_thread(a.says, f"{b.folder} leads the fleet now: all ends here")
        a.hold(None)
        assert await stream.task == counted(40)
        assert await relayed.task == counted(50), "the other host's client has read on"
        await asyncio.to_thread(a.says, f"{b.folder} leads, this host takes over when it is gone")
        assert await relays(a, key)
        assert not a.processes("kvmig.serve")
        made = await asyncio.to_thread(b.ask, "POST", "users", {"name": "carl"})
        assert made.status_code == 201, made.text
        (row,) = await until_counted(b, 3)
        assert row["output"] == 40 + 50 + 20
