"""The fork servers of one node of a Ray cluster, kept by the node's agent: one an engine.

An instance that starts on the node is forked there, so that it imports nothing. Its launcher finds
the socket by the id of the node and the word of the fleet. A fork server that
fails is started again by the agent, after ever longer pauses, and never for an order: while there
is none, instances start by themselves.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from hashlib import blake2b
from pathlib import Path

from kvmig.core.background import cancel_tasks
from kvmig.core.errors import StartupError
from kvmig.core.own_folder import own_folder
from kvmig.launcher.fork_servers import ForkServers
from kvmig.launcher.launch import LlumletLaunch
from kvmig.launcher.ray_environment import base_environment
from kvmig.launcher.shared_fork_server import AT_ONCE
from kvmig.process.fork_server import ENGINE, INSTANCES, ForkServerClient, digest, join, likeness
from kvmig.process.supervisor import ProcessPort, Spawn

LOOK_S = 1.0
"""Pause between two looks at the fork servers."""
FIRST_PAUSE_S, LAST_PAUSE_S = 10.0, 300.0
"""Pauses after failures in a row: each is twice as long as the one before."""
END_S = 25.0
"""Time for the fork servers to end."""
LOADING, READY = "loading", "ready"

log = logging.getLogger(__name__)


def node_folder(node: str) -> Path:
    """Make a node's folder of sockets, which is this user's alone. node: Ray's id of it. Raises
    StartupError."""
    try:
        folder = own_folder() / f"node-{node[:16]}"
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise StartupError(f"the folder of the node's sockets can't be used: {error}") from error
    return folder


def fork_address(node: str, fleet: str, engine: str) -> str:
    """The path of the socket of an engine's fork server. fleet: its word. Raises StartupError."""
    word = blake2b(fleet.encode(), digest_size=4).hexdigest()
    return str(node_folder(node) / f"{word}-{engine}.sock")


def pause_after(failures: int) -> float:
    """Seconds until a fork server is started again that has failed so often in a row."""
    return min(LAST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures - 1, 30))


class NodeForks:
    """The fork servers of a node, on a thread of their own. Only one thread calls its methods."""

    def __init__(self, node: str, own: Mapping[str, str] = os.environ) -> None:
        """node: Ray's id of it. own: the agent's environment."""
        self._node = node
        self._own = own
        self._engines: Sequence[str] = ()
        self._states: dict[str, str] = {}
        self._failures: dict[str, int] = {}
        """Failures in a row, by engine."""
        self._again_at: dict[str, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None

    def keep_engines(
        self, fleet: str, engines: Sequence[str], given: Mapping[str, str]
    ) -> dict[str, str]:
        """Keep fork servers of these engines; the state of each: LOADING, READY, or why there is
        none. fleet: see `fork_address`. given: see `base_environment`."""
        self._engines = engines
        if engines and fleet and self._thread is None:
            environment = base_environment(given, self._own)
            environment.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides the GPUs from an agent
            self._loop = asyncio.new_event_loop()
            self._keeping = self._loop.create_task(self._keep(fleet, environment))
            self._thread = threading.Thread(target=self._run, daemon=True, name="fork servers")
            self._thread.start()
        return {one: self._states.get(one, LOADING) for one in engines} if fleet else {}

    def close(self) -> None:
        """End all fork servers; the processes that they have forked go on."""
        if self._thread is None:
            return
        assert self._loop is not None
        assert self._keeping is not None
        self._loop.call_soon_threadsafe(self._keeping.cancel)
        self._thread.join(END_S)
        self._thread = None
        self._states.clear()

    def _run(self) -> None:
        assert self._loop is not None
        assert self._keeping is not None
        try:
            self._loop.run_until_complete(asyncio.wait([self._keeping]))
        finally:
            self._loop.close()

    async def _keep(self, fleet: str, environment: Mapping[str, str]) -> None:
        path = partial(fork_address, self._node, fleet)
        servers = ForkServers(path, lambda: environment, AT_ONCE)
        watching = asyncio.create_task(servers.watch())
        try:
            while True:
                for engine in self._engines:
                    await self._keep_one(servers, engine)
                await asyncio.sleep(LOOK_S)
        finally:
            await cancel_tasks(watching)
            await servers.close()

    async def _keep_one(self, servers: ForkServers, engine: str) -> None:
        now = asyncio.get_running_loop().time()
        if now < self._again_at.get(engine, 0.0):
            return
        try:
            server = await servers.server(engine)
            await server.loaded()
        except (StartupError, OSError) as error:
            failures = self._failures[engine] = self._failures.get(engine, 0) + 1
            self._again_at[engine] = asyncio.get_running_loop().time() + pause_after(failures)
            if self._states.get(engine) != str(error):
                log.warning("%s; instances start by themselves here, which takes longer", error)
            self._states[engine] = str(error)
        else:
            self._states[engine] = READY
            self._failures.pop(engine, None)


def forked_or(
    spawn: Spawn, node: str, fleet: str, launch: LlumletLaunch, environment: Mapping[str, str]
) -> Spawn:
    """Fork an instance where the node has a fork server that suits it; spawn it where there is
    none. fleet: see `fork_address`."""

    async def fork(stdin: int, announced: int) -> ProcessPort:
        try:
            engine = launch.config.engine
            sock = await asyncio.to_thread(_join, node, fleet, engine, environment)
            if sock is not None:
                server = ForkServerClient(sock)
                process = await server.fork(environment, stdin, announced, launch.title)
                server.retire()
                return process
        except StartupError as error:
            log.warning("%s; this instance starts by itself, which takes longer", error)
        return await spawn(stdin, announced)

    return fork


def _join(
    node: str, fleet: str, engine: str, environment: Mapping[str, str]
) -> socket.socket | None:
    """Connect to the fork server; None: there is none now, and the agent knows why. Raises
    StartupError."""
    address = fork_address(node, fleet, engine)
    if not Path(address).exists():
        return None
    return join(address, {**likeness(), ENGINE: engine, INSTANCES: digest(environment)})
