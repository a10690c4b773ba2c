"""What `bench.plugin_pairs` and `bench.plugin_soak` make of their samples."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bench import plugin_pairs, report
from bench.chaos.answers import Verdict
from bench.chaos.calls import KINDS, REFERENCES, reference
from bench.chaos.clients import Ledger, Outcome
from bench.chaos.mover import Mover
from bench.plugin_pairs import (
    ARMS,
    TARGETS,
    TIMEOUT_S,
    AskedProcess,
    environment,
    loaders,
    ratios,
    turns,
)
from bench.plugin_pairs import summarise as summarise_pairs
from bench.plugin_soak import SoakLoad, kinds_of, samples_of, summarise_load

pytestmark = pytest.mark.engine

CALL = reference("chat")
LOADER = """
import os, sys, types
def load_general_plugins():
    if os.environ["VLLM_PLUGINS"] == "kvmig":
        sys.modules["kvmig.plugin"] = types.ModuleType("kvmig.plugin")
"""
"""In vLLM's place."""


def samples(with_plugin: float) -> list[dict[str, Any]]:
    seconds = {"without": 1.0, "with": with_plugin, "again": 1.01}
    return [
        {"what": what, "pair": pair, "arm": arm, "s": seconds[arm], "imports_s": 1.0}
        for what in ("whole_start", "loader", "step")
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


def test_a_start_is_the_loaders_time_and_that_of_the_imports_before_it() -> None:
    summary = summarise_pairs(samples(1.5))

    assert summary["start_ratio"] == pytest.approx((1.0 + 1.5) / (1.0 + 1.0))
    assert summary["whole_start_ratio"] == pytest.approx(1.5)
    assert (summary["plugin_ms"], summary["plugin_noise_ms"]) == pytest.approx((500.0, 10.0))


def test_a_plugin_that_costs_something_misses_its_targets() -> None:
    missed = report.missed(summarise_pairs(samples(1.05)), TARGETS)
    assert [line.partition(" ")[0] for line in missed] == ["start_ratio", "step_ratio"]


async def test_the_loader_is_measured_in_forks_that_load_the_plugin_or_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    (tmp_path / "vllm" / "plugins.py").write_text(LOADER)
    monkeypatch.setattr(plugin_pairs, "ROOT", tmp_path)  # its vLLM is found first
    kept: list[dict[str, Any]] = []

    await loaders(2, tmp_path, kept.extend)

    assert [one["arm"] for one in kept] == [*ARMS, *ARMS[1:], ARMS[0]]
    assert all(one["s"] < TIMEOUT_S for one in kept)


async def test_a_measured_process_that_ends_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a process that is measured ended: 3"):
        async with AskedProcess("import sys; sys.exit(3)", (), {}):
            pass


def test_a_file_has_what_there_is_so_far(tmp_path: Path) -> None:
    options = report.parser("").parse_args(["--out", str(tmp_path / "a" / "result.json")])
    result = report.begin("plugin_pairs", {})

    result.samples.append({"s": 1.0})
    report.keep(result, options)

    assert json.loads(options.out.read_text())["samples"] == [{"s": 1.0}]
    assert list(options.out.parent.iterdir()) == [options.out]


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
    load = SoakLoad(Ledger(outcomes=outcomes), mover)
    summary = summarise_load(load)

    wanted = {"wrong": 1, "lost": 1, "stuck": 2, "tokens_lost": 3, "migrations_committed": 5}
    assert {name: summary[name] for name in wanted} == wanted
    assert summary["migrations_aborted"] == 2
    assert [(one["error"], one["wrong"]) for one in samples_of(load)][:3] == [
        ("", ""), ("", "3 lost"), ("500: no", ""),
    ]  # fmt: skip


def test_a_model_of_random_weights_gets_the_calls_that_have_references() -> None:
    assert kinds_of("count") == KINDS
    assert kinds_of("llama-1b-kv") == tuple(REFERENCES)
