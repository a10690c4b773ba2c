"""An HTTP server as a task: its start and its end, with a server of the tests' own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from functools import partial

import pytest

from kvmig.asgi.uvicorn_task import HttpTask
from kvmig.core.errors import StartupError


class Server:
    """Ends when it is told; `deaf`: only when it is told twice, or cancelled."""

    def __init__(self, deaf: int = 0) -> None:
        self.started = self.should_exit = self.force_exit = self.cancelled = False
        self._deaf = deaf

    async def serve(self) -> None:
        self.started = True
        try:
            while [self.should_exit, self.force_exit].count(True) <= self._deaf:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        except asyncio.CancelledError:
            self.cancelled = True
            raise


@pytest.mark.parametrize("deaf", [0, 1, 2])
async def test_it_ends_when_told_or_else_is_made_to(deaf: int) -> None:
    server, sock = Server(deaf), socket.socket()
    task = HttpTask(sock, lambda: server)
    await task.run(server.serve())
    await task.stop(0.05)
    await task.ended()
    assert (server.force_exit, server.cancelled) == (deaf > 0, deaf > 1)
    assert sock.fileno() == -1


async def test_a_server_that_fails_is_told_with_the_reason_and_its_port_is_closed() -> None:
    async def serve() -> None:
        raise OSError("no certificate")

    sock = socket.socket()
    task = HttpTask(sock, lambda: None)
    with pytest.raises(StartupError, match="the HTTP server did not start: no certificate"):
        await task.run(serve())
    await task.stop(1)
    assert sock.fileno() == -1


async def test_a_signal_while_it_starts_is_the_processs_own() -> None:
    loop, heard, server = asyncio.get_running_loop(), list[str](), Server()

    def listens(who: str) -> None:
        loop.add_signal_handler(signal.SIGUSR1, heard.append, who)

    async def serve() -> None:
        listens("theirs")
        await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.sleep(0.01)
        await server.serve()

    listens("ours")
    task = HttpTask(socket.socket(), lambda: server)
    try:
        await task.run(serve(), partial(listens, "ours"))
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
        await task.stop(1)
    assert heard == ["ours"]


async def test_one_that_was_never_run_gives_its_port_back() -> None:
    sock = socket.socket()
    await HttpTask(sock, lambda: None).stop(1)
    assert sock.fileno() == -1
