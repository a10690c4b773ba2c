"""The exploration of a roll-out: it finds what is wrong, and nothing where nothing is."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvmig.fleet.rollout import RolloutPlan, RolloutView, advance
from kvmig_tools.check import second_life
from kvmig_tools.check.second_life import RollingWorld


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
        (stubborn, "a roll-out neither ends nor stops, or an undone one is left"),
    ],
)
def test_a_wrong_step_is_found(
    wrong: object, violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_life, "advance", wrong)
    assert second_life.explore().violation == violation


def test_an_undo_is_explored_with_streams_on_both(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set[tuple[int, int, str]]()
    go_back = second_life.goes_back

    def look(now: RollingWorld) -> RollingWorld | None:
        seen.add((now.on_old, now.on_new, now.old))
        return go_back(now)

    monkeypatch.setattr(second_life, "goes_back", look)
    assert second_life.explore().violation == ""
    assert {(1, 1, "ready"), (0, 1, "none"), (0, 0, "ending")} <= seen


def cutting(now: RollingWorld, *, stands_by: bool) -> RollingWorld:
    """A new deployment that is not wanted ends at once."""
    return now if stands_by or now.new == "none" else replace(now, new="ending")


def staying(now: RollingWorld, *, stands_by: bool) -> RollingWorld:
    """A new deployment that is not wanted stays."""
    return now


@pytest.mark.parametrize(
    ("wrong", "violation"),
    [
        (cutting, "an undo cuts streams"),
        (staying, "a roll-out neither ends nor stops, or an undone one is left"),
    ],
)
def test_an_undo_that_goes_wrong_is_found(
    wrong: object, violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(second_life, "with_new", wrong)
    undone = second_life.undoes(second_life.RollingWorld(new="ready", on_new=1))
    assert undone is not None
    monkeypatch.setattr(second_life, "RollingWorld", lambda: undone)
    assert second_life.explore().violation == violation


def test_calls_that_wait_while_the_old_deployment_serves_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(second_life, "takes_all", lambda plan, *, new_ready: plan.share == 100)
    found = second_life.explore()
    assert found.violation == "calls wait while the old deployment serves"
    assert found.trace
