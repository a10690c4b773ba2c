"""Pages of models: the catalogue, one model with its roll-out and revisions, and orders to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from kvmig.core.live_records import LiveFleet
from kvmig.fleet.pages.backend import FleetPages
from kvmig.fleet.pages.model_orders import (
    ORDERS,
    api_path,
    basis_query,
    order_to,
    path_of,
    spec_of_form,
    weights_of,
)
from kvmig.fleet.spec import ModelSpec
from kvmig.pages.api_calls import ApiRefusal
from kvmig.pages.picture import model_part
from kvmig.pages.rendering import render
from kvmig.pages.site import NO_FORM, FormOutcome
from kvmig.pages.words import typed_json

LOG_LINES = 50
EVENTS = 20
MOST_VALUE = 200
"""Characters of a changed value that are shown."""
Spec = dict[str, Any]


class ChangedField(NamedTuple):
    """A field of a specification that a revision has otherwise than the one before."""

    name: str
    before: str
    after: str


def catalogue_routes(pages: FleetPages) -> list[Route]:
    """Routes of the list of models, and of new ones."""
    site = pages.site

    async def show_models(request: Request, outcome: FormOutcome = NO_FORM) -> Response:
        if not site.find_person(request).admin:
            names = (await pages.call(request, "GET", "/names"))["data"]
            return site.page(request, "names", {"title": "Models", "names": names}, outcome)
        models = (await pages.call(request, "GET", "/models"))["data"]
        aliases = (await pages.call(request, "GET", "/aliases"))["data"]
        values = {"title": "Models", "models": models, "aliases": aliases, "fit": outcome.found}
        return site.page(request, "models", values, outcome)

    async def add(request: Request, form: FormData) -> str:
        await pages.call(request, "POST", "/models", body=spec_of_form(form))
        return path_of(str(form.get("name", "")).strip())

    async def evaluate(request: Request) -> Response:
        """Show whether the model of a form would fit; a script gets that part of the page alone."""
        form = await site.read_form(request)
        try:
            fit = await pages.call(request, "POST", "/evaluate", body=spec_of_form(form))
            fit["error"] = ""
        except ApiRefusal as error:
            fit = {"error": str(error)}
        if "hx-request" in request.headers:
            return HTMLResponse(render("fit", fit=fit))
        return await show_models(request, FormOutcome(form=form, found=fit))

    async def set_alias(request: Request, form: FormData) -> str:
        name = str(form.get("alias", "")).strip()
        path, known = f"/aliases/{quote(name)}", typed_json(str(form.get("known", "")))
        based_on = known.get(name, {}) if isinstance(known, dict) else known
        body = {"targets": weights_of(str(form.get("targets", ""))), "based_on": based_on}
        await pages.call(request, "PUT", path, body=body)
        return "/models"

    async def remove_alias(request: Request, form: FormData) -> str:
        path = f"/aliases/{quote(str(form.get('alias', '')))}"
        await pages.call(request, "DELETE", path, query=basis_query(form))
        return "/models"

    return [
        site.form_route("/aliases", set_alias, show_models),
        site.form_route("/aliases/remove", remove_alias, show_models),
        Route("/models", show_models),
        site.form_route("/models", add, show_models),
        Route("/evaluate", evaluate, methods=["POST"]),
    ]


def model_routes(pages: FleetPages) -> list[Route]:
    """The routes. Orders to a model end with a word, so that its name may hold slashes."""
    site = pages.site

    async def show_model(request: Request, outcome: FormOutcome = NO_FORM) -> Response:
        site.find_person(request, admin=True)
        name = request.path_params["name"]
        path = api_path(name)
        model = await pages.call(request, "GET", path)
        logs = await pages.call(request, "GET", f"{path}/logs", query={"lines": LOG_LINES})
        found = await pages.call(request, "GET", "/live", query={"streams": 0})
        live = msgspec.convert(found, LiveFleet)
        now = next((model_part(one) for one in live.models if one.name == name), None)
        values = {
            "title": name,
            "model": model,
            "now": now,
            "instances": [one for one in live.instances if one.model == name],
            "spec": json.dumps(shown_spec(model["spec"]), indent=2),
            "revisions": with_changes(model["revisions"]),
            "events": model["events"][-EVENTS:][::-1],
            "logs": logs["data"],
        }
        return site.page(request, "model", values, outcome)

    return [
        *catalogue_routes(pages),
        *(
            site.form_route(f"/models/{{name:path}}/{word}", order_to(pages, act), show_model)
            for word, act in ORDERS.items()
        ),
        Route("/models/{name:path}", show_model),
        *reason_routes(pages),
    ]


def reason_routes(pages: FleetPages) -> list[Route]:
    """Routes of the reasons of places."""
    site = pages.site

    async def show_why(request: Request) -> Response:
        site.find_person(request, admin=True)
        name = request.path_params["name"]
        query = {"instance": request.query_params.get("instance", "")}
        found = await pages.call(request, "GET", f"/why/{quote(name)}", query=query)
        values = {"title": "Why here?", "name": name, "instance": found, "moves": None}
        return site.page(request, "why", values | {"found": found["decision"]})

    async def show_why_not(request: Request) -> Response:
        site.find_person(request, admin=True)
        name = request.path_params["name"]
        found = await pages.call(request, "GET", f"/why-not/{quote(name)}")
        values = {"title": "Where to, and why not elsewhere?", "name": name, "instance": None}
        return site.page(request, "why", values | {"found": found, "moves": found["moves"]})

    return [Route("/why/{name:path}", show_why), Route("/why-not/{name:path}", show_why_not)]


def shown_spec(spec: Spec) -> Spec:
    """A specification without the fields that have their defaults."""
    named = ModelSpec(name=spec["name"], source=spec["source"])
    plain: Spec = msgspec.json.decode(msgspec.json.encode(named))
    found = {one: spec[one] for one in spec if one in ("name", "source") or spec[one] != plain[one]}
    if "instances" in found:
        counts, usual = found["instances"], plain["instances"]
        found["instances"] = {one: counts[one] for one in counts if counts[one] != usual[one]}
    return found


def with_changes(revisions: Sequence[Spec]) -> list[Spec]:
    """The revisions, newest first, with what each has changed."""
    return [
        {**one, "changes": [] if before is None else changes(before["spec"], one["spec"])}
        for one, before in zip(revisions, [*revisions[1:], None], strict=True)
    ]


def changes(before: Spec, after: Spec) -> list[ChangedField]:
    """The fields of two specifications that differ."""
    return [
        ChangedField(name, shortened(before.get(name)), shortened(after[name]))
        for name in after
        if before.get(name) != after[name]
    ]


def shortened(value: object) -> str:
    """A value as JSON, cut short."""
    text = json.dumps(value)
    return text if len(text) <= MOST_VALUE else f"{text[: MOST_VALUE - 1]}…"
