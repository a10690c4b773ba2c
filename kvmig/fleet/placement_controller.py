"""A placement of the fleet's models, reached and kept: `kvmig.placement.executor` inside the
server.

With a rule it is planned again where requests come at other rates than it was planned for
(`kvmig.placement.replan`).

What is wanted is in the database. The server plans before it wants it, carries the plan out by the
deployments' own orders, and looks again now and then: an instance that is gone comes back where the
placement has it. Another server, after this one has died, goes on from what it sees.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec

from kvmig.core.api_records import InstanceRow
from kvmig.core.background import cancel_tasks
from kvmig.core.errors import ConfigError, KvmigError, StartupError
from kvmig.fleet.controller import ModelController
from kvmig.fleet.managed_model import ManagedModel
from kvmig.fleet.placed_agents import check_agent, check_member, is_kept
from kvmig.fleet.placed_workers import check_gpus_alike, check_on_worker, check_replan
from kvmig.fleet.rate_replanner import RateReplanner
from kvmig.fleet.store import NameTaken
from kvmig.placement.executor import (
    DeploymentClient,
    ExecutorSettings,
    PlacementExecutor,
    ReplaceFailed,
)
from kvmig.placement.file import PlacedUnit, UnitPlacement, placement_from
from kvmig.placement.moves import PlanWave
from kvmig.placement.observed import adopted, check
from kvmig.placement.replan import ReplanRule, check_rule
from kvmig.placement.stand_ins import StandIns, stand_ins, stand_ins_to_text
from kvmig.placement.told import way_to_text

START_S = 10.0
"""Assumed start time of an instance whose model has not been seen to start."""
LOOK_S = 5.0
"""Pause between two looks, once the placement is reached."""
MOST_PAUSE_S = 60.0
"""Longest pause after failures in a row."""
PLAN_S = 10.0
"""Wait for instances that start or leave, before there is a plan."""
WAIT_S = 0.5
"""Pause between two looks at models that don't serve yet."""
MIXED = "--mixed-shapes"
"""The flag with which a model's instances may have different numbers of workers."""
LINES = 100
"""Lines of the history that are kept."""

log = logging.getLogger(__name__)

State = Literal["none", "running", "reached", "failed"]


class PlacementStatus(msgspec.Struct, frozen=True):
    """How it stands."""

    state: State
    why: str
    """Why it has failed and whether it is tried again, or what it waits for; empty otherwise."""
    placement: UnitPlacement | None
    """The one that is wanted."""
    lines: list[str]
    """What was done last, for people."""
    rates: dict[str, float] = {}
    """Requests per second by model, as they are measured; empty: nothing is planned by them."""
    planned: dict[str, float] = {}
    """Requests per second for which the placement was planned."""
    replan: str = ""
    """What came of the last plan for other rates; empty: there was none."""


class DesiredPlacement(msgspec.Struct, frozen=True):
    """The desired placement as the database keeps it."""

    placement: UnitPlacement
    units: dict[str, dict[str, str]] = {}
    """Units of instances that started before a placement named them: by deployment, by instance."""
    rule: ReplanRule | None = None
    """When the placement is planned again; None: never."""


