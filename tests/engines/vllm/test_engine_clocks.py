"""Times of engines on several machines, on one front end's clock."""

from __future__ import annotations

import pytest

from kvmig.engines.vllm.outputs import ANOTHER_CLOCK_S, EngineClocks

pytestmark = pytest.mark.engine


def test_intervals_of_one_engine_are_kept_however_late_its_outputs_come() -> None:
    clocks = EngineClocks()
    clocks.step(0, 1000.0, 5.001)
    times = [clocks.step(0, 1000.1, 5.3), clocks.step(0, 1000.2, 5.31), clocks.step(0, 1000.3, 5.9)]
    assert times == pytest.approx([5.101, 5.201, 5.301])


def test_times_of_two_machines_can_be_subtracted() -> None:
    clocks = EngineClocks()
    before = clocks.step(0, 1_000_000.0, 50.0)
    assert clocks.step(1, 7.0, 50.02) - before == pytest.approx(0.02)
    assert clocks.here(0, 999_999.0) == pytest.approx(49.0)


def test_no_step_ends_before_the_one_before_it() -> None:
    clocks = EngineClocks()
    late = clocks.step(0, 1000.0, 6.0)
    assert clocks.step(0, 1000.1, 5.2) == late
    assert clocks.step(0, 1001.0, 6.1) == pytest.approx(6.1)


@pytest.mark.parametrize("told", [2.0, 900_000.0])
def test_an_instance_that_was_started_again_elsewhere_has_another_clock(told: float) -> None:
    clocks = EngineClocks()
    clocks.step(0, 1000.0, 5.0)
    now = 5.0 + 2 * ANOTHER_CLOCK_S
    assert clocks.step(0, told, now) == pytest.approx(now)
