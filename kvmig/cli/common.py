"""What the commands of `kvmig` have in common: which fleet, how they print, how they fail."""

from __future__ import annotations

import json
import os
import shlex
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.table import Table

from kvmig.cli.client import FleetClient
from kvmig.core.errors import ConfigError, KvmigError
from kvmig.fleet.settings import FleetSettings, data_folder

Parameters = ParamSpec("Parameters")

Json = Annotated[bool, typer.Option("--json", help="Print the server's answer as JSON.")]
PIPE_COLUMNS = 1 << 16
"""Width of a table that goes to no terminal: who reads it there wants each row in one line."""
SLOW_S = 1.5
"""Time after which a command prints what it waits for."""


@dataclass
class FleetAddress:
    """The fleet that the command is for."""

    data: str = ""
    url: str = ""
    key: str = ""

    def client(self) -> FleetClient:
        """A client of the fleet's server."""
        settings = FleetSettings(data=data_folder(self.data))
        return FleetClient(str(settings.api), self.url, self.key)

    def door(self) -> FleetClient:
        """A client of the fleet's proxies. Raises CallFailure, ConfigError."""
        if self.url:
            return FleetClient("", self.url, self.admin_key())
        found = self.client().get("status")
        return FleetClient("", found["address"], self.admin_key(), found.get("certificate", ""))

    def admin_key(self) -> str:
        """A key for the proxy, from the fleet's folder where none is given."""
        try:
            return self.key or Path(data_folder(self.data), "admin-key").read_text().strip()
        except OSError:
            return ""


where = FleetAddress()


def said(command: Callable[Parameters, None]) -> Callable[Parameters, None]:
    """Print a command's errors as one line: exit code 2 for bad input, 1 for the rest."""

    @wraps(command)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except ConfigError as error:
            print(f"kvmig: {error}", file=sys.stderr)
            raise typer.Exit(2) from error
        except KvmigError as error:
            print(f"kvmig: {error}", file=sys.stderr)
            raise typer.Exit(1) from error

    return run


@contextmanager
def patience(sentence: str) -> Iterator[None]:
    """Print on stderr what the command waits for, if it takes long."""
    words = (f"kvmig: {sentence}",)
    late = threading.Timer(SLOW_S, print, words, {"file": sys.stderr, "flush": True})
    late.daemon = True
    late.start()
    try:
        yield
    finally:
        late.cancel()


def show(answer: Any, as_json: bool, table: Callable[[Any], Table | str]) -> None:
    """Print an answer for people, or as it is."""
    if as_json:
        print(json.dumps(answer, indent=2))
    elif isinstance(found := table(answer), str):
        if found:
            print(found)
    else:
        given = sys.stdout.isatty() or "COLUMNS" in os.environ
        out = Console(highlight=False, markup=False, width=None if given else PIPE_COLUMNS)
        out.print(found)


def done(answer: Any, as_json: bool) -> None:
    """Print the answer to an order that says nothing to people."""
    show(answer, as_json, lambda _: "")


def table_of(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Rows under names."""
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*("-" if one is None else str(one) for one in row))
    return table


def show_table(
    answer: Any, as_json: bool, columns: Sequence[str], row: Callable[[Any], Sequence[object]]
) -> None:
    """Print the `data` of an answer for people, a row for each, or the answer as it is."""
    show(answer, as_json, lambda found: table_of(columns, map(row, found["data"])))


def time_of(at: float | None) -> str | None:
    """A Unix time, for people."""
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(" ", "seconds")


def words_of_flags(text: str) -> list[str]:
    """The engine's flags of an option. Raises ConfigError."""
    try:
        return shlex.split(text)
    except ValueError as error:
        said = f"--flags is {text!r:.200}, must be a list of words: {error}"
        raise ConfigError(said) from error


def day_of(flag: str, text: str, today: date) -> str:
    """A day (UTC) from `today`, `yesterday`, `7d` (seven days ago) or as it is written.

    Raises ConfigError.
    """
    ago = {"": None, "today": 0, "yesterday": 1}
    if text in ago:
        days = ago[text]
    elif text.endswith("d") and text[:-1].isdecimal() and len(text) <= 5:
        days = int(text[:-1])
    else:
        try:
            return date.fromisoformat(text).isoformat()
        except ValueError as error:
            raise ConfigError(
                f"{flag} is {text!r:.100}, must be a day (UTC) such as 2026-11-01, today,"
                " yesterday, or 7d for seven days ago"
            ) from error
    return "" if days is None else (today - timedelta(days=days)).isoformat()
