"""A front end: an OpenAI server on all instances, in the launcher's process or its own.

A front end knows the launcher by its socket only, so it may run anywhere. `FrontEnds` keeps
several running, each in a process of its own, behind one port.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import socket
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvmig.accounts.usage import Spool
from kvmig.asgi.access import access
from kvmig.core.config import ClusterConfig
from kvmig.core.errors import StartupError
from kvmig.core.heap import keep_small
from kvmig.core.secret import Discreet
from kvmig.process.child import end_loading, say
from kvmig.process.supervisor import (
    HEARTBEAT_TIMEOUT_S,
    Child,
    Heartbeats,
    Process,
    deaths_in_a_row,
    first_of,
    hangs,
    restart_pause,
    running,
)

if TYPE_CHECKING:
    from kvmig.gateway.quotas import Quotas
    from kvmig.gateway.usage import UsageWriter
    from kvmig.process.fork_server import SharedForks

COLLECT = (20_000, 20, 50)
"""Thresholds of Python's garbage collector. With the default ones it walks all streams again and
again: with 10,000 streams that costs a fifth of a front end's time, and frees little."""
GRACE_S = 2.0
"""Time for connections to close once no request runs any more."""

log = logging.getLogger(__name__)


class FrontLaunch(Discreet, frozen=True, kw_only=True):
    """Everything that a front end must know to start (JSON; the secret in base64)."""

    name: str
    """Unique among the front ends of all times: llumlets tell them apart by it."""
    launcher: str
    """The launcher's endpoint."""
    secret: bytes
    admin_key: str = ""
    """The admin API's key; empty: see `kvmig.asgi.access`."""
    whose: str = ""
    """Model and address of the server, for the titles of its processes."""
    config: ClusterConfig
    engine_argv: list[str]
    """MODEL and the engine's flags."""
    listening: int = -1
    """Descriptor of the port's socket, for a front end in a process of its own."""
    heartbeat: int = -1
    """Descriptor for `kvmig.process.child.send_heartbeats`, for such a front end."""


