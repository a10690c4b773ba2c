"""The launcher of this host: each llumlet a child process, with its share of the machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Self

from msgspec.structs import replace

from kvmig.core.errors import StartupError
from kvmig.engines.registry import with_tree
from kvmig.kvtransfer.transports.shm import sweep
from kvmig.launcher.environment import llumlet_environment, worker_threads
from kvmig.launcher.gpu_starts import GpuStart, GpuStarts
from kvmig.launcher.launch import LlumletLaunch, PlannedInstance
from kvmig.process.fork_server import HANDED, ForkServerPool
from kvmig.process.nvml import read_devices
from kvmig.process.supervisor import STOP_S, ChildProcess, ProcessHandle, ProcessPort, running

log = logging.getLogger(__name__)


class LocalHost:
    """The host, as it is before the launcher loads an engine's libraries, which set variables.

    A context: at its end nothing more is forked.
    """

    def __init__(self, engine: str, instances: int) -> None:
        """Start the fork server, or join the one that is handed. instances: planned.

        Raises StartupError.
        """
        self.inventory = read_devices(os.environ)
        self._environment = dict(os.environ)
        # How many workers an instance has isn't known yet; with several, forks don't suit.
        threads = worker_threads([1] * instances)
        environment = llumlet_environment(engine, self.gpus, threads, self._environment)
        self._forks = ForkServerPool(engine, environment, os.environ.get(HANDED, ""))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._forks.close()

    @property
    def gpus(self) -> list[str]:
        """Ids of the GPUs that may be used; empty on a CPU."""
        return [one.id for one in self.inventory.devices]

    @property
    def all_cores(self) -> bool:
        """Whether instances take all cores: there is no GPU, and the user has set no number."""
        return not self.gpus and "OMP_NUM_THREADS" not in self._environment

    def launcher(self, cluster: str, workers: Sequence[int], starts: GpuStarts) -> LocalLauncher:
        """The launcher. cluster: names its shared memory. workers: of each planned instance."""
        threads = worker_threads(workers)
        return LocalLauncher(cluster, starts, threads, self._environment, self._forks)


class LocalLlumlet(ChildProcess):
    """A llumlet whose staging memory goes with it, also when it is killed."""

    gpu_start: GpuStart | None = None
    """The start on GPUs, which ends when the instance is ready or gone."""

    async def ready(self, timeout_s: float) -> str:
        """See `ProcessHandle`."""
        try:
            endpoint = await super().ready(timeout_s)
            if self.gpu_start is not None:
                self.gpu_start.serves(self.kv_bytes)
            return endpoint
        finally:
            self._end_start()

    async def stop(self, timeout_s: float = STOP_S) -> None:
        """See `ProcessHandle`."""
        try:
            await super().stop(timeout_s)
        finally:
            self._end_start()
            sweep()

    def _end_start(self) -> None:
        if self.gpu_start is not None:
            self.gpu_start.end()


class LocalLauncher:
    """Implements `Launcher` with processes of this host."""

    def __init__(
        self,
        cluster: str,
        starts: GpuStarts,
        threads: int,
        environment: Mapping[str, str],
        forks: ForkServerPool | None = None,
    ) -> None:
        """cluster: names its shared memory. threads: a worker's, on a CPU.

        forks: makes the processes that could live in its environment.
        """
        self._cluster = cluster
        self._starts = starts
        self._threads = threads
        self._environment = dict(environment)
        self._forks = forks
        self._children: dict[str, ChildProcess] = {}

    async def open(self) -> None:
        """Remove the shared memory of clusters that were killed."""
        sweep()

    async def llumlet(self, launch: LlumletLaunch, workers: int) -> ProcessHandle:
        """A child process, on its GPUs once it is its turn there."""
        start: GpuStart | None = None
        if self._starts.ids:
            self._forget_ended(launch.instance)
            start = await self._starts.begin(launch, workers)
            launch = replace(
                launch,
                engine_argv=[*launch.engine_argv, *start.flags],
                where=f"GPU {','.join(start.place.gpus)} of {self._starts.node}",
            )
        try:
            child = await self._start(launch, () if start is None else start.place.gpus)
        except BaseException:
            if start is not None:
                start.end()
            raise
        child.gpu_start = start
        self._children[launch.instance] = child
        return child

    async def _start(self, launch: LlumletLaunch, gpus: Sequence[str]) -> LocalLlumlet:
        base = with_tree(launch.config.engine, self._environment, launch.engine_tree)
        environment = llumlet_environment(launch.config.engine, gpus, self._threads, base)

        async def spawn(stdin: int, announced: int) -> ProcessPort:
            if self._forks is not None and self._forks.suits(environment):
                try:
                    return await self._forks.fork(environment, stdin, announced, launch.title)
                except StartupError as error:
                    log.warning("%s; this instance starts by itself, which takes longer", error)
            spawned = running("kvmig.launcher.llumlet_main", environment, title=launch.title)
            return await spawned(stdin, announced)

        return await LocalLlumlet.start(f"instance {launch.instance}", spawn, launch)

    def check_room(self, instances: Sequence[PlannedInstance], gpus: Sequence[str]) -> None:
        """See `Launcher`."""
        for one in instances:
            self._starts.check_gpus(gpus, one.workers)
        if self._starts.ids:
            self._starts.check_room(instances, gpus, self._alive())

    def renew(self, tree: str) -> None:
        """See `Launcher`."""
        if self._forks is not None:
            self._forks.renew(tree)

    async def renewed(self) -> None:
        """See `Launcher`."""
        if self._forks is not None:
            await self._forks.loaded()

    async def close(self) -> None:
        """Remove the cluster's shared memory."""
        sweep(self._cluster)

    def _alive(self) -> list[str]:
        return [name for name, child in self._children.items() if child.alive]

    def _forget_ended(self, starts: str) -> None:
        """starts: the instance whose place is wanted now."""
        self._starts.forget_all_but([*self._alive(), starts])
