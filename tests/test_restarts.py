"""When a process that died is started again."""

from __future__ import annotations

from kvmig.controlplane.child import PAUSES_S, STABLE_S, Restarts


def test_the_pauses_grow_and_the_last_one_repeats() -> None:
    restarts = Restarts()

    assert [restarts.died(1.0) for _ in range(7)] == [*PAUSES_S, PAUSES_S[-1], PAUSES_S[-1]]


def test_after_the_stated_number_in_a_row_it_is_given_up() -> None:
    restarts = Restarts(2)

    assert [restarts.died(0.0) for _ in range(3)] == [*PAUSES_S[:2], None]
    assert Restarts(0).died(1.0) is None


def test_who_has_served_for_long_starts_a_new_row() -> None:
    restarts = Restarts(2)
    restarts.died(0.0)
    restarts.died(0.0)

    assert restarts.died(STABLE_S) == PAUSES_S[0]
    assert restarts.died(0.0) == PAUSES_S[1]
    assert restarts.died(0.0) is None
