"""Placements that are planned again for the rates at which requests come."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmig.core.errors import ConfigError
from kvmig.fleet.rate_replanner import RateReplanner
from kvmig.placement.estimator import PlanEstimator
from kvmig.placement.file import PlacedModel, PlacedUnit, UnitPlacement, plan_of
from kvmig.placement.problem import ModelLoad, cluster_of
from kvmig.placement.rates import LEAST_RATE, MeasuredRates
from kvmig.placement.replan import ReplanRule, check_rule, replanned
from kvmig.placement.step_costs import load
from kvmig_tools.sim.mux import poisson, simulate

GIB = 1 << 30
START_S = dict.fromkeys("abc", 10.0)
LOOK_S = 5.0


def rule(**rates: float) -> ReplanRule:
    models = [ModelLoad(name, "llama-7b", rate) for name, rate in rates.items()]
    return ReplanRule(load("a100-80g"), models)


def placement(**units: str) -> UnitPlacement:
    """Of models by unit: two of them fit into one."""
    return UnitPlacement(
        [
            PlacedUnit(
                78 * GIB, name, 0, [at],
                [PlacedModel(one, 18 * GIB, 20 * GIB, GIB) for one in models.split()],
            )
            for at, (name, models) in enumerate(units.items())
        ]
    )  # fmt: skip


def models_of(found: UnitPlacement) -> list[set[str]]:
    return [{one.name for one in unit.models} for unit in found.units]


EVEN = rule(a=4.0, b=4.0, c=4.0)
BEFORE = placement(left="a b", right="b c")


# -- what is planned


def test_rates_as_planned_leave_the_placement_as_it_is() -> None:
    found = replanned(BEFORE, EVEN, EVEN.planned, START_S)
    assert (found.placement, found.why) == (None, "no other placement serves noticeably more")


def test_a_model_that_becomes_hot_gets_the_place_of_one_that_cools() -> None:
    found = replanned(BEFORE, EVEN, {"a": 9.0, "b": 1.0, "c": 1.0}, START_S)
    assert found.placement is not None
    assert models_of(found.placement) == [{"a", "b"}, {"a", "c"}]
    assert found.why.startswith("worth it: in 600 s")
    assert [one.called for one in found.placement.units] == ["left", "right"]


def test_each_instance_keeps_the_bytes_of_its_model() -> None:
    found = replanned(BEFORE, EVEN, {"a": 9.0, "b": 1.0, "c": 1.0}, START_S).placement
    assert found is not None
    sizes = {(one.held_bytes, one.kv_bytes) for unit in found.units for one in unit.models}
    assert sizes == {(20 * GIB, 18 * GIB)}


def test_a_gain_that_the_way_there_would_eat_is_left() -> None:
    slow = dict.fromkeys("abc", 20_000.0)
    found = replanned(BEFORE, EVEN, {"a": 9.0, "b": 1.0, "c": 1.0}, slow)
    assert found.placement is None
    assert found.why.startswith("not worth it")


def test_the_new_placement_has_more_requests_in_time_in_the_simulator() -> None:
    now = {"a": 12.0, "b": 1.0, "c": 1.0}
    after = replanned(BEFORE, EVEN, now, START_S).placement
    assert after is not None
    models = [ModelLoad(name, "llama-7b", rate) for name, rate in now.items()]
    estimator = PlanEstimator(models, cluster_of("1x2:a100-80g"))
    coming = [poisson(one, int(60 * one.rate), at) for at, one in enumerate(models)]
    even = [
        replace(unit, models=[replace(one, rate=1.0) for one in unit.models])
        for unit in BEFORE.units
    ]
    old, new = (
        simulate(estimator, plan_of(one, estimator, "p"), coming)
        for one in (UnitPlacement(even), after)
    )
    assert new.in_time[8] > 0.95
    assert old.in_time[8] < 0.8


# -- what can't be planned again


@pytest.mark.parametrize(
    ("given_rule", "sentence"),
    [
        (rule(a=1.0, b=1.0), "models has c 0 times, must have each model"),
        (rule(a=1.0, b=1.0, c=1.0, d=1.0), "models has d, which the placement doesn't place"),
        (
            replace(EVEN, models=[replace(one, model="gpt") for one in EVEN.models]),
            "model of a is 'gpt', must be of llama-13b, llama-30b, llama-65b, llama-7b",
        ),
    ],
)
def test_a_rule_that_doesnt_fit_the_placement_is_refused(
    given_rule: ReplanRule, sentence: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        check_rule(given_rule, BEFORE, "replan")
    assert sentence in str(refused.value)


def test_units_that_share_kv_cache_arent_planned_again() -> None:
    shared = UnitPlacement([replace(one, arena_bytes=40 * GIB) for one in BEFORE.units])
    with pytest.raises(ConfigError, match="arena_bytes of the placement's units must be 0"):
        check_rule(EVEN, shared, "replan")


# -- rates


@given(
    rate=st.floats(0.5, 50), span=st.floats(10, 600), looks=st.integers(1, 200),
    seconds=st.floats(0.5, 60),
)  # fmt: skip
def test_a_steady_rate_is_measured_as_it_is_from_the_first_look_on(
    rate: float, span: float, looks: int, seconds: float
) -> None:
    measured = MeasuredRates(span)
    for _ in range(looks):
        measured.add({"a": rate * seconds}, seconds)
    assert measured.rates()["a"] == pytest.approx(rate)


def test_a_model_without_requests_keeps_a_rate_that_a_plan_can_divide_by() -> None:
    measured = MeasuredRates(60.0)
    for _ in range(1000):
        measured.add({"a": 0.0}, LOOK_S)
    assert measured.rates() == {"a": LEAST_RATE}


def test_chance_changes_no_rate() -> None:
    draw, changes = np.random.default_rng(1), 0
    planned = {"a": 0.2, "b": 2.0, "c": 20.0}
    measured = MeasuredRates(300.0)
    for _ in range(2000):  # almost three hours
        measured.add({one: draw.poisson(LOOK_S * rate) for one, rate in planned.items()}, LOOK_S)
        changes += measured.settled and bool(measured.changed(planned, 0.25))
    assert changes <= 20


def test_a_rate_that_doubles_is_seen_within_its_span() -> None:
    measured = MeasuredRates(300.0)
    for _ in range(200):
        measured.add({"a": 2.0 * LOOK_S}, LOOK_S)
    assert not measured.changed({"a": 2.0}, 0.25)
    for _ in range(60):
        measured.add({"a": 4.0 * LOOK_S}, LOOK_S)
    assert measured.changed({"a": 2.0}, 0.25) == ["a"]


# -- one after the other, in virtual time


class Traffic:
    """Requests at rates that change, the clock, and the replanner that follows them."""

    def __init__(self) -> None:
        self.now = 0.0
        self.replanner = RateReplanner(EVEN, self.rate_of, lambda: self.now)
        self.rates: Mapping[str, float] = {"a": 4.0, "b": 4.0, "c": 4.0}
        self.stores = True
        """Whether what is planned can be stored."""

    def rate_of(self, name: str, until: float, seconds: float) -> float:
        return self.rates[name]

    async def pass_by(self, placed: UnitPlacement, seconds: float) -> list[UnitPlacement]:
        """The placements that were planned meanwhile."""
        found: list[UnitPlacement] = []
        for _ in range(int(seconds / LOOK_S)):
            self.now += LOOK_S
            other = await self.replanner.replan(found[-1] if found else placed, START_S)
            if other is not None and self.stores:
                self.replanner.take_rule(other[1])
                found.append(other[0])
        return found


async def test_a_shift_is_followed_by_one_plan_for_the_new_rates() -> None:
    traffic = Traffic()
    assert await traffic.pass_by(BEFORE, 1200) == []
    traffic.rates = {"a": 9.0, "b": 1.0, "c": 1.0}
    (shifted,) = await traffic.pass_by(BEFORE, 1200)
    assert models_of(shifted) == [{"a", "b"}, {"a", "c"}]
    assert traffic.replanner.rule.planned == pytest.approx(traffic.rates)
    traffic.rates = {"a": 1.0, "b": 1.0, "c": 9.0}
    (back,) = await traffic.pass_by(shifted, 1200)
    assert sum("c" in one for one in models_of(back)) == 2


async def test_a_plan_that_could_not_be_stored_is_made_again() -> None:
    traffic = Traffic()
    traffic.rates, traffic.stores = {"a": 9.0, "b": 1.0, "c": 1.0}, False
    assert await traffic.pass_by(BEFORE, 1200) == []
    assert traffic.replanner.rule.planned == EVEN.planned
    traffic.stores = True
    (shifted,) = await traffic.pass_by(BEFORE, 600)
    assert models_of(shifted) == [{"a", "b"}, {"a", "c"}]


async def test_a_burst_that_is_over_before_it_is_confirmed_moves_nothing() -> None:
    traffic = Traffic()
    assert await traffic.pass_by(BEFORE, 600) == []
    traffic.rates = {"a": 20.0, "b": 4.0, "c": 4.0}
    assert await traffic.pass_by(BEFORE, 30) == []
    traffic.rates = {"a": 4.0, "b": 4.0, "c": 4.0}
    assert await traffic.pass_by(BEFORE, 3600) == []


async def test_rates_that_swing_faster_than_the_horizon_move_nothing_twice() -> None:
    traffic = Traffic()
    placed, moved = BEFORE, 0
    for turn in range(12):  # an hour
        hot, cold = ("a", "c") if turn % 2 else ("c", "a")
        traffic.rates = {hot: 9.0, cold: 1.0, "b": 1.0}
        found = await traffic.pass_by(placed, 300)
        placed, moved = (found[-1] if found else placed), moved + len(found)
    assert moved <= 6


async def test_what_came_of_the_last_plan_is_said() -> None:
    traffic = Traffic()
    traffic.rates = {"a": 6.0, "b": 6.0, "c": 6.0}
    assert await traffic.pass_by(BEFORE, 900) == []
    assert traffic.replanner.verdict.startswith("rates changed of a, b, c: ")
    assert traffic.replanner.rates()["a"] == pytest.approx(6.0)
