"""Routes of users and keys."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Literal, cast

import msgspec
from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import Response

from kvmig.accounts.keys import KeyGrant, KeyIndex, KeyTerms, ModelQuota, quotas_of
from kvmig.asgi.strict_body import StrictBody
from kvmig.fleet.account_lists import ListWindow
from kvmig.fleet.api_paths import routes_at
from kvmig.fleet.based_on import limits_of_key, order_based_on_values, values_of_user
from kvmig.fleet.quotas import left
from kvmig.fleet.store import MOST_KEEP_S, FleetStore, OrderActor
from kvmig.proxy.messages import QuotaLeft

DAY_S = 86400.0
JSON = "application/json"
LeftQuery = Annotated[bool, Query(alias="left")]
FindQuery = Annotated[
    str, Query(max_length=200, description="Only those whose names have each of these words.")
]
LimitQuery = Annotated[int | None, Query(ge=1, le=10_000, description="Most rows; null: all.")]
SkipQuery = Annotated[int, Query(ge=0, le=1_000_000_000, description="Rows to leave out.")]

STATE_FIELDS = ("role", "disabled")
"""What orders change of a user, apart from limits."""
Body = dict[str, Any]


def accounts_api(
    store: FleetStore,
    stored: Callable[..., Awaitable[Any]],
    changed: Callable[[], Awaitable[None]],
    keys: Callable[[], KeyIndex],
    caller: Any,
    reader: Any,
) -> APIRouter:
    """stored: runs a call of the database on the store's thread. changed: is awaited after each
    change. keys: those that let calls in now. reader: see `who_reads`."""
    api = routes_at()

    @api.get("/users")
    async def list_users(
        find: FindQuery = "", limit: LimitQuery = None, skip: SkipQuery = 0, _: OrderActor = caller
    ) -> Response:
        """The users of the fleet, by name; `total` counts those beyond `limit`, too."""

        def encoded() -> bytes:  # on the store's thread: there may be many
            found = store.find_users(ListWindow(find, limit, skip))
            return msgspec.json.encode({"data": found.rows, "total": found.total})

        return Response(await stored(encoded), media_type=JSON)

    @api.post("/users", status_code=HTTPStatus.CREATED)
    async def add_user(body: UserBody, actor: OrderActor = caller) -> Body:
        """Add a user."""
        await stored(store.add_user, body.name, body.role, actor)
        return {"name": body.name, "role": body.role}

    @api.patch("/users/{name:path}")
    async def set_user(name: str, body: UserChange, actor: OrderActor = caller) -> Body:
        """Change a user's role or limits, or refuse all keys of the user until they are enabled."""
        order = partial(
            store.set_user, name, actor,
            role=body.role, disabled=body.disabled, limits=body.changes(),
        )  # fmt: skip
        based_on = body.basis()
        look = partial(values_of_user, store, name, based_on or ())
        what = f"user {name}"
        row = await stored(order_based_on_values, what, look, based_on, order)
        await changed()
        found: Body = msgspec.to_builtins(row)
        return found

    @api.get("/keys")
    async def list_keys(
        with_left: LeftQuery = False,
        find: FindQuery = "",
        limit: LimitQuery = None,
        skip: SkipQuery = 0,
        user: str | None = reader,
    ) -> Response:
        """The keys of the fleet, by their prefixes, those that are not revoked first, by user, the
        newest first. `left`: with what is left of their quotas; `total` counts those beyond
        `limit`, too.

        A key with the scope `read` sees those of its own user.
        """
        found = await stored(store.find_keys, user, ListWindow(find, limit, skip))
        granted = [keys().of_prefix(row.prefix) for row in found.rows] if with_left else []

        def encoded() -> bytes:
            rows: list[Any] = found.rows
            if with_left:
                here = [grant for grant in granted if grant is not None]
                spare = left(store.database, here, time.time())
                rows = [
                    msgspec.to_builtins(row) | {"left": quotas_left(grant, spare)}
                    for row, grant in zip(rows, granted, strict=True)
                ]
            return msgspec.json.encode({"data": rows, "total": found.total})

        return Response(await stored(encoded), media_type=JSON)

    @api.post("/keys", status_code=HTTPStatus.CREATED)
    async def add_key(body: KeyBody, actor: OrderActor = caller) -> Body:
        """Create a key; only this answer shows it."""
        limits = body.model_dump(include=set(LimitsBody.model_fields))
        quotas = {name: one for name, one in limits.pop("quotas").items() if one is not None}
        terms = KeyTerms(
            scopes=tuple(body.scopes),
            models=None if body.models is None else tuple(body.models),
            cidrs=None if body.cidrs is None else tuple(body.cidrs),
            classes=None if body.classes is None else tuple(body.classes),
            expires=time.time() + body.days * DAY_S if body.days else None,
            quotas=msgspec.convert(quotas, dict[str, ModelQuota]),
            **limits,
        )
        row, key = await stored(store.create_key, body.user, body.name, terms, actor)
        await changed()
        return {"key": key, "prefix": row.prefix}

    @api.patch("/keys/{prefix}")
    async def limit_key(prefix: str, body: LimitsChange, actor: OrderActor = caller) -> Body:
        """Change the limits that the body names; all proxies know within a second."""
        order = partial(store.limit_key, prefix, body.changes(), actor)
        look, based_on = partial(limits_of_key, store, prefix), body.basis()
        what = f"limits of key {prefix}"
        row = await stored(order_based_on_values, what, look, based_on, order)
        await changed()
        return cast("Body", msgspec.to_builtins(row))

    @api.post("/keys/{prefix}/rotate")
    async def rotate_key(
        prefix: str,
        keep_s: Annotated[float, Query(ge=0, le=MOST_KEEP_S, allow_inf_nan=False)] = 0.0,
        actor: OrderActor = caller,
    ) -> Body:
        """Create another key with the same rights; this one is refused after `keep_s` seconds."""
        row, key = await stored(store.rotate_key, prefix, actor, keep_s=keep_s)
        await changed()
        return {"key": key, "prefix": row.prefix}

    @api.delete("/keys/{prefix}")
    async def revoke_key(prefix: str, actor: OrderActor = caller) -> Body:
        """Revoke a key: all proxies refuse it within a second."""
        await stored(store.revoke_key, prefix, actor)
        await changed()
        return {"prefix": prefix}

    return api


