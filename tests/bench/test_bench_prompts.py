"""Prompts at instances of their own: bench.prompts."""

from __future__ import annotations

from bench.prompts import INSTANCES, LOADS, Sample, busy_with, choose, simulate, tried


def test_as_many_instances_are_busy_as_the_prompts_take_seconds_a_second() -> None:
    slow, fast = LOADS[0], LOADS[1]
    assert abs(busy_with(fast) / busy_with(slow) - fast.rate / slow.rate) < 0.01
    assert all(0 < number < INSTANCES for load in LOADS for number in tried(load))


def test_the_number_with_the_least_tpot_is_chosen_whose_ttft_is_not_ruined() -> None:
    load = LOADS[0]

    def run(apart: int, ttft: float, tpot: float) -> Sample:
        return Sample(load.name, apart, 1, {"ttft_p99_s": ttft, "tpot_p99_s": tpot}, 0.0)

    today = run(0, 1.0, 0.03)
    assert choose(load, [today, run(6, 1.3, 0.01), run(7, 1.2, 0.02), run(8, 1.0, 0.025)]) == 7
    assert choose(load, [today, run(6, 1.3, 0.01)]) == tried(load)[-1]


def test_what_decodes_does_not_see_long_prompts_any_more() -> None:
    load = LOADS[3]
    mixed, apart = (simulate((load, number, 300, 1)) for number in (0, tried(load)[-1]))
    assert apart.figures["tpot_p99_s"] < 0.8 * mixed.figures["tpot_p99_s"]
    assert (mixed.moved_share, mixed.handover_steps) == (0.0, (0.0, 0.0))
    assert apart.moved_share > 0.8
    assert 1.0 < apart.handover_steps[0] < 3.0
