"""uvicorn inside a running event loop, with signals left to whoever runs the loop."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from kvmig.gateway.connection import Connection
from kvmig.ground.errors import StartupError

_START_TIMEOUT_S = 60.0


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None: the launcher decides when it ends."""
        yield


class UvicornServer:
    """Serves `app` on `sock`: `start`, then `stop`."""

    def __init__(self, app: FastAPI, sock: socket.socket, *, access_log: bool) -> None:
        """sock: listening; it is closed at the end."""
        config = uvicorn.Config(
            app,
            http=Connection,
            log_level="warning",
            access_log=access_log,
            lifespan="off",
            ws="none",
        )
        self._server = _Server(config)
        self._sock = sock
        if access_log:
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return once requests are taken. Raises StartupError."""
        self._serving = asyncio.create_task(self._server.serve([self._sock]), name="http")
        deadline = asyncio.get_running_loop().time() + _START_TIMEOUT_S
        while not self._server.started:
            if self._serving.done():
                error = self._serving.exception()
                raise StartupError(f"the HTTP server did not start: {error}")
            if asyncio.get_running_loop().time() > deadline:
                raise StartupError(f"the HTTP server did not start in {_START_TIMEOUT_S:g} s")
            await asyncio.sleep(0.02)

    async def ended(self) -> None:
        """Wait until it has stopped."""
        assert self._serving is not None
        await asyncio.wait([self._serving])

    async def stop(self, grace_s: float) -> None:
        """Close the port; open connections get `grace_s` to end."""
        if self._serving is not None:
            self._server.should_exit = True
            _, late = await asyncio.wait([self._serving], timeout=grace_s)
            if late:
                # It then prints a traceback of its own cancellation.
                logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
                self._server.force_exit = True
                _, late = await asyncio.wait([self._serving], timeout=grace_s)
            if late:
                self._serving.cancel()
                await asyncio.wait([self._serving])
        self._sock.close()