class FrontEnd:
    """One front end, made inside a running event loop: `start`, maybe `drain`, then `close`."""

    def __init__(
        self,
        launch: FrontLaunch,
        args: Namespace,
        sock: socket.socket,
        own_signals: Callable[[], None],
    ) -> None:
        """args: `launch.engine_argv`, parsed. sock: listening; closed with the front end.

        own_signals: puts the process's signal handlers in place.
        """
        from prometheus_client import REGISTRY

        from kvmig.gateway.http import HttpState
        from kvmig.gateway.isolation import PromptSalts
        from kvmig.gateway.launcher import LauncherLink, Membership
        from kvmig.gateway.loop_watch import LoopWatch
        from kvmig.gateway.meter import Meter
        from kvmig.gateway.metrics import Metrics
        from kvmig.gateway.quotas import Quotas
        from kvmig.gateway.router import Router
        from kvmig.gateway.usage import UsageWriter
        from kvmig.openai_server.base import openai_server

        self._launch = launch
        self._args = args
        self._sock = sock
        self._own_signals = own_signals
        config = launch.config
        salts = PromptSalts(launch.secret) if config.http.isolate_users else None
        self._server = openai_server(config, launch.engine_argv, args, sock, salts)
        metrics = Metrics(REGISTRY, config.priorities)
        names = args.served_model_name or [args.model]
        self._model = names[0]
        self._usage: UsageWriter | None = None
        if config.http.usage_spool:
            meter = Meter(self._model, time.time)
            path = Path(config.http.usage_spool, f"{launch.name}.sqlite")
            self._usage = UsageWriter(meter, path, config.http.quota_socket)
        self._quotas: Quotas | None = None
        if config.http.quota_socket and self._usage is not None:
            socket_path = config.http.quota_socket
            self._quotas = Quotas(self._usage.meter, launch.name, socket_path, self._server.cut)
        self._router = Router(
            launch.name,
            launch.secret,
            config,
            self._server.sink,
            self._server.decode,
            observer=metrics,
            meter=None if self._usage is None else self._usage.meter,
            quotas=self._quotas,
        )
        self._http = HttpState(
            config.http,
            access(args.api_key, launch.admin_key, bound_to(sock)),
            config.priorities,
            REGISTRY,
            vacant=self._router.fleet.vacant,
            queued=self._router.fleet.waiting,
            overloaded=metrics.refused,
            keyed=bool(args.api_key),
        )
        if args.api_key and launch.admin_key:  # the server's own look comes after ours
            args.api_key = [*args.api_key, launch.admin_key]
        if self._usage is not None:
            self._http.begin_work = self._usage.meter.enter
            self._http.uncounted = self._usage.refusal
        self._membership = Membership(self._router)
        self._launcher = LauncherLink(
            launch.launcher, launch.secret, launch.name, self._membership.hear
        )
        self._started = False
        self._writing: asyncio.Task[None] | None = None
        self._watch = LoopWatch(REGISTRY, self._http.budget.take_seen)
        self._watching: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Return once requests are taken: the launcher has named the instances, and they answer.

        Raises KvmigError; `close` it then, too.
        """
        from kvmig.gateway.app import extend

        config = self._launch.config
        await self._server.load()  # while the instances load theirs
        end_loading()
        ready = await self._membership.first(config.start_timeout_s)
        block_tokens = self._server.learn(ready)
        # What instances report in, see `engines.vllm.load`.
        self._router.fleet.block_tokens = config.migration.unit_tokens or block_tokens
        if self._usage is not None:
            self._writing = asyncio.create_task(self._usage.run(), name="usage")
        self._started = True
        app = await self._server.make_app(self._router)
        self._http.learn(self._server.reach())
        extend(app, self._http, self._router, self._membership, self._launcher, self._model)
        gc.collect()
        gc.freeze()  # what is there by now stays
        gc.set_threshold(*COLLECT)
        self._http.loop_use.watch(asyncio.get_running_loop())
        await self._server.serve(app, self._own_signals)
        self._watching = [
            asyncio.create_task(self._watch.run(), name="loop watch"),
            asyncio.create_task(keep_small(), name="heap"),
        ]

    async def ended(self) -> None:
        """Wait until the HTTP server has stopped by itself."""
        await self._server.ended()

    async def drain(self, at_once: asyncio.Event) -> None:
        """Take nothing new; wait for live requests to end, for the timeout, or for `at_once`."""
        self._http.closed = True
        running, timeout_s = len(self._router.live()), self._launch.config.shutdown_timeout_s
        if running:
            say(f"stopping: {running} requests run, at most {timeout_s:g} s")
        waits = [asyncio.create_task(at_once.wait()), asyncio.create_task(self._empty())]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()

    async def close(self) -> None:
        """End what still runs, stop serving, disconnect."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._http.loop_use.close(asyncio.get_running_loop())
        self._router.give_up("the server stops")
        if self._started:
            await self._server.stop(GRACE_S)
        await self._launcher.close()
        await self._membership.close()
        await self._router.close()
        if self._quotas is not None:
            await self._quotas.close()
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
            assert self._usage is not None
            await self._usage.close()  # nothing is counted any more
        self._sock.close()

    async def _empty(self) -> None:
        while self._router.live() or self._router.held:  # noqa: ASYNC110 - the end of the last one is no event
            await asyncio.sleep(0.05)


def bound_to(sock: socket.socket) -> str:
    """The address of the machine that it listens on, or a Unix socket's path."""
    name = sock.getsockname()
    address: str = name if isinstance(name, str) else name[0]
    return address


def forget_gauges(folder: Path, pid: int) -> None:
    """Drop what a front end that is gone has set of prometheus_client's gauges.

    What it has counted stays: sums go on.
    """
    for one in folder.glob(f"gauge_*_{pid}.db"):
        one.unlink(missing_ok=True)


MODULE = "kvmig.front_process"
CLOSE_S = 5.0
"""Time for a front end to close, once nothing runs any more."""


