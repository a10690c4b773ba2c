"""`kvmig placement rates`: the models file of `python -m kvmig.placement`, from usage records."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any

import msgspec
import typer

from kvmig.cli.common import Json, day_of, said, show, where
from kvmig.core.errors import ConfigError
from kvmig.placement.problem import ModelLoad


@said
def show_rates(
    since: Annotated[
        str, typer.Option(help="First day (UTC): 2026-11-01, today, yesterday or 7d.")
    ] = "today",
    until: Annotated[str, typer.Option(help="Last day (UTC), in the same forms.")] = "today",
    as_json: Json = False,
) -> None:
    """Print the models file for `python -m kvmig.placement`: each model's calls per second and its
    mean lengths, by the usage records of whole days."""
    today = datetime.now(UTC).date()
    first, last = day_of("--since", since, today), day_of("--until", until, today)
    answer = where.client().get("usage", by="model", since=first, until=last)
    loads = loads_of(answer["data"], seconds_of(first, last, time.time()))
    show({"models": msgspec.to_builtins(loads)}, as_json, lambda _: models_file(loads))


def seconds_of(first: str, last: str, now: float) -> float:
    """Seconds of these days (UTC) until now. Raises ConfigError where there are none."""
    begin, end = (_midnight(date.fromisoformat(one)) for one in (first, last))
    end = min(end + timedelta(days=1).total_seconds(), now)
    if end <= begin:
        raise ConfigError(f"--since is {first}, must be a day until {last} that has begun")
    return end - begin


def _midnight(day: date) -> float:
    return datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp()


def loads_of(rows: Sequence[Mapping[str, Any]], seconds: float) -> list[ModelLoad]:
    """The models with their rates and mean lengths, by name. rows: usage by model.

    Raises ConfigError where no model had calls.
    """
    called = [one for one in rows if one["calls"]]
    if not called:
        raise ConfigError("no model had calls in these days, so there are no rates")
    return [
        ModelLoad(
            name=one["model"],
            model=one["model"],
            rate=one["calls"] / seconds,
            prompt_tokens=max(1.0, one["prompt"] / one["calls"]),
            output_tokens=max(1.0, one["output"] / one["calls"]),
        )
        for one in sorted(called, key=lambda one: str(one["model"]))
    ]


def models_file(loads: Sequence[ModelLoad]) -> str:
    """The file's text."""
    return "\n".join(
        f"[[models]]\n"
        f"name = {json.dumps(one.name, ensure_ascii=False)}\n"
        f"model = {json.dumps(one.model, ensure_ascii=False)}  # whose costs it has\n"
        f"rate = {one.rate:.6g}\n"
        f"prompt_tokens = {one.prompt_tokens:.6g}\n"
        f"output_tokens = {one.output_tokens:.6g}\n"
        for one in loads
    )
