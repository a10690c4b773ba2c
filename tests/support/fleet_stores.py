"""Stores of the tests, by the kind of their database."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import Engine, Pool, create_engine, event
from sqlalchemy.pool import NullPool

from kvmig.core.clock import monotonic
from kvmig.fleet.model_files import ModelFiles
from kvmig.fleet.settings import FleetSettings
from kvmig.fleet.spec import ModelSpec, spec_of
from kvmig.fleet.store import FleetStore, OrderActor
from kvmig.fleet.tables import SCHEMA

ANNA = OrderActor("anna", "10.0.0.1")


class Place:
    """A database's URL with its pepper's file."""

    def __init__(self, url: str, folder: Path) -> None:
        self.url = url
        self.folder = folder
        self.now = 1_000_000.0

    def store(self, wait_s: float = 0.2) -> FleetStore:
        """Not open yet; its clock is `now`."""
        return FleetStore(self.url, self.folder / "pepper", wait_s=wait_s, clock=lambda: self.now)

    def spec(self, name: str = "qwen", **more: Any) -> ModelSpec:
        """A model whose folder is there."""
        return spec_of({"name": name, "source": f"path:{self.folder}", **more})


def make_tables(url: str) -> None:
    """All that the newest schema has, as a first start makes it, in an empty database."""
    config = Config()
    config.set_main_option("script_location", "kvmig.fleet:migrations")
    with create_engine(url, poolclass=NullPool).begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, f"{SCHEMA:04}")


def idle_files(
    settings: FleetSettings, store: FleetStore, stored: Callable[..., Awaitable[Any]]
) -> ModelFiles:
    """What keeps models' files, and fetches none as long as nobody runs it."""

    async def changed() -> None:
        return

    return ModelFiles(settings, store.database, stored, changed, set, monotonic, time.time)


@dataclass
class DatabaseReads:
    """What was asked of databases, and how much of it SQLite gave."""

    queries: list[str] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)

    def of(self, table: str) -> list[str]:
        """The queries that read a table."""
        return [one for one in self.queries if table in one]


@contextmanager
def database_reads() -> Iterator[DatabaseReads]:
    """What this process reads from databases within the block."""
    made = DatabaseReads()

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        if statement.startswith("SELECT"):
            made.queries.append(statement)

    def count(connection: Any, *_: Any) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.row_factory = take

    def take(_: sqlite3.Cursor, row: tuple[Any, ...]) -> tuple[Any, ...]:
        made.rows.append(row)
        return row

    event.listen(Engine, "before_cursor_execute", note)
    event.listen(Pool, "checkout", count)
    try:
        yield made
    finally:
        event.remove(Engine, "before_cursor_execute", note)
        event.remove(Pool, "checkout", count)
