"""A uvicorn server as a task of the running event loop: it begins, it ends, in bounded time."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from kvmig.ground.errors import StartupError

_START_TIMEOUT_S = 60.0


class Server(Protocol):
    """The part of `uvicorn.Server` that is used."""

    started: bool
    should_exit: bool
    force_exit: bool


class HttpTask:
    """`run`, then `stop`, also when `run` has failed."""

    def __init__(self, sock: socket.socket, server: Callable[[], Server | None]) -> None:
        """sock: listening; it is closed at the end. server: None as long as there is none."""
        self.sock = sock
        self._server = server
        self._serving: asyncio.Task[object] | None = None

    async def run(self, serve: Coroutine[Any, Any, object]) -> None:
        """Return once `serve`, which makes it go, takes requests. Raises StartupError."""
        self._serving = asyncio.create_task(serve, name="http")
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
