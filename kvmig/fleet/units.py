"""The units of a fleet, whose models share KV cache on one GPU or worker: where each is, and its
agent.

An agent is a deployment of the supervisor's as a model is: it outlives the server, and the next
server learns of it, or of the models that are in the unit. An agent that dies is started again, and
the instances come back to it by themselves (`kvmig.sharing.member`). On workers the agent is
started and ended by its node's (`kvmig.launcher.node_units`), as the server wishes.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from urllib.parse import quote

import msgspec

from kvmig.core.background import UNFORESEEN_S, cancel_tasks
from kvmig.core.clock import TimeSource
from kvmig.core.errors import ConfigError, TransportError
from kvmig.fleet.capacity import CapacityPlan, SharedHold
from kvmig.fleet.cluster_nodes import InstanceDemand
from kvmig.fleet.device_budget import DeviceBudget
from kvmig.fleet.device_room import DeviceNeed, unit_holder
from kvmig.fleet.orders import (
    DeployedProgram,
    DeploymentEnded,
    Order,
    StartDeployment,
    StopDeployment,
)
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.unit_plan import (
    AgentLife,
    allowed_gpus,
    arena_of,
    check_kinds,
    check_selectors,
    check_unit,
    ended,
    need_in_unit,
    need_of_unit,
    need_on_worker,
    next_step,
    node_of_unit,
    started,
    whole_need,
)
from kvmig.fleet.worker_nodes import InstanceNeed, InstancePlace, WorkerNode, with_amounts
from kvmig.fleet.worker_pool import GPU, WorkerPool
from kvmig.launcher.node_files import WantedUnit
from kvmig.launcher.node_reports import UnitReport
from kvmig.sharing.messages import UnitState
from kvmig.sharing.unit_state import fetch_unit

LOOK_S = 0.1
"""Pause between two attempts to reach an agent that starts."""
AGAIN_S = 2.0
"""Pause between two looks at one that answers."""

NOWHERE: Mapping[str, Mapping[str, tuple[str, ...]]] = MappingProxyType({})

ONE_GPU: Mapping[str, float] = MappingProxyType({GPU: 1.0})
"""What a unit whose instances use GPUs takes of Ray, for all of them."""

UnitGuard = Callable[[str], AbstractContextManager[None]]
"""Runs the part of a round for the unit of this name: if it fails, the others' parts go on."""

log = logging.getLogger(__name__)


class UnitRecord(msgspec.Struct, frozen=True):
    """The note of an agent that the supervisor keeps for the next server."""

    unit: str
    gpus: tuple[str, ...]
    arena: int
    worker: str = ""
    """The name of its worker, as a placement has it; empty: the fleet chooses it, or there is one
    host."""
    at: tuple[int, ...] = ()
    """Indices of its GPUs there; none: its instances run on CPUs."""


class AgentWatcher:
    """Asks a unit's agent for its state until `close`; make it inside a running event loop."""

    def __init__(self, path: str, changed: Callable[[], None]) -> None:
        """path: its socket. changed: called when it answers, and when it does so no more."""
        self.state: UnitState | None = None
        """The last report; None: the agent does not answer."""
        self._path = path
        self._changed = changed
        self._task = asyncio.create_task(self._follow(), name=f"unit at {path}")

    async def _follow(self) -> None:
        while True:
            found: UnitState | None = None
            pause_s = 0.0
            try:
                found = await fetch_unit(self._path)
            except (TransportError, ConfigError):
                pass  # it isn't there yet, or ends
            except Exception:  # the next look may show more
                log.exception("the unit at %s can't be looked at", self._path)
                pause_s = UNFORESEEN_S
            before, self.state = self.state, found
            if (before is None) != (self.state is None):
                self._changed()
            await asyncio.sleep(max(pause_s, LOOK_S if self.state is None else AGAIN_S))

    async def close(self) -> None:
        """Look no more."""
        await cancel_tasks(self._task)


