"""The parts of `bench.units` that decide."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from bench.replace import counted
from bench.units import relieve
from bench.units.gate import ratio
from bench.units.shift import (
    MODELS,
    SIZES,
    Answer,
    Call,
    Run,
    calls_of,
    in_time,
    jain,
    normalised,
    prompt_of,
    rate_for,
    summarise,
    wanted,
)
from bench.units.site import BLOCK_BYTES, BLOCK_TOKENS, MIB

ALONE = dict.fromkeys(SIZES, 2.0)
SIZE = SIZES[0]


def call(at: float, model: str = "a", phase: int = 0) -> Call:
    return Call(at, phase, model, SIZE, 700)


def test_the_heavy_model_changes_with_each_phase_and_others_get_a_tenth_each() -> None:
    calls = calls_of(1, 3, 100.0, 20.0)
    assert [one.at for one in calls] == sorted(one.at for one in calls)
    assert len(calls) == pytest.approx(6000, rel=0.05)
    for phase, heavy in enumerate(MODELS):
        counts = Counter(one.model for one in calls if one.phase == phase)
        assert all(phase * 100 <= one.at < (phase + 1) * 100 for one in calls if one.phase == phase)
        for model in MODELS:
            share = counts[model] / counts.total()
            assert share == pytest.approx(0.8 if model == heavy else 0.1, abs=0.03)


def test_the_same_seed_gives_the_same_arrivals() -> None:
    assert calls_of(1, 3, 10.0, 20.0) == calls_of(1, 3, 10.0, 20.0) != calls_of(2, 3, 10.0, 20.0)


def test_the_rate_is_such_that_requests_alone_would_hold_seven_tenths_of_the_arena() -> None:
    rate = rate_for(16 * MIB, ALONE)
    calls = calls_of(1, 1, 500.0, rate)
    held = wanted(calls, ALONE, 10.0, 490.0)
    assert sum(held.values()) == pytest.approx(0.7 * 16 * MIB, rel=0.05)
    assert held["a"] == pytest.approx(0.56 * 16 * MIB, rel=0.05)


def test_what_is_wanted_in_a_window_counts_requests_by_their_part_of_it() -> None:
    half_in, after = call(9.0), call(21.0, "b")
    assert wanted([half_in, after], ALONE, 10.0, 20.0) == {
        "a": pytest.approx(SIZE.held() / 10),
        "b": 0,
    }


def test_only_right_answers_in_the_scaled_time_of_their_own_size_count() -> None:
    alone = {**ALONE, SIZE: 1.0}
    one = Answer(call(0.0), 0.0, 7.9)
    answers = [
        one,
        replace(one, took_s=8.1),
        replace(one, took_s=15.9, call=one.call._replace(size=SIZES[1])),
        replace(one, failed="503"),
        replace(one, wrong=True),
    ]
    assert in_time(answers, alone, 8) == 2


@pytest.mark.parametrize(
    ("values", "index"), [((2, 2, 2), 1.0), ((5, 0, 0), 1 / 3), ((1, 1, 0.5), 6.25 / 6.75)]
)
def test_jains_index_is_one_where_all_are_equal(values: tuple[float, ...], index: float) -> None:
    assert jain(values) == pytest.approx(index)


def test_a_model_that_holds_half_of_what_it_would_alone_is_seen_in_its_phase() -> None:
    calls = calls_of(3, 2, 50.0, 20.0)
    rows = []
    for tenth in range(1000):
        at = tenth / 10
        begin = 50 * (at >= 50) + 2.0
        used = wanted(calls, ALONE, begin, begin + 48.0)
        rows.append({"at_s": at, "used": {**used, "b": used["b"] * (0.5 if at >= 50 else 1)}})
    first, second = normalised(rows, calls, ALONE, 50.0)
    assert first == pytest.approx({"a": 1.0, "b": 1.0, "c": 1.0})
    assert second == pytest.approx({"a": 1.0, "b": 0.5, "c": 1.0})


def test_a_prompt_is_numbers_up_to_its_own_and_the_answer_goes_on() -> None:
    prompt = prompt_of(call(0.0))
    assert len(prompt) == SIZE.prompt
    assert bytes(prompt).endswith(b" 0699 0700")
    assert bytes(counted(call(0.0).start - 1, 10)) == b" 0701 0702"


def run(arm: str, took_s: float, preemptions: int) -> Run:
    calls = [call(at, model) for at in range(10) for model in MODELS]
    used = wanted(calls, ALONE, 2.0, 10.0)
    samples = [{"at_s": at / 10, "used": used} for at in range(100)]
    answers = [Answer(one, one.at, took_s) for one in calls]
    answers[0] = replace(answers[0], wrong=True)
    return Run(arm, answers, samples, preemptions, 0.5)


def test_a_summary_sets_quotas_beside_thirds() -> None:
    runs = [run("kvmig", 2.0, 1), run("fixed", 7.0, 4), run("fixed", 9.0, 6), run("kvmig", 2, 3)]
    calls = [one.call for one in runs[0].answers]
    found = summarise(ALONE, calls, runs, 10.0)
    assert found["in 4 times the latency alone, quotas / thirds"] == 2.0
    assert found["in 8 times the latency alone, quotas / thirds"] == 1.0
    assert found["preemptions, quotas / thirds"] == 0.4
    assert found["quotas: Jain's index of R, least of phases"] == pytest.approx(1.0)
    assert (found["shift: wrong"], found["shift: failed"]) == (4, 0)
    assert found["thirds: in 4 times the latency alone, of all"] == pytest.approx(29 / 60)


def test_without_anything_to_compare_with_there_is_no_ratio() -> None:
    runs = [run("kvmig", 2.0, 0), run("fixed", 99.0, 0)]
    found = summarise(ALONE, [one.call for one in runs[0].answers], runs, 10.0)
    assert not {name for name in found if "/ thirds" in name}
    assert all(math.isfinite(value) for value in found.values())


def test_the_gates_cost_is_the_median_ratio_of_bursts_in_a_row() -> None:
    rates = [(90, 100), (990, 1000), (9.8, 10)]
    rows = [{"gated": gated, "plain": plain} for gated, plain in rates]
    assert ratio(rows) == pytest.approx(0.98)


def test_a_burst_wants_what_was_guaranteed_and_others_hold_more_than_the_rest() -> None:
    wanted = relieve.CALLS * -(-sum(relieve.BURST) // BLOCK_TOKENS) * BLOCK_BYTES
    begun = (relieve.HELD.prompt + relieve.BEGUN) // BLOCK_TOKENS * BLOCK_BYTES
    held = relieve.STREAMS * begun
    assert relieve.HERE - held < wanted <= relieve.GUARANTEE
    ended = relieve.STREAMS * -(-sum(relieve.HELD) // BLOCK_TOKENS) * BLOCK_BYTES
    assert ended < min(relieve.HERE, relieve.THERE)


def test_who_is_relieved_is_compared_with_quotas_alone() -> None:
    told = {
        "relieve": [relieve.Told("a-relieve", 1.0, 0.1), relieve.Told("b-relieve", 9.0, 0.02),
                    relieve.Told("a-relieve", 1.0, 0.1, "it failed")],
        "quotas": [relieve.Told("a-quotas", 3.0, 0.1), relieve.Told("b-quotas", 9.0, 0.04),
                   relieve.Told("b-quotas", 9.0, 0.04, wrong=True),
                   relieve.Told("a-quotas", 3.0, 0.1)],
    }  # fmt: skip
    told["relieve"].append(relieve.Told("a-relieve", 1.0, 0.1))
    figures = relieve.summarise(told, {"relieve": 5, "quotas": 0})
    assert figures["P99 of the burst's TTFT, quotas alone / relieve"] == pytest.approx(3.0)
    assert figures["TPOT of the others, relieve / quotas alone"] == pytest.approx(0.5)
    assert (figures["relieve: failed"], figures["relieve: wrong"]) == (1, 1)