class PlacementController:
    """Moves models to the desired placement; make it inside a running event loop.

    After `close` orders that were given go on by themselves.
    """

    def __init__(
        self,
        models: ModelController,
        store: Callable[[DesiredPlacement], Awaitable[None]],
    ) -> None:
        """store: keeps a placement that was planned again."""
        self._models = models
        self._store = store
        self._state: State = "none"
        self._why = ""
        self._wanted: DesiredPlacement | None = None
        self._lines: deque[str] = deque(maxlen=LINES)
        self._task: asyncio.Task[None] | None = None
        self._placed: UnitPlacement | None = None
        """The placement by which models start: the desired one, or that without lost workers."""
        self._reached: UnitPlacement | None = None
        """The placement that was reached last."""
        self._planning = asyncio.Lock()
        """Held while another placement is planned and stored."""
        self._replanner: RateReplanner | None = None

    def standing(self) -> PlacementStatus:
        """The placement's status now."""
        placement = None if self._wanted is None else self._wanted.placement
        found = PlacementStatus(self._state, self._why, placement, list(self._lines))
        if (by := self._replanner) is None:
            return found
        return msgspec.structs.replace(
            found, rates=by.rates(), planned=by.rule.planned, replan=by.verdict
        )

    async def accept_placement(
        self,
        given: object,
        keep: Callable[[DesiredPlacement], Awaitable[None]] | None,
        replan: object = None,
    ) -> list[str]:
        """Take a placement that can be reached, once `keep` has stored it; the way there in words.

        keep: None: only plan. replan: the rule by which it is planned again; None: never. Raises
        ConfigError: it can't be used, or there is no way; ReplaceFailed: not now; NameTaken:
        another one is on its way.
        """
        if self._planning.locked() or self._state == "running":
            raise NameTaken("a re-placement runs already (GET /kvmig/v2/placement)")
        placement = placement_from(given, "placement")
        self._check(placement)
        rule = None if replan is None else _rule(replan, placement)
        if rule is not None and self._models.workers.there:
            pool = self._models.workers
            check_replan(
                placement, self._refuses, {one: pool.inventory_of(one) for one in pool.names}
            )
        async with self._planning:
            try:
                async with asyncio.timeout(PLAN_S):
                    if starts := self._to_start(placement):
                        wanted = DesiredPlacement(placement, rule=rule)
                        plan = f"{', '.join(starts)} start in their units, once they are on"
                    else:
                        wanted = msgspec.structs.replace(await self._adopting(placement), rule=rule)
                        plan = way_to_text(await self._way(wanted))
            except TimeoutError as error:
                raise ReplaceFailed("instances start or leave now: try again later") from error
            if keep is not None:
                await keep(wanted)
                await self.reach_placement(wanted)
        return plan.splitlines()

    async def reach_placement(self, wanted: DesiredPlacement | None) -> None:
        """Reach a placement, and keep it; None: instances stay where they are, as many as the rules
        of their models want."""
        await self.close()
        self._why, self._reached = "", None
        self._lines.clear()
        rule = None if wanted is None else wanted.rule
        self._replanner = None if rule is None else RateReplanner(rule, self._rate)
        self._want(wanted)
        self._state = "none" if wanted is None else "running"
        if wanted is not None:
            self._task = asyncio.create_task(self._keep(wanted), name="placement")

    async def drop_placement(self, forget: Callable[[], Awaitable[None]]) -> None:
        """Want none, once `forget` has taken it out of the database; where that fails it is kept on
        as before. Raises what `forget` raises."""
        async with self._planning:  # what is planned again is not stored meanwhile
            await forget()
            await self.reach_placement(None)

    def _want(self, wanted: DesiredPlacement | None) -> None:
        self._wanted = wanted
        self._place(None if wanted is None else wanted.placement)

    def _place(self, placement: UnitPlacement | None) -> None:
        """Let models start where it has them."""
        self._placed = placement
        units: dict[str, list[PlacedUnit]] = {}
        for unit in () if placement is None else placement.units:
            for one in unit.models:
                units.setdefault(one.name, []).append(unit)
        self._models.place(units, () if placement is None else placement.units)

    async def close(self) -> None:
        """Do nothing more."""
        if self._task is not None:
            await cancel_tasks(self._task)
            self._task = None

    def _to_start(self, placement: UnitPlacement) -> list[str]:
        """The models that don't run yet, and start as members of the agents of their units."""
        models = {name: self._models.shown(name) for name in placement.models()}
        if not _keeps(placement):
            return []
        return [name for name, one in models.items() if one is not None and not one.deployment]

    def _check(self, wanted: UnitPlacement) -> None:
        """Raises ConfigError."""
        for unit in wanted.units:
            self._check_worker(unit)
            if is_kept(unit):
                gpus = self._models.memory.devices.named(tuple(map(str, unit.gpus)))
                agent = self._models.units.record(unit.called)
                check_agent(unit, gpus, agent, self._of_specs())
            self._check_gpus(unit)
        if self._models.workers.there:
            check_gpus_alike(wanted)
        for name in wanted.models():
            self._check_model(wanted, name)
        running = [one.wanted.name for one in self._models.every() if one.deployment]
        for name in running:
            if name not in wanted.models():
                raise ConfigError(f"placement: model {name} runs, and has no place in it")
        check(wanted, [*{*running, *wanted.models()}], "placement")

    def _check_model(self, wanted: UnitPlacement, name: str) -> None:
        """Raises ConfigError for a model that can't be placed."""
        kept = _keeps(wanted)
        model = self._models.shown(name)
        if model is None or model.removed:
            raise ConfigError(f"placement: model is {name!r:.100}, which isn't in the catalogue")
        if kept:
            units = [unit.called for unit in wanted.units if is_kept(unit)]
            check_member(model, units, elastic=wanted.elastic)
        if model.life.state != "serving" and (model.deployment or not kept):
            raise ConfigError(
                f"placement: model {name} is {model.life.state}, must serve (kvmig model wake "
                f"{name})"
            )
        if self._models.rollouts.beside(name) is not None:
            raise ConfigError(
                f"placement: model {name} rolls out to another deployment, must have ended that"
                f" (kvmig model rollout status {name})"
            )
        if model.unit:
            raise ConfigError(
                f"placement: model {name} is in unit {model.unit} by its specification, must"
                " have no unit there: the fleet places that itself"
            )
        if model.wanted.spec.instances.target_kind == "freeness":
            raise ConfigError(
                f"placement: model {name} sets its number of instances itself: its target_kind "
                "is 'freeness', must be 'concurrency' or 'rps'"
            )

    def _check_worker(self, unit: PlacedUnit) -> None:
        """Raises ConfigError for a unit that is on no worker where there are some, or on one where
        there are none."""
        where, pool = f"placement: unit {unit.called}", self._models.workers
        names = pool.names
        if not pool.there:
            if unit.worker:
                raise ConfigError(
                    f"{where}: worker is {unit.worker!r:.100}, must be left out without `kvmig up"
                    " --ray`"
                )
            return
        if unit.worker not in names:
            there = ", ".join(names) or "none, as none is known yet"
            raise ConfigError(f"{where}: worker is {unit.worker!r:.100}, must be one of {there}")

    def _check_gpus(self, unit: PlacedUnit) -> None:
        """Raises ConfigError for GPUs that aren't there, or aren't one for each worker."""
        where, inventory = (
            f"placement: unit {unit.called}",
            self._models.memory.devices.watch.inventory,
        )
        if unit.worker:
            shown = {one.name: self._models.shown(one.name) for one in unit.models}
            specs = [one.wanted.spec for one in shown.values() if one is not None]
            uses = {one.name: self._models.workers.gpu_amount(one) for one in specs}
            inventory = self._models.workers.inventory_of(unit.worker)
            check_on_worker(unit, inventory, uses)
        elif unit.gpus and unit.node:
            raise ConfigError(f"{where}: node is {unit.node}, must be 0: a fleet has one host")
        for gpu in () if unit.worker else unit.gpus:
            try:
                inventory.device(str(gpu))
            except KeyError:
                there = ", ".join(str(one.index) for one in inventory.devices) or "none"
                raise ConfigError(f"{where}: gpus has {gpu}, allowed are {there}") from None
        for one in unit.models if unit.gpus else ():
            model = self._models.shown(one.name)
            if model is None or MIXED in model.wanted.spec.flags:
                continue
            workers = model.wanted.spec.workers
            if workers != len(unit.gpus):
                raise ConfigError(
                    f"{where}: gpus has {len(unit.gpus)}, must have {workers}, one for each worker"
                    f" of model {one.name}, or the model needs {MIXED} among its flags"
                )

    def _of_specs(self) -> frozenset[str]:
        """The units that models have by their specifications."""
        return frozenset(one.wanted.spec.unit for one in self._models.every())

    async def _adopting(self, placement: UnitPlacement) -> DesiredPlacement:
        """The desired placement, with units for all running instances."""
        before = {} if self._wanted is None else self._wanted.units
        async with _Site(self._models, DesiredPlacement(placement, before)) as deployments:
            rows = {
                name: [self._by_index(row) for row in await one.rows()]
                for name, one in deployments.items()
            }
        units: dict[str, dict[str, str]] = {}
        for name, fresh in adopted(placement, rows, self._nodes(placement)).items():
            model = self._models.shown(name)
            assert model is not None
            units[model.deployment] = before.get(model.deployment, {}) | fresh
        return DesiredPlacement(placement, units)

    def _by_index(self, row: InstanceRow) -> InstanceRow:
        """The same with the indices of its GPUs, by which a placement names them; of workers' GPUs
        it names none."""
        if self._models.workers.there:
            return row
        device = self._models.memory.devices.watch.inventory.device
        return msgspec.structs.replace(row, gpus=tuple(str(device(one).index) for one in row.gpus))

    async def _keep(self, wanted: DesiredPlacement) -> None:
        """Keep the placement until cancelled, or until there is no way to it."""
        pause_s = WAIT_S
        while True:
            try:
                wanted = await self._keep_once(wanted)
            except (ConfigError, ReplaceFailed) as error:
                self._state, self._why = "failed", str(error)
                self._tell(str(error))
                return
            except Exception as error:  # also of a database that is away
                if self._models.faults.take_fault("placing", error):
                    log.exception("the placement is not kept now, and is tried again")
                if self._state != "reached":
                    self._state = "failed"
                what = str(error) if isinstance(error, KvmigError) else repr(error)
                self._why = f"{what}; it is tried again within {pause_s:g} s"
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MOST_PAUSE_S)
            else:
                pause_s = WAIT_S

    async def _keep_once(self, wanted: DesiredPlacement) -> DesiredPlacement:
        """Reach the placement if it is not reached, and pause; the one that is wanted then. Raises
        ConfigError and ReplaceFailed where there is no way to it, and StoreError."""
        without = self._without_lost(wanted)
        now = wanted
        if without is not None:
            now = msgspec.structs.replace(wanted, placement=without.placement)
        if self._placed != now.placement:
            self._place(now.placement)
        lost = "" if without is None else self._lost_to_text(wanted, without)
        if waits := self._waits_for(now):
            self._state, self._why = "running", f"{lost}; {waits}" if lost else waits
            await asyncio.sleep(WAIT_S)
            return wanted
        await self._end_lost(wanted)
        if self._reached != now.placement or await self._has_left(now):
            self._state, self._why = "running", lost
            await self._reach(now)
            self._reached = now.placement
            self._tell("the placement is reached" + (", without lost workers" if lost else ""))
        self._state, self._why = "running" if lost else "reached", lost
        await asyncio.sleep(WAIT_S if lost else LOOK_S)
        if lost or (other := await self._replanned(wanted)) is None:
            return wanted
        async with self._planning:  # what somebody wants now comes first
            await self._store(other)
            if (by := self._replanner) is not None and other.rule is not None:
                by.take_rule(other.rule)
                self._tell(f"planned again: {by.verdict}")
            self._state = "running"
            self._want(other)
        return other

    async def _has_left(self, wanted: DesiredPlacement) -> bool:
        """Whether instances are not any more where a placement that was reached has them. A look
        that a deployment does not answer shows nothing: the next one does."""
        try:
            return bool(await self._way(wanted))
        except ReplaceFailed as error:
            log.warning("the placement is not looked at now: %s", error)
            return False

    def _nodes(self, placement: UnitPlacement) -> dict[str, str]:
        """Ids of the nodes of the workers that it names, by name."""
        pool = self._models.workers
        return {one.worker: pool.node_id(one.worker) for one in placement.units if one.worker}

    def _without_lost(self, wanted: DesiredPlacement) -> StandIns | None:
        """The placement without workers that were lost; None: none was."""
        pool, placement = self._models.workers, wanted.placement
        named = {one.worker for one in placement.units if one.worker}
        lost = {one for one in named if pool.is_gone(one)}
        return stand_ins(placement, lost, self._refuses) if lost else None

    def _refuses(self, name: str, worker: str) -> str:
        model = self._models.shown(name)
        return "" if model is None else self._models.workers.refuses(model.wanted.spec, worker)

    def _lost_to_text(self, wanted: DesiredPlacement, without: StandIns) -> str:
        """Which workers are lost, and what becomes of their models."""
        pool = self._models.workers
        lost = [
            f"worker {one.worker} of unit {one.called}: {pool.unready(one.worker)}"
            for one in wanted.placement.units
            if one.worker and pool.is_gone(one.worker)
        ]
        return "; ".join(filter(None, [*lost, stand_ins_to_text(without)]))

    async def _end_lost(self, wanted: DesiredPlacement) -> None:
        """End the instances on nodes that were lost: they start where the placement has them, once
        a node with the worker's name is there. Those of a deployment that does not answer now end
        after a later look."""
        if not self._models.workers.there:
            return
        try:
            async with _Site(self._models, wanted) as deployments:
                for one in deployments.values():
                    await self._end_lost_of(one)
        except ReplaceFailed as error:  # it has just ended
            log.warning("lost instances are not looked for now: %s", error)

    async def _end_lost_of(self, deployment: DeploymentClient) -> None:
        try:
            for row in await deployment.rows():
                if row.node and self._models.workers.is_lost(row.node):
                    self._tell(f"{deployment.name} {row.id} ends: its worker was lost")
                    await deployment.drain_instance(row.id, last=True, now=True)
        except ReplaceFailed as error:  # others' are looked for all the same
            log.warning("lost instances are not looked for now: %s", error)

    def _waits_for(self, wanted: DesiredPlacement) -> str:
        """The first worker or model that isn't ready; empty: all are."""
        for unit in wanted.placement.units:
            if unit.worker and not unit.models:
                continue
            if why := self._models.workers.unready(unit.worker) if unit.worker else "":
                return f"worker {unit.worker} of unit {unit.called}: {why}"
            if why := self._models.units.waits(unit.called) if _is_held(unit) else "":
                return why
            for one in unit.models if unit.worker else ():
                if why := self._models.awaits_files(one.name, unit.worker):
                    return f"model {one.name} in unit {unit.called}: {why}"
        for name in wanted.placement.models():
            model = self._models.shown(name)
            state = "not known yet" if model is None else model.life.state
            if model is None or state != "serving" or model.note is None:
                return f"model {name} is {state}"
        return ""

    async def _replanned(self, wanted: DesiredPlacement) -> DesiredPlacement | None:
        """Another placement, if requests come at other rates and it is worth it."""
        if (by := self._replanner) is None:
            return None
        names = list(wanted.placement.models())
        found = await by.replan(wanted.placement, self._starts(names))
        if found is None:
            return None
        return msgspec.structs.replace(wanted, placement=found[0], rule=found[1])

    def _rate(self, name: str, until: float, seconds: float) -> float:
        """Requests per second that proxies had for a model."""
        model = self._models.shown(name)
        return 0.0 if model is None else model.window.rate(until, seconds)

    async def _way(self, wanted: DesiredPlacement) -> Sequence[PlanWave]:
        async with _Site(self._models, wanted) as deployments:
            return await self._replacing(wanted, deployments).waves()

    async def _reach(self, wanted: DesiredPlacement) -> None:
        async with _Site(self._models, wanted) as deployments:
            await self._replacing(wanted, deployments).run()

    def _replacing(
        self, wanted: DesiredPlacement, deployments: Mapping[str, DeploymentClient]
    ) -> PlacementExecutor:
        held = [
            self._models.units.record(one.called) for one in wanted.placement.units if _is_held(one)
        ]
        settings = ExecutorSettings(
            self._starts(list(deployments)),
            workers=self._nodes(wanted.placement),
            gpus={one.unit: one.gpus for one in held if one is not None and not one.arena},
        )
        return PlacementExecutor(wanted.placement, deployments, settings, self._tell, by_name=True)

    def _starts(self, names: Sequence[str]) -> dict[str, float]:
        """Seconds of a start, by model."""
        models = {name: self._models.shown(name) for name in names}
        return {
            name: START_S if model is None or model.start_s is None else model.start_s
            for name, model in models.items()
        }

    def _tell(self, line: str) -> None:
        self._lines.append(line)
        log.info("placement: %s", line)