@dataclass(eq=False)
class ManagedUnit:
    """A unit that has its GPU."""

    name: str
    places: dict[str, tuple[str, ...]]
    """UUIDs of its GPUs by nodes' ids; of the one host, by an empty one."""
    arena: int
    """Bytes of KV cache."""
    allowed: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """UUIDs by nodes' ids of which it may have one, as long as its node has not taken one."""
    life: AgentLife = field(default_factory=AgentLife)
    watched: AgentWatcher | None = None
    models: frozenset[str] = frozenset()
    """Models that run in it, or wait for their start, as of the last round."""
    node: str = ""
    """Id of the worker's node on which its instances start; empty: it has none, or there is one
    host."""
    worker: str = ""
    """The name of that worker."""
    home: UnitRecord | None = None
    """The unit's place in a placement; None: the fleet chooses its worker, or there is one
    host."""
    lacks: str = ""
    """Why it can't have the GPUs of its place; empty: it can, as far as is known."""
    reports: Mapping[str, UnitReport | None] = field(default_factory=dict)
    """Reports of the nodes that have it, as of the last round. None: not yet."""
    wishes: Mapping[str, WantedUnit] = field(default_factory=dict)
    """What nodes are to have of it, by their ids."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """UUIDs of its GPUs where its instances start."""
        return self.places.get(self.node, ())

    @property
    def every_gpu(self) -> list[str]:
        """UUIDs of its GPUs on all nodes."""
        return [gpu for gpus in self.places.values() for gpu in gpus]

    @property
    def state(self) -> UnitState | None:
        """The unit as its agent reports it; None: no agent answers."""
        return None if self.watched is None else self.watched.state

    @property
    def leased(self) -> Mapping[str, int] | None:
        """Bytes of KV cache that its models have; None: no agent answers."""
        reports = [one for one in self.reports.values() if one is not None and not one.why]
        if reports:
            found = Counter[str]()
            for one in reports:
                found.update(one.leased)
            return found
        return None if self.state is None else {one.model: one.lease for one in self.state.shares}

    @property
    def waits(self) -> str:
        """Why none of its models can start now; empty: they can."""
        if self.home is not None and not self.node:
            return f"worker {self.worker} of unit {self.name} is not there"
        if self.lacks:
            return f"unit {self.name}: {self.lacks}"
        if self.node:
            report = self.reports.get(self.node)
            if report is not None and not report.why:
                return ""
            why = f": {report.why}" if report is not None else ""
            starts = f"unit {self.name} takes its GPUs"
            if self.arena:
                starts = f"the agent of unit {self.name} starts"
            return f"{starts} on its worker{why}"
        if self.state is not None and not self.life.ends:
            return ""
        why = f", the last one ended: {self.life.why}" if self.life.why else ""
        return f"the agent of unit {self.name} starts{why}"


class FleetUnits:
    """The units of a fleet; make it inside a running event loop."""

    def __init__(
        self,
        settings: FleetSettings,
        order: Callable[[Order], None],
        devices: DeviceBudget,
        clock: TimeSource,
        changed: Callable[[], None],
        pool: WorkerPool,
    ) -> None:
        """order: to init. changed: called when an agent answers, or does so no more. pool: the
        workers; without any, agents run on this host."""
        self._pool = pool
        self._settings = settings
        self._order = order
        self._devices = devices
        self._clock = clock
        self._changed = changed
        self.placed: frozenset[str] = frozenset()
        """Units of the placement that is wanted, by name."""
        self._units: dict[str, ManagedUnit] = {}
        self._closing: set[asyncio.Task[None]] = set()

    # -- what is heard

    def adopt(self, one: DeployedProgram) -> None:
        """Take over an agent that a server before this one has started."""
        note = msgspec.json.decode(one.note, type=UnitRecord)
        unit = self.recall(note.unit, note.gpus, note.arena)
        if unit.life.agent:
            self._order(StopDeployment(one.deployment))
        else:
            self._follow(unit, one.deployment)

    def recall(self, name: str, gpus: tuple[str, ...], arena: int, node: str = "") -> ManagedUnit:
        """Take over a unit of which something runs. node: id of its worker's."""
        unit = self._units.setdefault(name, ManagedUnit(name, {}, arena))
        unit.places.setdefault(node, gpus)
        if node and not unit.node:
            unit.node, unit.worker = node, self._pool.name_of(node)
        return unit

    def recall_placed(self, record: UnitRecord) -> None:
        """Take over a unit where a placement has it."""
        if not record.worker:
            self.recall(record.unit, record.gpus, record.arena)
            return
        fresh = ManagedUnit(record.unit, {}, record.arena)
        unit = self._units.setdefault(record.unit, fresh)
        unit.home, unit.worker, unit.node = record, record.worker, self._node_of(record)
        if unit.node and record.gpus:
            unit.places.setdefault(unit.node, record.gpus)

    def take_end(self, news: DeploymentEnded) -> bool:
        """Take the end of a deployment; whether it was an agent."""
        for unit in self._units.values():
            if unit.life.agent == news.deployment:
                unit.life = ended(unit.life, news.said or news.how, self._clock())
                if unit.watched is not None:
                    closing = asyncio.create_task(unit.watched.close(), name="let go")
                    self._closing.add(closing)
                    closing.add_done_callback(self._closing.discard)
                    unit.watched = None
                return True
        return False

    # -- what is decided

    def check(self, unit: str, models: Sequence[ModelSpec]) -> None:
        """Raises ConfigError for a unit that can't have these models on any GPU here, or on any
        worker."""
        if unit in self.placed:
            raise ConfigError(f"unit {unit}: the placement has a unit of this name, choose another")
        devices = self._devices.watch.memory({}, {})
        if self._pool.there:  # a worker that is large enough may join later
            check_selectors(unit, models)
            check_kinds(unit, {one.name: self._devices.need(one) is not None for one in models})
            if not any(one.gpus for one in models):
                return
        check_unit(unit, self._needs(models), arena_of(models), devices)

    def need(self, spec: ModelSpec, models: Sequence[ModelSpec]) -> DeviceNeed | None:
        """What a model wants of GPUs: with all of its unit, until that has its place.

        models: of the unit.
        """
        own = self._devices.need(spec)
        if own is None:
            return None
        unit = self._units.get(spec.unit)
        if unit is not None and self.has_place(spec.unit):
            on_cpus = self._pool.there and not unit.gpus
            return None if on_cpus else need_in_unit(own, unit.gpus)
        every = [*(one for one in models if one.name != spec.name), spec]
        return whole_need(self._needs(every), arena_of(every))

    def need_of_node(
        self, spec: ModelSpec, need: InstanceNeed, others: Sequence[tuple[ModelSpec, InstanceNeed]]
    ) -> InstanceNeed:
        """What an instance wants of a worker: with all of its unit, until that has its place.

        need: of the instance alone. others: those of the unit's other models.
        """
        unit = self._units.get(spec.unit)
        if unit is not None and unit.worker:
            return need_on_worker(need, unit.worker)
        arena = arena_of([spec, *(one for one, _ in others)])
        if self._devices.need(spec) is not None:  # its KV cache is on a GPU
            whole = need_of_unit(need, (one for _, one in others), 0)
            return replace(whole, resources=with_amounts(whole.resources, ONE_GPU))
        return need_of_unit(need, (one for _, one in others), arena)

    def has_place(self, unit: str) -> bool:
        """Whether it is on a GPU, or a worker, already."""
        found = self._units.get(unit)
        return found is not None and (not self._pool.there or bool(found.worker))

    def await_unit(
        self,
        spec: ModelSpec,
        place: InstancePlace,
        models: Sequence[ModelSpec],
        worker: WorkerNode,
    ) -> str:
        """Put the unit of a model on the worker that its next instance gets, if it is on none; why
        the instance has to wait there, empty: it doesn't. models: all of the catalogue."""
        if not (spec.unit and self._pool.there):
            return ""
        return self._put(spec, place, models, worker).waits

    def _put(
        self,
        spec: ModelSpec,
        place: InstancePlace,
        models: Sequence[ModelSpec],
        worker: WorkerNode | None,
    ) -> ManagedUnit:
        """Put a unit where one of its models gets a place. worker: None: on this host."""
        every = [spec, *(it for it in models if it.unit == spec.unit and it.name != spec.name)]
        arena = arena_of(every)
        if worker is None:
            return self.recall(spec.unit, place.gpus, arena)
        node = self._pool.node_id(place.node)
        unit = self.recall(spec.unit, place.gpus, arena, node)
        if place.gpus:
            whole = whole_need(self._needs(every), arena)
            allowed = allowed_gpus(whole, place.gpus, worker.usable)
            unit.allowed.setdefault(node, allowed)
        return unit

    def admit(
        self, plan: CapacityPlan, asking: Sequence[ModelSpec], models: Sequence[ModelSpec]
    ) -> CapacityPlan:
        """Put units of models that have room on their GPU; such a model waits for its agent.

        asking: models that would start. models: all of the catalogue.
        """
        for spec in asking:
            if spec.unit and not self.has_place(spec.unit) and (at := plan.places.get(spec.name)):
                worker = plan.rooms[at[0].node].node if self._pool.there else None
                self._put(spec, at[0], models, worker)
        refused = dict(plan.refused)
        for spec in asking:
            if spec.unit and spec.name not in refused and spec.name not in plan.never:
                unit = self._units.get(spec.unit)
                place = "worker" if self._pool.there else "GPU"
                waits = f"unit {spec.unit} has no {place} yet"
                if unit is not None and self.has_place(spec.unit):
                    waits = unit.waits
                if waits:
                    refused[spec.name] = waits
        return replace(plan, refused=refused)

    def reconcile(
        self,
        wanted: Mapping[str, frozenset[str]],
        guard: UnitGuard,
        places: Mapping[str, Mapping[str, tuple[str, ...]]] = NOWHERE,
    ) -> None:
        """Start and end agents. wanted: models that run or wait for their start, by unit. places:
        by units, ids of the workers' nodes on which they have instances, with the GPUs there as far
        as these are known."""
        for name, unit in list(self._units.items()):
            unit.models = wanted.get(name, frozenset())
            with guard(f"unit {name}"):
                if self._pool.there:  # what is wished for one that fails stays as it was
                    unit.wishes = self._wishes_of(unit, places.get(name, {}))
                else:
                    self._step(unit)
            is_kept = name in self.placed if self._pool.there else bool(unit.life.agent)
            if not unit.models and not is_kept:
                del self._units[name]
        if self._pool.there:
            wish: dict[str, list[WantedUnit]] = {}
            for unit in self._units.values():
                for node, one in unit.wishes.items():
                    wish.setdefault(node, []).append(one)
            self._pool.take_units({node: tuple(units) for node, units in wish.items()})

    def _step(self, unit: ManagedUnit) -> None:
        """Start or end its agent on this host."""
        match next_step(unit.life, bool(unit.models), self._clock()):
            case "start":
                self._start(unit)
            case "stop":
                self._order(StopDeployment(unit.life.agent))
                unit.life = msgspec.structs.replace(unit.life, ends=True)

    def _wishes_of(
        self, unit: ManagedUnit, there: Mapping[str, tuple[str, ...]]
    ) -> dict[str, WantedUnit]:
        """What nodes are to have of a unit, by their ids. there: nodes on which it has instances,
        with its GPUs."""
        if not unit.models and unit.name not in self.placed:
            return {}
        if unit.home is None:
            unit.node = node_of_unit(unit.node, list(there), self._pool.leaves)
            unit.worker = self._pool.name_of(unit.node) if unit.node else ""
        else:
            unit.node = self._node_of(unit.home)
        path = str(self._settings.unit(unit.name))
        every = dict.fromkeys(one for one in (unit.node, *there) if one)
        unit.reports = {node: self._pool.unit_on(node, path) for node in every}
        on_gpus = bool(unit.every_gpu) if unit.home is None else bool(unit.home.at)
        self._take_gpus(unit, there)
        wishes = {}
        for node in every:
            gpus = unit.allowed.get(node) or unit.places.get(node, ())
            if gpus or not on_gpus:  # else its instances there report their GPU first
                count = max(1, 1 if unit.home is None else len(unit.home.at))
                wishes[node] = WantedUnit(path=path, memory=unit.arena, gpus=gpus, count=count)
        return wishes

    def _take_gpus(self, unit: ManagedUnit, there: Mapping[str, tuple[str, ...]]) -> None:
        """Take note of the GPUs that nodes have for a unit; a lost one has none. there: GPUs of its
        instances by nodes' ids, as far as they are known."""
        if unit.home is not None:
            at = unit.home.at
            named = {node: self._pool.gpus_at(node, at) for node in unit.reports}
            unit.lacks = self._pool.lacks_gpus(unit.worker, at)
            # A worker that is silent does not name its GPUs.
            unit.places = {node: it or unit.places.get(node, ()) for node, it in named.items()}
            return
        known = {node: gpus for node, gpus in {**unit.places, **there}.items() if gpus}
        found = {node: known.get(node, ()) for node in unit.reports}
        for node, report in unit.reports.items():
            if report is not None and report.gpus:
                found[node] = report.gpus
                unit.allowed.pop(node, None)
        unit.places = {node: it for node, it in found.items() if not self._pool.is_lost(node)}
        unit.allowed = {node: it for node, it in unit.allowed.items() if node in unit.places}

    # -- what is told

    def holds(self) -> list[tuple[str, InstanceDemand]]:
        """Ids of nodes with what a unit has taken there of Ray, and the bytes of the node's memory
        that its members may take there yet."""
        found = []
        for unit in self._units.values():
            for node, report in unit.reports.items():
                leased = 0 if report is None else sum(report.leased.values())
                kept = InstanceDemand(max(0, unit.arena - leased))
                gpus = {GPU: float(len(unit.places.get(node, ())))}
                found.append((node, InstanceDemand(0, gpus) if gpus[GPU] else kept))
        return found

    def every(self) -> list[ManagedUnit]:
        """The units that have their GPUs."""
        return list(self._units.values())

    def waits(self, name: str) -> str:
        """Why no model can start in a unit now; empty: they can."""
        unit = self._units.get(name)
        return f"unit {name} has no agent yet" if unit is None else unit.waits

    def shared(self, name: str, models: frozenset[str]) -> SharedHold | None:
        """What models of a unit hold together. models: those that run or wait for their start."""
        unit = self._units.get(name)
        if unit is None:
            return None
        resources = {
            self._pool.name_of(node): {GPU: float(len(gpus))}
            for node, gpus in unit.places.items()
            if node and gpus
        }
        return SharedHold(name, models, dict.fromkeys(unit.every_gpu, unit.arena), resources)

    def record(self, name: str) -> UnitRecord | None:
        """The place of a unit; None: it has none."""
        unit = self._units.get(name)
        if unit is None:
            return None
        found = UnitRecord(name, unit.gpus, unit.arena)
        if unit.home is None:
            return found
        return msgspec.structs.replace(found, worker=unit.home.worker, at=unit.home.at)

    def leased(self, name: str) -> Mapping[str, int]:
        """Bytes of KV cache that models of a unit have, as far as its agent says."""
        unit = self._units.get(name)
        return {} if unit is None else unit.leased or {}

    def arena(self, name: str) -> int:
        """Bytes of KV cache of a unit; 0: it has no place."""
        unit = self._units.get(name)
        return 0 if unit is None else unit.arena

    def claims(self) -> dict[str, dict[str, int]]:
        """Bytes of each GPU that units claim for their KV cache, by `unit_holder`."""
        found: dict[str, dict[str, int]] = {}
        for unit in self._units.values():
            for gpu in unit.every_gpu if unit.arena else ():
                found.setdefault(gpu, {})[unit_holder(unit.name)] = unit.arena
        return found

    async def close(self) -> None:
        """Look at no agent any more; they run on."""
        await asyncio.gather(*self._closing)
        for unit in self._units.values():
            if unit.watched is not None:
                await unit.watched.close()

    # -- helpers

    def _node_of(self, home: UnitRecord) -> str:
        """The id of the node of a placement's worker; empty: it was lost, or was never there."""
        node = self._pool.node_id(home.worker)
        return "" if node and self._pool.is_lost(node) else node

    def _needs(self, models: Sequence[ModelSpec]) -> dict[str, DeviceNeed]:
        needs = {one.name: self._devices.need(one) for one in models}
        return {name: need for name, need in needs.items() if need is not None}

    def _start(self, unit: ManagedUnit) -> None:
        agent, path = secrets.token_hex(4), str(self._settings.unit(unit.name))
        note = UnitRecord(unit.name, unit.gpus, unit.arena)
        self._order(
            StartDeployment(
                agent,
                "",
                (path, f"--memory={unit.arena}B", "--end-with-stdin"),
                msgspec.json.encode(note).decode(),
                str(self._settings.log(quote(unit_holder(unit.name), safe=""))),
                "unit",
            )
        )
        self._follow(unit, agent)

    def _follow(self, unit: ManagedUnit, agent: str) -> None:
        unit.life = started(unit.life, agent, self._clock())
        unit.watched = AgentWatcher(str(self._settings.unit(unit.name)), self._changed)
