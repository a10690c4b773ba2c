"""Connections to a server that accepts slowly: a full queue of its socket is no refusal."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from kvmig.process.unix_connections import connect_unix


class Client(asyncio.Protocol):
    """Keeps its connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport


@pytest.fixture
def full(tmp_path: Path) -> Iterator[socket.socket]:
    """A server with as many clients as may wait: one."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as first:
        server.bind(path)
        server.listen(0)
        server.settimeout(10)
        first.connect(path)
        yield server


def test_a_client_waits_for_a_place_in_a_full_queue(full: socket.socket) -> None:
    async def connect() -> None:
        accepting = asyncio.create_task(asyncio.to_thread(full.accept))
        client = await connect_unix(Client, full.getsockname(), 10)
        client.transport.close()
        (await accepting)[0].close()

    uvloop.run(connect())


def test_a_client_waits_for_so_long_at_most(full: socket.socket) -> None:
    with pytest.raises(TimeoutError):
        uvloop.run(connect_unix(asyncio.Protocol, full.getsockname(), 0.1))


def test_a_server_that_is_gone_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        uvloop.run(connect_unix(asyncio.Protocol, str(tmp_path / "s"), 10))
