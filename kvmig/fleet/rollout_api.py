"""The API's routes of roll-outs: how they stand, and orders to them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import msgspec
from fastapi import APIRouter
from pydantic import Field

from kvmig.asgi.strict_body import StrictBody
from kvmig.core.clock import TimeSource
from kvmig.core.errors import ConfigError
from kvmig.fleet.api_paths import routes_at
from kvmig.fleet.based_on import order_based_on
from kvmig.fleet.controller import ModelController
from kvmig.fleet.flag_rolls import start_of_instance
from kvmig.fleet.managed_model import ManagedModel
from kvmig.fleet.model_rows import ModelRow
from kvmig.fleet.rollout import (
    AT_ONCE,
    HOLD_S,
    CallFigures,
    RolloutPlan,
    RolloutTerms,
    checked_terms,
    paused,
    promoted,
    resumed,
    with_live_fields,
)
from kvmig.fleet.rollout_table import change_rollout, earlier_spec
from kvmig.fleet.spec import FleetFile, ModelSpec, SpecChange
from kvmig.fleet.store import FleetStore, NameTaken, OrderActor

CHANGES: dict[str, Callable[[RolloutPlan, float], RolloutPlan]] = {
    "pause": paused,
    "resume": resumed,
    "promote": promoted,
}


class RolloutBackend(Protocol):
    """What the routes work on: `kvmig.fleet.api.ApiBackend`."""

    @property
    def store(self) -> FleetStore:
        """The catalogue."""

    @property
    def models(self) -> ModelController:
        """What runs."""

    async def stored(self, call: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        """The result of one of the store's methods, on its thread. Raises what it raises."""

    async def row(self, name: str) -> ModelRow:
        """The model's row. Raises NotThere."""
        ...

    async def checked(self, specs: Sequence[ModelSpec]) -> None:
        """Let engines read the flags. Raises ConfigError, StoreError."""

    @property
    def changed(self) -> Callable[[], Awaitable[None]]:
        """Call to be awaited after every change."""


class RolloutSide(msgspec.Struct, frozen=True):
    """The state of one of the two deployments."""

    revision: int
    state: str
    why: str
    serving: int
    """Instances that serve."""
    running: int
    """Requests that it has."""
    figures: CallFigures | None
    """What became of its calls in this step; None: not known."""


class RolloutStatus(msgspec.Struct, frozen=True):
    """How a roll-out stands."""

    way: str
    """`beside`: a new deployment takes over new requests. `roll`: instances start again one after
    the other."""
    state: str
    why: str
    rolled: int
    """Instances that have started again; 0 for `beside`."""
    share: int
    """The new requests of 100 that go to the new deployment."""
    canary: tuple[int, ...]
    hold_s: float
    deadline_s: float | None
    since: float
    """Unix time at which the step began."""
    old: RolloutSide
    new: RolloutSide | None
    """The new deployment; None: there is none yet, or any more."""


class RolloutBody(StrictBody):
    """How changed models roll out."""

    canary: list[int] = Field(
        default=[],
        max_length=20,
        description="Of 100 new requests, those that the new deployment gets, step by step; 100 "
        "comes last in any case.",
    )
    hold_s: float = Field(
        default=HOLD_S, allow_inf_nan=False, description="Seconds from one step to the next."
    )
    deadline_s: float | None = Field(
        default=None,
        allow_inf_nan=False,
        description="Seconds that the old deployment's running requests get once it gets no new "
        "ones; null: no limit.",
    )


class RolloutOrder(RolloutBody):
    """An order to a roll-out; how it goes is for `undo`, where that begins another one."""

    action: Literal["pause", "resume", "promote", "undo"]
    revision: int | None = Field(
        default=None, ge=1, description="The one to go back to; null: that before. For undo only."
    )


def terms_of(body: RolloutBody | None) -> RolloutTerms:
    """Raises ConfigError."""
    if body is None:
        return AT_ONCE
    return checked_terms(body.canary, body.hold_s, body.deadline_s)


