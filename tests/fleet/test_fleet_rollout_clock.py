"""Roll-outs where Unix time jumps, and where the next server's clock differs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvmig.fleet.managed_model import CatalogEntry
from kvmig.fleet.rollout import RolloutPlan, RolloutTerms, begun, paused
from kvmig.fleet.rollout_table import StoredRollout
from tests.fleet.test_fleet_rollouts import NEW, OLD, RolloutBench, start_rolled
from tests.support.model_bench import silence


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RolloutBench]:
    silence(monkeypatch)
    made = RolloutBench(tmp_path)
    made.begin()
    yield made
    await made.models.close()


def stored(bench: RolloutBench) -> RolloutPlan:
    """What the database has."""
    return bench.kept[-1][1]


def plan_of(bench: RolloutBench) -> RolloutPlan:
    plan = bench.models.rollouts.plan("a")
    assert plan is not None
    return plan


async def test_an_order_counts_though_the_clock_was_set_back_after_the_last_step(
    bench: RolloutBench,
) -> None:
    start_rolled(bench, canary=(10, 50), hold_s=60)
    bench.ahead = -30.0
    ordered = paused(stored(bench), bench.wall)
    bench.models.take_catalogue([bench.entry(plan=ordered)])
    bench.turn(60)
    assert (plan_of(bench).state, plan_of(bench).share) == ("paused", 10)


async def test_a_step_that_is_not_stored_yet_stays_though_the_clock_was_set_back(
    bench: RolloutBench,
) -> None:
    start_rolled(bench, canary=(10, 50), hold_s=60)
    before = stored(bench)
    bench.turn(59)
    bench.ahead = -600.0
    bench.turn(1)
    assert plan_of(bench).share == 50
    bench.models.take_catalogue([bench.entry(plan=before)])
    bench.turn()
    assert plan_of(bench).share == 50


async def test_a_clock_that_is_set_ahead_shortens_no_step(bench: RolloutBench) -> None:
    start_rolled(bench, canary=(10, 50), hold_s=60)
    bench.ahead = 7200.0
    bench.turn(1)
    assert plan_of(bench).share == 10
    bench.turn(59)
    assert plan_of(bench).share == 50


async def test_a_clock_that_is_set_ahead_ends_no_streams(bench: RolloutBench) -> None:
    bench.say(old=2)
    start_rolled(bench, deadline_s=600)
    bench.say(old=2, new=1)
    bench.ahead = 7200.0
    bench.turn(1)
    bench.turn(1)
    assert bench.stopped == []


async def test_a_clock_that_is_set_back_makes_no_step_longer_and_its_calls_are_judged(
    bench: RolloutBench,
) -> None:
    start_rolled(bench, canary=(10, 50), hold_s=60)
    bench.ahead = -7200.0
    bench.turn(1)
    (both,) = bench.models.rollouts.both()
    assert both.since <= bench.wall, "the calls that begin from now on are of this step"
    assert stored(bench).since == both.since
    bench.turn(59)
    assert plan_of(bench).share == 50


async def test_a_step_is_no_longer_where_the_next_servers_clock_is_behind(
    bench: RolloutBench,
) -> None:
    start_rolled(bench, canary=(10,), hold_s=60)
    after = RolloutBench(bench.folder)
    after.now, after.ahead = bench.now, -3600.0
    after.models.take_catalogue([after.entry(plan=stored(bench))])
    after.adopt(*bench.running)
    after.turn()
    after.there("a")
    after.there("a@2")
    after.turn(1)
    assert plan_of(after).share == 10
    paused_by_order = paused(plan_of(after), after.wall)
    after.turn(60)
    assert plan_of(after).share == 100
    after.models.take_catalogue([after.entry(plan=paused_by_order)])
    assert plan_of(after).state == "paused"
    await after.models.close()


async def test_a_roll_out_that_fails_in_a_round_keeps_no_other_one_back(
    bench: RolloutBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = (replace(one, name="bad") for one in (OLD, NEW))
    first = CatalogEntry("m0", "bad", 1, True, old)
    bench.models.take_catalogue([first, bench.entry(OLD, 1)])
    bench.want("bad")
    bench.there("bad")
    bench.turn()
    running_at = bench.models.reports.running_at

    def odd(name: str, socket: str) -> int:
        if name == "bad":
            raise ZeroDivisionError
        return running_at(name, socket)

    monkeypatch.setattr(bench.models.reports, "running_at", odd)
    plan = begun(RolloutTerms(), 1, 2, bench.now)
    bad = CatalogEntry("m0", "bad", 2, True, new, StoredRollout(plan, old))
    bench.models.take_catalogue([bad])
    bench.models.take_catalogue([bad, bench.entry(NEW, plan=plan)])
    bench.models.reconcile()
    assert bench.models.faults.count["roll-outs"] == 1
    assert bench.models.shown("a@2") is not None
