"""Conversations, and long prompts, on real engines: bench.prefixes_real, bench.prompts_real."""

from __future__ import annotations

import json

import pytest

from bench import prefixes_real, prompts_real
from bench.models import model_flags
from bench.prefixes_real import (
    OURS,
    RULES,
    TurnSample,
    as_simulated,
    conversations,
    cost_of,
    simulate,
    summarize,
)
from bench.serving_calls import Answer, Run
from kvmig.launcher.flags import parse


def test_turns_come_at_the_rate() -> None:
    made = conversations(20.0, 200.0, 1)
    turns = sum(len(one.turns) for one in made)
    assert turns / 200.0 == pytest.approx(20.0, rel=0.1)
    assert made == conversations(20.0, 200.0, 1) != conversations(20.0, 200.0, 2)
    assert len(conversations(0.001, 1.0, 1)) == 1, "at least one"


def test_the_servers_flags_are_ones_that_kvmig_takes() -> None:
    for policy, rule in RULES.items():
        config, rest, _ = parse(["m", *prefixes_real.flags_of(policy, "device15ms")])
        assert (config.scheduler.policy, config.instances) == (rule[0][9:], 4)
        assert config.scheduler.prefix_dispatch == ("--no-prefix-dispatch" not in rule)
        (pace,) = (one for one in rest if one.startswith("--additional-config="))
        assert json.loads(pace.partition("=")[2]) == {"step_ms": 15, "token_ms": 0.3}
    config, _, _ = parse(["m", *prompts_real.flags_of("set apart", "count")])
    assert config.scheduler.prompt_instances == ("i0", "i1")
    assert "token_ms" not in " ".join(model_flags("device10ms"))


def turns_of(count: int) -> list[TurnSample]:
    """Conversations of five turns, one after the other at each moment."""
    rows = []
    for number in range(count):
        said, at = 0, 0.05 * number
        for _ in range(5):
            prompt = said + 300
            rows.append(TurnSample("", 0, number, at, said, prompt, 20, 0.0, 0.0, 0.0))
            said, at = prompt + 20, at + 3.0
    return rows


def test_the_same_turns_can_be_simulated_at_the_pace() -> None:
    cost = cost_of("device15ms")
    assert cost is not None
    assert cost_of("llama-1b-kv") is None
    ours, others = (simulate(one, turns_of(30), cost) for one in (OURS, "round-robin"))
    assert ours["hit_share"] > 1.5 * others["hit_share"]
    assert ours["ttft_mean_ms"] < others["ttft_mean_ms"]
    assert others["ttft_p50_ms"] > 15 + 0.3 * 300


def test_the_order_counts_only_of_policies_that_the_simulator_sets_apart() -> None:
    simulated = {"a": 1.0, "b": 2.0, "c": 2.1}
    assert as_simulated({"a": 1.0, "b": 3.0, "c": 2.0}, simulated) == 1.0
    assert as_simulated({"a": 2.5, "b": 3.0, "c": 2.0}, simulated) == 0.5
    assert as_simulated({"b": 3.0, "c": 2.0}, simulated) == 1.0


def test_figures_are_beside_the_best_of_the_others() -> None:
    row = dict.fromkeys((*prefixes_real.FIGURES, "hit_share"), 1.0)
    real = {
        "a": row, "b": {**row, "ttft_p99_ms": 4.0, "hit_share": 0.25},
        OURS: {**row, "ttft_p99_ms": 0.5, "hit_share": 1.5},
    }  # fmt: skip
    summary = summarize(real, {})
    assert summary["ttft_p99_ms_over_the_best"] == 0.5
    assert summary["hit_points_above_the_best"] == 50.0
    assert "order_as_simulated" not in summary
    assert summarize(real, real)["order_as_simulated"] == 1.0


def test_each_way_to_compute_prompts_is_beside_mixed_ones() -> None:
    runs = [Run(way, 0, 1.0, 0, {"prompt": 3}, 0) for way in prompts_real.WAYS]
    answers = [
        Answer(way, 0, 0.0, 10, 10, False, 5.0, 2.0 if way == prompts_real.MIXED else 1.0, 9.0)
        for way in prompts_real.WAYS
    ]
    summary = prompts_real.summarize(runs, answers)
    assert summary["set apart.tpot_ms.p99_over_mixed"] == 0.5
    assert summary["set apart.migrations"] == 3
    assert len(prompts_real.tables(summary)[0].rows) == len(prompts_real.WAYS)
