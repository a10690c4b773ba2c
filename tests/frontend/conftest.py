"""A router on llumlets without engines, and a client of its admin API."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.support.admin_site import admin_client
from tests.support.fake_llumlet import Cluster, cluster


@pytest.fixture
async def it() -> AsyncIterator[Cluster]:
    """A router on two llumlets."""
    async with cluster() as made:
        yield made


@pytest.fixture
async def client(it: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """Of its admin API."""
    async with admin_client(it) as made:
        yield made
