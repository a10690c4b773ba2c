"""Pages over a store, and a browser."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvmig.fleet.store import FleetStore
from tests.support.browsers import chromium
from tests.support.fleet_stores import Place
from tests.support.page_api import Pages

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for the tests of one file; no other tests may run while it is there."""
    with chromium() as found:
        yield found


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
