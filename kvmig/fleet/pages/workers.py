"""Pages of workers and of the placement, and the orders about them."""

from __future__ import annotations

from urllib.parse import quote

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvmig.fleet.pages.backend import FleetPages
from kvmig.pages.site import NO_FORM, FormOutcome
from kvmig.pages.words import typed_json, typed_number


def worker_routes(pages: FleetPages) -> list[Route]:
    """The routes."""
    site = pages.site

    async def show_workers(request: Request, outcome: FormOutcome = NO_FORM) -> Response:
        site.find_person(request, admin=True)
        workers = (await pages.call(request, "GET", "/workers"))["data"]
        status = await pages.call(request, "GET", "/status")
        placement = await pages.call(request, "GET", "/placement")
        values = {
            "title": "Workers",
            "workers": workers,
            "claims": {one["uuid"]: one["models"] for one in status["gpus"]},
            "units": status["units"],
            "placement": placement,
        }
        return site.page(request, "workers", values, outcome)

    async def order(request: Request, form: FormData) -> str:
        name, word = request.path_params["name"], request.path_params["order"]
        body = {"based_on": typed_json(str(form.get("based_on", "")))}
        if word == "drain":
            body["deadline_s"] = typed_number(str(form.get("deadline_s", "")))
        await pages.call(request, "POST", f"/workers/{quote(name, safe='')}/{word}", body=body)
        return "/workers"

    async def label(request: Request, form: FormData) -> str:
        path = f"/workers/{quote(request.path_params['name'], safe='')}/labels"
        name, value = str(form.get("label", "")).strip(), str(form.get("value", "")).strip()
        removed = form.get("remove") == "yes"
        body = {
            "labels": {name: None if removed else value},
            "based_on": typed_json(str(form.get("based_on", ""))),
        }
        await pages.call(request, "POST", path, body=body)
        return "/workers"

    async def drop_placement(request: Request, form: FormData) -> str:
        await pages.call(request, "DELETE", "/placement")
        return "/workers"

    return [
        Route("/workers", show_workers),
        site.form_route("/workers/{name}/labels", label, show_workers),
        site.form_route("/workers/{name}/{order}", order, show_workers),
        site.form_route("/placement/remove", drop_placement, show_workers),
    ]
