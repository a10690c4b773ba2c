"""The server's process: when it says that it serves, its first start, and its end."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from kvmig.core.errors import KvmigError, StartupError
from kvmig.fleet import server
from kvmig.fleet.api import ApiBackend
from kvmig.fleet.orders import CheckFlags, Order, order_of
from kvmig.fleet.server import FleetServer
from kvmig.fleet.settings import FleetSettings, ServerLaunch, make_folders
from kvmig.fleet.store import FleetStore, KeyChanges
from kvmig.fleet.tables import StoreError
from tests.support.waiting import until


@pytest.fixture
def settings() -> Iterator[FleetSettings]:
    with tempfile.TemporaryDirectory(prefix="kvmig-", dir="/tmp") as folder:
        made = FleetSettings(data=f"{folder}/data")
        make_folders(made)
        yield made


@asynccontextmanager
async def started(settings: FleetSettings) -> AsyncIterator[list[Order]]:
    """A server, which ends within seconds: what it orders of an init that carries nothing out."""
    orders: list[Order] = []
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    loop = asyncio.get_running_loop()
    with ours:
        loop.add_reader(ours, lambda: orders.append(order_of(ours.recv(1 << 20))))
        made = FleetServer(ServerLaunch(settings), theirs)
        try:
            await made.start()
            yield orders
        finally:
            loop.remove_reader(ours)
            async with asyncio.timeout(20):
                await made.close()


def api_client(settings: FleetSettings) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=str(settings.api), verify=False)
    return httpx.AsyncClient(transport=transport, base_url="http://x/kvmig/v2", timeout=60)


class DeposedServer:
    """Another host takes over while it starts."""

    deposed = True

    def __init__(self, launch: ServerLaunch, to_init: socket.socket) -> None:
        to_init.close()
        self.retiring = asyncio.Event()
        self.retiring.set()

    async def start(self) -> None:
        """Start at once."""

    async def close(self) -> None:
        """End at once."""


async def test_a_server_that_lost_the_lead_while_it_started_does_not_say_that_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor would let clients in beside the other host, and for good."""
    monkeypatch.setattr(server, "FleetServer", DeposedServer)
    monkeypatch.setattr(server, "until_stopped", asyncio.Event().wait)
    init, other = socket.socketpair()
    hears, announced = os.pipe()
    launch = ServerLaunch(FleetSettings(data=str(tmp_path)), ())
    try:
        with pytest.raises(StartupError, match="another host's server has taken over"):
            async with asyncio.timeout(5):
                await server.run(launch, announced, init.detach(), -1)
    finally:
        gc.unfreeze()
        other.close()
        os.close(announced)
        said = os.read(hears, 1000)
        os.close(hears)
    assert said == b""


async def test_an_order_that_waits_for_an_engine_is_refused_when_the_server_ends(
    settings: FleetSettings,
) -> None:
    """Another host would take over, and a fleet end, only minutes later."""
    spec = {"name": "a", "source": f"path:{settings.data}", "engine": "toy"}
    async with api_client(settings) as http:
        async with started(settings) as orders:
            adding = asyncio.create_task(http.post("/models", json=spec))
            await until(lambda: any(isinstance(order, CheckFlags) for order in orders))
        answer = await adding
    assert answer.status_code == 503
    assert "the server ends" in answer.text


async def test_a_call_that_does_not_end_keeps_no_server_from_its_end(
    settings: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = asyncio.Event()

    async def hang(*_: object) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(server, "API_END_S", 1, raising=False)
    monkeypatch.setattr(ApiBackend, "checked", hang)
    spec = {"name": "a", "source": f"path:{settings.data}", "engine": "toy"}
    async with api_client(settings) as http:
        async with started(settings):
            adding = asyncio.create_task(http.post("/models", json=spec))
            async with asyncio.timeout(20):
                await begun.wait()
        assert (await adding).status_code == 500


async def test_the_first_admins_key_is_made_again_where_it_could_not_be_written_down(
    settings: FleetSettings,
) -> None:
    """As on a full disk: nobody would ever know it."""
    path = settings.path("admin-key")
    path.mkdir()
    with pytest.raises((OSError, KvmigError), match="admin-key"):
        async with started(settings):
            pass
    path.rmdir()
    async with started(settings):
        pass
    assert path.read_text().startswith("kv-")
    assert path.stat().st_mode & 0o777 == 0o600


async def test_a_key_whose_revocation_could_not_be_read_back_lets_nobody_in_a_moment_later(
    settings: FleetSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else would read the keys again before the next order; the same one finds it done."""
    changes, left = FleetStore.key_changes, [1]

    def locked_once(store: FleetStore, since: int = 0) -> KeyChanges:
        if left:
            left.pop()
            raise StoreError("the database is locked")
        return changes(store, since)

    async with started(settings), api_client(settings) as http:
        await http.post("/users", json={"name": "anna"})
        made = (await http.post("/keys", json={"user": "anna"})).json()
        headers = {"x-forwarded-for": "10.0.0.9", "authorization": f"Bearer {made['key']}"}
        assert (await http.get("/names", headers=headers)).status_code == 200
        monkeypatch.setattr(FleetStore, "key_changes", locked_once)
        await http.delete(f"/keys/{made['prefix']}")
        assert not left
        async with asyncio.timeout(10):
            while (await http.get("/names", headers=headers)).status_code == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
