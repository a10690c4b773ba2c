"""The launcher of this host: each llumlet a child process, with its share of the machine."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvmig.cli.children import Child
from kvmig.cli.environment import instance_environment
from kvmig.cli.launch import LlumletLaunch
from kvmig.cli.launcher import STOP_S, Handle
from kvmig.engines.kind import kind_of
from kvmig.kvtransfer.transports.shm import sweep


class LocalLlumlet(Child):
    """One whose staging memory goes with it, also when it is killed."""

    async def stop(self, timeout_s: float = STOP_S) -> None:
        """See `Handle`."""
        try:
            await super().stop(timeout_s)
        finally:
            sweep()


@dataclass(eq=False)
class _Place:
    """What a llumlet has of this host; no child: it is just being started."""

    gpus: list[str] = field(default_factory=list)
    child: Child | None = None


class LocalLauncher:
    """Implements `Launcher` with processes of this host."""

    def __init__(
        self,
        cluster: str,
        gpus: Sequence[str],
        threads: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """cluster: names its shared memory. gpus: ids, none on a CPU. threads: a worker's."""
        self._cluster = cluster
        self._gpus = list(gpus)
        self._threads = threads
        self._environment = dict(os.environ if environment is None else environment)
        self._places: list[_Place] = []

    async def open(self) -> None:
        """Remove the shared memory of clusters that were killed."""
        sweep()

    async def llumlet(self, launch: LlumletLaunch, workers: int) -> Handle:
        """A child process, on the GPUs with the fewest workers."""
        place = self._place(workers)
        environment = instance_environment(place.gpus, self._threads, self._environment)
        if not place.gpus:
            preloaded = kind_of(launch.config.engine).preloaded
            environment["LD_PRELOAD"] = preloaded(environment.get("LD_PRELOAD", ""))
        name = f"instance {launch.instance}"
        try:
            place.child = await LocalLlumlet.start(name, "kvmig.cli.llumlet", launch, environment)
        except BaseException:
            self._places.remove(place)
            raise
        return place.child

    async def close(self) -> None:
        """Remove the cluster's shared memory."""
        sweep(self._cluster)

    def _place(self, workers: int) -> _Place:
        """A GPU for each worker, different ones as long as there are enough; none on a CPU."""
        self._places = [one for one in self._places if one.child is None or one.child.alive]
        used = Counter(dict.fromkeys(self._gpus, 0))
        used.update(gpu for place in self._places for gpu in place.gpus)
        place = _Place()
        for _ in range(workers if self._gpus else 0):
            gpu = min(self._gpus, key=lambda one: used[one])
            used[gpu] += 1
            place.gpus.append(gpu)
        self._places.append(place)
        return place
