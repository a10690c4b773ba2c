"""What `bench.pause` makes of moves: gaps in steps, and the parts of a pause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench import report
from bench.models import model_flags
from bench.moves import Window
from bench.pause import COLD, HERE, PauseSample, options_of, sample_of, summarise, tables

PAUSE = {"drain": 9.0, "tail_copy": 1.0, "commit": 4.0, "first_token": 8.0}
MIGRATION: dict[str, Any] = {"downtime_ms": PAUSE, "commit_engine_ms": 3.0, "total_ms": 100.0}


def sample(tree: str, load: int, move: int, longest_ms: float) -> PauseSample:
    window = Window(switch_ms=13.0, longest_ms=longest_ms, quiet_ms=7.0)
    return sample_of(tree, load, move, 6.0, window, MIGRATION)


def samples(tree: str, longest_ms: float) -> list[PauseSample]:
    cold = [sample(tree, 0, move + 1, 30.0) for move in range(COLD)]
    warm = [sample(tree, load, COLD + 1 + n, longest_ms) for load in (0, 8) for n in range(10)]
    return [*cold, *warm]


def test_a_pause_falls_into_its_parts() -> None:
    one = sample(HERE, 0, 9, 7.0)
    assert (one.tail, one.way, one.engine, one.first, one.wait) == (1.0, 1.0, 3.0, 8.0, 2.0)
    assert one.back == pytest.approx(13.0 - 1.0 - 0.5 - 3.0 - 8.0)


def test_the_first_moves_of_a_server_are_told_by_themselves() -> None:
    summary, targets = summarise(samples(HERE, 7.0), {HERE: 0})
    assert summary["cold_longest_steps"] == pytest.approx(5.0)
    assert summary["longest_steps_most_0"] == pytest.approx(7 / 6)
    assert summary["moves_8"] == 10
    assert report.missed(summary, targets) == []
    assert len(tables(samples(HERE, 7.0))) == 2


def test_a_gap_of_more_than_three_steps_misses_its_target() -> None:
    summary, targets = summarise(samples(HERE, 19.0), {HERE: 0})
    assert summary["over_three_steps_8"] == 10
    assert any(line.startswith("longest_steps_most_8") for line in report.missed(summary, targets))


@pytest.mark.parametrize(("late", "at_switch"), [(-3, 0), (0, 10), (1, 10), (4, 0)])
def test_a_long_gap_beside_the_switch_is_told_from_the_switchs(late: int, at_switch: int) -> None:
    moved = [replace(one, late=late) for one in samples(HERE, 19.0)]
    summary, _ = summarise(moved, {HERE: 0})
    assert (summary["over_three_steps_0"], summary["over_three_at_switch_0"]) == (10, at_switch)
    assert summary["quiet_over_three_steps_0"] == 0


def test_model_runner_v2_is_not_compared_with_another_tree(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        options_of(["--beside", ".", "--runner", "v2"])
    assert "--runner is v2, must not be given with --beside" in capsys.readouterr().err


def test_another_tree_has_figures_and_no_targets() -> None:
    both = [*samples(HERE, 7.0), *samples("before", 12.0)]
    summary, targets = summarise(both, {HERE: 0, "before": 0})
    assert summary["before_longest_steps_8"] == pytest.approx(2.0)
    assert not any(name.startswith("before") for name in targets)


def test_a_folder_that_is_no_working_tree_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options_of(["--beside", "/nowhere"])
    assert "--beside is /nowhere, must be a working tree" in capsys.readouterr().err


def test_servers_take_further_flags() -> None:
    assert options_of(["--flags", "--no-enforce-eager --dtype=auto"]).flags.split() == [
        "--no-enforce-eager", "--dtype=auto",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("device6ms", '{"step_ms": 6}'),
        ("device10ms-async", '{"step_ms": 10, "overlap": true}'),
    ],
)
def test_a_paced_model_is_named_with_its_pace(name: str, config: str) -> None:
    assert f"--additional-config={config}" in model_flags(name)
