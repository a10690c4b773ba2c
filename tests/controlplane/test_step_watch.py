"""Whether an engine's present step takes too long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.reporter import MOST_S, StepWatch

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
