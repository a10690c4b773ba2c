"""The launcher of this host: each llumlet a child process, with its share of the machine."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from kvmig.core.errors import ConfigError, StartupError
from kvmig.engines.registry import with_tree
from kvmig.kvtransfer.transports.shm import sweep
from kvmig.launcher.environment import gpus, llumlet_environment, worker_threads
from kvmig.launcher.launch import LlumletLaunch
from kvmig.process.fork_server import HANDED, ForkServerPool
from kvmig.process.supervisor import STOP_S, ChildProcess, ProcessHandle, ProcessPort, running

log = logging.getLogger(__name__)


class LocalHost:
    """This host, as it is before the launcher loads an engine's libraries, which set variables.

    A context: at its end nothing more is forked.
    """

    def __init__(self, engine: str, instances: int) -> None:
        """Start the fork server, or join the one that is handed. instances: planned.

        Raises StartupError.
        """
        self.gpus = gpus()
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
    def all_cores(self) -> bool:
        """Whether instances take all cores: there is no GPU, and the user has set no number."""
        return not self.gpus and "OMP_NUM_THREADS" not in self._environment

    def launcher(self, cluster: str, workers: Sequence[int]) -> LocalLauncher:
        """Make it. cluster: names its shared memory. workers: of each planned instance."""
        return LocalLauncher(
            cluster, self.gpus, worker_threads(workers), self._environment, self._forks
        )


class LocalLlumlet(ChildProcess):
    """A llumlet whose staging memory goes with it, also when it is killed."""

    async def stop(self, timeout_s: float = STOP_S) -> None:
        """See `ProcessHandle`."""
        try:
            await super().stop(timeout_s)
        finally:
            sweep()


@dataclass(eq=False)
class _Place:
    """A llumlet's part of this host; no child: it is just being started."""

    gpus: list[str] = field(default_factory=list)
    child: ChildProcess | None = None


class LocalLauncher:
    """Implements `Launcher` with processes of this host."""

    def __init__(
        self,
        cluster: str,
        gpu_ids: Sequence[str],
        threads: int,
        environment: Mapping[str, str],
        forks: ForkServerPool | None = None,
    ) -> None:
        """cluster: names its shared memory. gpu_ids: none on a CPU. threads: a worker's.

        forks: makes the processes that could live in its environment.
        """
        self._cluster = cluster
        self._gpus = list(gpu_ids)
        self._threads = threads
        self._environment = dict(environment)
        self._forks = forks
        self._places: list[_Place] = []

    async def open(self) -> None:
        """Remove the shared memory of clusters that were killed."""
        sweep()

    async def llumlet(self, launch: LlumletLaunch, workers: int) -> ProcessHandle:
        """A child process, on the GPUs with the fewest workers."""
        place = self._place(workers, launch.gpus)
        base = with_tree(launch.config.engine, self._environment, launch.engine_tree)
        environment = llumlet_environment(launch.config.engine, place.gpus, self._threads, base)

        async def spawn(stdin: int, announced: int) -> ProcessPort:
            if self._forks is not None and self._forks.suits(environment):
                try:
                    return await self._forks.fork(environment, stdin, announced, launch.title)
                except StartupError as error:
                    log.warning("%s; this instance starts by itself, which takes longer", error)
            spawned = running("kvmig.launcher.llumlet_main", environment, title=launch.title)
            return await spawned(stdin, announced)

        try:
            place.child = await LocalLlumlet.start(f"instance {launch.instance}", spawn, launch)
        except BaseException:
            self._places.remove(place)
            raise
        return place.child

    def check_gpus(self, gpus: Sequence[str], workers: int) -> None:
        """See `Launcher`."""
        known = ", ".join(self._gpus) or "none: there is no GPU"
        if not_here := [one for one in gpus if one not in self._gpus]:
            raise ConfigError(f"gpus has {not_here[0]}, allowed are {known}")
        if gpus and len(gpus) != workers:
            raise ConfigError(f"gpus has {len(gpus)}, must be one for each of {workers} workers")

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

    def _place(self, workers: int, given: Sequence[str]) -> _Place:
        """A GPU for each worker, different ones as long as there are enough; none on a CPU.

        given: which; none: those with the fewest workers.
        """
        self._places = [one for one in self._places if one.child is None or one.child.alive]
        used = Counter(dict.fromkeys(self._gpus, 0))
        used.update(gpu for place in self._places for gpu in place.gpus)
        place = _Place(list(given))
        for _ in range(workers if self._gpus and not given else 0):
            gpu = min(self._gpus, key=lambda one: used[one])
            used[gpu] += 1
            place.gpus.append(gpu)
        self._places.append(place)
        return place