class FrontEnds:
    """Front ends in processes of their own, used like one `FrontEnd`.

    All listen on one socket, so no connection waits for one that is gone. A front end that dies or
    hangs is started again; its streams are over, for their connections were its own.
    """

    def __init__(
        self, launch: FrontLaunch, sock: socket.socket, forks: SharedForks | None = None
    ) -> None:
        """launch: of each front end, but for the name. sock: listening; the caller closes it.

        forks: what they are forked from; None: each loads the engine's libraries by itself.
        """
        self._launch = launch
        self._forks = forks
        self._names: dict[int, str] = {}
        self._sock = sock
        self._children: dict[int, Child] = {}
        self._heartbeats: dict[int, Heartbeats] = {}
        self._keeping: list[asyncio.Task[None]] = []
        self._metrics: tempfile.TemporaryDirectory[str] | None = None
        self._environment = dict(os.environ)
        if launch.config.lifecycle.front_ends > 1:  # a single one sums nothing up
            self._metrics = tempfile.TemporaryDirectory(prefix="kvmig-metrics-")
            self._environment["PROMETHEUS_MULTIPROC_DIR"] = self._metrics.name

    async def start(self) -> None:
        """Return once all take requests. Raises StartupError; `close` it then, too."""
        numbers = range(self._launch.config.lifecycle.front_ends)
        await asyncio.gather(*map(self._begin, numbers))
        for number in numbers:
            self._keeping.append(asyncio.create_task(self._keep(number)))
        end_loading()

    async def ended(self) -> None:
        """Never: they are started again."""
        await asyncio.Event().wait()

    async def drain(self, at_once: asyncio.Event) -> None:
        """Let all take nothing new; wait for live requests, for the timeout, or for `at_once`."""
        self._stop_keeping()
        for child in self._children.values():
            child.terminate()
        ends = [asyncio.create_task(child.ended()) for child in self._children.values()]
        all_ended = asyncio.gather(*ends)
        hurry = asyncio.create_task(at_once.wait())
        timeout_s = self._launch.config.shutdown_timeout_s + CLOSE_S
        await asyncio.wait(
            (all_ended, hurry), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        hurry.cancel()
        all_ended.cancel()
        await asyncio.gather(*ends, return_exceptions=True)

    async def close(self) -> None:
        """End them all."""
        self._stop_keeping()
        await asyncio.gather(*self._keeping, return_exceptions=True)
        await asyncio.gather(*map(self._end, list(self._children)))
        if self._metrics is not None:
            self._metrics.cleanup()
        if self._forks is not None:
            self._forks.close()

    def _stop_keeping(self) -> None:
        for task in self._keeping:
            task.cancel()

    async def _begin(self, number: int) -> None:
        """Start a front end, and wait until it takes requests. Raises StartupError."""
        heartbeats = self._heartbeats[number] = Heartbeats()
        shared = [self._sock.fileno(), heartbeats.descriptor]
        launch = msgspec.structs.replace(
            self._launch,
            name=f"front-{secrets.token_hex(4)}",
            listening=shared[0],
            heartbeat=shared[1],
        )
        self._names[number] = launch.name
        child = await Child.start(f"front end {number}", partial(self._spawn, shared), launch)
        self._children[number] = child
        await child.ready(launch.config.start_timeout_s)

    async def _spawn(self, shared: list[int], stdin: int, announced: int) -> Process:
        title = f"of {self._launch.whose}" if self._launch.whose else ""
        if self._forks is not None:
            try:
                descriptors = (stdin, 1, 2, announced, *shared)
                return await self._forks.fork(MODULE, self._environment, descriptors, title)
            except StartupError as error:
                log.warning("%s; a front end starts by itself, which takes longer", error)
        return await running(MODULE, self._environment, shared, title)(stdin, announced)

    async def _end(self, number: int, timeout_s: float = CLOSE_S) -> None:
        if (child := self._children.pop(number, None)) is not None:
            await child.stop(timeout_s)
            if self._metrics is not None:
                forget_gauges(Path(self._metrics.name), child.pid)
            self._leave_spool(self._names[number])
        if (heartbeats := self._heartbeats.pop(number, None)) is not None:
            heartbeats.close()

    def _leave_spool(self, name: str) -> None:
        """Let the fleet's server know that nobody writes this front end's spool any more."""
        if not (folder := self._launch.config.http.usage_spool):
            return
        try:
            Spool(Path(folder, f"{name}.sqlite")).leave()
        except OSError as error:  # then it is counted to its end when the deployment ends
            log.warning("%s", error)

    async def _keep(self, number: int) -> None:
        loop = asyncio.get_running_loop()
        began, deaths = loop.time(), 0
        how = await self._dies(number)
        while True:
            deaths = deaths_in_a_row(deaths, loop.time() - began)
            pause_s = restart_pause(deaths)
            say(f"front end {number} is gone ({how}), it starts again in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            began = loop.time()
            try:
                await self._begin(number)
                say(f"front end {number} is ready")
                how = await self._dies(number)
            except StartupError as error:
                await self._end(number)  # it may be there still, but not ready
                how = str(error)

    async def _dies(self, number: int) -> str:
        """Wait until the front end ends or hangs, and end it; how."""
        hanging = hangs(self._heartbeats[number], HEARTBEAT_TIMEOUT_S)
        how = await first_of(self._children[number].ended(), hanging)
        await self._end(number, 0.0)
        return how
