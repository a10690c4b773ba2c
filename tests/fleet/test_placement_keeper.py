"""A placement is kept on, whatever fails meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvmig.core.api_records import InstanceRow
from kvmig.core.errors import ConfigError
from kvmig.fleet import placement_controller
from kvmig.fleet.deployments import DeploymentEvent
from kvmig.fleet.managed_model import CatalogEntry
from kvmig.fleet.placement_controller import DesiredPlacement, PlacementController
from kvmig.fleet.tables import StoreError
from kvmig.placement.executor import DeploymentClient, ReplaceFailed
from kvmig.placement.file import PlacedModel, PlacedUnit, UnitPlacement
from kvmig.placement.moves import PlanWave
from tests.support.fleet_api import Api
from tests.support.fleet_stores import Place
from tests.support.model_bench import Bench, served, silence, spec
from tests.support.waiting import until

WANTED = DesiredPlacement(UnitPlacement([PlacedUnit(models=[], memory_bytes=9, name="left")]))
OTHER = DesiredPlacement(UnitPlacement([PlacedUnit(models=[], memory_bytes=9, name="right")]))


class Keeper(PlacementController):
    """Deployments that the test plays."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.models, self.keep_stored)
        self.bench = bench
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


async def test_a_deployment_that_does_not_answer_a_look_for_lost_instances_ends_nothing(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    silence(monkeypatch)
    bench, looks = keeper.bench, list[str]()
    other = replace(spec(), name="b")
    bench.models.take_catalogue(
        CatalogEntry(f"m{at}", one.name, 1, True, one) for at, one in enumerate((spec(), other))
    )
    bench.want("a", "b")
    for name in "ab":
        bench.watched_of(name).told = DeploymentEvent(0, data=(served("i0"),))
    bench.turn(1)
    bench.models.workers.address = "auto"

    async def rows(client: DeploymentClient) -> list[InstanceRow]:
        looks.append(client.name)
        if client.name == "a":
            raise ReplaceFailed("deployment a doesn't answer")
        return []

    monkeypatch.setattr(DeploymentClient, "rows", rows)
    models = [PlacedModel(name=name, kv_bytes=1) for name in ("a", "b")]
    unit = PlacedUnit(models=models, memory_bytes=9, name="left")
    await keeper.reach_placement(DesiredPlacement(UnitPlacement([unit])))
    await until(lambda: looks.count("b") > 2)
    assert (keeper.standing().state, faults(keeper)) == ("reached", 0)


async def test_a_placement_that_can_not_be_dropped_is_kept_on(
    keeper: Keeper, sqlite_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    api = Api(sqlite_place)
    await api.backend.stored(api.store.open)
    api.backend.replacer = keeper
    await api.restart()
    await keeper.reach_placement(WANTED)
    await until(lambda: keeper.looks > 0)

    def away(*_: object) -> None:
        raise StoreError("the database is away")

    with monkeypatch.context() as patched:
        patched.setattr(api.store, "set_placement", away)
        status, _ = await api.ask("DELETE", "placement")
    assert status == 503
    looks = keeper.looks
    await until(lambda: keeper.looks > looks + 1)
    assert keeper.standing().state == "reached"
    assert (await api.ask("DELETE", "placement"))[0] == 200
    assert keeper.standing().state == "none"
    await api.close()


async def test_what_is_planned_again_while_a_placement_is_dropped_is_not_stored(
    keeper: Keeper,
) -> None:
    keeper.other = OTHER
    dropping, may_drop = asyncio.Event(), asyncio.Event()

    async def forget() -> None:
        dropping.set()
        await may_drop.wait()

    await keeper.reach_placement(WANTED)
    dropped = asyncio.create_task(keeper.drop_placement(forget))
    await dropping.wait()
    await asyncio.sleep(0.1)
    may_drop.set()
    await dropped
    await asyncio.sleep(0.05)
    assert (keeper.stored, keeper.standing().state) == ([], "none")
