"""What a soak under attack takes for wrong."""

from __future__ import annotations

from bench.fleet_attack import longest_gap, untrue
from bench.ledger import Asked, Row


def stream(*arrivals: float) -> Asked:
    got = [(at, number + 1) for number, at in enumerate(arrivals)]
    return Asked("ledger-1", "abc", 10, 0.0, got=got)


def test_a_gap_is_between_two_tokens_of_one_stream() -> None:
    assert longest_gap([stream(1.0, 1.25, 1.75), stream(3.0, 3.25)], 0.0, 10.0) == 0.5


def test_a_gap_counts_for_the_time_that_has_both_its_ends() -> None:
    calls = [stream(1.0, 4.0, 4.1)]
    assert longest_gap(calls, 2.0, 10.0) < 0.2
    assert longest_gap(calls, 0.0, 3.0) == 0.0


def test_an_answer_is_untrue_whose_usage_the_ledger_does_not_have() -> None:
    rows = [Row("attack-1", "abc", "finished", 16, 60, 0), Row("attack-2", "abc", "cut", 5, 1, 0)]
    told = {"attack-1": (16, 60), "attack-2": (5, 2), "attack-3": (1, 1)}
    assert [one["call"] for one in untrue(told, rows)] == ["attack-2", "attack-3"]
