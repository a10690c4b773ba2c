"""The exploration of a model's life: it finds what is wrong, and nothing where nothing is."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvmig.fleet.lifecycle import Action, DesiredState, ModelStatus, ObservedState, reconcile
from kvmig_tools.check import life


@pytest.mark.long  # CI explores all of it by `python -m kvmig_tools.check`
@pytest.mark.parametrize("parks", [True, False])
def test_nothing_is_wrong_with_it(parks: bool) -> None:
    found = life.explore(1, parks=parks)
    assert found.violation == ""
    assert found.states > 10_000


def hasty(
    now: ModelStatus, wish: DesiredState, seen: ObservedState, at: float
) -> tuple[ModelStatus, Action | None]:
    """It stops what proxies may still send requests to."""
    return reconcile(now, wish, replace(seen, unrouted=True), at)


def blind(
    now: ModelStatus, wish: DesiredState, seen: ObservedState, at: float
) -> tuple[ModelStatus, Action | None]:
    """It stops what still answers."""
    return reconcile(now, wish, replace(seen, running=0), at)


def stubborn(
    now: ModelStatus, wish: DesiredState, seen: ObservedState, at: float
) -> tuple[ModelStatus, Action | None]:
    """It never comes back from a failure."""
    return (now, None) if now.state == "failed" else reconcile(now, wish, seen, at)


def forgetful(
    now: ModelStatus, wish: DesiredState, seen: ObservedState, at: float
) -> tuple[ModelStatus, Action | None]:
    """It doesn't see what another server has started."""
    known = now.state not in ("zero", "failed")
    return reconcile(now, wish, replace(seen, deployment=seen.deployment and known), at)


def patient(
    now: ModelStatus, wish: DesiredState, seen: ObservedState, at: float
) -> tuple[ModelStatus, Action | None]:
    """It waits for a deployment that hangs, for ever."""
    return reconcile(replace(now, lost_at=None), wish, seen, at)


def strict(
    now: ModelStatus, wish: DesiredState, seen: ObservedState, at: float
) -> tuple[ModelStatus, Action | None]:
    """It ends what it has told to wake and what then refuses, though a server before woke it."""
    if now.state == "waking" and seen.refused and seen.deployment:
        return replace(now, state="stopping", since=at), "kill"
    return reconcile(now, wish, seen, at)


def repeating(
    now: ModelStatus, wish: DesiredState, seen: ObservedState, at: float
) -> tuple[ModelStatus, Action | None]:
    """It wakes what a server before has woken."""
    if now.state == "parked" and seen.ready and seen.wanted:
        return replace(now, state="waking", since=at), "unpark"
    return reconcile(now, wish, replace(seen, ready=seen.ready and now.state != "parked"), at)


@pytest.mark.parametrize(
    ("wrong", "violation"),
    [
        pytest.param(strict, "a deployment that serves is killed", marks=pytest.mark.long),
        (repeating, "one is parked again, or woken again"),
    ],
)
def test_what_is_wrong_with_orders_that_outlive_their_server_is_found(
    wrong: object, violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "reconcile", wrong)
    assert life.explore(1, parks=True).violation == violation


@pytest.mark.parametrize(
    ("wrong", "violation"),
    [
        (hasty, "one that is told to end has its route"),
        (blind, "a deployment is told to end while it answers"),
        (stubborn, "who waits is never served"),
        # "stubborn" shows that sooner.
        pytest.param(patient, "who waits is never served", marks=pytest.mark.long),
        (forgetful, "two deployments at once"),
    ],
)
def test_what_is_wrong_is_found(
    wrong: object, violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life, "reconcile", wrong)
    found = life.explore(1)
    assert found.violation == violation
    assert found.trace
