"""Orders to models: what their forms mean to the API."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from starlette.datastructures import FormData
from starlette.requests import Request

from kvmig.fleet.pages.backend import FleetPages
from kvmig.pages.api_calls import ApiRefusal
from kvmig.pages.site import Act
from kvmig.pages.words import typed_list, typed_number

OF_INSTANCES = ("min", "max", "target", "zero_after_s")
"""Fields of the form for a new model that are about its instances."""

Spec = dict[str, Any]
Order = Callable[[FleetPages, Request, str, FormData], Awaitable[str]]
"""Takes the model's name and the form; the path to go to."""


async def scale(pages: FleetPages, request: Request, name: str, form: FormData) -> str:
    """Set the bounds of the number of instances."""
    body = {"min": typed(form, "min"), "max": typed(form, "max")}
    body["based_on"] = typed(form, "based_on")
    await pages.call(request, "POST", f"{api_path(name)}/scale", body=body)
    return path_of(name)


async def switch(pages: FleetPages, request: Request, name: str, form: FormData) -> str:
    """Switch a model on or off."""
    body = {"on": form.get("on") == "yes"}
    await pages.call(request, "POST", f"{api_path(name)}/switch", body=body)
    return path_of(name)


async def wake(pages: FleetPages, request: Request, name: str, _: FormData) -> str:
    """Start a model now."""
    await pages.call(request, "POST", f"{api_path(name)}/wake")
    return path_of(name)


async def change(pages: FleetPages, request: Request, name: str, form: FormData) -> str:
    """Make a new revision."""
    body: Spec = {"fleet": {"models": [changed_spec(name, form)]}, "rollout": rollout_of(form)}
    if (revision := typed(form, "based_on")) is not None:
        body["based_on"] = {name: revision}
    await pages.call(request, "POST", "/apply", body=body)
    return path_of(name)


async def roll(pages: FleetPages, request: Request, name: str, form: FormData) -> str:
    """Give an order to its roll-out, or go back to a revision."""
    body: Spec = {"action": form.get("action", "")}
    if form.get("revision"):
        body["revision"] = typed(form, "revision")
    await pages.call(request, "POST", f"{api_path(name)}/rollout", body=body)
    return path_of(name)


async def drain(pages: FleetPages, request: Request, name: str, form: FormData) -> str:
    """Let the requests of an instance go elsewhere, then end it."""
    await pages.call(request, "POST", "/live/drain", body=instance_of(name, form))
    return path_of(name)


async def undrain(pages: FleetPages, request: Request, name: str, form: FormData) -> str:
    """Let an instance that is drained serve again."""
    await pages.call(request, "POST", "/live/undrain", body=instance_of(name, form))
    return path_of(name)


async def remove(pages: FleetPages, request: Request, name: str, form: FormData) -> str:
    """Remove a model from the catalogue."""
    await pages.call(request, "DELETE", api_path(name), query=basis_query(form))
    return "/models"


ORDERS: Mapping[str, Order] = {
    "scale": scale,
    "switch": switch,
    "wake": wake,
    "change": change,
    "rollout": roll,
    "drain": drain,
    "undrain": undrain,
    "remove": remove,
}
"""Orders by the last word of their paths."""


def order_to(pages: FleetPages, order: Order) -> Act:
    """What takes the form of an order to a model."""

    async def act(request: Request, form: FormData) -> str:
        return await order(pages, request, request.path_params["name"], form)

    return act


def path_of(name: str) -> str:
    """The path of a model's page, below the prefix."""
    return f"/models/{quote(name)}"


def api_path(name: str) -> str:
    """The path of a model in the API."""
    return f"/models/{quote(name)}"


def basis_query(form: FormData) -> dict[str, str]:
    """What an order was made from, where its form has that."""
    based_on = str(form.get("based_on", ""))
    return {"based_on": based_on} if based_on else {}


def typed(form: FormData, field: str) -> int | float | str | None:
    """A number of a form."""
    return typed_number(str(form.get(field, "")))


def instance_of(name: str, form: FormData) -> Spec:
    """The instance that an order is about."""
    return {"model": name, **{one: form.get(one, "") for one in ("instance", "deployment")}}


def spec_of_form(form: FormData) -> Spec:
    """The specification of a new model; what was left empty has its default."""
    texts = {one: str(form.get(one, "")).strip() for one in ("name", "source", "engine", "flags")}
    counts = {one: typed(form, one) for one in OF_INSTANCES}
    found: Spec = {one: text for one, text in texts.items() if text}
    return found | {"instances": {one: n for one, n in counts.items() if n is not None}}


def changed_spec(name: str, form: FormData) -> Spec:
    """The specification that the form holds. Raises ApiRefusal."""
    text = str(form.get("spec", ""))
    try:
        spec = json.loads(text)
    except (ValueError, RecursionError) as error:
        sentence = f"the specification is no JSON: {error}"
        raise ApiRefusal(HTTPStatus.BAD_REQUEST, sentence) from error
    if not isinstance(spec, dict) or spec.get("name") != name:
        sentence = f"the specification must be a mapping whose name is {name!r}"
        raise ApiRefusal(HTTPStatus.BAD_REQUEST, sentence)
    return spec


def weights_of(text: str) -> Spec:
    """The weights of the models that an alias stands for, as MODEL=90 OTHER=10; a model without
    one has 1."""
    found: Spec = {}
    for one in typed_list(text):
        model, equals, weight = one.rpartition("=")
        found[model if equals else one] = typed_number(weight) if equals else 1
    return found


def rollout_of(form: FormData) -> Spec:
    """The way in which a changed model rolls out."""
    steps = [typed_number(one) for one in typed_list(str(form.get("canary", "")))]
    hold = {} if (hold_s := typed(form, "hold_s")) is None else {"hold_s": hold_s}
    return {"canary": steps, "deadline_s": typed(form, "deadline_s"), **hold}
