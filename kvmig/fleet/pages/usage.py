"""Pages of what was used, and of who has changed what."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from http import HTTPStatus
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvmig.fleet.pages.backend import FleetPages
from kvmig.pages.api_calls import Query
from kvmig.pages.plots import DayValue, stacked_days
from kvmig.pages.words import typed_number

BY = ("model", "user", "key")
"""Fields by which the page groups."""
COUNTS = ("calls", "prompt", "cached", "output", "characters", "seconds", "images")
SHOWN = ("calls", "prompt", "output")
"""Counts that are plotted."""
DAYS = 30
"""Days that the page begins with."""
MOST_ROWS = 1000
MOST_SUMS = 10_000
"""Rows by field and day that are shown: they are taken apart on the server's event loop."""
MOST_TEXT = 300
"""Characters of a value before or after a change that are shown."""


def usage_routes(pages: FleetPages) -> list[Route]:
    """The routes."""
    site = pages.site

    async def rows(request: Request) -> tuple[str, dict[str, str], list[dict[str, Any]]]:
        """What is asked for: the field, the days, and the rows by field and day."""
        asked = request.query_params
        if (by := asked.get("by", "model")) not in BY:
            sentence = f"by is {by!r:.100}, must be one of {', '.join(BY)}"
            raise HTTPException(HTTPStatus.BAD_REQUEST, sentence)
        days = {one: asked.get(one, "") for one in ("since", "until")}
        if "since" not in asked:
            days["since"] = (today() - timedelta(days=DAYS - 1)).isoformat()
        query: Query = {"by": f"{by},day", "limit": MOST_SUMS + 1, **days}
        found = await pages.call(request, "GET", "/usage", query=query)
        return by, days, found["data"]

    async def show_usage(request: Request) -> Response:
        site.find_person(request)
        by, days, every = await rows(request)
        found = every[:MOST_SUMS]
        what = request.query_params.get("what", "output")
        what = what if what in SHOWN else "output"
        values = [DayValue(one["day"], str(one[by]), one[what]) for one in found]
        shown = {
            "title": "Usage",
            "by": by,
            "fields": BY,
            "what": what,
            "counts": SHOWN,
            **days,
            "plot": stacked_days(values, days["since"], days["until"] or today().isoformat()),
            "columns": [one for one in COUNTS if one in SHOWN or any(row[one] for row in found)],
            "sums": sums(found, by),
            "most": MOST_SUMS if len(every) > MOST_SUMS else 0,
        }
        return site.page(request, "usage", shown)

    async def usage_csv(request: Request) -> Response:
        site.find_person(request)
        by, _, found = await rows(request)
        if len(found) > MOST_SUMS:
            sentence = f"there are more than {MOST_SUMS} rows: choose fewer days"
            raise HTTPException(HTTPStatus.BAD_REQUEST, sentence)
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow([by, "day", *COUNTS])
        writer.writerows(
            [plain_cell(one[by]), one["day"], *(one[n] for n in COUNTS)] for one in found
        )
        named = {"content-disposition": 'attachment; filename="usage.csv"'}
        return Response(text.getvalue(), media_type="text/csv", headers=named)

    async def show_audit(request: Request) -> Response:
        site.find_person(request, admin=True)
        limit = typed_number(request.query_params.get("limit", "")) or 100
        found = (await pages.call(request, "GET", "/audit", query={"limit": limit}))["data"]
        for one in found:
            one["before"], one["after"] = map(shortened, differing(one["before"], one["after"]))
        values = {"title": "Audit", "rows": found, "limit": limit, "most": MOST_ROWS}
        return site.page(request, "audit", values)

    return [
        Route("/usage", show_usage),
        Route("/usage.csv", usage_csv),
        Route("/audit", show_audit),
    ]


def today() -> date:
    """The day in UTC."""
    return datetime.now(UTC).date()


def sums(rows: Sequence[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """The rows of all days together, the largest output first."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        one = found.setdefault(str(row[by]), {"name": str(row[by]), **dict.fromkeys(COUNTS, 0)})
        for name in COUNTS:
            one[name] += row[name]
    return sorted(found.values(), key=lambda one: (-one["output"], one["name"]))


def plain_cell(text: object) -> str:
    """A text that no spreadsheet takes for a formula."""
    return f"'{text}" if str(text).startswith(("=", "+", "-", "@")) else str(text)


def differing(before: object, after: object) -> tuple[object, object]:
    """What differs between two states; of mappings only the fields that do."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        return before, after
    names = [one for one in {**before, **after} if before.get(one) != after.get(one)]
    return {one: before.get(one) for one in names}, {one: after.get(one) for one in names}


def shortened(value: object) -> str:
    """A value as JSON, cut short; empty: there is none."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 1]}…"
