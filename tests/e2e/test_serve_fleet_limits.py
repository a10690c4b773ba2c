"""A key's limits behind several proxies."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.test_serve_fleet_quotas import new_key
from tests.support.fleets import PATH, ToyFleet, ask
from tests.support.waiting import until

pytestmark = pytest.mark.server


async def test_with_three_proxies_a_client_within_its_limit_is_never_refused(
    tmp_path: Path,
) -> None:
    with ToyFleet(tmp_path, "--proxies=3") as fleet:
        fleet.add_toy("a")
        key, statuses = new_key(fleet, parallel=3), Counter[int]()

        async def call(times: int) -> None:
            for _ in range(times):
                async with fleet.client(key) as client:  # a connection, and so a proxy, each time
                    statuses[(await client.post(PATH, json=ask("a", 10))).status_code] += 1

        await asyncio.gather(*(call(30) for _ in range(3)))
        assert statuses == {200: 90}

        statuses.clear()
        fleet.hold(2)
        calls = [asyncio.create_task(call(1)) for _ in range(9)]
        await until(lambda: statuses[429] == 6)
        fleet.hold(None)
        await asyncio.gather(*calls)
        assert statuses == {200: 3, 429: 6}
