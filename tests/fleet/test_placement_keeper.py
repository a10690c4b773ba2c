"""A placement is kept on, whatever fails meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvmig.core.errors import ConfigError
from kvmig.fleet import placement_controller
from kvmig.fleet.placement_controller import DesiredPlacement, PlacementController
from kvmig.fleet.tables import StoreError
from kvmig.placement.executor import ReplaceFailed
from kvmig.placement.file import PlacedUnit, Placement
from kvmig.placement.moves import PlanWave
from tests.support.model_bench import Bench
from tests.support.waiting import until

WANTED = DesiredPlacement(Placement([PlacedUnit(models=[], memory_bytes=9, name="left")]))
OTHER = DesiredPlacement(Placement([PlacedUnit(models=[], memory_bytes=9, name="right")]))


class Keeper(PlacementController):
    """Deployments that the test plays."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.models, self.keep_stored)
        self.counted = bench.models.faults.count
        self.faults: list[Exception] = []
        """What the next steps raise."""
        self.unanswered: list[ReplaceFailed] = []
        """What the next looks raise."""
        self.looks = 0
        self.reached = 0
        self.away = False
        """Whether the database is."""
        self.other: DesiredPlacement | None = None
        """What is planned next."""
        self.stored: list[DesiredPlacement] = []

    def raise_next(self) -> None:
        if self.faults:
            raise self.faults.pop(0)

    async def keep_stored(self, wanted: DesiredPlacement) -> None:
        if self.away:
            raise StoreError("the database is away")
        self.stored.append(wanted)

    async def _way(self, wanted: DesiredPlacement) -> list[PlanWave]:
        self.looks += 1
        if self.unanswered:
            raise self.unanswered.pop()
        self.raise_next()
        return []

    async def _reach(self, wanted: DesiredPlacement) -> None:
        self.raise_next()
        self.reached += 1

    async def _replanned(self, wanted: DesiredPlacement) -> DesiredPlacement | None:
        self.raise_next()
        return self.other if wanted == WANTED else None


@pytest.fixture
async def keeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Keeper]:
    for name in ("LOOK_S", "WAIT_S"):
        monkeypatch.setattr(placement_controller, name, 0.01)
    bench = Bench(tmp_path)
    made = Keeper(bench)
    yield made
    await made.close()
    await bench.models.close()


def faults(keeper: Keeper) -> int:
    return keeper.counted["placing"]


async def test_an_unforeseen_error_is_counted_and_the_placement_is_reached_after_it(
    keeper: Keeper,
) -> None:
    keeper.faults = [ZeroDivisionError("a"), KeyError("b")]
    await keeper.reach_placement(WANTED)
    await until(lambda: keeper.standing().state == "failed")
    assert keeper.standing().why.startswith("ZeroDivisionError('a'); it is tried again within")
    await until(lambda: keeper.standing().state == "reached")
    assert keeper.standing().why == ""
    assert faults(keeper) == 2


async def test_a_placement_that_is_reached_is_looked_at_after_an_error(keeper: Keeper) -> None:
    await keeper.reach_placement(WANTED)
    await until(lambda: keeper.looks > 0)
    keeper.faults = [ZeroDivisionError()]
    await until(lambda: faults(keeper) == 1)
    looks = keeper.looks
    await until(lambda: keeper.looks > looks + 1)
    assert (keeper.standing().state, keeper.reached) == ("reached", 1)


async def test_while_the_database_is_away_the_next_plan_waits_and_is_stored_once(
    keeper: Keeper,
) -> None:
    keeper.away, keeper.other = True, OTHER
    await keeper.reach_placement(WANTED)
    await until(lambda: faults(keeper) >= 2)
    standing = keeper.standing()
    assert (standing.state, standing.placement) == ("reached", WANTED.placement)
    assert standing.why.startswith("the database is away; it is tried again within")
    keeper.away = False
    await until(lambda: keeper.standing().placement == OTHER.placement)
    await until(lambda: keeper.standing().state == "reached")
    assert keeper.stored == [OTHER]


async def test_pauses_grow_while_it_fails(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement_controller, "MOST_PAUSE_S", 0.04)
    keeper.faults = [ZeroDivisionError() for _ in range(4)]
    whys = set[str]()
    await keeper.reach_placement(WANTED)
    while keeper.standing().state != "reached":
        whys.add(keeper.standing().why.rpartition("within ")[2])
        await asyncio.sleep(0.002)
    assert {"0.01 s", "0.02 s", "0.04 s"} <= whys


async def test_a_deployment_that_does_not_answer_a_look_ends_nothing(keeper: Keeper) -> None:
    await keeper.reach_placement(WANTED)
    await until(lambda: keeper.looks > 0)
    keeper.unanswered = [ReplaceFailed("deployment a doesn't answer")]
    looks = keeper.looks
    await until(lambda: keeper.looks > looks + 2)
    assert (keeper.standing().state, faults(keeper)) == ("reached", 0)


@pytest.mark.parametrize("error", [ReplaceFailed("given up"), ConfigError("no way")])
async def test_a_placement_without_a_way_has_failed_for_good(
    keeper: Keeper, error: Exception
) -> None:
    keeper.faults = [error]
    await keeper.reach_placement(WANTED)
    await until(lambda: keeper.standing().state == "failed")
    await asyncio.sleep(0.05)
    assert (keeper.standing().why, keeper.reached) == (str(error), 0)
