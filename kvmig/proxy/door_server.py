"""HTTP servers of a process that takes calls: of clients, and of hosts that stand by."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from kvmig.asgi.certificate import CertificateWatch
from kvmig.asgi.tls import TlsServer
from kvmig.asgi.uvicorn_task import HttpTask, uvicorn_config, uvicorn_server
from kvmig.core.background import cancel_tasks, keep_running
from kvmig.core.config import HttpConfig
from kvmig.core.heap import keep_small
from kvmig.proxy.call import DoorConnection, PeerConnection
from kvmig.proxy.messages import ProxyLaunch
from kvmig.proxy.peer_tls import peer_context

NamedWork = tuple[str, Callable[[], Coroutine[None, None, None]]]
"""The name and the function of a task that runs while a server serves."""
CountRefused = Callable[[int], None]
"""Takes the status of a call that ended before it was one."""


def _server(
    app: ASGIApp,
    connection: type[DoorConnection],
    context: Callable[[], ssl.SSLContext] | None,
) -> uvicorn.Server:
    """context: of a handshake that begins now; None: plain HTTP."""
    if context is None:
        return uvicorn_server(app, connection, access_log=False)
    config = uvicorn_config(app, connection, access_log=False)
    return TlsServer(config, connection, context)


class DoorServer(HttpTask):
    """The port for clients. Make it inside a running event loop; `begin`, then `stop`."""

    def __init__(self, launch: ProxyLaunch, listening: int) -> None:
        """listening: descriptor of the port's socket. Raises OSError for one that is none, and
        ConfigError for a certificate that can't be used."""
        super().__init__(socket.socket(fileno=listening), lambda: self._uvicorn)
        self.certificate = CertificateWatch(launch.certificate) if launch.certificate else None
        self._http = launch.http
        self._uvicorn: uvicorn.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(
        self,
        app: ASGIApp,
        count_refused: CountRefused,
        works: Sequence[NamedWork] = (),
        kind: type[DoorConnection] = DoorConnection,
    ) -> None:
        """Take calls. works: done until the stop. kind: of connections. Raises StartupError."""
        own = self.certificate
        every = [("heap", keep_small), *works]
        if own is not None:
            every.append(("certificate", own.watch))
        self._tasks = [
            asyncio.create_task(keep_running(work, name), name=name) for name, work in every
        ]
        connection = kind.limited(self._http.send_timeout_s, count_refused)
        context = None if own is None else lambda: own.certificate.context
        self._uvicorn = _server(app, connection, context)
        await self.run(self._uvicorn.serve([self.sock]))

    async def stop(self, grace_s: float) -> None:
        """Take no more calls; those that are there get a time to end."""
        await super().stop(grace_s)
        await cancel_tasks(*self._tasks)

    def cut(self) -> None:
        """Let `stop` wait no more."""
        if self._uvicorn is not None:
            self._uvicorn.force_exit = True


class PeerServer(HttpTask):
    """The port for the relays of hosts that stand by. Make it inside a running event loop; `begin`,
    then `stop`."""

    def __init__(self, pepper: Path, listening: int) -> None:
        """listening: descriptor of the port's socket. Raises OSError for one that is none."""
        super().__init__(socket.socket(fileno=listening), lambda: self._uvicorn)
        self._pepper = pepper
        self._uvicorn: uvicorn.Server | None = None

    async def begin(self, app: ASGIApp, http: HttpConfig, count_refused: CountRefused) -> None:
        """Take calls. Raises StartupError; OSError where the pepper can't be read."""
        context = await asyncio.to_thread(peer_context, self._pepper, server=True)
        connection = PeerConnection.limited(http.send_timeout_s, count_refused)
        self._uvicorn = _server(app, connection, lambda: context)
        await self.run(self._uvicorn.serve([self.sock]))

    def cut(self) -> None:
        """Let `stop` wait no more."""
        if self._uvicorn is not None:
            self._uvicorn.force_exit = True
