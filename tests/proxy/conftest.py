"""A door for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.proxy_site import Site, site


@pytest.fixture
async def door(tmp_path: Path) -> AsyncIterator[Site]:
    """A door with one key that may use everything; it knows no models."""
    async with site(tmp_path) as made:
        yield made
