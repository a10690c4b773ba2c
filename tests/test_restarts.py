"""When a process that died is started again."""

from __future__ import annotations

from kvmig.cli.processes import PAUSES_S, STABLE_S, deaths_in_a_row, restart_pause


def test_the_pauses_grow_and_the_last_one_repeats() -> None:
    assert [restart_pause(deaths) for deaths in range(1, 8)] == [*PAUSES_S, *PAUSES_S[-1:] * 2]


def test_who_has_served_for_long_starts_a_new_row() -> None:
    assert deaths_in_a_row(2, STABLE_S - 1) == 3
    assert deaths_in_a_row(2, STABLE_S) == 1
