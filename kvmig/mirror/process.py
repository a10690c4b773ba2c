"""A mirror as a process: its port, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from kvmig.asgi.connection import HttpConnection
from kvmig.asgi.uvicorn_task import HttpTask, uvicorn_server
from kvmig.core.background import cancel_tasks, keep_running
from kvmig.core.clock import monotonic
from kvmig.core.config import HttpConfig
from kvmig.core.errors import ConfigError, StartupError
from kvmig.mirror.app import MirrorApp, words_of
from kvmig.mirror.blob_folder import BlobFolder
from kvmig.mirror.hub_client import HubClient
from kvmig.mirror.hub_mirror import HubMirror
from kvmig.mirror.metrics import MirrorMetrics
from kvmig.mirror.peer_client import PeerClient
from kvmig.mirror.peers import HolderBook, PeerBook
from kvmig.mirror.prefetch import RepositoryPrefetch
from kvmig.mirror.settings import MirrorSettings
from kvmig.process.child import (
    StartAnnouncement,
    StopSignals,
    announce,
    quiet,
    say,
    send_heartbeats,
)
from kvmig.process.sockets import raise_open_files, take_port

END_S = 5.0
"""Time that answers get to end."""


class MirrorServer(HttpTask):
    """A mirror of the hub; make it inside a running event loop, `start` it, then `stop` it."""

    def __init__(self, settings: MirrorSettings, sock: socket.socket) -> None:
        """sock: listening; closed by `stop`."""
        super().__init__(sock, lambda: self._uvicorn)
        pins = frozenset((*settings.pins, *settings.prefetch))
        metrics = MirrorMetrics(lambda: folder.size)
        folder = BlobFolder(Path(settings.folder), settings.most_bytes, pins, metrics.evicted.inc)
        holders, peers = HolderBook(), None
        if settings.peers:
            book = PeerBook(settings.url, settings.peers)
            peers = PeerClient(book, holders, words_of(settings.secret)[1], monotonic)
        self._prefetch = settings.prefetch
        self._fetching: asyncio.Task[None] | None = None
        hub = HubClient(settings.endpoint, time.time)
        self._mirror = HubMirror(hub, folder, peers, metrics, monotonic, time.time)
        app = MirrorApp(self._mirror, holders, settings.url, settings.secret, monotonic)
        # It logs an error for each answer that is broken off.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        connection = HttpConnection.limited(HttpConfig().send_timeout_s, lambda _: None)
        self._uvicorn = uvicorn_server(app, connection, access_log=False)

    async def start(self) -> None:
        """Take calls. Raises ConfigError, StartupError."""
        try:
            self._mirror.open()
        except OSError as error:
            raise ConfigError(f"{self._mirror.folder.root} can't be used: {error}") from error
        await self.run(self._uvicorn.serve([self.sock]))
        if self._prefetch:
            fetching = RepositoryPrefetch(self._mirror, self._prefetch)
            self._fetching = asyncio.create_task(keep_running(fetching.run, "prefetch"))

    async def stop(self, grace_s: float) -> None:
        """Take no more calls."""
        await cancel_tasks(self._fetching)
        await super().stop(grace_s)
        await self._mirror.close()


def endpoint_of(settings: MirrorSettings, sock: socket.socket) -> str:
    """What clients set HF_ENDPOINT to."""
    host, port = sock.getsockname()[:2]
    word = words_of(settings.secret)[0]
    own = settings.url or f"http://{f'[{host}]' if ':' in host else host}:{port}"
    return f"{own}/{word}" if word else own


async def serve(
    settings: MirrorSettings, sock: socket.socket, stopped: asyncio.Event, ready: Callable[[], None]
) -> None:
    """Serve until `stopped` is set. ready: called once calls are taken. Raises ConfigError,
    StartupError."""
    if settings.endpoint.startswith(endpoint_of(settings, sock)):
        raise ConfigError(f"--hub is {settings.endpoint}, must not be this mirror itself")
    server = MirrorServer(settings, sock)
    waits: list[asyncio.Task[object]] = []
    try:
        await server.start()
        ready()
        waits = [asyncio.create_task(stopped.wait()), asyncio.create_task(server.ended())]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not stopped.is_set():
            raise StartupError("its HTTP server has stopped")
    finally:
        await cancel_tasks(*waits)
        await server.stop(END_S)


def run_mirror(settings: MirrorSettings) -> None:
    """Serve until a signal. Raises ConfigError, StartupError."""
    quiet("mirror")
    raise_open_files()
    with take_port(settings.host, settings.port) as sock:

        async def run() -> None:
            stopped, loop = asyncio.Event(), asyncio.get_running_loop()
            for name in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(name, stopped.set)
            said = f"mirror of {settings.endpoint}: HF_ENDPOINT={endpoint_of(settings, sock)}"
            await serve(settings, sock, stopped, lambda: say(said))

        asyncio.run(run())


async def run_child_mirror(
    settings: MirrorSettings, announced: int, listening: int, heartbeat: int
) -> None:
    """Serve until the supervisor wants an end, or has ended. Raises ConfigError, StartupError."""
    signals = StopSignals()
    signals.listen()
    beating = asyncio.create_task(send_heartbeats(heartbeat), name="heartbeats")

    def ready() -> None:
        with contextlib.suppress(StartupError):  # init has gone, and stdin says so
            announce(announced, StartAnnouncement(endpoint="mirror"))

    try:
        await serve(settings, socket.socket(fileno=listening), signals.stop, ready)
    finally:
        await cancel_tasks(beating)
