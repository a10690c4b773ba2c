"""A deployment that runs a command: its servers, its HTTP application, its usage records."""

from __future__ import annotations

import asyncio
import secrets
import signal
import socket
import time
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Mount

from kvmig.asgi.access import access
from kvmig.asgi.connection import HttpConnection
from kvmig.asgi.problems import as_problem
from kvmig.asgi.uvicorn_task import HttpTask, uvicorn_server
from kvmig.command.admin_routes import AdminRoutes
from kvmig.command.call_meter import CallMeter
from kvmig.command.launch import CommandLaunch
from kvmig.command.relay import CommandRelay
from kvmig.command.server_pool import ServerPool
from kvmig.core.background import cancel_tasks, keep_running
from kvmig.core.clock import monotonic
from kvmig.core.config import HttpConfig
from kvmig.core.errors import StartupError
from kvmig.core.heap import keep_small
from kvmig.core.priorities import NORMAL
from kvmig.frontend.grant_link import GrantLink
from kvmig.frontend.middleware import HttpMiddleware, HttpState
from kvmig.frontend.probes import probe_routes
from kvmig.frontend.usage_writer import UsageWriter
from kvmig.process.child import call_at_stdin_end, say, send_heartbeats

GRACE_S = 2.0
"""Time for connections to close once no call runs any more."""


class CommandDeployment:
    """A deployment of a command's servers; make it inside a running event loop, `serve` once."""

    def __init__(self, launch: CommandLaunch, sock: socket.socket) -> None:
        """sock: listening."""
        self._launch = launch
        self._uvicorn: uvicorn.Server | None = None
        self._http = HttpTask(sock, lambda: self._uvicorn)
        self._stop = asyncio.Event()
        self._at_once = asyncio.Event()
        source = f"front-{secrets.token_hex(4)}"
        self._pool = ServerPool(launch)
        self._meter = CallMeter(launch.model, time.time, monotonic)
        spool = Path(launch.spool, f"{source}.sqlite")
        self._usage = UsageWriter(self._meter, spool, launch.quotas)
        self._quotas = GrantLink(launch.quotas, source, launch.model)
        self._relay = CommandRelay(
            self._pool, self._meter, self._quotas, asks_usage=launch.stream_usage
        )
        self._state = self._http_state()
        self._tasks: list[asyncio.Task[None]] = []

    def _http_state(self) -> HttpState:
        launch = self._launch
        config = HttpConfig(uds=launch.uds, usage_spool=launch.spool, quota_socket=launch.quotas)
        state = HttpState(
            config,
            access([], "", launch.uds),
            (NORMAL,),
            CollectorRegistry(),
            vacant=lambda: self._pool.vacant,
        )
        state.begin_work = self._meter.enter
        state.uncounted = self._usage.refusal
        return state

    def _app(self) -> Starlette:
        state, pool = self._state, self._pool
        admin = AdminRoutes(
            pool,
            self._launch.model,
            int(time.time()),
            state.access.admin,
            lambda: self._relay.live,
            lambda: state.closed,
            state.registry,
        )
        app = Starlette(
            routes=[
                *probe_routes(state, lambda: False),
                *admin.routes(),
                Mount("/", app=self._relay),
            ],
            middleware=[Middleware(HttpMiddleware)],
            exception_handlers={HTTPException: as_problem},
        )
        app.state.kvmig = state
        return app

    async def serve(self, heartbeat: int) -> None:
        """Serve until a signal, or the end of stdin. heartbeat: descriptor of a pipe that gets a
        byte a second. Raises StartupError where no server could be started."""
        loop = asyncio.get_running_loop()
        for name in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(name, self._signalled)
        call_at_stdin_end(self._stop.set)
        self._tasks = [
            asyncio.create_task(keep_running(self._usage.run, "writing of usage"), name="usage"),
            asyncio.create_task(send_heartbeats(heartbeat), name="heartbeats"),
            asyncio.create_task(keep_running(keep_small, "heap"), name="heap"),
        ]
        try:
            self._pool.start()
            connection = HttpConnection.limited(
                self._state.config.send_timeout_s, self._state.count
            )
            self._uvicorn = uvicorn_server(self._app(), connection, access_log=False)
            await self._http.run(self._uvicorn.serve([self._http.sock]))
            await self._serve_until_stopped()
        finally:
            await self._close()

    def _signalled(self) -> None:
        (self._at_once if self._stop.is_set() else self._stop).set()

    async def _serve_until_stopped(self) -> None:
        ready = asyncio.create_task(self._pool.first_ready())
        stopped = asyncio.create_task(self._stop.wait())
        ended = asyncio.create_task(self._http.ended())
        failed = asyncio.create_task(self._pool.given_up())
        try:
            await asyncio.wait((ready, stopped), return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                await ready
            await asyncio.wait((ended, failed, stopped), return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                raise StartupError(await failed)
            if not stopped.done():
                raise StartupError("its HTTP server has stopped")
            await self._drain()
        finally:
            for task in (ready, stopped, ended, failed):
                task.cancel()

    async def _drain(self) -> None:
        """Take nothing new; wait for running calls, for the timeout, or for a second signal."""
        self._state.closed = True
        running, timeout_s = self._relay.live, self._launch.shutdown_timeout_s
        if running:
            say(f"stopping: {running} calls run, at most {timeout_s:g} s")
        waits = [asyncio.create_task(one.wait()) for one in (self._relay.idle, self._at_once)]
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in waits:
            task.cancel()

    async def _close(self) -> None:
        """End what still runs, the servers, and the application."""
        self._state.closed = True
        self._relay.give_up()
        await self._http.stop(GRACE_S)
        await self._pool.close()
        await cancel_tasks(*self._tasks)
        self._quotas.close()
        await self._usage.close()
