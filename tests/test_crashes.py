"""When a request may run on a further instance."""

from __future__ import annotations

import itertools

import pytest

from kvmig.gateway.requests import PATIENCE_S, Crashes, Verdict


def crashes(crashed: int, missing: int, since: float = 0.0) -> Crashes:
    names = [f"i{number}" for number in range(crashed + missing)]
    return Crashes(names[:crashed], dict.fromkeys(names[crashed:], since))


TABLE: dict[tuple[int, int], Verdict] = {
    (0, 0): "run", (0, 1): "run", (0, 2): "wait", (0, 3): "wait",
    (1, 0): "run", (1, 1): "wait", (1, 2): "wait",
    (2, 0): "poison", (2, 1): "poison",
}  # fmt: skip
"""With two crashes at most: (crashed, missing) -> verdict."""


@pytest.mark.parametrize(("seen", "verdict"), TABLE.items())
def test_the_verdict_by_what_a_request_has_seen(seen: tuple[int, int], verdict: Verdict) -> None:
    assert crashes(*seen).verdict(1.0, 2) == verdict


@pytest.mark.parametrize(("crashed", "missing"), list(itertools.product(range(3), range(4))))
def test_nobody_waits_longer_than_the_patience(crashed: int, missing: int) -> None:
    late = crashes(crashed, missing).verdict(PATIENCE_S, 2)
    assert late == ("poison" if crashed >= 2 else "run")


def test_patience_starts_with_the_last_that_went_missing() -> None:
    seen = Crashes(missing={"a": 0.0, "b": 10.0})
    assert seen.verdict(PATIENCE_S + 5, 2) == "wait"
    assert seen.verdict(PATIENCE_S + 10, 2) == "run"


def test_only_a_missing_instance_is_confirmed_to_have_crashed() -> None:
    seen = Crashes()
    seen.confirmed("never ran there")
    seen.missed("a", 1.0)
    seen.missed("a", 2.0)
    assert seen.missing == {"a": 1.0}
    seen.confirmed("a")
    seen.confirmed("a")
    assert (seen.crashed, seen.missing) == (["a"], {})


def test_an_instance_that_returned_does_not_count() -> None:
    seen = crashes(1, 1)
    seen.returned("i1")
    seen.returned("never missing")
    assert seen.verdict(0.0, 2) == "run"


def test_a_restarted_instance_counts_each_time() -> None:
    seen = Crashes()
    for at in (0.0, 5.0):
        seen.missed("a", at)
        seen.confirmed("a")
    assert seen.verdict(9.0, 2) == "poison"
