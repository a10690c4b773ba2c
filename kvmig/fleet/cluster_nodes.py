"""The workers of a Ray cluster as `kvmig.fleet.place_choice` sees them. Pure; sizes are bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvmig.fleet.device_room import DeviceMemory
from kvmig.fleet.worker_files import WorkerFiles, local_sources
from kvmig.fleet.worker_nodes import NodeInstance, WorkerNode
from kvmig.fleet.workers import CORDONED, FleetWorker


@dataclass(frozen=True, slots=True)
class InstanceDemand:
    """What an instance takes of its worker."""

    memory: int
    resources: Mapping[str, float] = field(default_factory=dict)
    """Amounts by Ray's names."""


@dataclass(frozen=True, slots=True)
class InstanceHold:
    """An instance, or a unit's KV cache, that is on a node, or was ordered there."""

    node: str
    demand: InstanceDemand
    serves: bool
    """Whether it has taken its memory already."""
    model: str = ""
    """The instance's; empty: it is the KV cache of a unit."""


def worker_nodes(
    workers: Iterable[FleetWorker],
    holds: Sequence[InstanceHold],
    files: WorkerFiles,
    devices: Sequence[DeviceMemory] = (),
) -> tuple[WorkerNode, ...]:
    """Make nodes of workers, with what is left there. holds: all the fleet's instances. devices:
    the GPUs of all workers.

    What an agent or Ray has measured lags behind: what was ordered counts with what it will take.
    """
    by_node: dict[str, list[InstanceHold]] = {}
    for one in holds:
        by_node.setdefault(one.node, []).append(one)
    by_uuid = {one.id: one for one in devices}
    return tuple(
        replace(
            _node(one, by_node.get(one.node, []), files),
            devices=tuple(by_uuid[it.uuid] for it in one.devices if it.uuid in by_uuid),
        )
        for one in workers
    )


def _node(worker: FleetWorker, here: Sequence[InstanceHold], files: WorkerFiles) -> WorkerNode:
    coming = sum(one.demand.memory for one in here if not one.serves)
    left = {
        name: min(
            worker.free_resources.get(name, 0.0),
            total - sum(one.demand.resources.get(name, 0.0) for one in here),
        )
        for name, total in worker.resources.items()
    }
    return WorkerNode(
        worker.name,
        worker.memory_total,
        worker.memory_free - coming,
        labels={**worker.labels, "worker": worker.name},
        cordoned=worker.cordoned,
        unready="" if worker.refusal == CORDONED else worker.refusal,
        engines=frozenset(worker.engines),
        files=local_sources(worker),
        no_files=files.refused(worker),
        sought=files.sought(worker),
        instances=tuple(NodeInstance(one.model) for one in here if one.model),
        resources=worker.resources,
        free_resources=left,
    )
