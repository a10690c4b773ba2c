"""Stores of the tests, by the kind of their database."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from alembic import command
from alembic.config import Config
from sqlalchemy import create_engine
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
