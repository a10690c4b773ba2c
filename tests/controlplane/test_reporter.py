"""When a llumlet reports, what it says of itself, and whether its engine's step takes too long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.reporter import IDLE_PERIOD_S, LINGER_S, MOST_S, LoadReporter, StepWatch
from kvmig.engines.base import EngineLoad

ONE = EngineLoad(100, 10, 1, 0, 0, 0)
TWO = EngineLoad(100, 10, 2, 0, 0, 0)
GROWN = EngineLoad(100, 11, 2, 0, 0, 0)


def test_it_reports_when_it_is_time_and_when_there_is_news() -> None:
    reporter = LoadReporter(50, 60, 0.0)
    assert reporter.is_due(1.0, "serving", ONE, 0, 0)
    assert not reporter.is_due(1.01, "serving", ONE, 0, 0)
    assert reporter.is_due(1.02, "serving", TWO, 0, 0)
    assert not reporter.is_due(1.03, "serving", GROWN, 0, 0)
    assert reporter.is_due(1.04, "serving", GROWN, 1, 0)
    assert reporter.is_due(1.05, "hung", GROWN, 1, 0)
    assert reporter.is_due(1.11, "hung", GROWN, 1, 0)
    assert reporter.seq == 5


def test_it_is_in_the_wanted_state_unless_it_ails() -> None:
    reporter = LoadReporter(50, 1.0, 0.0)
    reporter.wanted = "draining"
    said = [reporter.state(look / 10, look / 10, failed=False) for look in range(1, 31)]
    assert sorted(set(said), key=said.index) == ["draining", "hung", "failed"]
    assert reporter.state(3.1, 0.0, failed=False) == "draining"
    assert reporter.state(3.2, 0.0, failed=True) == "failed"


def test_an_engine_with_nothing_to_do_is_looked_at_for_heartbeats_alone() -> None:
    reporter, now, looks = LoadReporter(50, 60, 0.0), 1.0, 0
    while now < 2.0:
        reporter.is_due(now, "serving", ONE, 0, 0)
        now += reporter.pause_s(now, busy=False, came=False)
        looks += 1
    assert reporter.seq == looks == 20


def test_an_engine_with_requests_is_looked_at_often_and_so_it_is_a_while_after_a_message() -> None:
    reporter = LoadReporter(5000, 60, 0.0)
    reporter.is_due(1.0, "serving", ONE, 0, 0)
    assert reporter.pause_s(1.0, busy=True, came=False) == pytest.approx(0.01)
    assert reporter.pause_s(1.0 + LINGER_S, busy=False, came=False) == IDLE_PERIOD_S
    assert reporter.pause_s(2.0, busy=False, came=True) == pytest.approx(0.01)
    assert reporter.pause_s(2.1, busy=False, came=False) == pytest.approx(0.01)


def test_a_look_that_came_a_little_too_early_is_followed_by_one_in_time() -> None:
    reporter = LoadReporter(50, 60, 0.0)
    reporter.is_due(1.0, "serving", ONE, 0, 0)
    assert not reporter.is_due(1.0495, "serving", ONE, 0, 0)
    assert reporter.pause_s(1.0495, busy=False, came=False) == pytest.approx(0.001)


LOOK_S = 0.1


def test_a_long_step_is_hung_and_then_lost() -> None:
    watch = StepWatch(1.0, 0.0)
    said = [watch.check_step(look * LOOK_S, look * LOOK_S) for look in range(1, 31)]
    assert said[:10] == [""] * 10
    assert said[11:19] == ["hung"] * 8
    assert said[22:] == ["lost"] * 8


def test_a_new_step_starts_anew() -> None:
    watch = StepWatch(1.0, 0.0)
    for look in range(1, 16):
        watch.check_step(look * LOOK_S, look * LOOK_S)
    assert watch.check_step(1.6, 0.05) == ""
    assert watch.check_step(1.7, 0.0) == ""


def test_many_short_steps_are_no_long_one() -> None:
    watch = StepWatch(1.0, 0.0)
    assert {watch.check_step(look * LOOK_S, 0.03) for look in range(100)} == {""}


@given(st.floats(0, 1000))
def test_a_process_that_was_stopped_in_a_step_is_not_hung(stopped_s: float) -> None:
    watch = StepWatch(2 * MOST_S, 0.0)
    assert watch.check_step(stopped_s, stopped_s) == ""
