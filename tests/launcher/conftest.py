"""A cluster whose processes are made up."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.made_up_cluster import World, world


@pytest.fixture
async def it() -> AsyncIterator[World]:
    """Two instances, which serve, and one front end."""
    async with world() as made:
        yield made
