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


@usage_app.callback()
@said
def usage(
    context: typer.Context,
    by: Annotated[str, typer.Option(help="Some of key, user, model, day.")] = "model",
    since: Annotated[
        str, typer.Option(help="First day (UTC): 2026-11-01, today, yesterday, 7d.")
    ] = "",
    until: Annotated[str, typer.Option(help="Last day, likewise.")] = "",
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    as_json: Json = False,
) -> None:
    """Calls and tokens; the largest first; with a key of the scope read, those of its user."""
    if context.invoked_subcommand is not None:
        return
    today = datetime.now(UTC).date()
    first, last = day_of("--since", since, today), day_of("--until", until, today)
    answer = where.client().get("usage", by=by, since=first, until=last)
    columns = [*(one for one in by.split(",") if one), "calls", "prompt", "cached", "output"]
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
        int | None, typer.Option(help="Days before today that stay, 1 or more.")
    ] = None,
    before: Annotated[
        str, typer.Option(help="First day (UTC) that stays: 2026-11-01, today, yesterday, 90d.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Delete the rows of calls that are older and over; the sums of days stay, and so what
    `kvmig usage` shows and what is left of quotas."""
    if (keep_days is None) == (not before):
        raise ConfigError("prune takes --keep-days or --before, one of them")
    if keep_days is not None and not 1 <= keep_days <= MOST_DAYS:
        raise ConfigError(f"--keep-days is {keep_days}, must be 1 to {MOST_DAYS}")
    text = before or f"{keep_days}d"
    day = day_of("--before", text, datetime.now(UTC).date())
    client, rows, more = where.client(), 0, True
    with patience("deletes piece by piece; orders and grants go on meanwhile"):
        while more:
            answer = client.post("usage/prune", {"before": day})
            rows, more = rows + answer["rows"], answer["more"]
    whole = {"before": day, "rows": rows}
    show(whole, as_json, lambda _: f"the rows of {rows} calls before {day} are deleted")
