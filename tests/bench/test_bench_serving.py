"""bench.serving: the calls it makes of a trace, its figures, its flags and its picture."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from bench import report, serving
from bench.arrivals import Arrival
from bench.serving_calls import Answer, Call, Run, answer_of, calls_of, summarise
from bench.serving_plot import draw_serving
from kvmig.core.errors import ConfigError
from kvmig.launcher.flags import parse


def calls(count: int, rate: float = 2.0, high: float = 0.0, longest: int = 3000) -> list[Call]:
    return calls_of(serving.TRACE, count, rate=rate, scale=0.25, longest=longest, high=high, seed=1)


def test_arrivals_are_stretched_to_the_rate_and_lengths_are_scaled() -> None:
    slow, quick = calls(101), calls(101, rate=20.0)
    assert slow[0].at == quick[0].at == 0.0
    assert slow[-1].at == pytest.approx(50.0)
    assert [one.at for one in slow] == pytest.approx([10 * one.at for one in quick])
    first = serving.TRACE.read_text().splitlines()[1].split(",")
    assert (slow[0].prompt, slow[0].output) == tuple(round(int(n) / 4) for n in first[1:])


def test_requests_that_can_not_fit_are_left_out() -> None:
    assert max(one.prompt + one.output for one in calls(100, longest=200)) <= 200
    with pytest.raises(ConfigError, match=r"has no request of at most 1 tokens at --scale 0\.25"):
        calls(100, longest=1)


def test_the_same_seed_gives_the_same_calls_the_priority() -> None:
    some = calls(500, high=0.1)
    assert some == calls(500, high=0.1)
    assert 0.05 < fmean(one.high for one in some) < 0.15


def test_a_clients_times_are_those_since_the_call_was_due() -> None:
    arrivals = [Arrival(0.5, 0, 1), Arrival(0.75, 1, 2), Arrival(1.5, 3, 1)]
    answer = answer_of(Call(3.0, 10, 4), "kvmig", 0, arrivals)
    assert (answer.ttft_ms, answer.e2e_ms) == (500.0, 1500.0)
    assert answer.tpot_ms == pytest.approx(333.333, abs=0.001)
    assert answer_of(Call(0.0, 10, 1), "kvmig", 0, arrivals[:1]).tpot_ms is None


def answers(policy: str, repeat: int, base: float) -> list[Answer]:
    return [
        Answer(policy, repeat, 0.0, 5, 5, high, base + n, 1.0 if n else None, 10 * base)
        for n in range(3)
        for high in (False, True)
    ]


def test_the_figures_are_medians_over_the_repeats() -> None:
    runs = [Run("kvmig", repeat, 1.0, 10 * repeat, {"balance": repeat}, 0) for repeat in range(3)]
    them = [one for repeat in range(3) for one in answers("kvmig", repeat, 100.0 * (repeat + 1))]
    summary = summarise(them, runs)
    assert summary["kvmig.ttft_ms.mean"] == 201.0
    assert summary["kvmig.high.ttft_ms.p50"] == 201.0
    assert summary["kvmig.normal.e2e_ms.p99"] == 2000.0
    assert (summary["kvmig.preemptions"], summary["kvmig.migrations"]) == (10, 1)
    assert not any("high" in name for name in summarise([a for a in them if not a.high], runs))


def test_the_servers_flags_are_ones_that_kvmig_takes() -> None:
    options = serving.options_of(["--high=0.1", "--policy=kvmig"])
    config, _, _ = parse(["m", *serving.flags_of("kvmig", options)])
    assert config.scheduler.policy == "kvmig"
    assert [one.name for one in config.priorities] == ["high", "normal"]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("--policy=best", "invalid choice: 'best'"),
        ("--scale=2", "--scale is 2.0, must be more than 0, at most 1"),
        ("--high=1", "--high is 1.0, must be 0 or more, less than 1"),
        ("--requests=1", "--requests is 1, must be 2 or more"),
    ],
)
def test_bad_flags_are_refused_by_name(
    given: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        serving.options_of([given])
    assert sentence in capsys.readouterr().err


def test_a_result_becomes_tables_a_file_and_a_picture(tmp_path: Path) -> None:
    runs = [Run(policy, 0, 1.0, 3, {"balance": 2}, 1) for policy in ("round-robin", "kvmig")]
    them = [one for run in runs for one in answers(run.policy, 0, 100.0)]
    result = report.begin("serving", {})
    result.samples = [{"kind": "answer", **vars(one)} for one in them]
    result.summary = summarise(them, runs)
    options = serving.options_of([f"--out={tmp_path}/r.json", f"--plot={tmp_path}/r.png"])

    tables = serving.tables(result.summary, runs)
    assert report.finish(result, options, tables, draw_serving) == 0

    assert [one.row_count for one in tables] == [6, 6, 6, 2]
    assert json.loads((tmp_path / "r.json").read_text())["summary"] == result.summary
    assert (tmp_path / "r.png").stat().st_size > 1000