# -- what comes


class UserBody(StrictBody):
    """A user."""

    name: str = Field(min_length=1, max_length=128)
    role: Literal["user", "admin"] = "user"


class ModelQuotaBody(StrictBody):
    """A quota of one model."""

    tokens: int
    period: Literal["day", "month", "total"] = "month"


class LimitsBody(StrictBody):
    """Limits of a key, or of a user."""

    rpm: int | None = Field(default=None, description="Requests per minute; null: no limit.")
    tpm: int | None = Field(default=None, description="Tokens per minute; null: no limit.")
    parallel: int | None = Field(default=None, description="Requests at once; null: no limit.")
    quota: int | None = Field(default=None, description="Tokens in a period; null: no limit.")
    period: Literal["day", "month", "total"] = Field(default="month", description="Of the quota.")
    quotas: dict[str, ModelQuotaBody | None] = Field(
        default={}, description="More of them, by models; null: none of that one any more."
    )


class LimitsChange(LimitsBody):
    """Limits that are to be different; what isn't named stays."""

    based_on: LimitsBody | None = Field(
        default=None, description="Refuse it unless these are the limits now; null: don't."
    )

    def changes(self) -> Body:
        """The limits that are named."""
        return self.model_dump(include=set(LimitsBody.model_fields), exclude_unset=True)

    def basis(self) -> Body | None:
        """The limits that the order was made from."""
        return None if self.based_on is None else self.based_on.model_dump()


class UserBasis(LimitsBody):
    """A user as an order was made from it. Limits are compared where one of them is named, or
    nothing is."""

    role: Literal["user", "admin"] | None = Field(default=None, description="null: not compared.")
    disabled: bool | None = Field(default=None, description="null: not compared.")


class UserChange(LimitsChange):
    """What is to be different of a user; what isn't named stays."""

    based_on: UserBasis | None = Field(
        default=None, description="Refuse it unless the user is so now; null: don't."
    )
    role: Literal["user", "admin"] | None = Field(default=None, description="null: as it is.")
    disabled: bool | None = Field(default=None, description="null: as it is.")

    def basis(self) -> Body | None:
        """What the order was made from, of the user's role, state and limits."""
        if (given := self.based_on) is None:
            return None
        state = given.model_dump(include=set(STATE_FIELDS), exclude_none=True)
        if state and given.model_fields_set <= set(STATE_FIELDS):
            return state
        return state | given.model_dump(include=set(LimitsBody.model_fields))


class KeyBody(LimitsBody):
    """A key."""

    user: str
    name: str = Field(default="", max_length=128)
    models: list[str] | None = Field(default=None, description="Only these; null: all.")
    scopes: list[Literal["infer", "read", "admin"]] = Field(default=["infer"], min_length=1)
    cidrs: list[str] | None = Field(default=None, description="Only from there; null: anywhere.")
    classes: list[str] | None = Field(
        default=None, description="Only these priority classes; null: all."
    )
    days: float = Field(default=0.0, ge=0, le=36500, allow_inf_nan=False, description="0: no end.")


# -- what goes out


def quotas_left(grant: KeyGrant | None, spare: Mapping[str, QuotaLeft]) -> list[Body]:
    """What is left of each quota that holds for a key, its user's included; none of a revoked one.

    spare: by `Quota.id`.
    """
    found = [] if grant is None else quotas_of(grant)
    return [
        {
            "whose": "key" if one.whose.id == grant.origin else "user",
            "model": one.model or None,
            "tokens": one.tokens,
            "period": one.period,
            "left": max(0, spare[one.id].tokens),
            "renewed_at": spare[one.id].anew,
        }
        for one in found
        if grant is not None and one.id in spare
    ]
