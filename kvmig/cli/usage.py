"""`kvmig usage`: what calls have used, and for how long it is kept call by call."""

from __future__ import annotations

import csv
import sys
from datetime import UTC, datetime
from typing import Annotated

import typer

from kvmig.cli.common import Json, day_of, patience, said, show, table_of, where
from kvmig.core.errors import ConfigError

usage_app = typer.Typer(invoke_without_command=True)
MOST_DAYS = 9999
UNITS = ("characters", "seconds", "images")
"""Columns of what is not counted in tokens, which the table shows where there is any."""


@usage_app.callback()
@said
def usage(
    context: typer.Context,
    by: Annotated[
        str, typer.Option(help="Group by key, user, model or day; several with commas.")
    ] = "model",
    since: Annotated[
        str, typer.Option(help="First day (UTC): 2026-11-01, today, yesterday or 7d.")
    ] = "",
    until: Annotated[str, typer.Option(help="Last day (UTC), in the same forms.")] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    as_json: Json = False,
) -> None:
    """Show calls, their tokens, and their characters of speech, seconds of recordings and images;
    largest first: of all, or with a key of scope read of its user."""
    if context.invoked_subcommand is not None:
        return
    today = datetime.now(UTC).date()
    first, last = day_of("--since", since, today), day_of("--until", until, today)
    answer = where.client().get("usage", by=by, since=first, until=last)
    columns = [*(one for one in by.split(",") if one), "calls", "prompt", "cached", "output"]
    columns += [one for one in UNITS if as_csv or any(row[one] for row in answer["data"])]
    rows = [[one[name] for name in columns] for one in answer["data"]]
    if as_csv:
        writer = csv.writer(sys.stdout)
        writer.writerow(columns)
        writer.writerows(rows)
    else:
        show(answer, as_json, lambda _: table_of(columns, rows))


@usage_app.command("prune")
@said
def prune(
    keep_days: Annotated[
        int | None, typer.Option(help="Number of days before today to keep, 1 or more.")
    ] = None,
    before: Annotated[
        str, typer.Option(help="First day (UTC) to keep: 2026-11-01, today, yesterday or 90d.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Delete the usage records of older, finished calls. Daily totals stay, so `kvmig usage` and
    remaining quotas do not change."""
    if (keep_days is None) == (not before):
        raise ConfigError("prune takes either --keep-days or --before")
    if keep_days is not None and not 1 <= keep_days <= MOST_DAYS:
        raise ConfigError(f"--keep-days is {keep_days}, must be 1 to {MOST_DAYS}")
    text = before or f"{keep_days}d"
    day = day_of("--before", text, datetime.now(UTC).date())
    client, rows, more = where.client(), 0, True
    with patience("deleting in small batches; the fleet keeps serving"):
        while more:
            answer = client.post("usage/prune", {"before": day})
            rows, more = rows + answer["rows"], answer["more"]
    whole = {"before": day, "rows": rows}
    show(whole, as_json, lambda _: f"deleted the records of {rows} calls before {day}")
