"""The models as the server keeps them: desired state, observed state, and actions.

A round looks at every model, lets `lifecycle` and `autoscale` decide, carries that out through the
supervisor and the deployments' own sockets, and sends proxies the route of each model. What is seen
is not stored: a new server gets what runs from the supervisor, and its state from each deployment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import msgspec

from kvmig.core.api_records import InstanceRow
from kvmig.core.background import BackgroundTasks
from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.config import instance_name
from kvmig.core.errors import StartupError
from kvmig.fleet.autoscale import (
    PANIC_S,
    STABLE_S,
    DemandSample,
    ObservedDemand,
    ScalingDecision,
    ScalingOrder,
    counted,
    decide,
    one_less_holds,
    taken_over,
)
from kvmig.fleet.capacity import (
    STAY,
    STAY_S,
    CapacityPlan,
    ResidentModel,
    WaitingModel,
    no_plan,
    plan,
    why_not_parked,
)
from kvmig.fleet.deployment_words import start_order
from kvmig.fleet.deployments import DeploymentWatcher
from kvmig.fleet.gpu_choice import GpuChoice
from kvmig.fleet.host_memory import MemoryBudget
from kvmig.fleet.instance_measures import InstanceMeasures
from kvmig.fleet.instance_moves import InstanceMover, patience_s
from kvmig.fleet.instance_nodes import InstanceNodes
from kvmig.fleet.instance_orders import InstanceOrders
from kvmig.fleet.instance_places import InstancePlaces
from kvmig.fleet.lifecycle import (
    DesiredState,
    ModelStatus,
    ObservedState,
    awake,
    reconcile,
    wants_to_start,
)
from kvmig.fleet.managed_model import (
    CatalogEntry,
    DeploymentRecord,
    ManagedModel,
    MissingFiles,
    ModelEvent,
    record_of,
)
from kvmig.fleet.model_places import ModelPlaces
from kvmig.fleet.orders import (
    DeployedProgram,
    DeployedPrograms,
    DeploymentEnded,
    DeploymentStarted,
    LoadEngine,
    Order,
    StopDeployment,
)
from kvmig.fleet.place_choice import PlaceExplanation, with_places
from kvmig.fleet.placed_agents import PlacedAgents
from kvmig.fleet.proxy_reports import ProxyReports
from kvmig.fleet.rollout_controller import Keep, ModelRollouts, can_gather
from kvmig.fleet.room_moves import RoomPlan
from kvmig.fleet.round_faults import RoundFaults
from kvmig.fleet.route_sender import RouteSender, SendRoutes
from kvmig.fleet.schedule import floor_at
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spec import ModelSpec
from kvmig.fleet.units import FleetUnits
from kvmig.fleet.wanted_entries import WantedEntries
from kvmig.fleet.worker_nodes import InstancePlace, Rooms
from kvmig.fleet.worker_pool import WorkerPool
from kvmig.placement.file import PlacedUnit
from kvmig.proxy.messages import ModelRoute, ModelWanted, ProxyDemand

ROUND_S = 0.5
"""Pause between two rounds, if nothing happens before."""
RECENT = 1000
"""Events that are kept."""
WANT_S = 2.0
"""A proxy repeats within this time that a request waits."""

log = logging.getLogger(__name__)

Explanations = tuple[PlaceExplanation, ...]


class ModelController:
    """Decides for all models; make it inside a running event loop, `run` it as a task."""

    def __init__(
        self,
        settings: FleetSettings,
        order: Callable[[Order], None],
        send: SendRoutes,
        memory: MemoryBudget,
        clock: TimeSource = monotonic,
        wall: TimeSource = monotonic,
        measured: Callable[[ModelSpec], object] = lambda spec: None,
        missing: Callable[[str], MissingFiles | None] = lambda source: None,
        workers: WorkerPool | None = None,
        keep: Keep = lambda model_id, plan, done: None,
        term: Callable[[], int] = lambda: 0,
    ) -> None:
        """order: to the supervisor. send: routes, names that are gone, and the version to proxies.

        memory: of the host. clock: steady. wall: Unix time. measured: called when more is known of
        what a model takes of GPUs. missing: why a model with this source can't start yet. workers:
        None: there is one host. keep: stores how far a roll-out is. term: of this server, for its
        orders.
        """
        self.memory = memory
        self.workers = workers or WorkerPool()
        self.events: deque[ModelEvent] = deque(maxlen=RECENT)
        self.starts = 0
        """Deployments that were started by this server."""
        self._settings = settings
        self._order = order
        self._term = term
        self._clock = clock
        self._wall = wall
        self._orders = BackgroundTasks("models")
        self._models: dict[str, ManagedModel] = {}
        self._whose: dict[str, ManagedModel] = {}
        """Models by deployment."""
        self.reports = ProxyReports()
        self._has_begun = False  # the rounds; before the first, nobody knows what runs
        self._plan = CapacityPlan()
        self._missing = missing
        self.faults = RoundFaults(clock, self._note)
        self._placed: Mapping[str, Sequence[PlacedUnit]] = {}
        """Units of the instances of models that a placement sets."""
        self._changed = asyncio.Event()
        self.units = FleetUnits(
            settings, order, memory.devices, clock, self._changed.set, self.workers
        )
        self._agents = PlacedAgents(settings, self.units, memory.devices, self.workers)
        self.places = ModelPlaces(self._models, self.units, memory, self.workers)
        self._workers = self.places.workers
        self.instances_on = self._workers.instances_on
        self.mover = InstanceMover(
            self._models, self.places, memory.devices, self._orders, clock, self._note, wall
        )
        self._sets = InstanceOrders(self.places, self.workers, memory.devices, self._note, wall)
        self._measures = InstanceMeasures(
            self._models, memory, wall, self._note, measured, self.units
        )
        self._gpu_choice = GpuChoice(self._models, self.places, self._measures.take_claim)
        self.rollouts = ModelRollouts(
            self._models, keep, clock, wall, self._note, self._measures.take_claim, self.running
        )
        self._entries = WantedEntries(
            self._models, self.rollouts, self._measures, self.faults, clock
        )
        self._sender = RouteSender(send, self.rollouts, self.faults, clock)
        self._closing: set[asyncio.Task[None]] = set()
        """Connections to deployments that have ended."""
        self._told = False  # by init, what runs
        self._running: set[str] = set()  # of that what has not ended, whether or not it is ours
        self._woken = set[str]()
        """Models to start that the catalogue here doesn't have yet, by name."""

    def take_catalogue(self, wanted: Iterable[CatalogEntry]) -> None:
        """Replace the desired catalogue."""
        named = {one.name: one for one in wanted}
        self._entries.take_catalogue(named, self._woken)
        self._woken.clear()
        self.rollouts.forget_others(named.keys())
        for model in self._models.values():
            model.removed = model.wanted.name not in named
            if model.removed:
                model.wanted = msgspec.structs.replace(model.wanted, on=False)
        for engine in {one.spec.library for one in named.values() if one.on} - {""}:
            self._order(LoadEngine(engine))
        if self._has_begun:  # an order's answer waits until all proxies know
            self._send_routes()
        self._changed.set()

    def place(
        self, placed: Mapping[str, Sequence[PlacedUnit]], units: Iterable[PlacedUnit] = ()
    ) -> None:
        """Leave the instances of these models to the placement, one in each of these units each;
        they start so, and stay. units: all of them."""
        self._placed = placed
        self._agents.take_units(units)
        self._changed.set()

    def take_news(self, news: DeployedPrograms | DeploymentStarted | DeploymentEnded) -> None:
        """Take news from the supervisor."""
        match news:
            case DeployedPrograms(deployments):
                self._told, self._running = True, {one.deployment for one in deployments}
                for one in self.rollouts.in_order(deployments):
                    try:
                        self.units.adopt(one) if one.program == "unit" else self._adopt(one)
                    except msgspec.DecodeError as error:  # of another kvmig; nobody knows whose
                        log.error("deployment %s ends, its note: %s", one.deployment, error)
                        self._order(StopDeployment(one.deployment))
                    except Exception as error:
                        self.faults.take_fault("adopting", error)
                        log.exception("deployment %s can't be adopted, and ends", one.deployment)
                        self._order(StopDeployment(one.deployment))
            case DeploymentStarted(deployment, pid):
                if (model := self._whose.get(deployment)) is not None:
                    model.pid = pid
            case DeploymentEnded(deployment):
                self._running.discard(deployment)
                if (model := self._whose.pop(deployment, None)) is not None:
                    model.ended, model.deployment = news, ""
                else:
                    self.units.take_end(news)
        self._changed.set()

    def take_want(self, want: ModelWanted) -> None:
        """Take a proxy's message that a request waits for the model."""
        if (model := self.rollouts.front(want.model)) is not None:
            model.asked_until = self._clock() + WANT_S
            self._changed.set()

    def take_demand(self, proxy: str, demand: ProxyDemand) -> None:
        """Take a proxy's report of what it relays and holds."""
        self.reports.take_report(proxy, demand)
        now = self._clock()
        for one in demand.models:
            if (model := self.rollouts.at(one.model, one.socket)) is not None:
                model.window.add(DemandSample(now, demand.seconds, one.request_s, one.arrivals))
                if one.arrivals or one.request_s:  # also what came and went between two looks
                    model.busy_at = now
        self._changed.set()

    def folders(self) -> set[str]:
        """Folders that deployments were started from."""
        return {one.note.folder for one in self._models.values() if one.note is not None}

    def is_over(self, deployment: str) -> bool:
        """Whether the deployment has ended."""
        return self._told and deployment not in self._running | self._whose.keys()

    def wake(self, name: str) -> None:
        """Start a model now, also after failures, or once it is in the next catalogue."""
        model = self.rollouts.front(name) or self._models.get(name)
        if model is None:
            self._woken.add(name)
            return
        model.asked_until = math.inf
        model.life = awake(model.life, self._clock())
        self._changed.set()

    # -- what is told

    def routes(self) -> list[ModelRoute]:
        """The routes, as proxies know them."""
        return self._sender.routes()

    @property
    def claimed(self) -> int:
        """Bytes that all deployments take."""
        return sum(model.claimed for model in self._models.values())

    def claimed_by(self, name: str) -> int:
        """Bytes that all deployments of a model take."""
        return sum(one.claimed for one in self.rollouts.deployments(name))

    def every(self) -> list[ManagedModel]:
        """The models that there are; of those that roll out the deployment that has the name."""
        return [one for key, one in self._models.items() if key == one.wanted.name]

    def fronts(self) -> list[ManagedModel]:
        """The models that there are; of those that roll out the deployment that calls wait for."""
        return [self.rollouts.front(one.wanted.name) or one for one in self.every()]

    def shown(self, name: str) -> ManagedModel | None:
        """One as it stands, for people."""
        return self._models.get(name)

    def running(self, model: ManagedModel) -> int:
        """Requests that its deployment has."""
        told = 0 if model.watched is None else model.watched.told.live
        return max(told, self.reports.running_at(model.wanted.name, model.socket))

    # -- rounds

    async def wait_first_round(self, timeout_s: float) -> None:
        """Return after the first round, for which it is known what runs and what each deployment
        does; after timeout_s at most. Before it is known what runs there is no round."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._told:
                    self._changed.clear()
                    await self._changed.wait()
                for model in list(self._models.values()):
                    if model.watched is not None:
                        await model.watched.looked.wait()
        if self._told:
            self.reconcile()

    async def run(self) -> None:
        """A round at each change, and every ROUND_S, until cancelled."""
        while True:
            if self._told:  # or it would start what runs
                self.reconcile()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROUND_S):
                    await self._changed.wait()
            self._changed.clear()

    async def close(self) -> None:
        """Follow no deployment any more; they run on."""
        await asyncio.gather(*self._closing)
        await self.units.close()
        await self._orders.close()
        for model in self._models.values():
            if model.watched is not None:
                await model.watched.close()

    def reconcile(self) -> None:
        """One round. A part that fails is given up in this round, and keeps no other one back."""
        self._has_begun = True
        now, guard = self._clock(), self.faults.guard
        self._entries.take_rest()
        self._measures.measure(self.faults)
        with guard("moving instances"):
            self.mover.settle()
        with guard("roll-outs"):
            self.rollouts.blocked = dict.fromkeys(self._placed, "a placement sets its instances")
            self.rollouts.reconcile(self.faults)
        seen, unseen = {}, set(self._models)
        for name, model in self._models.items():
            seen[name] = ObservedState(deployment=bool(model.deployment), wanted=True)
            with guard("observing", model):
                seen[name] = self._seen(model, now)
                unseen.discard(name)
        self._plan = no_plan(self._models)
        with guard("planning"):
            self._plan = self._make_room(seen, now)
        for name, model in list(self._models.items()):
            if name not in unseen:
                with guard("starting and stopping", model):
                    self._live(model, self._with_room(name, seen[name]), now)
            over = model.removed or (model.retires and name != model.wanted.name)
            if over and model.life.state == "zero" and not model.deployment:
                del self._models[name]
        with guard("routing"):
            self._send_routes()
        with guard("units"):
            in_units = self._agents.in_units(self._models, self._placed)
            self.units.reconcile(
                in_units, lambda name: guard("units", name=name), self._workers.unit_places()
            )
        with guard("moving instances"):
            if self._plan.moves is not None:
                self.mover.begin(self._plan.moves, self._plan.rooms)
        for model in self._models.values():
            with guard("scaling", model):
                self._scale(model, now)
                self._gather(model)
                self._roll(model)
        with guard("workers"):
            self._workers.decide_nodes(self._placed)

    def _live(self, model: ManagedModel, seen: ObservedState, now: float) -> None:
        before = model.life
        model.life, action = reconcile(before, self._wish(model), seen, now)
        if action == "start":
            try:
                self._start(model)
            finally:
                if not model.deployment:  # nothing was begun: the next round tries again
                    model.life = before
        if model.life.state != before.state:
            yields = seen.yields and model.life.state == "emptying"
            self._entered(model, before, "to make room" if yields else "", now)
            ends = (before.state, model.life.state) == ("emptying", "stopping")
            if ends and seen.no_park and self._wish(model).parks:
                self._note(model, f"it ends and is not parked: {seen.no_park}")
        match action:
            case "park" | "unpark":
                assert model.watched is not None
                work = self._rest(model, model.life, model.watched, parks=action == "park")
                model.ordering = self._orders.start(work, f"{action} {model.wanted.name}")
            case "stop" | "kill":
                self._order(StopDeployment(model.deployment, kill=action == "kill"))

    def _seen(self, model: ManagedModel, now: float) -> ObservedState:
        name, running = model.wanted.name, self.running(model)
        held = self.reports.held(name) if self.rollouts.front(name) is model else 0
        if running or held:
            model.busy_at = now
        ended, model.ended = model.ended, None
        return ObservedState(
            deployment=bool(model.deployment),
            ready=model.serving > 0,
            tells=model.watched is not None and bool(model.watched.told.data),
            parked=model.watched is not None and model.watched.told.parked,
            refused=model.refused,
            ended="" if ended is None else ended.reason,
            clean=ended is not None and ended.how == "exit code 0",
            wanted=bool(held) or now < model.asked_until,
            running=running,
            idle_s=now - model.busy_at,
            unrouted=self.reports.known_to_all(model.unrouted_at, self._settings.proxies),
        )

    def _make_room(self, seen: Mapping[str, ObservedState], now: float) -> CapacityPlan:
        waiting, residents = [], []
        for name, model in self._models.items():
            asking = False
            with self.faults.guard("observing", model):
                asking = wants_to_start(model.life, self._wish(model), seen[name], now)
                asking = asking and self._lacks(model) is None
            if model.asks_since is None or not asking:
                model.asks_since = now if asking else None
        nodes = self.places.nodes()
        self._gpu_choice.choose(nodes, self._first)
        units = self._agents.in_units(self._models, self._placed)
        for name, model in self._models.items():
            life, wish = model.life, self._wish(model)
            if model.deployment:
                residents.append(
                    ResidentModel(
                        name,
                        model.claimed,
                        since=life.there_since if life.state == "serving" else life.since,
                        stay_s=STAY_S if model.start_s is None else STAY * model.start_s,
                        ready=self.workers.there  # its node knows what is yet to come
                        or seen[name].ready
                        or life.state == "stopping",
                        idle_s=seen[name].idle_s,
                        priority=model.wanted.spec.priority,
                        kept=life.state in ("zero", "starting", "parking", "waking")
                        or seen[name].wanted
                        or seen[name].running > 0,
                        pinned=wish.on and wish.least > 0,
                        leaving=life.state in ("emptying", "stopping"),
                        parked=life.state == "parked",
                        held=model.held,
                        shared=self.units.shared(model.unit, units.get(model.unit, frozenset())),
                        on=self.places.claims_on(model),
                        resources=self.places.resources_on(model),
                    )
                )
        asking_now = [one for one in self._models.values() if one.asks_since is not None]
        starting = [model.wanted.spec for model in asking_now]
        opening = {spec.unit: spec.name for spec in reversed(starting)}
        """The models with which their units are placed; the others of a unit wait for that."""
        unplanned = set[str]()
        for model in asking_now:
            spec = model.wanted.spec
            if not spec.unit or self.units.has_place(spec.unit) or opening[spec.unit] == spec.name:
                assert model.asks_since is not None
                unplanned.add(model.key)
                with self.faults.guard("planning", model):
                    waiting.append(self._waiting(model, model.asks_since))
                    unplanned.discard(model.key)
        strategy = self.memory.devices.strategy
        movable = [] if self._placed else self.mover.movable()  # a placement says where they are
        made = plan(nodes, waiting, residents, now, strategy, movable, self.mover.nodes)
        made = replace(made, refused={**made.refused, **no_plan(unplanned).refused})
        wanted = [model.wanted for model in self._models.values()]
        made = self.units.admit(made, starting, [one.spec for one in wanted if one.on])
        at = {one.name: it for one in waiting if (it := self._placed.get(one.name))}
        return self._agents.hold_back(made, at)

    def moves_for(self, model: ManagedModel) -> RoomPlan | None:
        """Moves that would make room for its first instances, or for another one, now; None: there
        are none, or one is being carried out."""
        if self._placed:
            return None
        instances = 1 if model.deployment else self._first(model)
        return self.mover.moves_for(model, self._plan.rooms, instances)

    def awaits_files(self, name: str, worker: str) -> str:
        """Why a model can't start on a worker yet for want of its files; empty: it can."""
        model = self._models.get(name)
        return "" if model is None else self._workers.files_awaited(model, [worker])

    def _waiting(self, model: ManagedModel, since: float) -> WaitingModel:
        name, spec = model.key, model.wanted.spec
        if model.deployment:  # it is parked, and wakes where it is
            more = max(0, model.claim * model.planned - model.claimed)
            of_gpus = model.places.more(model.instance_rows)
            of_nodes = self.places.more_on(model, more)
            return WaitingModel(name, more, since, more=of_gpus, wakes_on=of_nodes)
        first, placed = self._first(model), self._placed.get(name, ())
        need = self.places.device_need(self._agents.spec(spec, placed))
        if need is not None and (at := self.places.in_units(placed)):
            need = replace(need, at=at)
        of_node = self.places.need_of_node(model)
        return WaitingModel(
            name,
            of_node.memory * first,
            since,
            need,
            first,
            engine=spec.engine,
            selector=of_node.selector,
            source=spec.source,
            strategy=spec.placement_strategy or None,
            resources=self._agents.resources(of_node.resources, placed),
            workers=[one.worker for one in placed if one.worker],
            patience_s=patience_s(model),
        )

    def _first(self, model: ManagedModel) -> int:
        """Instances with which it would start."""
        return len(self._placed.get(model.wanted.name, ())) or max(1, model.wanted.spec.least)

    def _lacks(self, model: ManagedModel) -> MissingFiles | None:
        """Why it can't start even with room enough."""
        return None if model.deployment else self._missing(model.wanted.spec.source)

    def _with_room(self, name: str, seen: ObservedState) -> ObservedState:
        made, model = self._plan, self._models[name]
        if (lacks := self._lacks(model)) is not None:
            model.lacks_room = False
            reason = {"never" if lacks.failed else "no_room": lacks.why}
            return msgspec.structs.replace(seen, **reason)
        on = [one.node for one in made.places.get(name, ())]
        if awaited := self._workers.files_awaited(model, on):
            model.lacks_room = False
            return msgspec.structs.replace(seen, no_room=awaited)
        model.lacks_room = name in made.refused and name not in made.barred
        return msgspec.structs.replace(
            seen,
            no_room=made.refused.get(name, ""),
            never=made.never.get(name, ""),
            no_park=self._why_not_parked(model),
            yields=name in made.yielding or self._workers.wakes_elsewhere(model),
        )

    def _why_not_parked(self, model: ManagedModel) -> str:
        """Why it ends where it would be parked; empty: it is parked."""
        more = self.places.more_on(model, model.more_parked)
        whys = (why_not_parked(size, self._plan.spare(name)) for name, size in more.items())
        return next((why for why in whys if why), "")

    def _wish(self, model: ManagedModel) -> DesiredState:
        spec = model.wanted.spec
        return DesiredState(
            on=model.wanted.on and not model.former and not model.retires,
            overdue=model.overdue,
            least=max(
                spec.least, self._floor(spec), len(self._placed.get(spec.name, ())), model.stands_by
            ),
            parks=spec.warm == "parked",
            zero_after_s=spec.instances.zero_after_s,
            start_timeout_s=spec.instances.start_timeout_s,
            shutdown_timeout_s=self._settings.shutdown_timeout_s,
        )

    def _floor(self, spec: ModelSpec) -> int:
        return floor_at(spec.instances.schedule, self._wall())

    def _entered(self, model: ManagedModel, before: ModelStatus, cause: str, now: float) -> None:
        life, model.refused = model.life, ""
        model.entered[life.state] += 1
        model.evicted += bool(cause)
        if life.state == "serving":
            model.busy_at = now
            if before.state == "starting":
                model.starts.append(now - before.since)
        if life.state in ("serving", "failed"):
            model.asked_until = -math.inf
        if life.state in ("zero", "failed") and model.watched is not None:
            closing = asyncio.create_task(model.watched.close(), name="let go")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            model.watched, model.note, model.pid, model.beside_kv = None, None, 0, 0
        why = f": {life.why or cause}" if life.why or cause else ""
        self._note(model, f"{before.state} -> {life.state}{why}")

    def _start(self, model: ManagedModel) -> None:
        wanted, deployment = model.wanted, secrets.token_hex(4)
        socket = str(self._settings.deployment(deployment))
        placed, devices = self._placed.get(wanted.name, ()), self.memory.devices
        spec, units = self._agents.spec(wanted.spec, placed), [one.called for one in placed]
        claim, places = devices.claim(spec), self._plan.places.get(model.key, ())
        on_gpus = [one.gpus for one in places if one.gpus]
        nodes = tuple(self.workers.node_id(one.node) for one in places if self.workers.there)
        size, arena = 0 if claim is None else claim.each, self.units.arena(wanted.spec.unit)
        agents = self._agents.records(placed)
        note = record_of(wanted, socket, on_gpus, size, arena, nodes, agents)
        self._order(
            start_order(
                spec,
                deployment,
                self._settings,
                msgspec.json.encode(note).decode(),
                units,
                claim,
                self._agents.gpus(placed, on_gpus),
                self.workers.words(spec, nodes) + self._agents.words(spec, placed),
            )
        )
        self._keep(model, deployment, note)
        for at, why in enumerate(self._plan.explained.get(model.key, ())):
            self.places.history.keep(deployment, instance_name(at), self._wall(), why)
        model.scaling = ScalingDecision(self._first(model))
        self.starts += 1

    def _adopt(self, one: DeployedProgram) -> None:
        note = msgspec.json.decode(one.note, type=DeploymentRecord)
        model = self.rollouts.home_of(note)
        if model is None or model.deployment:  # only one can have been ordered on purpose
            self._order(StopDeployment(one.deployment))
            return
        self._keep(model, one.deployment, note)
        model.pid, model.scaling = one.pid, None
        self._agents.recall(note.agents)
        if note.unit:
            gpus, node = next(iter(note.gpus.values()), ()), next(iter(note.nodes.values()), "")
            self.units.recall(note.unit, gpus, note.unit_bytes, node)

    def _keep(self, model: ManagedModel, deployment: str, note: DeploymentRecord) -> None:
        model.deployment, model.note = deployment, note
        model.rolled_last = model.cant_roll = None
        model.watched = DeploymentWatcher(note.socket, self._changed.set, self._term())
        model.busy_at = self._clock()
        devices = self.memory.devices
        parked = devices.parked(model.wanted.spec)
        model.places = InstancePlaces(
            dict(note.gpus), note.gpu_bytes, parked, devices.uuids, self.workers.gpus_of
        )
        model.nodes = InstanceNodes(dict(note.nodes))
        self._whose[deployment] = model

    async def _rest(
        self, model: ManagedModel, life: ModelStatus, watched: DeploymentWatcher, *, parks: bool
    ) -> None:
        """Carry an order out. life: the model's, which the order belongs to."""
        try:
            await (watched.park() if parks else watched.unpark())
        except StartupError as error:
            self._note(model, f"{'parking' if parks else 'waking'} failed: {error}")
            if (model.life.state, model.life.since) == (life.state, life.since):
                model.refused = str(error)
                self._changed.set()

    # -- instances

    def _scale(self, model: ManagedModel, now: float) -> None:
        watched = model.watched
        if watched is None or not self._scales(model, watched):
            return
        leaving = self.workers.leaving(model.nodes, watched.told.data)
        if model.rolls and not leaving:  # a lost one is replaced first, or the roll-out would wait
            return
        before = model.scaling or taken_over(watched.told.data, now)
        staying = [one for one in watched.told.data if one.id not in leaving]
        rule, demand = model.rule, self._demand(model, watched, staying, now)
        model.scaling = decided = decide(before, rule, demand, now)
        if decided.wanted != before.wanted:
            way = "up" if decided.wanted > before.wanted else "down"
            model.scaled[way, decided.reason] += 1
            self._note(model, decided.why)
        order = model.additions.next_order(staying, decided.wanted, now)
        if model.is_ordering:
            return
        self._workers.forget_departed(model, leaving)
        places: Sequence[InstancePlace] = ()
        why: Explanations = ()
        if order is not None and order.more > 0 and not order.failed:
            places, why = self._take_places(model, order.more)
            order = order if places else None  # nothing has room for one more now
        if order is not None:
            names = [one.id for one in staying]
            work = self._sets.set_instances(model, watched, order, places, why, names)
            model.ordering = self._orders.start(work, f"scale {model.wanted.name}")
        elif leaving or model.departing:
            no_room = self.places.no_room(model, self._plan.rooms)
            step = self._workers.leaving_step(model, leaving, decided.wanted, no_room)
            if step.drained or step.removed or step.kept or step.renewed:
                deadlines = self._workers.deadlines(model, (*step.drained, *step.renewed))
                work = self._sets.empty_workers(model, watched, step, deadlines)
                model.ordering = self._orders.start(work, f"leave {model.wanted.name}")

    def _scales(self, model: ManagedModel, watched: DeploymentWatcher) -> bool:
        """Whether the number of its instances is decided here, and can be decided now."""
        spec = model.wanted.spec
        return (
            model.life.state == "serving"
            and spec.instances.target_kind != "freeness"
            and not (spec.name in self._placed or model.agents)
            and counted(watched.told.data) > 0
        )

    def _demand(
        self,
        model: ManagedModel,
        watched: DeploymentWatcher,
        rows: Sequence[InstanceRow],
        now: float,
    ) -> ObservedDemand:
        spec = model.wanted.spec
        kind = model.rule.kind
        most = max(counted(rows), model.desired)
        return ObservedDemand(
            ready=watched.serving,
            stable=model.window.load(kind, now, STABLE_S),
            panic=model.window.load(kind, now, PANIC_S),
            holds=bool(rows) and one_less_holds(rows),
            floor=self._floor(spec),
            room=most + self._more(model),
        )

    def _more(self, model: ManagedModel) -> int:
        """Instances that fit in addition."""
        return self.places.most_more(model, self._free_rooms)

    @property
    def _free_rooms(self) -> Rooms:
        """What is free for more instances: nothing while a model waits for room."""
        return {} if self._plan.waits else self._plan.rooms

    def why_not(self, model: ManagedModel) -> PlaceExplanation:
        """Explain where another instance would go now, and every filter that refuses a node."""
        return self.places.why_not(model, self._plan.rooms)

    def _take_places(
        self, model: ManagedModel, most: int
    ) -> tuple[Sequence[InstancePlace], Explanations]:
        """Places for up to `most` more instances, as many as fit, and why there.

        They are its own from now on, whether or not their start succeeds. On a CPU their memory is
        its own since they are wanted.
        """
        on_cpu = self.places.device_need(model.wanted.spec) is None
        rooms = self._plan.rooms if on_cpu else self._free_rooms
        places, why = self.places.more_places(model, most, rooms)
        if places:
            left = with_places(self._plan.rooms, self.places.need(model), places)
            self._plan = replace(self._plan, rooms=left)
        places, why = self._workers.with_files(model, places, why)
        wanted = [one.wanted.spec for one in self._models.values() if one.wanted.on]
        if places:
            node = self._plan.rooms[places[0].node].node
            if self.units.await_unit(model.wanted.spec, places[0], wanted, node):
                places, why = (), ()
        model.places.coming = tuple(one.gpus for one in places if one.gpus)
        if self.workers.there:
            model.nodes.coming = tuple(self.workers.node_id(one.node) for one in places)
        return places, why

    def _gather(self, model: ManagedModel) -> None:
        """Let the streams of a deployment that gets no new ones move onto as few instances as hold
        them; each instance that is empty then ends."""
        if model.watched is not None and can_gather(model):
            names, less = [one.id for one in model.instance_rows], ScalingOrder(-1, ())
            leaving = self.workers.leaving(model.nodes, model.instance_rows)
            deadlines = self._workers.deadlines(model, list(leaving))
            work = self._sets.set_instances(model, model.watched, less, (), (), names, deadlines)
            model.ordering = self._orders.start(work, f"gather {model.wanted.name}")

    def _roll(self, model: ManagedModel) -> None:
        """Restart or replace one more instance that is not as the specification has it."""
        step = self.rollouts.next_roll(model)
        if step is None or model.watched is None:
            return
        places: Sequence[InstancePlace] = ()
        why: Explanations = ()
        if not step.instance and self._more(model) > 0:
            places, why = self._take_places(model, 1)
        if step.instance or places:  # else nothing has room for one more now
            work = self._sets.roll_instance(model, model.watched, step, places, why)
            model.ordering = self._orders.start(work, f"roll {model.wanted.name}")

    def _send_routes(self) -> None:
        self._sender.send_changes(self.every(), self._models.values())

    def _note(self, model: ManagedModel, what: str) -> None:
        name = model.wanted.name
        if model.key != name:
            what = f"revision {model.key.removeprefix(name)[1:]}: {what}"
        self.events.append(ModelEvent(self._wall(), name, what))
        log.info("%s: %s", name, what)
