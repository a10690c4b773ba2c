"""A placement on workers that is planned again for the rates at which requests come, on a real Ray
cluster of a head and two nodes, which are processes of this machine, with toys.
"""

from __future__ import annotations

import asyncio
import tomllib
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.placement.test_replace import placement_text
from tests.support.fleets import ToyFleet, answer, ask, counted
from tests.support.waiting import until_yes

pytest.importorskip("ray", reason="needs the extra kvmig[ray]")

from tests.e2e.test_fleet_worker_placement import fleet_on, left_and_right, places, reached
from tests.e2e.test_fleet_workers import NamedNodes
from tests.e2e.test_serve_fleet_placement import rule

pytestmark = [pytest.mark.server, pytest.mark.long]


@pytest.fixture
def nodes() -> Iterator[NamedNodes]:
    with left_and_right(NamedNodes) as made:
        yield made


@pytest.fixture
def fleet(nodes: NamedNodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToyFleet]:
    """With models a and c on one worker each, and b on both."""
    with fleet_on(nodes, tmp_path_factory.mktemp("fleet")) as made:
        for name, count in (("b", 2), ("a", 1), ("c", 1)):
            made.add_toy(name, instances={"min": count, "max": 3}, memory=1 << 20)
            made.until(f"models/{name}", state="serving", serving=count)
        yield made


def on_workers(**more: Any) -> dict[str, Any]:
    """Units of which each holds two models, with their workers."""
    made = tomllib.loads(placement_text(0, left="a b", right="b c"))
    for unit in made["units"]:
        unit["worker"] = unit["name"]
    return {"placement": made, **more}


async def test_models_move_between_workers_for_the_rates_of_their_requests(
    fleet: ToyFleet,
) -> None:
    said = fleet.ask("PUT", "placement", on_workers(replan=rule(span_s=4, horizon_s=99)))
    assert said.status_code == 200, said.text
    await until_yes(lambda: reached(fleet))

    async def call(client: httpx.AsyncClient) -> None:
        while len(places(fleet).get("a", ())) < 2:
            assert await answer(client, ask("a", 10)) == counted(10)
            await asyncio.sleep(0.1)

    async with asyncio.timeout(120), fleet.client() as client:
        await asyncio.gather(*(call(client) for _ in range(5)))
    shown = fleet.get("placement")
    assert shown["replan"].startswith("rates changed of a"), shown
    await until_yes(lambda: reached(fleet))
    assert places(fleet)["a"] == {"left", "right"}