def _is_held(unit: PlacedUnit) -> bool:
    """Whether it is on a worker that keeps something for it."""
    return bool(unit.worker) and is_kept(unit)


def _keeps(placement: UnitPlacement) -> bool:
    """Whether models start in its units, of which something is kept."""
    return any(map(is_kept, placement.units))


def _rule(given: object, placement: UnitPlacement) -> ReplanRule:
    """Raises ConfigError."""
    try:
        rule = msgspec.convert(given, ReplanRule)
    except msgspec.ValidationError as error:
        raise ConfigError(f"replan: {error}") from error
    check_rule(rule, placement, "replan")
    return rule


def _token_of(model: ManagedModel) -> Mapping[str, str]:
    """Headers of an order to its deployment now: another contact with it may have begun since the
    last one."""
    return {} if model.watched is None else model.watched.order_headers


def _note_unanswered(model: ManagedModel) -> None:
    if model.watched is not None:
        model.watched.note_unanswered()


async def _settle(model: ManagedModel) -> None:
    """Raises StartupError."""
    if model.watched is None:
        raise StartupError("it has ended")
    await model.watched.settle()


class _Site:
    """The deployments of a placement's models."""

    def __init__(self, models: ModelController, wanted: DesiredPlacement) -> None:
        self._deployments: dict[str, DeploymentClient] = {}
        for name in wanted.placement.models():
            model = models.shown(name)
            if model is None or model.note is None:
                raise ReplaceFailed(f"model {name} doesn't run")
            units = wanted.units.get(model.deployment)
            self._deployments[name] = DeploymentClient(
                name,
                model.note.socket,
                units=units,
                token=partial(_token_of, model),
                unanswered=partial(_note_unanswered, model),
                settle=partial(_settle, model),
            )

    async def __aenter__(self) -> Mapping[str, DeploymentClient]:
        return self._deployments

    async def __aexit__(self, *_: object) -> None:
        for one in self._deployments.values():
            await one.close()
