"""Pages of users and keys, and the orders about them."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvmig.accounts.keys import SCOPES
from kvmig.fleet.pages.backend import FleetPages
from kvmig.pages.api_calls import ApiRefusal, Query
from kvmig.pages.site import NO_FORM, FormOutcome
from kvmig.pages.words import typed_json, typed_list, typed_number

NUMBERS = ("rpm", "tpm", "parallel", "quota")
"""Limits that are numbers."""
ROWS = 100
"""Rows of one page of a list."""
NAMED_USERS = 100
"""Users that the form of a key proposes."""
MOST_FIND, MOST_SKIPPED = 200, 1_000_000_000
"""The most that the API allows."""


class ListPart(NamedTuple):
    """The part of a list that a page shows."""

    find: str
    skip: int

    @property
    def query(self) -> dict[str, str | int]:
        """What the API is asked for."""
        return {"find": self.find, "skip": self.skip, "limit": ROWS}

    @property
    def fields(self) -> dict[str, str | int]:
        """Hidden fields of the page's forms, which lead back to the same part."""
        every: dict[str, str | int] = {"find": self.find, "skip": self.skip}
        return {name: value for name, value in every.items() if value}

    def path(self, page: str) -> str:
        """The page with this part, below the prefix."""
        return f"{page}?{urlencode(self.fields)}" if self.fields else page


def part_of(asked: Mapping[str, Any]) -> ListPart:
    """The part that a query or a form names; what is no number of rows is none."""
    skip = typed_number(str(asked.get("skip", "")))
    skip = min(skip, MOST_SKIPPED) if isinstance(skip, int) and skip > 0 else 0
    find = " ".join(str(asked.get("find", "")).split())
    return ListPart(find[:MOST_FIND], skip)


def shown_list(part: ListPart, page: str, found: Mapping[str, Any]) -> dict[str, Any]:
    """What a template needs for a part of a list. found: the API's answer."""
    before = part._replace(skip=max(0, part.skip - ROWS))
    after = part._replace(skip=part.skip + ROWS)
    return {
        "part": part,
        "total": found["total"],
        "last": part.skip + len(found["data"]),
        "before": before.path(page) if part.skip else "",
        "after": after.path(page) if after.skip < found["total"] else "",
    }


def key_routes(pages: FleetPages) -> list[Route]:
    """Routes of keys."""
    site = pages.site

    async def show_keys(request: Request, outcome: FormOutcome = NO_FORM) -> Response:
        person = site.find_person(request)
        part = part_of(outcome.form or request.query_params)
        found = await pages.call(request, "GET", "/keys", query={"left": True, **part.query})
        users = []
        if person.admin:
            query: Query = {"limit": NAMED_USERS}
            users = (await pages.call(request, "GET", "/users", query=query))["data"]
        values = {
            "title": "Keys",
            "keys": found["data"],
            "users": [one["name"] for one in users],
            "scopes": SCOPES,
            "shown": shown_list(part, "/keys", found),
        }
        return site.page(request, "keys", values, outcome)

    async def add(request: Request, form: FormData) -> FormOutcome:
        lists = {one: typed_list(str(form.get(one, ""))) for one in ("models", "cidrs", "classes")}
        body = {
            "user": form.get("user", ""),
            "name": str(form.get("name", "")).strip(),
            "scopes": form.getlist("scope"),
            "days": typed_number(str(form.get("days", ""))) or 0,
            **{name: found or None for name, found in lists.items()},
            **limits_of(form),
        }
        made = await pages.call(request, "POST", "/keys", body=body)
        return FormOutcome(found=made)

    async def limit(request: Request, form: FormData) -> str:
        path = f"/keys/{quote(request.path_params['prefix'], safe='')}"
        await pages.call(request, "PATCH", path, body=changed_limits(form))
        return part_of(form).path("/keys")

    async def rotate(request: Request, form: FormData) -> FormOutcome:
        path = f"/keys/{quote(request.path_params['prefix'], safe='')}/rotate"
        query = {"keep_s": str(form.get("keep_s", "")).strip() or "0"}
        made = await pages.call(request, "POST", path, query=query)
        return FormOutcome(found=made, form=part_of(form).fields)

    async def revoke(request: Request, form: FormData) -> str:
        path = f"/keys/{quote(request.path_params['prefix'], safe='')}"
        await pages.call(request, "DELETE", path)
        return part_of(form).path("/keys")

    return [
        Route("/keys", show_keys),
        site.form_route("/keys", add, show_keys),
        site.form_route("/keys/{prefix}/limit", limit, show_keys),
        site.form_route("/keys/{prefix}/rotate", rotate, show_keys),
        site.form_route("/keys/{prefix}/revoke", revoke, show_keys),
    ]


def user_routes(pages: FleetPages) -> list[Route]:
    """Routes of users."""
    site = pages.site

    async def show_users(request: Request, outcome: FormOutcome = NO_FORM) -> Response:
        site.find_person(request, admin=True)
        part = part_of(outcome.form or request.query_params)
        found = await pages.call(request, "GET", "/users", query=part.query)
        values = {
            "title": "Users",
            "users": found["data"],
            "shown": shown_list(part, "/users", found),
        }
        return site.page(request, "users", values, outcome)

    async def add(request: Request, form: FormData) -> str:
        body = {"name": str(form.get("name", "")).strip(), "role": form.get("role", "")}
        await pages.call(request, "POST", "/users", body=body)
        return "/users"

    async def change(request: Request, form: FormData) -> str:
        path = f"/users/{quote(request.path_params['name'])}"
        body: dict[str, Any] = changed_limits(form) if "period" in form else {}
        if "role" in form:
            body["role"] = form["role"]
        if "disabled" in form:
            body["disabled"] = form["disabled"] == "yes"
        if "based_on" in form:
            body["based_on"] = typed_json(str(form["based_on"]))
        await pages.call(request, "PATCH", path, body=body)
        return part_of(form).path("/users")

    return [
        Route("/users", show_users),
        site.form_route("/users", add, show_users),
        site.form_route("/users/{name:path}/change", change, show_users),
    ]


def limits_of(form: FormData) -> dict[str, Any]:
    """The limits of a form; an empty field is no limit. Raises ApiRefusal."""
    numbers = {name: typed_number(str(form.get(name, ""))) for name in NUMBERS}
    had = typed_list(str(form.get("had_quotas", "")))
    quotas = {**dict.fromkeys(had), **model_quotas(str(form.get("quotas", "")))}
    return {**numbers, "period": form.get("period", "month"), "quotas": quotas}


def changed_limits(form: FormData) -> dict[str, Any]:
    """The limits of a form, with those that it was made from. Raises ApiRefusal."""
    return limits_of(form) | {"based_on": typed_json(str(form.get("based_on", "")))}


def model_quotas(text: str) -> Mapping[str, Any]:
    """Quotas of single models, as MODEL=TOKENS/PERIOD. Raises ApiRefusal."""
    found = {}
    for one in typed_list(text):
        model, equals, said = one.rpartition("=")
        tokens, slash, period = said.partition("/")
        if not (model and equals and tokens.isdecimal()):
            sentence = f"quotas of models has {one!r:.100}, must be MODEL=TOKENS/PERIOD"
            raise ApiRefusal(HTTPStatus.BAD_REQUEST, sentence)
        found[model] = {"tokens": typed_number(tokens), "period": period if slash else "month"}
    return found
