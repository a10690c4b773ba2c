"""A front end: an OpenAI server on all instances, in the launcher's process or its own.

A front end knows the launcher by its socket only, so it may run anywhere.
`kvmig.launcher.front_ends` keeps several running, each in a process of its own, behind one port.
"""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvmig.asgi.access import access
from kvmig.controlplane.front_messages import AbortCalls, FrontAsked, FrontReply
from kvmig.core.background import cancel_tasks, keep_running
from kvmig.core.heap import keep_small
from kvmig.launcher.front_ends import FrontLaunch
from kvmig.process.child import end_loading, say
from kvmig.tracing.collector import open_collector
from kvmig.tracing.logs import show_trace_ids
from kvmig.tracing.settings import settings_of

if TYPE_CHECKING:
    from kvmig.frontend.meter import UsageMeter
    from kvmig.frontend.metrics import FrontendMetrics
    from kvmig.frontend.middleware import HttpState
    from kvmig.frontend.quotas import QuotaClient
    from kvmig.frontend.usage_writer import UsageWriter

COLLECT = (20_000, 20, 50)
"""Thresholds of Python's garbage collector. With the default ones it walks all streams again and
again: with 10,000 streams that costs a fifth of a front end's time, and frees little."""
GRACE_S = 2.0
"""Time for connections to close once no request runs any more."""


