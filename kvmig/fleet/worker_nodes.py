"""The machines on which instances run, as placement sees them, and what an instance wants of one.
Pure; all sizes are bytes.

A fleet on one host has one of them, `local`. A `WorkerNode` is what is known of a machine; a
`NodeRoom` is what is free there while a decision is made. Neither is ever changed: another one is
made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from kvmig.fleet.device_room import DeviceMemory, DeviceNeed, groups_of

LOCAL = "local"
"""The name of the only node of a fleet on one host."""
WORKER = "worker"
"""The label of a worker that is its name."""
NO_GPU = ""
"""Stands for a GPU in counts, for instances that have none."""
NONE: Mapping[str, int] = {}
NO_AMOUNTS: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class NodeInstance:
    """An instance that is on a node, or was ordered there."""

    model: str
    gpus: tuple[str, ...] = ()
    """UUIDs."""


@dataclass(frozen=True, slots=True)
class PlacedCounts:
    """How many instances are on a node, by GPU; an instance on several GPUs counts on each."""

    every: Mapping[str, int] = field(default_factory=dict)
    by_model: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def with_instance(self, one: NodeInstance) -> PlacedCounts:
        """The same with one more."""
        every, own = dict(self.every), dict(self.by_model.get(one.model, NONE))
        for gpu in one.gpus or (NO_GPU,):
            every[gpu] = every.get(gpu, 0) + 1
            own[gpu] = own.get(gpu, 0) + 1
        return PlacedCounts(every, {**self.by_model, one.model: own})


@dataclass(frozen=True)
class WorkerNode:
    """What is known of a machine."""

    name: str
    total: int
    """Bytes of its memory that all models together may take."""
    available: int
    """Bytes of its memory that are free now."""
    devices: tuple[DeviceMemory, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    cordoned: bool = False
    """Whether it gets no more instances, until it is uncordoned."""
    unready: str = ""
    """Why nothing can start there now, such as that its agent does not answer; empty: it can."""
    engines: frozenset[str] = frozenset()
    """Engines that can start there; empty: all."""
    files: frozenset[str] = frozenset()
    """Sources whose files are on its disk, or come there now."""
    no_files: Mapping[str, str] = field(default_factory=dict)
    """Why its disk can't have the files of sources."""
    sought: frozenset[str] = frozenset()
    """Sources among these of which that is not known yet: their files are looked for."""
    instances: tuple[NodeInstance, ...] = ()
    resources: Mapping[str, float] = field(default_factory=dict)
    """Amounts of what else instances take, by Ray's names."""
    free_resources: Mapping[str, float] = field(default_factory=dict)
    """Amounts of these that are free now."""

    @cached_property
    def groups(self) -> tuple[tuple[str, ...], ...]:
        """The GPUs in groups, in each of which all reach each other."""
        return tuple(groups_of(self.devices))

    @cached_property
    def frees(self) -> Mapping[str, int]:
        """Bytes of each GPU that are neither taken nor claimed."""
        return {one.id: one.free for one in self.devices}

    @cached_property
    def usable(self) -> Mapping[str, int]:
        """Bytes of each GPU that the fleet's models can have, all together."""
        return {one.id: max(0, one.total - one.others) for one in self.devices}

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each GPU, free or not."""
        return {one.id: one.total for one in self.devices}

    @cached_property
    def counts(self) -> PlacedCounts:
        """How many instances are there."""
        counted = PlacedCounts()
        for one in self.instances:
            counted = counted.with_instance(one)
        return counted


@dataclass(frozen=True, slots=True)
class InstanceNeed:
    """What one instance wants of a node."""

    model: str
    memory: int
    """Bytes of the node's memory."""
    wants: tuple[DeviceNeed, ...] = ()
    """What it may have of GPUs, in order of preference: the first that any node has room for
    counts. Empty: it uses none."""
    engine: str = ""
    selector: Mapping[str, str] = field(default_factory=dict)
    """Labels that its node has."""
    source: str = ""
    """The source of its files; empty: no node has them before others."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Amounts of what else it takes, by Ray's names."""


@dataclass(frozen=True, slots=True)
class InstancePlace:
    """A place that an instance gets."""

    node: str
    gpus: tuple[str, ...] = ()
    """UUIDs, in the order of its workers."""
    each: int = 0
    """Bytes that it takes of each of them."""


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """What is free on a node."""

    node: WorkerNode
    memory: int
    """Bytes of its memory that the next instances may take."""
    devices: Mapping[str, int]
    """Bytes of each GPU."""
    counts: PlacedCounts
    resources: Mapping[str, float] = field(default_factory=dict)
    """Amounts of what else instances take."""

    def with_instance(self, need: InstanceNeed, place: InstancePlace) -> NodeRoom:
        """What is left once this instance has started there."""
        left = dict(self.devices)
        for gpu in place.gpus:
            left[gpu] -= place.each
        counts = self.counts.with_instance(NodeInstance(need.model, place.gpus))
        amounts = {name: -amount for name, amount in need.resources.items()}
        return NodeRoom(
            self.node,
            self.memory - need.memory,
            left,
            counts,
            with_amounts(self.resources, amounts),
        )


def with_amounts(have: Mapping[str, float], more: Mapping[str, float]) -> Mapping[str, float]:
    """The sums of both."""
    if not more:
        return have
    return {**have, **{name: have.get(name, 0.0) + amount for name, amount in more.items()}}


def room_now(node: WorkerNode, memory: int) -> NodeRoom:
    """What is free on a node now. memory: bytes of its memory, as the models that run leave it."""
    return NodeRoom(node, memory, node.frees, node.counts, node.free_resources)


Rooms = Mapping[str, NodeRoom]
"""What is free, by the nodes' names."""
