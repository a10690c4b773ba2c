"""What `bench.plugin_pairs` and `bench.plugin_soak` make of their samples."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench import report
from bench.chaos.answers import Verdict
from bench.chaos.calls import KINDS, REFERENCES, reference
from bench.chaos.clients import Ledger, Outcome
from bench.chaos.leaks import Holdings
from bench.chaos.mover import Mover
from bench.plugin_pairs import ARMS, TARGETS, environment, ratios, turns
from bench.plugin_pairs import summarise as summarise_pairs
from bench.plugin_soak import Soaked, kinds_of
from bench.plugin_soak import summarise as summarise_soak

pytestmark = pytest.mark.engine

CALL = reference("chat")


def samples(with_plugin: float) -> list[dict[str, Any]]:
    seconds = {"without": 1.0, "with": with_plugin, "again": 1.01}
    return [
        {"what": what, "pair": pair, "arm": arm, "s": seconds[arm], "loader_s": 0.1}
        for what in ("start", "step")
        for pair in range(4)
        for arm in ARMS
    ]


def test_each_arm_is_as_often_the_first() -> None:
    assert Counter(order[0] for order in turns(6)) == dict.fromkeys(ARMS, 2)


def test_a_pair_is_a_ratio_beside_the_noise() -> None:
    summary = summarise_pairs(samples(1.0))

    assert ratios(samples(1.5), "step", "with") == [1.5] * 4
    assert summary["step_noise"] == pytest.approx(1.01)
    assert report.missed(summary, TARGETS) == []


def test_a_plugin_that_costs_something_misses_its_targets() -> None:
    missed = report.missed(summarise_pairs(samples(1.05)), TARGETS)
    assert [line.partition(" ")[0] for line in missed] == ["start_ratio", "step_ratio"]


def test_only_one_arm_loads_kvmigs_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVMIG", "1")
    loaded = {arm: environment(arm, tmp_path)["VLLM_PLUGINS"] for arm in ARMS}

    assert loaded == {"without": "", "with": "kvmig", "again": ""}
    assert "KVMIG" not in environment("with", tmp_path)


def test_calls_are_wrong_lost_or_stuck() -> None:
    outcomes = [
        Outcome(CALL, 0.0),
        Outcome(CALL, 0.0, verdict=Verdict("3 lost", lost=3)),
        Outcome(CALL, 0.0, error="500: no"),
        Outcome(CALL, 0.0, error="nothing came"),
        Outcome(CALL, 0.0, error="did not end"),
    ]
    moves = Counter({"committed": 5, "aborted: finished": 2})
    mover = cast("Mover", SimpleNamespace(ended=moves))
    summary = summarise_soak(Soaked(Ledger(outcomes=outcomes), mover, Holdings(), Holdings()))

    wanted = {"wrong": 1, "lost": 1, "stuck": 2, "tokens_lost": 3, "migrations_committed": 5}
    assert {name: summary[name] for name in wanted} == wanted
    assert summary["migrations_aborted"] == 2


def test_a_model_of_random_weights_gets_the_calls_that_have_references() -> None:
    assert kinds_of("count") == KINDS
    assert kinds_of("llama-1b-kv") == tuple(REFERENCES)
