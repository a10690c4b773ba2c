"""What bench.room calls growth."""

from __future__ import annotations

from bench.room import growth


def test_growth_is_from_the_first_to_the_last_third_after_the_warm_up() -> None:
    figures = [500.0, 400.0, 10.0, 12.0, 11.0, 20.0, 20.0, 20.0, 14.0, 17.0]
    rows = [{"kvmig.proxy": figure} for figure in figures]
    assert growth(rows, "kvmig.proxy") == 15.5 - 11.0


def test_few_samples_are_compared_one_with_one() -> None:
    assert growth([{"a": 3.0}, {"a": 5.0}], "a") == 2.0
