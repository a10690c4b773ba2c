"""The deployments of models that roll out: which is the model's own, which stands next to it.

A model has one `ManagedModel` under its name. While it rolls out there is another one, of the new
revision, under a key of its own; it starts, serves and ends by the same rules. When the old one has
ended, the new one gets the name. A deployment that no roll-out wants any more, since an order went
back or on to yet another revision, gets no new requests and ends after those that it has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from kvmig.core.clock import TimeSource
from kvmig.fleet.autoscale import counted, one_less_holds
from kvmig.fleet.flag_rolls import (
    RolledStart,
    RollStep,
    has_others,
    has_rolled,
    next_roll,
    why_failed,
)
from kvmig.fleet.managed_model import CatalogEntry, DeploymentRecord, ManagedModel
from kvmig.fleet.model_rows import ModelRow
from kvmig.fleet.orders import DeployedProgram
from kvmig.fleet.rollout import (
    CallFigures,
    RolloutPlan,
    RolloutTerms,
    RolloutView,
    advance,
    gives_way,
    is_overdue,
    need_of,
    stopped,
    takes_all,
    with_live_fields,
    worse,
)
from kvmig.fleet.rollout_table import StoredRollout
from kvmig.fleet.round_faults import RoundFaults
from kvmig.fleet.spec import PATH, ModelSpec
from kvmig.sources.source import is_remote

Keep = Callable[[str, RolloutPlan, bool], None]
"""Stores how far the roll-out of a model, by its id, is; or that it is done."""


BESIDE = "@"
"""A mark in the key of a deployment next to a model's own, and in no model's name."""


def key_of(name: str, revision: int) -> str:
    """The key of a deployment next to a model's own."""
    return f"{name}{BESIDE}{revision}"


def sources_of(
    rows: Iterable[ModelRow],
    rollouts: Mapping[str, StoredRollout],
    resolved: Callable[[ModelSpec], ModelSpec],
) -> dict[str, str]:
    """The sources of all models, by name; and of what models roll out from, by its key, where its
    files were downloaded: it may start again.

    rollouts: by models' ids. resolved: the specification with the folder of such files.
    """
    found = {}
    for row in rows:
        found[row.name] = row.spec.source
        if (stored := rollouts.get(row.model_id)) is not None:
            base = stored.base_spec
            if base.source not in (row.spec.source, resolved(base).source):
                found[key_of(row.name, stored.plan.base)] = base.source
    return found


class RunningRollout(NamedTuple):
    """A roll-out whose two deployments get calls."""

    name: str
    since: float
    """Unix time of the present step."""
    old: str
    """The deployment."""
    new: str


