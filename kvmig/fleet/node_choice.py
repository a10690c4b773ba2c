"""Which worker an instance runs on. Pure; sizes are bytes.

`choose_node` is the only place where that is decided. Of the workers with room it takes the one
with the most free memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvmig.fleet.workers import FleetWorker
from kvmig.launcher.ray_resources import amounts

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class InstanceDemand:
    """What an instance takes of its worker."""

    memory: int
    resources: Mapping[str, float] = field(default_factory=dict)
    """Amounts by Ray's names."""


@dataclass(frozen=True, slots=True)
class InstanceHold:
    """An instance that is on a node, or was ordered there."""

    node: str
    demand: InstanceDemand
    serves: bool
    """Whether it has taken its memory already."""


@dataclass(frozen=True, slots=True)
class WorkerRoom:
    """What a worker has left."""

    worker: FleetWorker
    memory: int
    resources: Mapping[str, float]

    def refusal(self, demand: InstanceDemand) -> str:
        """Why it does not take the instance; empty: it does."""
        if self.worker.refusal:
            return self.worker.refusal
        for name, amount in demand.resources.items():
            if (free := self.resources.get(name, 0.0)) < amount:
                return f"it has {amounts({name: max(0.0, free)})} free of {amounts({name: amount})}"
        if self.memory < demand.memory:
            free_gib = max(0, self.memory) / GIB
            return f"it has {free_gib:.1f} GiB free of {demand.memory / GIB:.1f} GiB"
        return ""

    def with_instance(self, demand: InstanceDemand) -> WorkerRoom:
        """What is left once this instance is there, too."""
        left = {one: it - demand.resources.get(one, 0.0) for one, it in self.resources.items()}
        return replace(self, memory=self.memory - demand.memory, resources=left)


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The workers of instances, or why no worker takes them."""

    nodes: tuple[str, ...] = ()
    """Ids, one for each instance; empty: not all of them have room."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Why workers did not take the first one without room, by name."""

    @property
    def why(self) -> str:
        """The refusals, for people."""
        if not self.refused:
            return "no room: there is no worker"
        said = "; ".join(f"{name}: {why}" for name, why in self.refused.items())
        return f"no worker has room: {said}"


def rooms_of(
    workers: Iterable[FleetWorker], holds: Sequence[InstanceHold]
) -> tuple[WorkerRoom, ...]:
    """What workers have left. holds: all the fleet's instances.

    What an agent or Ray has measured lags behind: what was ordered counts with what it will take.
    """
    rooms = []
    for worker in workers:
        here = [one for one in holds if one.node == worker.node]
        claimed = sum(one.demand.memory for one in here)
        coming = sum(one.demand.memory for one in here if not one.serves)
        left = {
            name: min(
                worker.free_resources.get(name, 0.0),
                total - sum(one.demand.resources.get(name, 0.0) for one in here),
            )
            for name, total in worker.resources.items()
        }
        memory = min(worker.memory_total - claimed, worker.memory_free - coming)
        rooms.append(WorkerRoom(worker, memory, left))
    return tuple(rooms)


def choose_node(demand: InstanceDemand, rooms: Sequence[WorkerRoom]) -> WorkerRoom | None:
    """The worker for one instance; None: none has room."""
    fitting = [one for one in rooms if not one.refusal(demand)]
    return max(fitting, key=lambda one: (one.memory, one.worker.name), default=None)


def choose_nodes(demand: InstanceDemand, count: int, rooms: Sequence[WorkerRoom]) -> NodeChoice:
    """Choose workers for `count` instances, one after the other."""
    left, nodes = list(rooms), []
    for _ in range(count):
        chosen = choose_node(demand, left)
        if chosen is None:
            return NodeChoice(refused={one.worker.name: one.refusal(demand) for one in left})
        nodes.append(chosen.worker.node)
        left[left.index(chosen)] = chosen.with_instance(demand)
    return NodeChoice(tuple(nodes))
