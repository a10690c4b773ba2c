"""Routes of the ledger: what calls have used, and how long their rows stay."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from datetime import date
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Query
from pydantic import Field
from starlette.responses import Response

from kvmig.asgi.strict_body import StrictBody
from kvmig.core.errors import ConfigError
from kvmig.fleet.api_paths import routes_at
from kvmig.fleet.ledger import FIELDS, sums
from kvmig.fleet.retention import UsageRetention, day_before
from kvmig.fleet.store import OrderActor
from kvmig.fleet.tables import FleetDatabase

PRUNE_S = 20.0
"""Most seconds that one order deletes rows."""

Body = dict[str, Any]


class PruneBody(StrictBody):
    """Which rows of the ledger go."""

    before: str = Field(min_length=1, description="A day (UTC); its own calls stay.")


def usage_api(
    database: FleetDatabase,
    stored: Callable[..., Awaitable[Any]],
    retention: UsageRetention,
    caller: Any,
    reader: Any,
) -> APIRouter:
    """stored: runs a call of the database on the store's thread. reader: see `who_reads`."""
    api = routes_at("/usage")

    @api.get("")
    async def usage(
        by: str = "model",
        since: str = "",
        until: str = "",
        limit: Annotated[int | None, Query(ge=1, description="Most rows; null: all.")] = None,
        user: str | None = reader,
    ) -> Response:
        """Calls and tokens by some of key, user, model, day, the largest output first; since,
        until: days in UTC.

        A key with the scope `read` sees those of its own user.
        """
        named = [one for one in by.split(",") if one]
        if unknown := [one for one in named if one not in FIELDS]:
            allowed = ", ".join(FIELDS)
            raise ConfigError(f"by has {unknown[0]!r:.100}, must be some of {allowed}")
        fields = tuple(dict.fromkeys(named))
        check_day("since", since)
        check_day("until", until)

        def encoded() -> bytes:  # on the store's thread: there may be many
            rows = sums(database, fields, since, until, user, limit)
            return msgspec.json.encode({"data": rows})

        return Response(await stored(encoded), media_type="application/json")

    @api.post("/prune")
    async def prune_usage(body: PruneBody, actor: OrderActor = caller) -> Body:
        """Delete rows of calls that began before a day (UTC) and are over; the days' sums stay.

        `more`: time was up before all were deleted; ask again.
        """
        check_day("before", body.before)
        if body.before > (today := day_before(time.time(), 0)):
            raise ConfigError(f"before is {body.before!r}, must be a day until today, {today}")
        rows, more = await retention.prune(body.before, actor, PRUNE_S)
        return {"before": body.before, "rows": rows, "more": more}

    return api


def check_day(field: str, day: str) -> None:
    """Raises ConfigError unless it is one of the calendar's, or empty."""
    try:
        sound = not day or date.fromisoformat(day).isoformat() == day
    except ValueError:
        sound = False
    if not sound:
        raise ConfigError(f"{field} is {day!r:.100}, must be a day (UTC) as 2026-11-01")
