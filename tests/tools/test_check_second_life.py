"""The exploration of a roll-out: it finds what is wrong, and nothing where nothing is."""

from __future__ import annotations

import pytest

from kvmig.fleet.rollout import RolloutPlan, RolloutView, advance
from kvmig_tools.check import second_life


@pytest.mark.long  # CI explores all of it by `python -m kvmig_tools.check`
def test_nothing_is_wrong_with_a_roll_out() -> None:
    found = second_life.explore()
    assert found.violation == ""
    assert found.states > 10_000


def hasty(plan: RolloutPlan, seen: RolloutView, now: float) -> RolloutPlan | None:
    """It is done once all new calls go to the new deployment."""
    after = advance(plan, seen, now)
    done = after is not None and after.share == 100 and after.state == "running"
    return None if done else after


def stubborn(plan: RolloutPlan, seen: RolloutView, now: float) -> RolloutPlan | None:
    """It never stops."""
    after = advance(plan, seen, now)
    return plan if after is not None and after.state == "stopped" else after


@pytest.mark.parametrize(
    ("wrong", "violation"),
    [
        (hasty, "it is done while the old deployment is there"),
        (stubborn, "a roll-out neither ends nor stops"),
    ],
)
def test_a_wrong_step_is_found(
    wrong: object, violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_life, "advance", wrong)
    assert second_life.explore().violation == violation


def test_calls_that_wait_while_the_old_deployment_serves_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(second_life, "takes_all", lambda plan, *, new_ready: plan.share == 100)
    found = second_life.explore()
    assert found.violation == "calls wait while the old deployment serves"
    assert found.trace
