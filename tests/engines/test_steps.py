"""How long an engine's steps take, and which of them waits for a request that comes."""

from __future__ import annotations

import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.engines.base import StepCadence
from kvmig.engines.steps import HOLD, LAUNCH_S, MOST_S, CadenceMeter, StepHold, limit_s
from tests.support.inside import await_arrivals

MS = 1e-3


def decoding(times: CadenceMeter, steps: int, ms: float, start: float = 0.0) -> float:
    """`steps` steps one after the other; when the last one ended."""
    for _ in range(steps):
        times.step(start, start + ms * MS)
        start += ms * MS
    return start


def test_an_engine_that_never_stepped_does_nothing() -> None:
    assert CadenceMeter().cadence(1.0) == StepCadence(0.0, 0.0)


def test_a_busy_engine_says_where_in_its_step_it_is() -> None:
    times = CadenceMeter()
    end = decoding(times, 20, ms=10.0)
    cadence = times.cadence(end + 4 * MS)
    assert cadence.since_ms == pytest.approx(4.0)
    assert cadence.step_ms == pytest.approx(10.0)


def test_what_it_does_between_two_steps_counts() -> None:
    times = CadenceMeter()
    for number in range(200):
        times.step(number * 0.012, number * 0.012 + 0.010)
    assert times.cadence(199 * 0.012 + 0.010).step_ms == pytest.approx(12.0)


def test_a_rest_does_not_count_as_a_step() -> None:
    times = CadenceMeter()
    end = decoding(times, 20, ms=10.0)
    end = decoding(times, 1, ms=10.0, start=end + 5.0)
    assert times.cadence(end).step_ms == pytest.approx(10.0)


def test_an_engine_that_rests_says_so() -> None:
    times = CadenceMeter()
    end = decoding(times, 20, ms=10.0)
    assert times.cadence(end + 31 * MS).step_ms == 0.0


@given(st.lists(st.floats(0.0, 1e3), max_size=40))
def test_no_step_makes_a_cadence_that_can_not_be(steps: list[float]) -> None:
    times, end = CadenceMeter(), 0.0
    for ms in steps:
        end = decoding(times, 1, ms, start=end)
    cadence = times.cadence(end)
    assert cadence.since_ms >= 0.0
    assert cadence.step_ms >= 0.0


def test_an_engine_whose_steps_overlap_says_when_it_launches_them() -> None:
    times = CadenceMeter(overlap=True)
    end = decoding(times, 20, ms=10.0)
    assert times.cadence(end).launch_ms == pytest.approx(LAUNCH_S * 1e3)


def test_a_short_step_is_launched_half_a_step_ahead() -> None:
    times = CadenceMeter(overlap=True)
    end = decoding(times, 20, ms=4.0)
    assert times.cadence(end).launch_ms == pytest.approx(2.0)
    assert times.free_s(end) == pytest.approx(0.002)


def test_a_step_may_wait_at_no_cost_until_it_is_to_be_launched() -> None:
    times = CadenceMeter(overlap=True)
    end = decoding(times, 20, ms=10.0)
    assert times.free_s(end) == pytest.approx(0.007)
    assert times.free_s(end + 0.005) == pytest.approx(0.002)
    assert times.free_s(end + 0.008) == 0.0


def test_no_wait_is_free_where_nothing_runs_meanwhile() -> None:
    times = CadenceMeter()
    assert times.free_s(decoding(times, 20, ms=10.0)) == 0.0
    assert CadenceMeter(overlap=True).free_s(1.0) == 0.0


STEP_S = 0.01


def hold(**due: float) -> StepHold:
    made = StepHold()
    for name, at in due.items():
        made.expect(name, at)
    return made


@given(st.floats(0, 100))
def test_no_step_waits_longer_than_is_stated(step_s: float) -> None:
    assert limit_s(step_s) <= MOST_S
    assert limit_s(step_s) <= HOLD * step_s


def test_a_step_waits_for_those_that_are_due_about_now() -> None:
    expected = hold(soon=1.002, late=0.998, later=1.004, gone=0.99)
    assert set(expected.awaited(1.0, STEP_S)) == {"soon", "late"}


def test_a_step_that_waits_at_no_cost_waits_for_those_that_come_later() -> None:
    expected = hold(soon=1.009, late=0.998, later=1.011, gone=0.99)
    assert set(expected.awaited(1.0, STEP_S, free_s=0.007)) == {"soon", "late"}