def standing(models: ModelController, name: str) -> RolloutStatus | None:
    """How the roll-out of a model stands; None: it has none."""
    rollouts = models.rollouts
    plan, own, beside = rollouts.plan(name), models.shown(name), rollouts.beside(name)
    if plan is None or own is None:
        return None
    old, new = rollouts.figures(name) or (None, None)
    why = plan.why or rollouts.blocked.get(name, "") or _waits_for(own, beside)
    rolls = rollouts.is_roll(name) and plan.state != "stopped"
    start = own.instance_start if rolls else None
    serving = [one for one in own.instance_rows if one.state == "serving"]
    rolled = [one for one in serving if start_of_instance(one) == start]
    return RolloutStatus(
        way="roll" if rollouts.is_roll(name) else "beside",
        rolled=len(rolled),
        state=plan.state,
        why=why,
        share=plan.share,
        canary=plan.canary,
        hold_s=plan.hold_s,
        deadline_s=plan.deadline_s,
        since=plan.since,
        old=_side(models, own, plan.base, old),
        new=None if beside is None else _side(models, beside, plan.target, new),
    )


def _waits_for(own: ManagedModel, beside: ManagedModel | None) -> str:
    """What a roll-out waits for; empty: for nothing but time."""
    if beside is not None and beside.life.state == "waiting":
        return beside.life.why
    if own.retires:
        return "the old deployment ends after the requests that it has"
    for one in own.instance_rows:
        if own.rolls and one.state == "draining":
            left = one.running + one.waiting
            return f"instance {one.id} starts again when its {left} requests have left or ended"
    return ""


def _side(
    models: ModelController, model: ManagedModel, revision: int, figures: CallFigures | None
) -> RolloutSide:
    life = model.life
    running = models.running(model)
    return RolloutSide(revision, life.state, life.why, model.serving, running, figures)


def at_next_start(models: ModelController, changes: Iterable[SpecChange]) -> list[str]:
    """Names of changed models that run on as they were started: their changes wait for the next
    start, and no roll-out brings that about."""

    def waits(name: str) -> bool:
        model = models.shown(name)
        if model is None or model.note is None or model.removed:
            return False
        return not model.is_newest and models.rollouts.plan(name) is None

    return [one.name for one in changes if one.kind == "model" and waits(one.name)]


def rollout_api(backend: RolloutBackend, caller: Any, wall: TimeSource) -> APIRouter:
    """Routes of roll-outs; a model's name may hold slashes. caller: who calls. wall: Unix time."""
    api, store, models = routes_at("/models"), backend.store, backend.models

    def shown(name: str) -> dict[str, Any]:
        return {"name": name, "rollout": msgspec.to_builtins(standing(models, name))}

    @api.get("/{name:path}/rollout")
    async def show_rollout(name: str, _: OrderActor = caller) -> dict[str, Any]:
        """How the roll-out of a model stands; null: it has none."""
        await backend.row(name)
        return shown(name)

    @api.post("/{name:path}/rollout")
    async def order_rollout(
        name: str, body: RolloutOrder, actor: OrderActor = caller
    ) -> dict[str, Any]:
        """Pause a roll-out, resume it, take its next step at once, or go back.

        `undo` makes a new revision that is started as an earlier one was. 409 for `promote` while
        the new deployment doesn't serve, and for `undo` of a model that is changed meanwhile.
        """
        row = await backend.row(name)
        if body.action == "undo":
            terms = terms_of(body)
            spec = await backend.stored(earlier_spec, store.database, name, body.revision)
            spec = with_live_fields(spec, row.spec)
            if spec == row.spec:
                raise ConfigError(f"model {name} is as that revision already")
            await backend.checked([spec])
            with models.rollouts.order([name], terms) as terms:
                await asyncio.sleep(0)  # as below
                back = partial(store.apply, FleetFile((spec,)), actor, terms=terms)
                await backend.stored(order_based_on, store, {name: row.revision}, back)
                await backend.changed()
        else:
            going, beside = models.rollouts.plan(name), models.rollouts.beside(name)
            ready = beside is not None and beside.serves
            if body.action == "promote" and going is not None and not ready:
                raise NameTaken(f"the new deployment of model {name} doesn't serve")
            change, by = CHANGES[body.action], (actor.name, actor.address)
            with models.rollouts.hold(name):
                await asyncio.sleep(0)  # a step that was just taken is written first
                await backend.stored(change_rollout, store.database, name, change, by, wall())
                await backend.changed()
        return shown(name)

    return api
