"""Which workers models' instances go to, and which instances leave theirs: what is decided from all
models together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from kvmig.core.api_records import InstanceRow
from kvmig.fleet.cluster_nodes import InstanceDemand, InstanceHold
from kvmig.fleet.device_room import DeviceMemory
from kvmig.fleet.instance_places import Gpus
from kvmig.fleet.leaving_instances import LeavingStep, leaving_step
from kvmig.fleet.managed_model import ManagedModel
from kvmig.fleet.place_choice import PlaceExplanation
from kvmig.fleet.worker_drain import InstanceOnWorker
from kvmig.fleet.worker_nodes import InstancePlace, WorkerNode
from kvmig.fleet.worker_pool import WorkerPool
from kvmig.fleet.workers import Leaving
from kvmig.placement.file import PlacedUnit


class WorkerDeadline(NamedTuple):
    """The time that the requests of an instance have to move."""

    seconds: float | None
    """Seconds; None: as many as the deployment gives them."""
    until: float | None
    """The same as the worker's drain has it, in Unix time."""


class ModelWorkers:
    """The workers, with the instances of all models on them."""

    def __init__(self, pool: WorkerPool, models: Mapping[str, ManagedModel]) -> None:
        """models: those that there are, by name; they change."""
        self._pool = pool
        self._models = models

    def nodes(
        self, devices: Sequence[DeviceMemory], units: Iterable[tuple[str, InstanceDemand]]
    ) -> tuple[WorkerNode, ...]:
        """The workers, with what is left there of what the instances of all models take. devices:
        the GPUs of all. units: nodes' ids with what units take, or may take yet."""
        found = [InstanceHold(node, demand, serves=False) for node, demand in units]
        for name, one in self._models.items():
            if one.deployment:
                demand = self._pool.demand(one.wanted.spec, one.claim, placed=bool(one.agents))
                found += one.nodes.holds(one.instance_rows, demand, name)
        return self._pool.nodes(found, devices)

    def claims_on(self, model: ManagedModel) -> dict[str, int]:
        """The bytes that its instances take of each worker's memory, by name."""
        each = model.claimed // max(1, model.planned)
        return {name: each * count for name, count in self._instances_by_worker(model).items()}

    def resources_on(self, model: ManagedModel) -> dict[str, dict[str, float]]:
        """What else its instances take of each worker."""
        placed = bool(model.agents)
        each = self._pool.demand(model.wanted.spec, model.claim, placed=placed).resources
        return {
            name: {one: count * amount for one, amount in each.items()}
            for name, count in self._instances_by_worker(model).items()
        }

    def _instances_by_worker(self, model: ManagedModel) -> Counter[str]:
        rows = model.nodes.rows(model.instance_rows) if model.deployment else ()
        nodes = [*(model.nodes.node_of(one) for one in rows), *model.nodes.coming]
        named = ((node, self._pool.name_of(node)) for node in nodes)
        # The name of a node that was lost may be another one's by now.
        return Counter(name for node, name in named if name and self._pool.node_id(name) == node)

    def lacking_files(self, model: ManagedModel, nodes: Sequence[str]) -> dict[str, str]:
        """Why instances of it can't start yet on some of these workers, by name: their files come
        there first."""
        if not self._pool.there:
            return {}
        folder = folder_of(model)
        found = {one: self._pool.lack(one, folder) for one in dict.fromkeys(nodes)}
        return {one: why for one, why in found.items() if why}

    def files_awaited(self, model: ManagedModel, nodes: Sequence[str]) -> str:
        """Why it can't start on these workers yet, in words for all who call it; empty: all have
        its files."""
        whys = "; ".join(dict.fromkeys(self.lacking_files(model, nodes).values()))
        return f"on its worker {whys}" if whys else ""

    def with_files(
        self,
        model: ManagedModel,
        places: Sequence[InstancePlace],
        why: Sequence[PlaceExplanation],
    ) -> tuple[tuple[InstancePlace, ...], tuple[PlaceExplanation, ...]]:
        """The places among these that have its files, with their reasons."""
        lacking = self.lacking_files(model, [one.node for one in places])
        kept = [at for at, one in enumerate(places) if one.node not in lacking]
        return tuple(places[at] for at in kept), tuple(why[at] for at in kept)

    def decide_nodes(self, placed: Mapping[str, Sequence[PlacedUnit]]) -> None:
        """End a round: name the files that each worker is to have, and the nodes that are wanted in
        all. placed: units of the placement by model; they have their GPUs already, so that models
        in them wait for no node, and their workers are in use."""
        every = self._models.values()
        self._pool.decide_nodes(
            (
                (node, folder_of(model))
                for model in every
                if model.deployment
                for row in model.nodes.rows(model.instance_rows)
                if (node := model.nodes.node_of(row))
            ),
            [
                (model.wanted.spec, count)
                for model in every
                if model.wanted.name not in placed and (count := _waiting(model))
            ],
            {self._pool.node_id(unit.worker) for units in placed.values() for unit in units},
        )

    def wakes_elsewhere(self, model: ManagedModel) -> bool:
        """Whether it is parked on a worker that is drained, or was lost: then it ends, and starts
        on another one when it is wanted."""
        parked = model.life.state == "parked"
        return parked and bool(self._pool.leaving(model.nodes, model.instance_rows))

    def forget_departed(self, model: ManagedModel, leaving: Mapping[str, Leaving]) -> None:
        """Forget which instances were drained for their workers' sake and are gone, or serve on
        where they are to stay, since the order has failed."""
        there = {
            one.id for one in model.instance_rows if one.state == "draining" or one.id in leaving
        }
        model.departing = {one: until for one, until in model.departing.items() if one in there}

    def leaving_step(
        self, model: ManagedModel, leaving: Mapping[str, Leaving], wanted: int, no_room: str
    ) -> LeavingStep:
        """What is ordered now of the instances that leave; the model keeps why others stay.
        no_room: why no worker takes another one; empty: one does."""
        rows, no_room = model.instance_rows, no_room or model.additions.sentence
        step = leaving_step(rows, leaving, model.departing, wanted, no_room)
        model.stays = step.blocked
        renewed = [
            one.id
            for one in rows
            if one.id in leaving and one.state == "draining" and one.id in model.departing
            if model.departing[one.id] != self._pool.drain_until(model.nodes.node_of(one))
        ]
        return step._replace(renewed=tuple(renewed))

    def deadlines(self, model: ManagedModel, names: Sequence[str]) -> dict[str, WorkerDeadline]:
        """The time that the requests of these instances have to move, by name."""
        nodes = {one.id: model.nodes.node_of(one) for one in model.instance_rows}
        return {
            one: WorkerDeadline(
                self._pool.deadline_s(nodes[one]), self._pool.drain_until(nodes[one])
            )
            for one in names
        }

    def unit_places(self) -> dict[str, dict[str, Gpus]]:
        """The nodes' ids of the instances in each unit, those included that were only ordered, with
        the GPUs that the unit has there, as far as instances report them."""
        found: dict[str, dict[str, Gpus]] = {}
        for model in self._models.values():
            if model.unit and model.deployment:
                places = found.setdefault(model.unit, {})
                for row in model.nodes.rows(model.instance_rows):
                    node, gpus = model.nodes.node_of(row), self._pool.gpus_of(row)
                    places[node] = gpus or places.get(node, ())
                for node in model.nodes.coming:
                    places.setdefault(node, ())
        return found

    def instances_on(self, node: str) -> list[InstanceOnWorker]:
        """The instances of all models on a node, those included that were only ordered."""
        return [
            _on_worker(model, row)
            for model in self._models.values()
            if model.deployment
            for row in model.nodes.rows(model.instance_rows)
            if model.nodes.node_of(row) == node
        ]


def folder_of(model: ManagedModel) -> str:
    """The folder that its instances start from: that of its deployment, if it has one."""
    return model.wanted.spec.folder if model.note is None else model.note.folder


def _waiting(model: ManagedModel) -> int:
    """How many of its instances wait for a node."""
    if model.deployment:
        return max(0, model.desired - len(model.instance_rows)) if model.instance_rows else 0
    return max(1, model.wanted.spec.least) if model.asks_since is not None else 0


def _on_worker(model: ManagedModel, row: InstanceRow) -> InstanceOnWorker:
    moves = () if model.watched is None else tuple(model.watched.moves)
    moved_s = sum(one.total_ms for one in moves) / 1000
    stays = model.stays if model.life.state == "serving" else f"the model is {model.life.state}"
    return InstanceOnWorker(
        model=model.wanted.name,
        instance=row.id,
        state=row.state,
        streams=row.running + row.waiting,
        kv_bytes=row.blocks_used * row.block_bytes,
        bytes_per_s=sum(one.bytes for one in moves) / moved_s if moved_s else None,
        stays="" if row.state == "draining" else stays,
    )