def test_only_one_step_waits_for_a_request_whatever_its_source_says() -> None:
    expected = hold(a=1.002)
    assert set(expected.awaited(1.0, STEP_S)) == {"a"}
    expected.expect("a", 1.012)
    assert not expected.awaited(1.01, STEP_S)


def test_a_request_that_comes_later_is_waited_for_by_a_later_step() -> None:
    expected = hold(a=1.012)
    assert not expected.awaited(1.0, STEP_S)
    assert set(expected.awaited(1.01, STEP_S)) == {"a"}


def test_a_request_that_is_here_or_given_up_is_not_waited_for() -> None:
    expected = hold(a=1.001, b=1.001)
    expected.over("a")
    awaited = expected.awaited(1.0, STEP_S)
    assert set(awaited) == {"b"}
    assert expected.coming(awaited)
    expected.over("b")
    expected.over("unknown")
    assert not expected.coming(awaited)


def test_an_engine_without_steps_yet_waits_for_nobody() -> None:
    assert not hold(a=1.001).awaited(1.0, 0.0)


# -- in vLLM's loop


class Handled:
    """What the engine's thread took from its queue before a step; `StepCore` without an engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvmig.engines.vllm import core

        self.calls: list[str] = []
        self.core: Any = object.__new__(core.StepCore)
        self.core.input_queue = queue.Queue()
        self.core.hold = StepHold()
        self.core.cadence_meter = CadenceMeter()
        self.core.batch_queue = None
        self.now = 0.0
        monkeypatch.setattr(core, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(
            core.StepCore, "_handle_client_request", lambda core, kind, call: call()
        )
        self.core.cadence_meter.step(-STEP_S, 0.0)

    def put(self, name: str, then: Callable[[], None] = lambda: None) -> None:
        def call() -> None:
            self.calls.append(name)
            then()

        self.core.input_queue.put((None, call))

    def passes(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def handled(monkeypatch: pytest.MonkeyPatch) -> Handled:
    return Handled(monkeypatch)


@pytest.mark.engine
def test_what_comes_while_a_step_waits_is_done_and_the_commit_ends_the_wait(
    handled: Handled,
) -> None:
    handled.core.hold.expect("a", 0.001)
    handled.put("other")
    handled.put("commit", lambda: handled.core.hold.over("a"))
    handled.put("next")
    await_arrivals(handled.core)
    assert handled.calls == ["other", "commit"]


@pytest.mark.engine
def test_a_step_begins_when_its_time_is_over_though_nothing_came(handled: Handled) -> None:
    handled.core.hold.expect("a", 0.001)
    handled.put("other", lambda: handled.passes(limit_s(STEP_S)))
    await_arrivals(handled.core)
    assert handled.calls == ["other"]
    handled.put("next")
    await_arrivals(handled.core)
    assert handled.calls == ["other"]


@pytest.mark.engine
def test_a_step_without_anybody_to_wait_for_begins_at_once(handled: Handled) -> None:
    handled.put("other")
    await_arrivals(handled.core)
    handled.core.hold.expect("far", 5.0)
    await_arrivals(handled.core)
    assert handled.calls == []


@pytest.fixture
def overlapping(handled: Handled) -> Handled:
    """Its device computes a step that was launched before."""
    handled.core.cadence_meter = CadenceMeter(overlap=True)
    handled.core.cadence_meter.step(-STEP_S, 0.0)
    handled.core.batch_queue = ["a step"]
    return handled


@pytest.mark.engine
def test_a_step_that_needn_t_be_launched_yet_waits_for_a_commit(overlapping: Handled) -> None:
    overlapping.core.hold.expect("a", 0.006)
    overlapping.put("other", lambda: overlapping.passes(0.006))
    overlapping.put("commit", lambda: overlapping.core.hold.over("a"))
    overlapping.put("next")
    await_arrivals(overlapping.core)
    assert overlapping.calls == ["other", "commit"]


@pytest.mark.engine
def test_a_step_is_launched_in_time_though_nothing_came(overlapping: Handled) -> None:
    overlapping.core.hold.expect("a", 0.006)
    overlapping.put("other", lambda: overlapping.passes(0.007 + limit_s(STEP_S)))
    overlapping.put("next")
    await_arrivals(overlapping.core)
    assert overlapping.calls == ["other"]


@pytest.mark.engine
def test_a_step_that_nothing_runs_before_waits_no_longer_than_any(overlapping: Handled) -> None:
    overlapping.core.batch_queue = []
    overlapping.core.hold.expect("a", 0.006)
    overlapping.put("other")
    await_arrivals(overlapping.core)
    assert overlapping.calls == []
