"""What an engine says of its steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.engines.base import Cadence
from kvmig.engines.steps import CadenceMeter

MS = 1e-3


def decoding(times: CadenceMeter, steps: int, ms: float, start: float = 0.0) -> float:
    """`steps` steps one after the other; when the last one ended."""
    for _ in range(steps):
        times.step(start, start + ms * MS)
        start += ms * MS
    return start


def test_an_engine_that_never_stepped_does_nothing() -> None:
    assert CadenceMeter().cadence(1.0) == Cadence(0.0, 0.0)


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
