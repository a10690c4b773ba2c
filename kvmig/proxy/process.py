"""A proxy's process: its port, its link to the server, the file that it begins with alone."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import time
from pathlib import Path

import msgspec

from kvmig.accounts.limits import OwnTallies
from kvmig.core.clock import monotonic
from kvmig.core.errors import StartupError
from kvmig.process.child import StartAnnouncement, StopSignals, announce, say, send_heartbeats
from kvmig.proxy.app import ProxyApp
from kvmig.proxy.call import DoorConnection, SharedConnection
from kvmig.proxy.control_link import ServerLink
from kvmig.proxy.cross_origin import CrossOrigin
from kvmig.proxy.directory import ModelDirectory
from kvmig.proxy.door_server import DoorServer, NamedWork, PeerServer
from kvmig.proxy.messages import (
    Down,
    FleetSnapshot,
    LeadingHost,
    ModelWanted,
    ProxyDemand,
    ProxyLaunch,
    ProxyMetrics,
    SpentLimits,
)
from kvmig.proxy.relay_process import RelayServer
from kvmig.proxy.shared_tallies import SharedTallies
from kvmig.tracing.calls import CallTracer
from kvmig.tracing.collector import open_collector
from kvmig.tracing.settings import settings_of

log = logging.getLogger(__name__)

TELL_S = 0.5
"""Pause between two demands."""
FIGURES = 4
"""Demands for each message with the metrics."""
FIRST_S = 2.0
"""Wait for the server's snapshot, before the proxy listens."""
KEEP_S = 1.0
"""Pause between two writings of the file."""


class ProxyServer(DoorServer):
    """A proxy; make it inside a running event loop, `start` it, then `stop` it."""

    def __init__(self, launch: ProxyLaunch, listening: int, peers: int | None = None) -> None:
        """listening: descriptor of the port's socket. peers: the same for hosts that stand by;
        None: there are none. Raises OSError for one that is none, and where the file of the limits
        can't be had; ConfigError for a certificate that can't be used."""
        super().__init__(launch, listening)
        self._launch = launch
        self._peers = None if peers is None else PeerServer(Path(launch.pepper), peers)
        self._file = Path(launch.snapshot)
        self._unsaved = False
        self._heard_at = 0.0
        """When the server was last there, in Unix time."""
        self._told_at = monotonic()
        self._told = asyncio.Event()
        """Set once the server has sent a snapshot."""
        self._link: ServerLink | None = None
        self._tallies = SharedTallies(Path(launch.tallies)) if launch.tallies else None
        settings = settings_of(os.environ)
        self._collector = open_collector(settings, launch.name)
        traces: CallTracer | None = None
        if settings is not None and self._collector is not None:
            traces = CallTracer(self._collector.tracer, trusts=settings.parents == "trust")
        self.door = ProxyApp(
            ModelDirectory(),
            launch.http,
            launch.api,
            self._want,
            lambda: time.time() - self._heard_at,
            number=launch.number,
            tallies=self._tallies or OwnTallies(since=monotonic()),
            cross_origin=CrossOrigin(launch.allowed_origins),
            traces=traces,
        )
        if (own := self.certificate) is not None:
            self.door.metrics.show_certificate(lambda: own.certificate.expires)

    async def start(self) -> None:
        """Take calls. Raises StartupError, OSError."""
        self._load()
        self._link = ServerLink(self._launch.links, self._launch.name, self._take)
        with contextlib.suppress(TimeoutError):  # without a server, by what was known before
            async with asyncio.timeout(FIRST_S):
                await self._told.wait()
        works: list[NamedWork] = [("demands", self._tell), ("snapshot", self._keep)]
        kind = DoorConnection if self._peers is None else SharedConnection
        await self.begin(self.door, self.door.count_refused, works, kind)
        if self._peers is not None:
            await self._peers.begin(self.door, self._launch.http, self.door.count_refused)

    async def stop(self, grace_s: float) -> None:
        """Take no more calls; those that are there get a time to end."""
        self.door.close()
        peers = [] if self._peers is None else [self._peers.stop(grace_s)]
        await asyncio.gather(super().stop(grace_s), *peers)
        if self._link is not None:
            await self._link.close()
        if self._tallies is not None:
            self._tallies.close()
        if self._collector is not None:
            await self._collector.close()

    def cut(self) -> None:
        """Let `stop` wait no more."""
        super().cut()
        if self._peers is not None:
            self._peers.cut()

    # -- the server

    def _take(self, message: Down) -> None:
        if isinstance(message, LeadingHost):
            return  # for relays
        self.door.apply(message)
        self._unsaved = True
        self._heard_at = time.time()
        self._told.set()
        if not isinstance(message, SpentLimits):
            self._tell_now()  # the server may wait for it: to end a deployment, to answer an order

    def _want(self, model: str) -> None:
        if self._link is not None:
            self._link.send(ModelWanted(model))

    async def _tell(self) -> None:
        for turn in itertools.count():
            await asyncio.sleep(TELL_S)
            self._tell_now()
            for model in self.door.wishes():  # the first may have been lost
                self._want(model)
            if turn % FIGURES == 0 and self._link is not None:
                self._link.send(ProxyMetrics(self.door.figures().decode()))

    def _tell_now(self) -> None:
        if self._link is None or not self._link.connected:
            return
        now = monotonic()
        self._heard_at = time.time()
        demand = ProxyDemand(self.door.directory.version, now - self._told_at, self.door.demands())
        self._told_at = now
        self._link.send(demand)

    # -- the file

    def _load(self) -> None:
        """What was known before, if anything was."""
        try:
            if not self._file.exists():
                return
            known = msgspec.msgpack.decode(self._file.read_bytes(), type=FleetSnapshot)
            if not known.pepper:  # an older kvmig kept it there
                pepper = Path(self._launch.pepper).read_bytes()
                known = msgspec.structs.replace(known, pepper=pepper)
            self._heard_at = self._file.stat().st_mtime
        except (OSError, msgspec.DecodeError) as error:
            say(f"{self._file} can't be read, the server must be there: {error}", self._launch.name)
            return
        self.door.apply(known)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(KEEP_S)
            if self._unsaved:
                self._unsaved = False
                known = self.door.directory.snapshot()
                content = msgspec.msgpack.encode(msgspec.structs.replace(known, pepper=b""))
                await asyncio.to_thread(self._write, content)

    def _write(self, content: bytes) -> None:
        """Several proxies may keep the same file."""
        part = self._file.with_name(f"{self._file.name}.{os.getpid()}")
        try:
            with os.fdopen(
                os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb"
            ) as out:
                out.write(content)
            part.replace(self._file)
        except OSError as error:
            log.warning("%s can't be kept: %s", self._file, error)


