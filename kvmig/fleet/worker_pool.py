"""The workers of a fleet, as its models use them: who has room, and whose instances leave.

Without `kvmig up --ray` there is one host, and nothing here decides anything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Self

import msgspec

from kvmig.core.api_records import InstanceRow
from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.devices import DeviceInventory
from kvmig.core.errors import ConfigError
from kvmig.fleet.capacity import HostCapacity
from kvmig.fleet.cluster_nodes import InstanceDemand, InstanceHold, worker_nodes
from kvmig.fleet.device_room import DeviceMemory
from kvmig.fleet.device_watch import DeviceWatch
from kvmig.fleet.instance_nodes import InstanceNodes
from kvmig.fleet.node_reserve import ReserveLadder, parse_ladder, wanted_bundles
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spec import ModelSpec, text_in
from kvmig.fleet.worker_files import WorkerFiles
from kvmig.fleet.worker_nodes import WORKER, WorkerNode
from kvmig.fleet.workers import FleetWorker, Leaving, WorkerTable, WorkerWish
from kvmig.launcher.node_files import ClusterWish, FolderReport, WantedUnit
from kvmig.launcher.node_reports import ClusterReport, UnitReport
from kvmig.launcher.ray_resources import Resources, needs_of, parse_resources

RESOURCES = "--ray-resources"
FILES = "--ray-files"
FLEET = "--ray-fleet"
GPU = "GPU"
UNKNOWN = 1 << 60
NO_RESOURCES: Resources = {}


class WorkerPool:
    """The workers, with what they have left."""

    def __init__(
        self,
        address: str = "",
        threads: int = 1,
        clock: TimeSource = monotonic,
        wall: TimeSource = monotonic,
        reserve: ReserveLadder | None = None,
        reserve_node: Resources = NO_RESOURCES,
    ) -> None:
        """address: of the Ray cluster; empty: there is none. threads: of an instance on a CPU.

        clock: steady. wall: Unix time. reserve: how many nodes are to be spare; None: Ray's
        autoscaler is asked for none. reserve_node: what such a node has; empty: as the largest.
        """
        self.address = address
        self._threads = threads
        self._clock = clock
        self._wall = wall
        self._table = WorkerTable()
        self.files = WorkerFiles()
        self._reserve = reserve
        self._reserve_node = reserve_node
        self._bundles: tuple[Resources, ...] | None = None
        self._engines: tuple[str, ...] = ()
        self._units: Mapping[str, tuple[WantedUnit, ...]] = {}
        self._fleet, self._term = "", 0

    @classmethod
    def of_fleet(cls, settings: FleetSettings, clock: TimeSource, wall: TimeSource) -> Self:
        """The workers of a fleet. Raises ConfigError."""
        reserve = parse_ladder(settings.reserve)
        return cls(settings.ray, settings.threads, clock, wall, reserve, settings.reserve_node)

    @property
    def there(self) -> bool:
        """Whether models run on workers."""
        return bool(self.address)

    def take_report(self, report: ClusterReport | None) -> None:
        """Take what is seen of the cluster; None: nothing is."""
        self._table.take_report(report, self._clock())

    def take_wishes(self, wishes: Sequence[WorkerWish]) -> None:
        """Take what is wanted of workers."""
        self._table.take_wishes(wishes)

    def workers(self) -> list[FleetWorker]:
        """Every worker, by name."""
        return self._table.workers()

    @property
    def names(self) -> list[str]:
        """Their names."""
        return [one.name for one in self.workers()]

    def node_id(self, name: str) -> str:
        """The id of a worker's node; empty: it has none now."""
        worker = self._table.named(name)
        return "" if worker is None else worker.node

    def name_of(self, node: str) -> str:
        """The name of the worker with this node; empty: there is none."""
        worker = self._table.node(node)
        return "" if worker is None else worker.name

    def memory(self) -> HostCapacity:
        """The memory of all workers together; while none is known, models wait for one, and
        not for memory."""
        ready = [one for one in self.workers() if one.state == "ready"]
        if not ready:
            return HostCapacity(UNKNOWN, UNKNOWN)
        total = sum(one.memory_total for one in ready)
        return HostCapacity(total, sum(one.memory_free for one in ready))

    def demand(self, spec: ModelSpec, memory: int, *, placed: bool = False) -> InstanceDemand:
        """What an instance takes. memory: bytes. placed: whether it is in a unit of a placement.
        The GPUs of one in a unit are the unit's."""
        used = self._resources(spec)
        if spec.unit or placed:
            used = {name: amount for name, amount in used.items() if name != GPU}
        return InstanceDemand(memory, used)

    def _resources(self, spec: ModelSpec) -> Resources:
        """What an instance uses. Unless its flags have resources, it uses a GPU for each of its
        workers where there are GPUs, and else CPUs."""
        try:
            given = parse_resources(text_in(spec.flags, RESOURCES))
        except ConfigError:  # of an earlier kvmig; its deployment says so when it starts
            given = {}
        usual = {} if self._table.has_gpus else {"CPU": float(self._threads * spec.workers)}
        return needs_of(given or usual, spec.workers)

    def nodes(
        self, holds: Sequence[InstanceHold], devices: Sequence[DeviceMemory]
    ) -> tuple[WorkerNode, ...]:
        """The workers, with what is left there. holds: all instances that run, or were ordered.
        devices: the GPUs of all."""
        return worker_nodes(self.workers(), holds, self.files, devices)

    def device_watch(self) -> DeviceWatch | None:
        """The GPUs of all workers, as their agents have measured them; None: there is one host."""
        return DeviceWatch(None, self._inventory, elsewhere=True) if self.there else None

    def _inventory(self) -> DeviceInventory:
        """The GPUs of all workers; on each they have the same indices."""
        ready = [one for one in self.workers() if one.state == "ready"]
        return DeviceInventory(
            devices=tuple(
                msgspec.structs.replace(gpu, id=gpu.uuid) for one in ready for gpu in one.devices
            )
        )

    def uses_gpus(self, spec: ModelSpec) -> bool:
        """Whether instances of a model use GPUs where there are some."""
        return not self.there or self.gpu_amount(spec) > 0

    def gpus_of(self, row: InstanceRow) -> tuple[str, ...]:
        """UUIDs of the GPUs that Ray has given an instance, as far as it reports them."""
        worker = self._table.node(row.node)
        if worker is None:
            return ()
        there = DeviceInventory(devices=worker.devices)
        with contextlib.suppress(KeyError):  # its agent sees other GPUs
            return tuple(there.device(one).uuid for one in row.gpus)
        return ()

    def gpu_amount(self, spec: ModelSpec) -> float:
        """GPUs that an instance takes of Ray outside of units."""
        return self._resources(spec).get(GPU, 0.0)

    def inventory_of(self, name: str) -> DeviceInventory:
        """The GPUs of a worker, as far as its agent has measured them."""
        worker = self._table.named(name)
        return DeviceInventory(devices=() if worker is None else worker.devices)

    def gpus_at(self, node: str, indices: Sequence[int]) -> tuple[str, ...]:
        """UUIDs of a node's GPUs with these indices; none if one of them is not there, as far as
        its agent has measured them."""
        worker = self._table.node(node)
        there = {} if worker is None else {one.index: one.uuid for one in worker.devices}
        return tuple(there[at] for at in indices) if there.keys() >= set(indices) else ()

    def lacks_gpus(self, name: str, indices: Sequence[int]) -> str:
        """Which GPUs with these indices are not on a worker; empty: all are, or its agent has not
        measured them now."""
        worker = self._table.named(name)
        there = {one.index for one in self.inventory_of(name).devices}
        missing = ", ".join(str(at) for at in indices if at not in there)
        if worker is None or worker.state != "ready" or not missing:
            return ""
        return f"worker {name} has no GPU {missing}"

    def files_on(self, folder: str) -> dict[str, FolderReport]:
        """What is known of a folder on each worker that has, or fetches it, by name."""
        return self._table.with_folder(folder)

    def wish(self) -> ClusterWish:
        """What is wanted of the nodes now."""
        return msgspec.structs.replace(
            self.files.wish,
            bundles=self._bundles,
            engines=self._engines,
            units=self._units,
            threads=self._threads,
            fleet=self._fleet,
            term=self._term,
        )

    def take_lead(self, fleet: str, term: int) -> None:
        """Wish from now on as the server of this term. fleet: the word of the fleet."""
        self._fleet, self._term = fleet, term

    def take_units(self, units: Mapping[str, tuple[WantedUnit, ...]]) -> None:
        """Let nodes have the agents of these units, by nodes' ids."""
        self._units = units

    def unit_on(self, node: str, path: str) -> UnitReport | None:
        """What a node's agent reports of a unit; None: nothing yet, or it is not ready."""
        worker = self._table.node(node)
        if worker is None or worker.state != "ready":
            return None
        return next((one for one in worker.units if one.path == path), None)

    def leaves(self, node: str) -> bool:
        """Whether instances of this node are to be elsewhere."""
        return bool(self._table.leaving(node, self._clock()))

    def is_lost(self, node: str) -> bool:
        """Whether a node was lost, longer ago than a lease."""
        return self._table.leaving(node, self._clock()) == "lost"

    def is_gone(self, name: str) -> bool:
        """Whether a worker was lost, longer ago than a lease, and no node has its name again."""
        return self._table.is_gone(name, self._clock())

    def refuses(self, spec: ModelSpec, name: str) -> str:
        """Why a worker can't have a model, apart from what is free there; empty: it can."""
        worker = self._table.named(name)
        if worker is None:
            return "it is not there"
        has = {**worker.labels, WORKER: name}
        for label, value in sorted(spec.worker_selector.items()):
            if has.get(label) != value:
                return f"it has no label {label}={value}"
        if worker.engines and spec.engine not in worker.engines:
            return f"engine {spec.engine} can't start there, only {', '.join(worker.engines)}"
        return ""

    def unready(self, name: str) -> str:
        """Why a worker can have no instances now, cordoned or not; empty: it can."""
        worker = self._table.named(name)
        if worker is None:
            return "it is not there"
        return "" if worker.state == "ready" else worker.refusal

    def take_engines(self, engines: Iterable[str]) -> None:
        """Let workers have fork servers of these engines."""
        self._engines = tuple(sorted(engines))

    def decide_nodes(
        self,
        held: Iterable[tuple[str, str]],
        waiting: Iterable[tuple[ModelSpec, int]],
        taken: Iterable[str] = (),
    ) -> None:
        """End a round. held: nodes' ids with the folders of the instances that are there. waiting:
        models with the number of instances that wait for a node. taken: ids of nodes that are in
        use without instances, too."""
        held = list(held)
        self.files.decide(self.workers(), held)
        if self._reserve is not None:
            needs = (
                self._resources(spec) for spec, count in _once_a_unit(waiting) for _ in range(count)
            )
            used = {*taken, *(node for node, _ in held)}
            self._bundles = wanted_bundles(
                self._reserve, self._reserve_node, self.workers(), used, needs
            )

    def lack(self, name: str, folder: str) -> str:
        """Why an instance can't start on a worker yet for want of its files, which are fetched
        there; empty: they are there."""
        worker = self._table.named(name)
        return "" if worker is None else self.files.lack(worker, folder)

    def leaving(self, nodes: InstanceNodes, rows: Sequence[InstanceRow]) -> Mapping[str, Leaving]:
        """Why instances are to be elsewhere, by name; only of those that are."""
        if not self.there:
            return {}
        now = self._clock()
        found = {one.id: self._table.leaving(nodes.node_of(one), now) for one in rows}
        return {name: why for name, why in found.items() if why}

    def drain_until(self, node: str) -> float | None:
        """The deadline of the drain of this node's worker, in Unix time; None: it has none."""
        worker = self._table.node(node)
        return None if worker is None else worker.drain_until

    def deadline_s(self, node: str) -> float | None:
        """Seconds until the deadline of the drain of this node's worker; None: it has none."""
        until = self.drain_until(node)
        return None if until is None else max(0.0, until - self._wall())

    def words(self, spec: ModelSpec, nodes: Sequence[str]) -> list[str]:
        """Flags of a deployment whose first instances are on these nodes."""
        if not self.there:
            return []
        own = [f"--ray={self.address}"]
        if self.files.root:
            own.append(f"{FILES}={self.files.root}")
        if self._fleet:
            own.append(f"{FLEET}={self._fleet}")
        own += [f"--instance-node=i{at}: {node}" for at, node in enumerate(nodes)]
        if not text_in(spec.flags, RESOURCES):
            resources = msgspec.json.encode(dict(self._resources(spec)))
            own.append(f"{RESOURCES}={resources.decode()}")
        return own

    def check(self, spec: ModelSpec) -> None:
        """Raises ConfigError for a model that can't run on workers."""
        if not self.there:
            return
        if spec.engine == "command":
            raise ConfigError(
                f"model {spec.name}: engine is 'command', must be vllm or transformers with `kvmig"
                " up --ray`: a command's servers run on one host"
            )
        if spec.load:
            raise ConfigError(
                f"model {spec.name}: load is {spec.load!r}, must be left out with `kvmig up --ray`:"
                " which way is the fastest differs between hosts"
            )
        if spec.tensor_parallel and (given := text_in(spec.flags, RESOURCES)):
            raise ConfigError(
                f"model {spec.name}: flags has {RESOURCES} {given}, must not with tensor_parallel"
                f" {spec.tensor_parallel}: an instance takes a GPU for each of its workers"
            )
        if spec.unit:
            self._check_gpus(spec)
        for field in ("gpus", "gpus_per_instance"):
            if getattr(spec, field) and not (field == "gpus" and spec.unit):
                raise ConfigError(
                    f"model {spec.name}: {field} is given, must be left out with `kvmig up --ray`:"
                    f" Ray gives out GPUs (tensor_parallel auto, or {RESOURCES} and"
                    " --tensor-parallel-size in flags)"
                )
        if spec.instances.target_kind == "freeness":
            raise ConfigError(
                f"model {spec.name}: instances.target_kind is 'freeness', must be concurrency or"
                " rps with `kvmig up --ray`"
            )
        parse_resources(text_in(spec.flags, RESOURCES))

    def _check_gpus(self, spec: ModelSpec) -> None:
        """Raises ConfigError for GPUs that a unit can't have."""
        there = {gpu.uuid: one.name for one in self.workers() for gpu in one.devices}
        for gpu in spec.gpus:
            if gpu not in there:
                known = ", ".join(f"{uuid} ({name})" for uuid, name in there.items()) or "none yet"
                raise ConfigError(
                    f"model {spec.name}: gpus has {gpu!r:.100}, must be UUIDs of workers' GPUs:"
                    f" {known}"
                )
        amount = self.gpu_amount(spec)
        if spec.gpus and not amount:
            raise ConfigError(
                f"model {spec.name}: gpus is {', '.join(spec.gpus)}, must be left out: it uses no"
                f" GPU by {RESOURCES} {text_in(spec.flags, RESOURCES)}"
            )
        if amount not in (0.0, 1.0):
            raise ConfigError(
                f"model {spec.name}: {RESOURCES} has {amount:g} GPU, must be 1 with unit: a unit"
                " has one GPU, and its models share that"
            )


def _once_a_unit(waiting: Iterable[tuple[ModelSpec, int]]) -> Iterator[tuple[ModelSpec, int]]:
    """The models that wait; of a unit's, which have one GPU together, the first one."""
    units = set[str]()
    for spec, count in waiting:
        if not spec.unit or spec.unit not in units:
            yield spec, count
        units.add(spec.unit)
