"""From step times to the headroom of classes with a target."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.headroom import headroom_blocks, load_within
from kvmig.core.priorities import NORMAL, PriorityClass
from kvmig.engines.base import StepTime

LINE = [StepTime(1000, 10.0), StepTime(3000, 20.0)]
times = st.lists(
    st.builds(StepTime, st.integers(1, 100_000), st.floats(0.01, 1000)), min_size=1, max_size=8
)


def test_the_load_is_where_the_line_meets_the_target() -> None:
    assert load_within(15.0, LINE) == pytest.approx(2000)
    assert load_within(4.0, LINE) == 0.0


def test_without_a_line_a_token_costs_what_the_slowest_did() -> None:
    assert load_within(5.0, [StepTime(1000, 10.0)]) == pytest.approx(500)
    falling = [StepTime(1000, 10.0), StepTime(2000, 8.0)]
    assert load_within(5.0, falling) == pytest.approx(500)
    assert load_within(5.0, []) == 0.0


def test_headroom_is_the_capacity_beyond_that_load() -> None:
    fast = PriorityClass("fast", -2, target_ms=15.0)
    high = PriorityClass("high", -1, headroom_tokens=1600)
    blocks = headroom_blocks([fast, high, NORMAL], LINE, 625, 16)
    assert blocks == {-2: pytest.approx((10_000 - 2000) / 16), -1: 100.0}


def test_headroom_is_never_more_than_the_instance_has() -> None:
    high = PriorityClass("high", -1, headroom_tokens=10_000_000)
    fast = PriorityClass("fast", -2, target_ms=0.001)
    slow = PriorityClass("slow", -3, target_ms=1e9)
    assert headroom_blocks([high, fast, slow], LINE, 10, 16) == {-1: 10.0, -2: 10.0}


@given(times, st.floats(0.001, 1e4), st.floats(0.001, 1e4))
def test_a_slower_target_allows_no_less(them: list[StepTime], one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert 0 <= load_within(less, them) <= load_within(more, them) < math.inf