class ModelRollouts:
    """Knows which of the controller's models is what."""

    def __init__(
        self,
        models: dict[str, ManagedModel],
        keep: Keep,
        clock: TimeSource,
        wall: TimeSource,
        note: Callable[[ManagedModel, str], None],
        added: Callable[[ManagedModel], None],
        running: Callable[[ManagedModel], int],
    ) -> None:
        """models: the controller's, by their keys; changed here. clock: steady. wall: Unix time.
        note: writes down what was decided. added: takes the sizes of a model that is new, or
        another. running: how many requests one has."""
        self._models = models
        self._keep = keep
        self._clock = clock
        self._wall = wall
        self._note = note
        self._added = added
        self._running = running
        self._newest: dict[str, CatalogEntry] = {}
        self._plans: dict[str, RolloutPlan] = {}
        self._own: dict[str, list[RolloutPlan]] = {}
        """The stored plan that each began with here, and what was decided since. What the database
        has of these is no order: the newest may not be stored yet. Unix time does not show that: it
        may have been set, and another host's differs."""
        self._began: dict[str, tuple[RolloutPlan, float]] = {}
        """The plans whose steps are timed, with the steady clock's time when they began."""
        self._bases: dict[str, ModelSpec] = {}
        """What those began from."""
        self._figures: dict[str, tuple[CallFigures, CallFigures]] = {}
        """Figures of the calls of the old deployment and of the new one, in the present step."""
        self._done: dict[str, int] = {}
        """The revisions that models were rolled out to last, by models' ids: that it is done may
        not be stored yet."""
        self._held = Counter[str]()
        """Orders that are being carried out, by models' names."""
        self.blocked: Mapping[str, str] = {}
        """Why models can't have two deployments now, by name."""

    # -- the catalogue

    def take_entry(self, one: CatalogEntry) -> CatalogEntry:
        """Take a model of the catalogue; what is wanted of its own deployment."""
        stored, name = one.rollout, one.name
        self._newest[name] = one
        if stored is None or self._done.get(one.model_id) == stored.plan.target:
            self._drop(name)
            return one
        known, plan = self._plans.get(name), stored.plan
        if known is None or (known.base, known.target) != (plan.base, plan.target):
            self._drop(name)
            known = None
        if plan not in self._own.get(name, ()):
            if known is not None and known.state == "stopped" and plan.state == "running":
                model = self._models[name]
                model.rolled_last, model.cant_roll = None, None  # it is tried again
            self._plans[name], self._own[name] = plan, [plan]
        self._bases[name] = stored.base_spec
        if (beside := self.beside(name)) is not None:
            beside.wanted = one
            self._added(beside)
        return self._own_entry(name)

    def _own_entry(self, name: str) -> CatalogEntry:
        """What is wanted of the deployment that a roll-out began from: to be as it is, or, where
        instances start again one after the other, to be as the newest revision says."""
        newest, plan = self._newest[name], self._plans[name]
        if self.is_roll(name) and plan.state != "stopped":
            return replace(newest, rollout=None)
        spec = with_live_fields(self._bases[name], newest.spec)
        return replace(newest, revision=plan.base, spec=spec, rollout=None)

    def is_roll(self, name: str) -> bool:
        """Whether a model that rolls out does so by its instances, one after the other."""
        return need_of(self._bases[name], self._newest[name].spec) == "roll"

    def forget_others(self, names: Collection[str]) -> None:
        """Forget the roll-outs of models that are not in the catalogue any more."""
        for name in self._newest.keys() - set(names):
            del self._newest[name]
            self._drop(name)

    def _drop(self, name: str) -> None:
        model, beside = self._models.get(name), self.beside(name)
        if model is not None and beside is not None and model.life.state != "serving":
            model.asked_until = max(model.asked_until, beside.asked_until)  # who waits waits on
        self._plans.pop(name, None)
        self._own.pop(name, None)
        self._began.pop(name, None)
        self._bases.pop(name, None)
        self._figures.pop(name, None)

    # -- which is which

    def plan(self, name: str) -> RolloutPlan | None:
        """The roll-out of a model; None: it has none."""
        return self._plans.get(name)

    def beside(self, name: str) -> ManagedModel | None:
        """The new deployment of a model that rolls out; None: there is none."""
        plan = self._plans.get(name)
        return None if plan is None else self._models.get(key_of(name, plan.target))

    def front(self, name: str) -> ManagedModel | None:
        """The deployment that calls wait for, if they have to wait."""
        model = self._models.get(name)
        # Right after an undo the own one still retires, until the next round.
        return self.beside(name) or model if model is not None and model.retires else model

    def share(self, name: str) -> tuple[str, int]:
        """The socket of the deployment next to a model's own, and how many of 100 new calls go
        there; none once it gets all of them, or while it doesn't serve."""
        plan, beside = self._plans.get(name), self.beside(name)
        if plan is None or beside is None or not beside.serves or self.front(name) is beside:
            return "", 0
        return (beside.socket, plan.share) if plan.share else ("", 0)

    def deployments(self, name: str) -> list[ManagedModel]:
        """List the deployments of a model, its own first, also those that end after their calls."""
        own = self._models.get(name)
        rest = [one for one in self._models.values() if one.wanted.name == name and one is not own]
        return rest if own is None else [own, *rest]

    def at(self, name: str, socket: str) -> ManagedModel | None:
        """The deployment that has this socket, or else the one that calls wait for."""
        own = self._models.get(name)
        if not socket:
            return self.front(name)
        if own is not None and own.socket == socket:  # as of nearly all models
            return own
        found = (one for one in self._models.values() if one.socket == socket)
        return next((one for one in found if one.wanted.name == name), self.front(name))

    def both(self) -> list[RunningRollout]:
        """The roll-outs in which both deployments get calls, or have got some."""
        found = []
        for name, plan in self._plans.items():
            model, beside = self._models.get(name), self.beside(name)
            if plan.share and model is not None and beside is not None:
                found.append(RunningRollout(name, plan.since, model.deployment, beside.deployment))
        return found

    def judge(self, one: RunningRollout, old: CallFigures, new: CallFigures) -> None:
        """Take what became of the calls of this step; of an earlier step it counts no more."""
        plan = self._plans.get(one.name)
        if plan is not None and plan.since == one.since:
            self._figures[one.name] = (old, new)

    def figures(self, name: str) -> tuple[CallFigures, CallFigures] | None:
        """What was taken last; None: nothing in this step."""
        return self._figures.get(name)

    # -- what runs already

    def in_order(self, deployed: Iterable[DeployedProgram]) -> Sequence[DeployedProgram]:
        """The deployments, those first that are their models' own, then those that models roll out
        to."""

        def rank(one: DeployedProgram) -> tuple[bool, bool]:
            try:
                note = msgspec.json.decode(one.note, type=DeploymentRecord)
            except msgspec.DecodeError:
                return True, True
            model, plan = self._models.get(note.model), self._plans.get(note.model)
            if model is None or note.spec is None:
                return False, True
            is_other = need_of(note.spec, model.wanted.spec) not in ("nothing", "roll")
            return is_other, plan is None or note.revision != plan.target

        return sorted(deployed, key=rank)

    def home_of(self, note: DeploymentRecord) -> ManagedModel | None:
        """The place of a deployment that runs; None: another one has it."""
        name, plan = note.model, self._plans.get(note.model)
        model = self._models.get(name)
        if model is None:  # it was removed, and its requests end first
            model = self._models[name] = self._leftover(note, name, removed=True)
        same = note.model_id == model.wanted.model_id
        if same and plan is not None and self._is_aim(name, plan, note):
            beside = self.beside(name) or self._add(name, plan)
            if not beside.deployment:
                return beside
            if note.revision == plan.target:
                return None
        if not model.deployment and not (same and _is_left(note, model.wanted)):
            return model
        key = key_of(name, note.revision)
        if note.spec is None or not same or key in self._models:
            return None
        retired = self._models[key] = self._leftover(note, key, retires=True)
        return retired

    def _leftover(
        self, note: DeploymentRecord, key: str, *, removed: bool = False, retires: bool = False
    ) -> ManagedModel:
        """A deployment that is to end after its streams, with what it takes until then."""
        made = ManagedModel(_gone(note), key=key, removed=removed, retires=retires)
        if note.spec is not None:
            self._added(made)
        return made

    def _is_aim(self, name: str, plan: RolloutPlan, note: DeploymentRecord) -> bool:
        """Whether a deployment is what a model rolls out to. It was started as a later revision
        where one has come since that changes no start."""
        if self.is_roll(name):
            return False
        if note.revision == plan.target or note.spec is None:
            return note.revision == plan.target
        return need_of(note.spec, self._newest[name].spec) == "nothing"

    # -- rounds

    @contextmanager
    def hold(self, name: str) -> Iterator[None]:
        """Let a roll-out take no step while an order to it is carried out: one of both would be
        lost."""
        self._held[name] += 1
        try:
            yield
        finally:
            self._held[name] -= 1

    @contextmanager
    def order(self, names: Iterable[str], terms: RolloutTerms) -> Iterator[RolloutTerms]:
        """Hold the roll-outs of these models while they are changed. Gives the terms, with what is
        known here of roll-outs that are done."""
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(self.hold(name))
            yield replace(terms, over=dict(self._done))

    def reconcile(self, faults: RoundFaults) -> None:
        """Take each roll-out a step on, and decide what each deployment is to be. One that fails
        keeps no other one back."""
        for name in list(self._plans):
            if name not in self.blocked and not self._held[name]:
                with faults.guard("roll-outs", self._models.get(name)):
                    self._step(name, self._timed(name))
        wanted = {
            key_of(name, plan.target)
            for name, plan in self._plans.items()
            if not self.is_roll(name)
        }
        for key, model in self._models.items():
            if BESIDE in key and key not in wanted:
                model.retires, model.stands_by = True, False
            elif BESIDE not in key and key not in self._plans:
                model.retires = model.overdue = False
            with faults.guard("roll-outs", model):
                model.rolls = self._rolls(model)

    def _timed(self, name: str) -> RolloutPlan:
        """The roll-out of a model, whose step has a time of the steady clock, and of Unix time one
        that is not yet to come."""
        plan, wall = self._plans[name], self._wall()
        timed = self._began.get(name)
        if timed is None or timed[0] != plan:
            self._began[name] = plan, self._clock() - max(0.0, wall - plan.since)
        if plan.since > wall:  # calls of the step are known by the time at which they began
            self._take(name, replace(plan, since=wall), self._began[name][1])
        return self._plans[name]

    def _take(self, name: str, plan: RolloutPlan, began: float) -> None:
        """Go on with a plan that was decided here. began: its step, by the steady clock."""
        self._plans[name], self._began[name] = plan, (plan, began)
        self._own[name].append(plan)
        self._keep(self._models[name].wanted.model_id, plan, False)

    def _step(self, name: str, plan: RolloutPlan) -> None:
        model, beside = self._models[name], self.beside(name)
        now = plan.since + self._clock() - self._began[name][1]
        old_ended = _has_ended(model, plan) or _waits_for_nothing(model, beside)
        if self.is_roll(name):
            self._step_of_roll(name, plan, old_ended)
            return
        if plan.state != "stopped" and beside is None and not old_ended:
            beside = self._add(name, plan)
        seen = RolloutView(
            old_ended=old_ended,
            new_ready=beside is not None and beside.serves,
            new_failed=""
            if beside is None or beside.life.state != "failed"
            else f"revision {plan.target} can't start: {beside.life.why}",
            worse=worse(*self._figures[name]) if name in self._figures else "",
        )
        after = advance(plan, seen, now)
        if after is None:
            self._finish(name, plan, beside)
            return
        if after != plan:
            after, now = self._change(name, plan, after), self._wall()
        model.retires = takes_all(after, new_ready=seen.new_ready) or gives_way(
            after,
            no_room=beside is not None and beside.lacks_room,
            running=self._running(model),
            now=now,
        )
        model.overdue = model.retires and is_overdue(after, now)
        if beside is not None:
            beside.stands_by = after.state != "stopped"
            beside.retires = not beside.stands_by

    def _step_of_roll(self, name: str, plan: RolloutPlan, old_ended: bool) -> None:
        """Let instances start again one after the other; `next_roll` chooses which."""
        model = self._models[name]
        model.retires = model.overdue = False
        start = model.instance_start
        if plan.state == "stopped":
            return
        if old_ended or (start is not None and has_rolled(model.instance_rows, start)):
            if plan.state == "running":
                self._finish(name, plan, None)
            return
        if start is not None and (why := _why_not(model, start)):
            self._change(name, plan, stopped(plan, why, plan.since))
            model.wanted = self._own_entry(name)

    def next_roll(self, model: ManagedModel) -> RollStep | None:
        """Which of a deployment's instances is to start again as something else now, if any."""
        start, plan = model.instance_start, self._plans.get(model.wanted.name)
        busy = model.ordering is not None and not model.ordering.done()
        if not model.rolls or start is None or busy or _why_not(model, start):
            return None
        deadline_s = None if plan is None else plan.deadline_s
        return next_roll(model.instance_rows, start, deadline_s)

    def _rolls(self, model: ManagedModel) -> bool:
        """Whether some of its instances are to start again as something else, and may now."""
        start, name = model.instance_start, model.wanted.name
        plan, rows = self._plans.get(name), model.instance_rows
        if start is None or name in self.blocked or not has_others(rows, start):
            return False
        if _why_not(model, start):  # its number of instances is decided as ever
            return False
        paused = plan is not None and plan.state == "paused"
        return model.life.state == "serving" and not model.retires and not paused

    def _change(self, name: str, plan: RolloutPlan, after: RolloutPlan) -> RolloutPlan:
        """Take a step, or stop: from now on. The plan with the time."""
        model, after = self._models[name], replace(after, since=self._wall())
        self._figures.pop(name, None)
        self._take(name, after, self._clock())
        said = f"{after.share} % of new requests go to revision {after.target}"
        if after.state != plan.state:
            said = f"the roll-out has {after.state}: {after.why}"
        self._note(model, said)
        return after

    def _finish(self, name: str, plan: RolloutPlan, beside: ManagedModel | None) -> None:
        """The new deployment, if there is one, is the model's own from now on."""
        model = self._models[name]
        if beside is not None:
            del self._models[beside.key]
            beside.key, beside.stands_by = name, False
            self._models[name] = model = beside
        elif model.life.state == "failed":  # what failed was something else
            model.life = replace(model.life, state="zero", failures=0, retry_at=0.0, why="")
        model.retires = model.overdue = False
        model.wanted = replace(self._newest[name], rollout=None)
        self._drop(name)
        self._done[model.wanted.model_id] = plan.target
        self._added(model)
        self._keep(model.wanted.model_id, plan, True)
        self._note(model, f"revision {plan.target} is rolled out")

    def _add(self, name: str, plan: RolloutPlan) -> ManagedModel:
        key = key_of(name, plan.target)
        made = self._models[key] = ManagedModel(self._newest[name], key=key)
        self._added(made)
        return made