async def run(
    launch: ProxyLaunch, announced: int, listening: int, heartbeat: int, peers: int | None = None
) -> None:
    """Serve until the supervisor wants an end, or has ended. peers: descriptor of the socket for
    hosts that stand by. Raises StartupError, OSError."""
    signals = StopSignals()
    proxy: ProxyServer | RelayServer
    if launch.relays:
        proxy = RelayServer(launch, listening)
    else:
        proxy = ProxyServer(launch, listening, peers)
    stopped = asyncio.create_task(signals.stop.wait())
    beating: asyncio.Task[None] | None = None
    try:
        await proxy.start()
        signals.listen()
        beating = asyncio.create_task(send_heartbeats(heartbeat), name="heartbeats")
        with contextlib.suppress(StartupError):  # init has gone, and stdin says so
            announce(announced, StartAnnouncement(endpoint="shared"))
        ended = asyncio.create_task(proxy.ended())
        await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        if not stopped.done():
            raise StartupError("its HTTP server has stopped")
    finally:
        stopped.cancel()
        await _stop(proxy, launch.shutdown_timeout_s, signals)
        if beating is not None:
            beating.cancel()


async def _stop(proxy: ProxyServer | RelayServer, grace_s: float, signals: StopSignals) -> None:
    """Stop with time for the present calls, unless a second signal ends all at once."""
    stopping = asyncio.create_task(proxy.stop(grace_s))
    at_once = asyncio.create_task(signals.at_once.wait())
    await asyncio.wait((stopping, at_once), return_when=asyncio.FIRST_COMPLETED)
    at_once.cancel()
    if not stopping.done():
        proxy.cut()
    await stopping
