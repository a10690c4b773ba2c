"""An HTTPS server: each connection counts from its first byte on, and has a time for its handshake.

An event loop's own TLS server knows no connection before its handshake is done, so clients that
never begin one could take all of a process's files.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Set
from typing import Any

import uvicorn

from kvmig.asgi.connection import HttpConnection
from kvmig.asgi.uvicorn_task import OwnedServer
from kvmig.core.background import BackgroundTasks, keep_running

HANDSHAKE_S = 10.0
"""Timeout of a handshake."""
GOODBYE_S = 5.0
"""Timeout of the end of a connection that was closed in order."""
UNSENT_BYTES = 1 << 16
"""Bytes that wait for a client until no more are made: as for plain HTTP."""
NO_FILES_S = 0.2
"""Pause where the process may open no more files."""

log = logging.getLogger(__name__)


class TlsListener:
    """Accepts the connections of one socket; uvicorn takes it for an `asyncio.Server`. Make it
    inside a running event loop."""

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[], HttpConnection],
        connections: Set[object],
        most: float,
        context: Callable[[], ssl.SSLContext],
    ) -> None:
        """sock: listening. make: a connection's protocol. connections: those whose handshakes are
        done. most: of both kinds; one more is closed. context: of a handshake that begins now."""
        self._sock = sock
        self._make = make
        self._connections = connections
        self._most = most
        self._context = context
        self._open = 0
        """Handshakes that are not done."""
        self._tasks = BackgroundTasks("HTTPS")
        sock.setblocking(False)
        self._tasks.start(keep_running(self._accept, "the port"))

    def close(self) -> None:
        """Accept no more; handshakes that are not done end."""
        self._tasks.cancel()

    async def wait_closed(self) -> None:
        """Wait for their ends."""
        await self._tasks.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, _ = await loop.sock_accept(self._sock)
            except OSError as error:
                log.warning("no connection is accepted now: %s", error)
                await asyncio.sleep(NO_FILES_S)
                continue
            if len(self._connections) + self._open >= self._most:
                client.close()
            else:
                self._open += 1
                self._tasks.start(self._shake(client))

    async def _shake(self, client: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.connect_accepted_socket(
                self._make, client, ssl=self._context(),
                ssl_handshake_timeout=HANDSHAKE_S, ssl_shutdown_timeout=GOODBYE_S,
            )  # fmt: skip
            transport.set_write_buffer_limits(UNSENT_BYTES)
        except OSError:  # ssl.SSLError, too: no TLS client, or it has left
            client.close()
        finally:
            self._open -= 1


class TlsServer(OwnedServer):
    """A uvicorn server of HTTPS, on sockets that it is given."""

    def __init__(
        self,
        config: uvicorn.Config,
        connection: type[HttpConnection],
        context: Callable[[], ssl.SSLContext],
    ) -> None:
        """connection: the config's protocol. context: see `TlsListener`."""
        super().__init__(config)
        self._connection = connection
        self._context = context

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections."""
        await self.lifespan.startup()
        most, connections = self._connection.most, self.server_state.connections
        listeners: list[Any] = [
            TlsListener(one, self._make, connections, most, self._context) for one in sockets or ()
        ]
        self.servers = listeners
        self.started = True

    def _make(self) -> HttpConnection:
        return self._connection(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
