"""Routes of places: why an instance is where it is, and why workers refuse another one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query

from kvmig.core.api_records import InstanceRow
from kvmig.fleet.api_paths import routes_at
from kvmig.fleet.controller import ModelController
from kvmig.fleet.managed_model import ManagedModel
from kvmig.fleet.place_choice import PlaceExplanation
from kvmig.fleet.rollout_controller import BESIDE
from kvmig.fleet.room_moves import RoomPlan
from kvmig.fleet.store import NotThere, OrderActor

Body = dict[str, Any]
InstanceQuery = Annotated[str, Query(min_length=1, max_length=100)]


def places_api(
    models: ModelController, known: Callable[[str], Awaitable[object]], caller: Any
) -> APIRouter:
    """known: raises NotThere for a model that isn't in the catalogue. caller: who calls."""
    api = routes_at()

    async def model_of(name: str) -> ManagedModel:
        await known(name.partition(BESIDE)[0])
        found = models.shown(name)
        if found is None:
            raise NotThere(f"model {name} is not known to this server yet")
        return found

    def holder_of(model: ManagedModel, instance: str) -> tuple[ManagedModel, InstanceRow]:
        """The deployment with this instance; of a model that rolls out its own one goes first."""
        every = models.rollouts.deployments(model.key) if model.key == model.wanted.name else []
        for one in every or [model]:
            for row in one.instance_rows:
                if row.id == instance:
                    return one, row
        there = ", ".join(
            row.id if one is model else f"{row.id} of {one.key}"
            for one in every or [model]
            for row in one.instance_rows
        )
        raise NotThere(
            f"model {model.key} has no instance {instance!r:.100}, there are: {there or 'none'}"
        )

    @api.get("/why-not/{name:path}")
    async def why_not(name: str, _: OrderActor = caller) -> Body:
        """Explain where another instance of a model would go now: each worker with its score, or
        with every filter that refuses it, in bytes. `why`: what else keeps the model from starting.
        `moves`: those of other models' instances that would make room. `moving`: those that are
        under way, and what they wait for."""
        model = await model_of(name)
        found = models.why_not(model)
        waits = model.life.state == "waiting" or found.chosen is None
        moves = models.moves_for(model) if waits else None
        return {
            "state": model.life.state,
            "why": model.life.why,
            "moves": None if moves is None else moves_json(models, moves),
            "moving": models.mover.lines(),
        } | explanation_json(models, found)

    @api.get("/why/{name:path}")
    async def why(name: str, instance: InstanceQuery, _: OrderActor = caller) -> Body:
        """Why an instance of a model is where it is: the decision, as things were then. `decision`
        is null where it isn't kept: an earlier server has started the instance. While a model
        rolls out, NAME@REVISION is its deployment of that revision."""
        model, row = holder_of(await model_of(name), instance)
        kept = models.places.history.decision(model.deployment, instance)
        return {
            "model": model.key,
            "instance": instance,
            "worker": models.places.worker_of(model, row),
            "gpus": [models.places.title(gpu) for gpu in model.places.gpus_of(row)],
            "at": None if kept is None else kept.at,
            "decision": None if kept is None else explanation_json(models, kept.explanation),
        }

    return api


def moves_json(models: ModelController, found: RoomPlan) -> Body:
    """Moves as the API shows them."""
    shown: Body = msgspec.to_builtins(found)
    for one in (shown, *shown["moves"]):
        for field in {"gpus", "to_gpus"} & one.keys():
            one[field] = [models.places.title(gpu) for gpu in one[field]]
    return shown


def explanation_json(models: ModelController, found: PlaceExplanation) -> Body:
    """An explanation as the API shows it: with what people call the GPUs."""
    shown: Body = msgspec.to_builtins(found)
    for one in shown["nodes"]:
        one["gpus"] = [models.places.title(gpu) for gpu in one["gpus"]]
    return shown