def _has_ended(model: ManagedModel, plan: RolloutPlan) -> bool:
    """Whether nothing of the old one runs, and nothing of it is to start again.

    Below 100 % it does when it is wanted: after a crash, or where its host has ended all. One that
    can't start any more is over, too, before calls are compared with its own.
    """
    life, wanted = model.life, model.wanted
    if model.deployment or life.state not in ("zero", "failed"):
        return False
    if life.state == "failed":
        return plan.step < 0
    if model.retires or life.why or life.failures:
        return model.retires
    starts_again = wanted.on and wanted.spec.least > 0
    return plan.share == 100 or (plan.step < 0 and not starts_again)


def _waits_for_nothing(model: ManagedModel, beside: ManagedModel | None) -> bool:
    """Whether the old one has ended and has no room or no files to start again, while the new one
    serves."""
    waits = not model.deployment and model.life.state == "waiting"
    return waits and beside is not None and beside.serves


def _why_not(model: ManagedModel, start: RolledStart) -> str:
    """Why a deployment's instances can't be started so; empty: they can, as far as is known."""
    if model.cant_roll is not None and model.cant_roll[0] == start:
        return model.cant_roll[1]
    return why_failed(model.instance_rows, start, model.rolled_last)


def can_gather(model: ManagedModel) -> bool:
    """Whether a deployment that gets no new requests can do with an instance less now."""
    rows = model.instance_rows
    busy = model.ordering is not None and not model.ordering.done()
    settled = all(one.state in ("serving", "failed") for one in rows)
    ends = model.retires and model.life.state == "emptying"
    return ends and settled and not busy and counted(rows) > 1 and one_less_holds(rows)


def _is_left(note: DeploymentRecord, wanted: CatalogEntry) -> bool:
    """Whether a deployment is left of a roll-out that has ended."""
    if note.spec is None or note.revision == wanted.revision or is_remote(wanted.spec.source):
        return False  # what it is to be is not known as long as its files aren't
    return need_of(note.spec, wanted.spec) == "beside"


def _gone(note: DeploymentRecord) -> CatalogEntry:
    """The entry of a deployment that is to end."""
    spec = note.spec or ModelSpec(name=note.model, source=PATH)
    return CatalogEntry(note.model_id, note.model, note.revision, on=False, spec=spec)
