"""A uvicorn server as a task of the running event loop: starts and stops in bounded time."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from kvmig.core.config import KEEP_ALIVE_S
from kvmig.core.errors import StartupError

_START_TIMEOUT_S = 60.0


class StoppableServer(Protocol):
    """The part of `uvicorn.Server` that `HttpTask` uses."""

    started: bool
    should_exit: bool
    force_exit: bool


class HttpTask:
    """Runs and stops an HTTP server: `run`, then `stop`, also when `run` has failed."""

    def __init__(self, sock: socket.socket, server: Callable[[], StoppableServer | None]) -> None:
        """sock: listening, closed by `stop`. server: None before there is one."""
        self.sock = sock
        self._server = server
        self._serving: asyncio.Task[object] | None = None

    async def run(
        self, serve: Coroutine[Any, Any, object], own_signals: Callable[[], None] = lambda: None
    ) -> None:
        """Start `serve`; return once the server takes requests. Raises StartupError.

        own_signals: puts the process's signal handlers in place again, where `serve` begins with
        its own: a signal that comes before this returns would end the server under its requests.
        """
        self._serving = asyncio.create_task(serve, name="http")
        asyncio.get_running_loop().call_soon(own_signals)  # after the first step of `serve`
        deadline = asyncio.get_running_loop().time() + _START_TIMEOUT_S
        while (server := self._server()) is None or not server.started:
            if self._serving.done():
                error = self._serving.exception()
                raise StartupError(f"the HTTP server did not start: {error}")
            if asyncio.get_running_loop().time() > deadline:
                raise StartupError(f"the HTTP server did not start in {_START_TIMEOUT_S:g} s")
            await asyncio.sleep(0.02)

    async def ended(self) -> None:
        """Wait until the server has stopped."""
        assert self._serving is not None
        await asyncio.wait([self._serving])

    async def stop(self, grace_s: float) -> None:
        """Close the port; open connections get `grace_s` to end."""
        if self._serving is not None:
            server = self._server()
            if server is not None:
                server.should_exit = True
            _, late = await asyncio.wait([self._serving], timeout=grace_s)
            if late and server is not None:
                # It then prints a traceback of its own cancellation.
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
                server.force_exit = True
                _, late = await asyncio.wait([self._serving], timeout=grace_s)
            if late:
                self._serving.cancel()
                await asyncio.wait([self._serving])
        self.sock.close()


class OwnedServer(uvicorn.Server):
    """A uvicorn server that takes no signals: its owner ends it."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: the launcher decides when the server ends."""
        yield


def uvicorn_server(
    app: ASGIApp, connection: type[asyncio.Protocol], *, access_log: bool
) -> uvicorn.Server:
    """A uvicorn server for `HttpTask`. connection: its HTTP protocol."""
    return OwnedServer(uvicorn_config(app, connection, access_log=access_log))


def uvicorn_config(
    app: ASGIApp, connection: type[asyncio.Protocol], *, access_log: bool
) -> uvicorn.Config:
    """The same, for a server of another kind."""
    config = uvicorn.Config(
        app,
        http=connection,
        log_level="warning",
        access_log=access_log,
        lifespan="off",
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    if access_log:  # the configuration has set another level
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
    return config
