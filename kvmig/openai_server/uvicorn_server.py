"""uvicorn inside a running event loop, with signals left to whoever runs the loop."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from kvmig.ground.http import KEEP_ALIVE_S
from kvmig.openai_server.http_task import HttpTask


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None: the launcher decides when it ends."""
        yield


class UvicornServer(HttpTask):
    """Serves `app`: `start`, then `stop`."""

    def __init__(self, app: FastAPI, sock: socket.socket, *, access_log: bool) -> None:
        """sock: listening; it is closed at the end. app.state.connection: uvicorn's protocol."""
        config = uvicorn.Config(
            app,
            http=app.state.connection,
            log_level="warning",
            access_log=access_log,
            lifespan="off",
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._uvicorn = _Server(config)
        super().__init__(sock, lambda: self._uvicorn)
        if access_log:
            logging.getLogger("uvicorn.access").setLevel(logging.INFO)

    async def start(self) -> None:
        """Return once requests are taken. Raises StartupError."""
        await self.run(self._uvicorn.serve([self.sock]))
