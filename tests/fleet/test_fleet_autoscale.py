"""How many instances: Knative's windows, up at once, down by one, never below what holds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.api_records import InstanceRow
from kvmig.fleet.autoscale import (
    COOLDOWN_S,
    STABLE_S,
    DemandSample,
    DemandWindow,
    ObservedDemand,
    ScalingDecision,
    ScalingOrder,
    ScalingRule,
    counted,
    decide,
    next_order,
    one_less_holds,
)

RULE = ScalingRule(least=0, most=10, target=4)


def steady(load: float, ready: int = 1) -> ObservedDemand:
    return ObservedDemand(ready, load, load)


def test_the_mean_is_weighted_by_time() -> None:
    window = DemandWindow()
    window.add(DemandSample(at=10, seconds=10, request_s=100))  # ten requests for ten seconds
    window.add(DemandSample(at=40, seconds=30, request_s=0))
    assert window.concurrency(40, 40) == 2.5
    assert window.concurrency(40, 30) == 0
    assert window.concurrency(40, 35) == pytest.approx(50 / 35)


def test_samples_of_several_proxies_add_up() -> None:
    window = DemandWindow()
    window.add(DemandSample(at=10, seconds=10, request_s=30, arrivals=5))
    window.add(DemandSample(at=10, seconds=10, request_s=50, arrivals=15))
    assert window.concurrency(10, 10) == 8
    assert window.rate(10, 10) == 2


def test_what_is_older_than_the_windows_is_forgotten() -> None:
    window = DemandWindow()
    for second in range(1000):
        window.add(DemandSample(second, 1, 1))
    assert window.concurrency(999, 1000) * 1000 < 100


def test_it_goes_up_at_once_and_says_why() -> None:
    decided = decide(ScalingDecision(1), RULE, steady(12), 0)
    assert (decided.wanted, decided.why) == (3, "up to 3: 12.0 at 4 an instance")


def test_a_burst_counts_by_the_panic_window_and_does_not_go_down_for_a_minute() -> None:
    decided = decide(ScalingDecision(1), RULE, ObservedDemand(1, stable=2, panic=20), 0)
    assert decided.wanted == 5
    calm = ObservedDemand(5, stable=3, panic=0)
    assert decide(decided, RULE, calm, STABLE_S - 1).wanted == 5
    assert decide(decided, RULE, calm, STABLE_S).wanted == 4


def test_one_step_is_at_most_tenfold() -> None:
    assert decide(ScalingDecision(1), ScalingRule(most=1000, target=1), steady(900), 0).wanted == 10


def test_it_goes_down_one_at_a_time_with_pauses() -> None:
    state, downs = ScalingDecision(4, changed_at=0), []
    for now in range(0, 200, 5):
        before = state
        state = decide(state, RULE, steady(1, ready=state.wanted), now)
        if state.wanted < before.wanted:
            downs.append(now)
    assert state.wanted == 1
    assert downs == [COOLDOWN_S, 2 * COOLDOWN_S, 3 * COOLDOWN_S]


def test_it_does_not_go_down_where_the_survivors_would_not_hold_it() -> None:
    full = ObservedDemand(2, stable=1, panic=1, holds=False)
    assert decide(ScalingDecision(2), RULE, full, 1e6).wanted == 2


def test_a_lower_bound_from_above_is_an_order_and_needs_no_patience() -> None:
    decided = decide(
        ScalingDecision(3, changed_at=0), ScalingRule(most=1, target=1), steady(9, 3), 1
    )
    assert decided.wanted == 1


def test_it_does_not_go_down_while_others_still_start() -> None:
    assert decide(ScalingDecision(3), RULE, steady(1, ready=2), 1e6).wanted == 3


@pytest.mark.parametrize(
    ("rule", "demand", "wanted", "why"),
    [
        (ScalingRule(most=3, target=1), steady(9), 3, "up to 3: max"),
        (ScalingRule(least=2, most=3), steady(0), 2, "up to 2: min"),
        (ScalingRule(most=3), ObservedDemand(1, 0, 0, floor=2), 2, "up to 2: by the schedule"),
        (
            ScalingRule(most=9, target=2, kind="rps"),
            steady(5),
            3,
            "up to 3: 5.0/s at 2/s an instance",
        ),
    ],
)  # fmt: skip
def test_bounds_and_other_rules(
    rule: ScalingRule, demand: ObservedDemand, wanted: int, why: str
) -> None:
    decided = decide(ScalingDecision(1), rule, demand, 0)
    assert (decided.wanted, decided.why) == (wanted, why)


@given(
    st.integers(0, 3), st.integers(1, 20), st.floats(0.1, 100), st.lists(st.floats(0, 1e4)),
)  # fmt: skip
def test_it_is_always_within_the_bounds(
    least: int, more: int, target: float, loads: list[float]
) -> None:
    rule, state = ScalingRule(least, least + more, target), ScalingDecision(max(1, least))
    for number, load in enumerate(loads):
        state = decide(state, rule, steady(load, state.wanted), 7.0 * number)
        assert max(1, least) <= state.wanted <= rule.most


def row(state: str = "serving", used: int = 0, running: int = 0, number: int = 0) -> InstanceRow:
    """An instance of 100 blocks."""
    return InstanceRow(
        id=f"i{number}", state=state, blocks_total=100, blocks_used=used, running=running
    )


def test_instances_that_leave_or_failed_are_not_counted() -> None:
    assert counted([row(), row("starting"), row("draining"), row("failed")]) == 2


def test_the_survivors_hold_what_is_there_and_what_it_may_grow_by() -> None:
    assert one_less_holds([row(used=30, running=3), row(used=20, running=2)])
    assert not one_less_holds([row(used=31, running=3), row(used=20, running=2)])
    assert not one_less_holds([row(used=30, running=3), row(used=20, running=3)])


@pytest.mark.parametrize(
    ("instances", "wanted", "order"),
    [
        ([row()], 1, None),
        ([row()], 3, ScalingOrder(2, [])),
        ([row(), row("starting")], 1, ScalingOrder(-1, [])),
        ([row(), row("draining")], 1, None),
        ([row(), row("failed", number=7)], 1, ScalingOrder(0, ["i7"])),
        ([row(), row("failed", number=7)], 2, ScalingOrder(1, ["i7"])),
    ],
)
def test_one_order_leads_towards_the_number_that_is_wanted(
    instances: list[InstanceRow], wanted: int, order: ScalingOrder | None
) -> None:
    assert next_order(instances, wanted) == order
