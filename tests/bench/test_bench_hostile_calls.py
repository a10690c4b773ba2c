"""What bench.hostile_calls sends, and what it makes of what it saw."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from bench.hostile_calls import Sample, calls_of, main, markdown, summarise, worst

FITS = Sample("beams", "fits", "/v1/completions", 0.002, 200, 80.0, 10.0, 20.0, 3.0)
HUGE = replace(FITS, size="huge", body_mb=60.0, status=413, longest_ms=15.0)


def test_of_two_runs_the_one_with_the_longest_gap_counts_and_the_most_memory_of_both() -> None:
    (one,) = worst([replace(FITS, longest_ms=30.0), replace(FITS, quiet_ms=12.0, grown_mb=9.0)])
    assert (one.longest_ms, one.quiet_ms, one.grown_mb) == (30.0, 12.0, 9.0)


def test_the_figures_are_of_the_worst_kind_and_count_calls_without_an_answer() -> None:
    summary = summarise([FITS, HUGE, replace(FITS, kind="echo", status=0, longest_ms=50.0)])
    assert summary == {
        "kinds": 2, "quiet_ms": 10.0, "longest_ms": 50.0, "ratio_max": 5.0, "ratio_median": 2.0,
        "grown_mb_max": 3.0, "unanswered": 1,
    }  # fmt: skip


def test_the_table_has_a_row_for_each_kind_with_both_sizes() -> None:
    row = markdown([FITS, HUGE]).splitlines()[2]
    assert row == (
        "| beams | 60.0 MB | 413 | 15 (10) ms | +3 MB | 2 kB | 200 | 20 (10) ms | +3 MB |"
    )


@pytest.mark.parametrize(("quick", "sizes"), [(True, ["fits"]), (False, ["huge", "fits"])])
def test_a_quick_run_sends_only_what_is_let_through(quick: bool, sizes: list[str]) -> None:
    options = Namespace(quick=quick, only="logprobs of a stream", context=256)
    assert [(one.kind, one.size) for one in calls_of("m", options)] == [
        ("logprobs of a stream", size) for size in sizes
    ]


def test_a_quick_run_writes_no_table_of_both_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--quick", f"--table={tmp_path / 'table.md'}"])
    assert "must be left out with --quick" in capsys.readouterr().err