def leave_what_stays() -> None:
    """Let Python's garbage collector walk only what comes from now on, and rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT)


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

        from kvmig.asgi.call import current_trace_id
        from kvmig.frontend.isolation import PromptSalts
        from kvmig.frontend.launcher_link import InstanceMembership, LauncherLink
        from kvmig.frontend.loop_watch import LoopWatch
        from kvmig.frontend.metrics import FrontendMetrics
        from kvmig.frontend.openai.base import openai_server
        from kvmig.frontend.request_traces import RequestTraces
        from kvmig.frontend.router import FrontendRouter

        self._launch = launch
        self._args = args
        self._sock = sock
        self._own_signals = own_signals
        config = launch.config
        salts = PromptSalts(launch.secret) if config.http.isolate_users else None
        self._server = openai_server(config, launch.engine_argv, args, sock, salts)
        metrics = FrontendMetrics(REGISTRY, config.priorities)
        names = args.served_model_name or [args.model]
        self._model = names[0]
        self._usage = usage_writer(launch, self._model)
        self._quotas = quotas_of(launch, self._usage, self._server.cut)
        self._traces = open_collector(settings_of(os.environ), launch.name)
        if self._traces is not None:
            self._hide_trace_ids = show_trace_ids(current_trace_id)
        self._router = FrontendRouter(
            launch.name,
            launch.secret,
            config,
            self._server.sink,
            self._server.decode,
            observer=metrics,
            meter=None if self._usage is None else self._usage.meter,
            quotas=self._quotas,
            traces=None if self._traces is None else RequestTraces(),
        )
        self._http = self._http_state(metrics)
        if args.api_key and launch.admin_key:  # the server's own look comes after ours
            args.api_key = [*args.api_key, launch.admin_key]
        self._membership = InstanceMembership(self._router)
        self._launcher = LauncherLink(
            launch.launcher, launch.secret, launch.name, self._membership.apply_news
        )
        if config.lifecycle.front_ends > 1:
            self._router.sessions.others = self._router.aborts.others = self._launcher
        self._launcher.reply = self._reply
        self._started = False
        self._writing: asyncio.Task[None] | None = None
        self._watch = LoopWatch(REGISTRY, self._http.budget.take_seen)
        self._watching: list[asyncio.Task[None]] = []

    async def _reply(self, asked: FrontAsked) -> FrontReply:
        """Answer the launcher, or another front end."""
        if isinstance(asked, AbortCalls):
            return await self._router.aborts.reply(asked)
        return await self._router.sessions.reply(asked)

    def _http_state(self, metrics: FrontendMetrics) -> HttpState:
        from prometheus_client import REGISTRY

        from kvmig.frontend.call_spans import CallSpans
        from kvmig.frontend.isolation import session_secret
        from kvmig.frontend.middleware import HttpState

        config, fleet, keys = self._launch.config, self._router.fleet, self._args.api_key
        state = HttpState(
            config.http,
            access(keys, self._launch.admin_key, bound_to(self._sock)),
            config.priorities,
            REGISTRY,
            vacant=fleet.vacant,
            without_engine=lambda: not fleet.alive_here,
            queued=fleet.waiting,
            overloaded=metrics.refused,
            keyed=bool(keys),
            session_secret=session_secret(self._launch.secret),
        )
        if self._usage is not None:
            state.begin_work = self._usage.meter.enter
            state.uncounted = self._usage.refusal
        if self._traces is not None:
            state.traces = CallSpans(self._traces.tracer, self._model)
        return state

    async def start(self) -> None:
        """Return once requests are taken: the launcher has named the instances, and they answer.

        Raises KvmigError; `close` it then, too.
        """
        from kvmig.frontend.app import extend

        config = self._launch.config
        await self._server.load()  # while the instances load theirs
        end_loading()
        ready = await self._membership.first(config.start_timeout_s)
        block_tokens = self._server.learn(ready)
        # What instances report in, see `engines.vllm.load`.
        self._router.fleet.block_tokens = config.migration.unit_tokens or block_tokens
        if self._usage is not None:
            writing = keep_running(self._usage.run, "writing of usage")
            self._writing = asyncio.create_task(writing, name="usage")
        self._started = True
        app = await self._server.make_app(self._router)
        self._http.learn(self._server.reach())
        extend(
            app,
            self._http,
            self._router,
            self._membership,
            self._launcher,
            self._model,
            admin_key=self._launch.admin_key,
            tls=bool(getattr(self._args, "ssl_certfile", None)),
        )
        leave_what_stays()
        self._http.loop_use.watch(asyncio.get_running_loop())
        await self._server.serve(app, self._own_signals)
        self._watching = [
            asyncio.create_task(keep_running(work, name), name=name)
            for name, work in (("loop watch", self._watch.run), ("heap", keep_small))
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
        await cancel_tasks(*self._watching)
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
            await cancel_tasks(self._writing)
            assert self._usage is not None
            await self._usage.close()  # nothing is counted any more
        if self._traces is not None:
            self._hide_trace_ids()
            await self._traces.close()
        self._sock.close()

    async def _empty(self) -> None:
        while self._router.live() or self._router.held:  # noqa: ASYNC110 - the end of the last one is no event
            await asyncio.sleep(0.05)


def usage_writer(launch: FrontLaunch, model: str) -> UsageWriter[UsageMeter] | None:
    """Writes what calls have used; None: no usage is wanted. model: its name in records."""
    from kvmig.frontend.meter import UsageMeter
    from kvmig.frontend.usage_writer import UsageWriter

    http = launch.config.http
    if not http.usage_spool:
        return None
    path = Path(http.usage_spool, f"{launch.name}.sqlite")
    return UsageWriter(UsageMeter(model, time.time), path, http.quota_socket)


def quotas_of(
    launch: FrontLaunch, usage: UsageWriter[UsageMeter] | None, cut: Callable[[Any, int], None]
) -> QuotaClient | None:
    """Asks the server for tokens; None: calls may use as many as they like. cut: leaves the first
    tokens of what an instance sent."""
    from kvmig.frontend.quotas import QuotaClient

    socket_path = launch.config.http.quota_socket
    if not socket_path or usage is None:
        return None
    return QuotaClient(usage.meter, launch.name, socket_path, cut)


def bound_to(sock: socket.socket) -> str:
    """The address of the machine that it listens on, or a Unix socket's path."""
    name = sock.getsockname()
    address: str = name if isinstance(name, str) else name[0]
    return address
