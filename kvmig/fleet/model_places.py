"""The places of a fleet's models: what each has, what is free, where another instance would go, and
why. It reads the models as the controller keeps them, and changes none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvmig.core.api_records import InstanceRow
from kvmig.core.errors import ConfigError
from kvmig.fleet import device_room
from kvmig.fleet.capacity import HostCapacity, ResidentModel, free
from kvmig.fleet.device_room import DeviceMemory, DeviceNeed, Places, Strategy
from kvmig.fleet.device_watch import title_of
from kvmig.fleet.evaluate import FitVerdict, on_host, verdict, without
from kvmig.fleet.host_memory import MemoryBudget
from kvmig.fleet.managed_model import ManagedModel
from kvmig.fleet.model_workers import ModelWorkers
from kvmig.fleet.place_choice import (
    UNKNOWN,
    PlaceExplanation,
    choose_places,
    explain,
    explained,
    most_instances,
)
from kvmig.fleet.place_history import PlaceHistory
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.tensor_parallel import choose_gpus, is_open, sized
from kvmig.fleet.units import FleetUnits
from kvmig.fleet.worker_nodes import (
    LOCAL,
    InstanceNeed,
    InstancePlace,
    NodeInstance,
    Rooms,
    WorkerNode,
    room_now,
)
from kvmig.fleet.worker_pool import WorkerPool
from kvmig.placement.file import PlacedUnit


class ModelPlaces:
    """The places of all models."""

    def __init__(
        self,
        models: Mapping[str, ManagedModel],
        units: FleetUnits,
        memory: MemoryBudget,
        pool: WorkerPool,
    ) -> None:
        self.workers = ModelWorkers(pool, models)
        self._pool = pool
        self._models = models
        self._units = units
        self._memory = memory
        self.history = PlaceHistory()

    # -- what there is

    def devices(self) -> tuple[DeviceMemory, ...]:
        """The GPUs, with what models claim of them."""
        claims = self._units.claims()
        taken = Counter({gpu: sum(sizes.values()) for gpu, sizes in claims.items()})
        for name, model in self._models.items():
            for gpu, size in model.held.items():
                claims.setdefault(gpu, {})[name] = size
                if model.serving or model.life.state == "parked":
                    taken[gpu] += size
        return self._memory.devices.watch.memory(claims, taken)

    def nodes(self) -> tuple[WorkerNode, ...]:
        """The nodes with what is on them: the workers, or this host."""
        if not self._pool.there:
            return (self._host(),)
        return self.workers.nodes(self.devices(), self._units.holds())

    def _host(self) -> WorkerNode:
        """The host; where there are workers, all of them together."""
        host = self._memory.host()
        return WorkerNode(
            LOCAL,
            host.total,
            host.available,
            self.devices(),
            self._memory.labels,
            instances=tuple(
                NodeInstance(name, gpus)
                for name, model in self._models.items()
                for gpus in model.instance_gpus
            ),
        )

    def claims_on(self, model: ManagedModel) -> Mapping[str, int]:
        """The bytes that its instances take of the memory of each node."""
        return self.workers.claims_on(model) if self._pool.there else {LOCAL: model.claimed}

    def resources_on(self, model: ManagedModel) -> Mapping[str, Mapping[str, float]]:
        """What else its instances take of each node."""
        return self.workers.resources_on(model) if self._pool.there else {}

    def more_on(self, model: ManagedModel, more: int) -> dict[str, int]:
        """The parts of nodes in bytes that all instances together take more."""
        claims = self.claims_on(model)
        whole = sum(claims.values())
        if not whole:
            return dict.fromkeys(claims, more)
        return {name: -(-more * size // whole) for name, size in claims.items()}

    def node_id(self, name: str) -> str:
        """The id of a worker's node, as deployments have it; empty: there is one host."""
        return self._pool.node_id(name) if self._pool.there else ""

    def leaves(self, model: ManagedModel) -> bool:
        """Whether a worker of its instances is drained, or was lost."""
        return bool(self._pool.leaving(model.nodes, model.instance_rows))

    def worker_of(self, model: ManagedModel, row: InstanceRow) -> str:
        """The name of the worker that an instance is on; empty: it is not known."""
        return self._pool.name_of(model.nodes.node_of(row)) if self._pool.there else LOCAL

    def title(self, gpu: str) -> str:
        """What people call a GPU; one that isn't there keeps its UUID."""
        try:
            return title_of(self._memory.devices.watch.inventory.device(gpu))
        except KeyError:
            return gpu

    # -- what a model wants

    def device_need(self, spec: ModelSpec) -> DeviceNeed | None:
        """What an instance wants of GPUs; None: nothing."""
        if not spec.unit:
            return self._memory.devices.need(spec)
        wanted = [model.wanted for model in self._models.values()]
        return self._units.need(
            spec, [one.spec for one in wanted if one.on and one.spec.unit == spec.unit]
        )

    def need(self, model: ManagedModel) -> InstanceNeed:
        """What an instance of it wants of a node."""
        need = self.device_need(model.wanted.spec)
        return replace(self.need_of_node(model), wants=() if need is None else (need,))

    def need_of_node(self, model: ManagedModel) -> InstanceNeed:
        """The same apart from GPUs: with all of its unit, until that is on a worker."""
        spec, alone = model.wanted.spec, self._alone(model)
        if not (spec.unit and self._pool.there):
            return alone
        others = [
            (one.wanted.spec, self._alone(one))
            for one in self._models.values()
            if one.wanted.on and one.wanted.spec.unit == spec.unit and one is not model
        ]
        return self._units.need_of_node(spec, alone, others)

    def _alone(self, model: ManagedModel) -> InstanceNeed:
        """The same without the other models of its unit, and without its unit's KV cache."""
        spec = model.wanted.spec
        return InstanceNeed(
            model.key,
            model.claim,
            (),
            spec.engine,
            spec.worker_selector,
            spec.source,
            self.resources(spec),
        )

    def resources(self, spec: ModelSpec) -> Mapping[str, float]:
        """What else an instance takes of a node, by Ray's names."""
        return self._pool.demand(spec, 0).resources if self._pool.there else {}

    def kv_bytes(self, spec: ModelSpec) -> int:
        """Bytes of the KV cache of an instance, all its workers together; 0: not known."""
        claim = self._memory.devices.claim(spec)
        each = self._memory.kv(spec) if claim is None else claim.kv
        return each * spec.workers

    def strategy(self, spec: ModelSpec) -> Strategy:
        """The strategy by which its places are chosen."""
        return spec.placement_strategy or self._memory.devices.strategy

    # -- where instances go

    def in_units(self, units: Sequence[PlacedUnit]) -> Places:
        """The GPUs of instances in these units of a placement; none if units have none."""
        if self._pool.there:
            records = [self._units.record(one.called) for one in units if one.gpus]
            return tuple((one and one.gpus) or (UNKNOWN,) for one in records)
        devices = self._memory.devices
        return tuple(devices.named(tuple(map(str, one.gpus))) for one in units if one.gpus)

    def with_gpus(self, spec: ModelSpec, instances: int, nodes: Sequence[WorkerNode]) -> ModelSpec:
        """The specification with the number of GPUs that the fleet chooses for each of these
        instances; unchanged where it isn't the fleet that chooses."""
        if not is_open(spec) or not self._memory.devices.there:
            return spec

        def need(gpus: int) -> InstanceNeed:
            of_size = sized(spec, gpus)
            found = self.device_need(of_size)
            return InstanceNeed(
                spec.name,
                0,  # it waits for memory with the number that GPUs have room for
                () if found is None else (found,),
                spec.engine,
                spec.worker_selector,
                spec.source,
                self.resources(of_size),
            )

        now = {one.name: room_now(one, 0) for one in nodes}
        empty = {
            name: replace(room, devices=room.node.sizes, resources=room.node.resources)
            for name, room in now.items()
        }
        groups = (group for one in nodes for group in one.groups)
        sizes = self._memory.devices.open_sizes(spec, groups)
        return sized(spec, choose_gpus(sizes, need, now, empty, instances))

    def most_more(self, model: ManagedModel, rooms: Rooms) -> int:
        """How many more instances of it have room, up to its greatest number."""
        return most_instances(rooms, self.need(model), model.wanted.spec.instances.max)

    def more_places(
        self, model: ManagedModel, most: int, rooms: Rooms
    ) -> tuple[tuple[InstancePlace, ...], tuple[PlaceExplanation, ...]]:
        """Places for up to `most` more instances, as many as fit, and why they are there. This
        host's memory for them is the model's already, since they are wanted."""
        need, strategy = self.need(model), self.strategy(model.wanted.spec)
        if (local := rooms.get(LOCAL)) is not None:
            rooms = {**rooms, LOCAL: replace(local, memory=local.memory + model.claim * most)}
        count = most_instances(rooms, need, most)
        places = choose_places(rooms, need, count, strategy) or ()
        return places, explained(rooms, need, places, strategy)

    def no_room(self, model: ManagedModel, rooms: Rooms) -> str:
        """Say for each node why it takes no other instance of it; empty: one does."""
        found = explain(rooms, self.need(model), self.strategy(model.wanted.spec))
        if any(not one.refusals for one in found.nodes):
            return ""
        said = "; ".join(f"{one.node}: {one.refusals[0].why}" for one in found.nodes)
        return f"no worker has room: {said}" if said else "no room: there is no worker"

    def explain_move(
        self, model: ManagedModel, place: InstancePlace, rooms: Rooms
    ) -> PlaceExplanation:
        """Explain why an instance of it moves to a place, packed as moves are."""
        return explain(rooms, self.need(model), "pack", place)

    # -- for people

    def why_not(self, model: ManagedModel, rooms: Rooms) -> PlaceExplanation:
        """Explain where another instance of it would go now, with every filter that refuses a node.
        The reasons name other models: for admins only."""
        need, strategy = self.need(model), self.strategy(model.wanted.spec)
        places = choose_places(rooms, need, 1, strategy)
        return explain(rooms, need, strategy, places[0] if places else None, holders=True)

    def evaluate(self, spec: ModelSpec, worker: str = "") -> FitVerdict:
        """Whether an instance fits with all other models there, and where. worker: the only one
        that it may be on; empty: any. Raises ConfigError."""
        memory, devices = self._memory, self._memory.devices
        own = {key for key, one in self._models.items() if one.wanted.name == spec.name}
        others = [
            ResidentModel(name, one.claimed, since=0, stay_s=0, ready=bool(one.instance_rows))
            for name, one in self._models.items()
            if one.deployment and name not in own
        ]
        host = memory.host()
        node, left = self._host(), free(host, others)
        if worker:
            node = self._worker(worker)
            taken = sum(
                self.claims_on(one).get(worker, 0)
                for key, one in self._models.items()
                if one.deployment and key not in own
            )
            host = HostCapacity(node.total, node.available)
            left = max(0, min(node.total - taken, node.available))
        node = replace(
            node,
            devices=tuple(without(own, node.devices)),
            instances=tuple(one for one in node.instances if one.model not in own),
        )
        others_only = [
            replace(one, devices=tuple(without(own, one.devices))) for one in self.nodes()
        ]
        spec = self.with_gpus(spec, 1, others_only)
        known = devices.known(spec)
        return verdict(
            spec.name,
            spec.workers,
            on_host(memory.claim(spec), host, left),
            known,
            memory.kv(spec),
            memory.rest_of_worker(spec),
            devices.claim(spec),
            self.device_need(spec),
            node,
            self.strategy(spec),
        )

    def _worker(self, name: str) -> WorkerNode:
        """The worker with that name. Raises ConfigError."""
        nodes = {one.name: one for one in self.nodes()}
        if name not in nodes:
            there = ", ".join(sorted(nodes)) or "none yet"
            raise ConfigError(f"worker is {name!r:.100}, must be one of the workers: {there}")
        return nodes[name]

    def reasons(self, model: ManagedModel) -> list[str]:
        """Why each GPU has no room for a model that waits. It names models: for admins only."""
        need = self.device_need(model.wanted.spec)
        if model.life.state != "waiting" or need is None:
            return []
        return device_room.reasons(need, self.devices())
