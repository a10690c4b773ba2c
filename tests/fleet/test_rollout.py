"""A roll-out's steps, as pure decisions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvmig.core.errors import ConfigError
from kvmig.fleet.rollout import (
    CALLS,
    CallFigures,
    RolloutPlan,
    RolloutTerms,
    RolloutView,
    advance,
    begun,
    checked_terms,
    gives_way,
    is_overdue,
    need_of,
    paused,
    promoted,
    resumed,
    start_of,
    takes_all,
    with_live_fields,
    worse,
)
from kvmig.fleet.spec import InstanceCounts, ModelSpec

OLD = ModelSpec(name="a", source="path:/a")
PLAN = begun(RolloutTerms(canary=(10, 50), hold_s=60), 1, 2, 1000)
READY = RolloutView(new_ready=True)


def stepped(plan: RolloutPlan, seen: RolloutView, now: float) -> RolloutPlan:
    after = advance(plan, seen, now)
    assert after is not None
    return after


@pytest.mark.parametrize(
    ("changed", "need"),
    [
        ({"instances": InstanceCounts(min=2, max=3)}, "nothing"),
        ({"aliases": ("b",), "priority": 3, "max_held": 5}, "nothing"),
        ({"source": "path:/b"}, "beside"),
        ({"flags": ("--max-model-len=64",)}, "beside"),
        ({"adapters": {"x": "/x"}}, "beside"),
        ({"engine": "transformers"}, "beside"),
        ({"instances": InstanceCounts(target_kind="freeness")}, "beside"),
        ({"unit": "left", "unit_memory": 1 << 30}, "start"),
    ],
)
def test_a_change_needs_another_deployment_only_if_a_start_depends_on_it(
    changed: dict[str, object], need: str
) -> None:
    assert need_of(OLD, replace(OLD, **changed)) == need


def test_what_takes_effect_at_once_does_so_for_the_old_deployment_too() -> None:
    new = replace(OLD, source="path:/b", flags=("--x",), priority=3, aliases=("b",))
    found = with_live_fields(OLD, new)
    assert start_of(found) == start_of(OLD)
    assert (found.priority, found.aliases) == (3, ("b",))


def test_shares_rise_step_by_step_while_the_new_one_serves() -> None:
    plan = stepped(PLAN, RolloutView(), 1500)
    assert plan.share == 0, "it does not serve yet"
    shares = []
    for now in (2000, 2059, 2060, 2119, 2120, 9999):
        plan = stepped(plan, READY, now)
        shares.append(plan.share)
    assert shares == [10, 10, 50, 50, 100, 100]


def test_without_a_canary_all_new_calls_go_to_the_new_one_once_it_serves() -> None:
    assert stepped(begun(RolloutTerms(), 1, 2, 0), READY, 1).share == 100


def test_a_new_one_that_does_not_serve_for_a_moment_gets_no_larger_share() -> None:
    plan = stepped(PLAN, READY, 2000)
    assert stepped(plan, RolloutView(), 2100).share == 10


def test_it_is_done_when_the_old_one_has_ended() -> None:
    assert advance(PLAN, RolloutView(old_ended=True), 1000) is None
    assert advance(paused(PLAN, 1000), RolloutView(old_ended=True), 1000) is not None


@pytest.mark.parametrize(
    "seen", [RolloutView(new_failed="out of memory"), replace(READY, worse="slower")]
)
def test_it_stops_by_itself_and_then_waits_for_an_order(seen: RolloutView) -> None:
    plan = stepped(stepped(PLAN, READY, 2000), seen, 2001)
    assert (plan.state, plan.share, plan.why) == ("stopped", 0, seen.new_failed or seen.worse)
    assert advance(plan, replace(READY, old_ended=True), 9e9) == plan
    again = resumed(plan, 3000)
    assert (again.state, again.share, again.why) == ("running", 0, "")


def test_a_paused_one_keeps_its_share_but_still_stops_for_errors() -> None:
    plan = paused(stepped(PLAN, READY, 2000), 2001)
    assert advance(plan, READY, 9e9) == plan
    assert stepped(plan, replace(READY, worse="slower"), 2002).state == "stopped"


def test_a_promotion_takes_the_next_step_at_once_until_all_is_taken() -> None:
    plan = PLAN
    for share in (10, 50, 100):
        plan = promoted(plan, 1000)
        assert plan.share == share
    with pytest.raises(ConfigError, match="has all new calls"):
        promoted(plan, 1000)


def test_orders_that_do_not_fit_the_state_are_refused() -> None:
    for change, plan in (
        (resumed, PLAN),
        (paused, paused(PLAN, 0)),
        (promoted, replace(PLAN, state="stopped")),
    ):
        with pytest.raises(ConfigError, match="the roll-out is"):
            change(plan, 0)


def test_the_old_one_gets_no_new_calls_only_while_the_new_one_serves() -> None:
    plan = replace(PLAN, step=2)
    assert takes_all(plan, new_ready=True)
    assert not takes_all(plan, new_ready=False)
    assert not takes_all(replace(PLAN, step=1), new_ready=True)


def test_a_deadline_counts_from_when_the_old_one_gets_no_new_calls() -> None:
    plan = replace(PLAN, step=2, since=5000, deadline_s=30)
    assert [is_overdue(plan, now) for now in (5029, 5030)] == [False, True]
    assert not is_overdue(replace(plan, deadline_s=None), 9e9)
    assert not is_overdue(replace(plan, step=1), 9e9)


def test_without_room_for_both_the_old_one_gives_way_when_it_is_idle_or_late() -> None:
    plan = replace(PLAN, deadline_s=30)
    assert gives_way(plan, no_room=True, running=0, now=1001)
    assert not gives_way(plan, no_room=True, running=1, now=1029)
    assert gives_way(plan, no_room=True, running=1, now=1030)
    assert not gives_way(plan, no_room=False, running=0, now=1030)
    assert not gives_way(paused(plan, 1000), no_room=True, running=0, now=1030)


def test_more_cut_calls_or_later_first_tokens_are_worse_and_few_calls_are_not_compared() -> None:
    old = CallFigures(100, 5, 200.0, 100)
    few = CallFigures(CALLS - 1, CALLS - 1, 900.0, CALLS - 1)
    assert worse(old, few) == ""
    assert worse(old, CallFigures(100, 15, 300.0, 100)) == ""
    assert "16 were cut" in worse(old, CallFigures(100, 16, 200.0, 100))
    assert "is 301 ms" in worse(old, CallFigures(100, 0, 301.0, 100))
    assert worse(CallFigures(), CallFigures(100, 50, 300.0, 100)) == ""
    assert "51 were cut" in worse(CallFigures(), CallFigures(100, 51, 300.0, 100))
    quick = replace(old, ttft_ms=10.0)
    assert worse(quick, CallFigures(100, 0, 110.0, 100)) == "", "that much is noise"


@pytest.mark.parametrize("canary", [(0,), (101,), (50, 50), (50, 10), tuple(range(1, 30))])
def test_steps_that_do_not_rise_are_refused_by_name(canary: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"canary is .*, must be at most 20 rising percentages"):
        checked_terms(canary)


def test_times_out_of_bounds_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="hold_s is -1, must be 0 to 604800"):
        checked_terms((), -1)
    with pytest.raises(ConfigError, match="deadline_s is 1e"):
        checked_terms((), 1, 1e12)


VIEWS = st.builds(
    RolloutView,
    old_ended=st.booleans(),
    new_ready=st.booleans(),
    new_failed=st.sampled_from(["", "no"]),
    worse=st.sampled_from(["", "slow"]),
)
CANARIES = st.lists(st.integers(1, 100), max_size=4, unique=True).map(sorted).map(tuple)


@given(CANARIES, st.lists(st.tuples(VIEWS, st.floats(0, 100)), max_size=20))
def test_a_share_never_falls_but_by_a_stop_and_never_rises_without_a_new_one_that_serves(
    canary: tuple[int, ...], seen: list[tuple[RolloutView, float]]
) -> None:
    plan, now = begun(RolloutTerms(canary=canary, hold_s=10), 1, 2, 0), 0.0
    for view, seconds in seen:
        now += seconds
        after = advance(plan, view, now)
        if after is None:
            assert view.old_ended
            break
        assert after.share >= plan.share or after.state == "stopped"
        assert after.share <= plan.share or view.new_ready
        assert after.step <= plan.step + 1
        assert (after.state == "stopped") <= (after.share == 0)
        plan = after
