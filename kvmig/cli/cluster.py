"""The processes of one cluster: llumlets, wherever the launcher puts them, and the scheduler."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Sequence

from kvmig.cli.children import Child
from kvmig.cli.launch import LlumletLaunch
from kvmig.cli.launcher import Handle, Launcher
from kvmig.cli.shapes import InstanceShape, instance_name
from kvmig.controlplane.messages import ClusterMessage, Member, Members
from kvmig.controlplane.scheduler_process import SchedulerLaunch
from kvmig.ground.config import ClusterConfig
from kvmig.ground.errors import KvmigError, PeerError, StartupError, TransportError
from kvmig.kvtransfer.link import Client

log = logging.getLogger(__name__)

SCHEDULER_TIMEOUT_S = 30.0
RESTART_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses before the scheduler is started again; the last one repeats."""


class Cluster:
    """Starts and ends all processes; the scheduler is started again when it dies."""

    def __init__(
        self,
        name: str,
        config: ClusterConfig,
        secret: bytes,
        engine_argv: Sequence[str],
        shapes: Sequence[InstanceShape],
        launcher: Launcher,
    ) -> None:
        """name: of its shared memory. engine_argv: MODEL and vLLM's flags for all instances;
        shapes: one an instance.
        """
        self._name = name
        self._config = config
        self._secret = secret
        self._engine_argv = list(engine_argv)
        self._shapes = list(shapes)
        self._launcher = launcher
        self._llumlets: dict[str, Handle] = {}
        self._members: list[Member] = []
        self._scheduler: Child | None = None
        self._link: Client | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, progress: Callable[[str], None]) -> list[Member]:
        """All instances, ready; in parallel. Raises StartupError, and leaves nothing running."""
        await self._launcher.open()
        numbers = range(self._config.instances)
        starting = [asyncio.create_task(self._start(number, progress)) for number in numbers]
        try:
            self._members = list(await asyncio.gather(*starting))
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await self.stop()
            raise
        return self._members

    def watch(self, lost: Callable[[str, str], Awaitable[None]]) -> None:
        """Keep the scheduler running; tell `lost` (instance, how) when a llumlet ends."""
        if self._config.scheduler.migration:
            self._tasks.append(asyncio.create_task(self._keep_scheduler(), name="scheduler"))
        for name, handle in self._llumlets.items():
            self._tasks.append(asyncio.create_task(self._watch(name, handle, lost)))

    async def stop(self) -> None:
        """End every process and remove the cluster's shared memory. May be called twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        if self._link is not None:
            self._link.close()
            self._link = None
        handles = [*self._llumlets.values(), *([self._scheduler] if self._scheduler else [])]
        await asyncio.gather(*(handle.stop() for handle in handles))
        self._llumlets.clear()
        self._scheduler = None
        await self._launcher.close()

    async def _start(self, number: int, progress: Callable[[str], None]) -> Member:
        began = asyncio.get_running_loop().time()
        config, name = self._config, instance_name(number)
        launch = LlumletLaunch(
            cluster=self._name,
            instance=name,
            secret=self._secret,
            config=config,
            engine_argv=[*self._engine_argv, *self._shapes[number].own],
        )
        progress(f"instance {name} starts")
        handle = await self._launcher.llumlet(launch, self._shapes[number].workers)
        self._llumlets[name] = handle
        endpoint = await handle.ready(config.start_timeout_s)
        progress(f"instance {name} is ready ({asyncio.get_running_loop().time() - began:.0f} s)")
        return Member(name, endpoint)

    async def _watch(
        self, name: str, handle: Handle, lost: Callable[[str, str], Awaitable[None]]
    ) -> None:
        how = await handle.ended()
        await handle.stop()  # its workers, and what they share
        self._members = [member for member in self._members if member.instance != name]
        self._tell_members()
        await lost(name, how)

    async def _keep_scheduler(self) -> None:
        failures = 0
        while True:
            try:
                await self._run_scheduler()
            except KvmigError as error:
                log.warning("scheduler: %s; serving goes on without migrations", error)
            await asyncio.sleep(RESTART_S[min(failures, len(RESTART_S) - 1)])
            failures += 1

    async def _run_scheduler(self) -> None:
        """From start to death. Raises StartupError or TransportError saying how it ended."""
        launch = SchedulerLaunch(self._secret, self._config)
        child = await Child.start("scheduler", "kvmig.cli.scheduler", launch, os.environ)
        self._scheduler = child
        try:
            endpoint = await child.ready(SCHEDULER_TIMEOUT_S)
            self._link = Client(endpoint, self._secret, "launcher", "launcher", ClusterMessage)
            self._tell_members()
            how = await child.ended()
            raise StartupError(f"it ended ({how})")
        finally:
            if self._link is not None:
                self._link.close()
                self._link = None
            await child.stop()
            self._scheduler = None

    def _tell_members(self) -> None:
        if self._link is None:
            return
        try:
            self._link.send(Members(self._members))
        except (TransportError, PeerError) as error:
            log.warning("the scheduler did not hear of the instances: %s", error)
