"""Pages over a store."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvmig.fleet.store import FleetStore
from tests.support.fleet_stores import Place
from tests.support.page_api import Pages


@pytest.fixture(scope="session")
def new_fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fleet whose database is new; tests copy it, since making one takes longer."""
    folder = tmp_path_factory.mktemp("new-fleet")
    store = FleetStore(f"sqlite:///{folder}/fleet.db", folder / "pepper")
    store.open()
    store.close()
    return folder


@pytest.fixture
async def pages(tmp_path: Path, new_fleet: Path) -> AsyncIterator[Pages]:
    """Pages that nobody has logged in to."""
    folder = tmp_path / "fleet"
    shutil.copytree(new_fleet, folder)
    made = Pages(Place(f"sqlite:///{folder}/fleet.db", folder))
    await made.backend.stored(made.store.open)
    yield made
    await made.close()
