"""The benchmarks of scheduling: their figures, and tiny runs."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from bench import policies, queues, report, scheduler
from bench.scheduler import Sample
from kvmig_tools.sim.run import Run

SAMPLE = Sample(10_000, 1, 4.0, 100, 30.0, 5.0, 60, 400.0)


def test_a_small_cluster_is_measured_and_drawn(tmp_path: Path) -> None:
    samples = scheduler.measure("kvmig", (2, 20), (1, 100), repeats=2)
    assert len(samples) == 8
    assert all(one.round_ms > 0 and one.dispatch_us > 0 and one.report_us > 0 for one in samples)
    assert any(one.pairs for one in samples)
    assert [table.row_count for table in scheduler.tables(samples)] == [2, 2, 2]
    result = report.begin("scheduler", {})
    result.samples = [asdict(one) for one in samples]
    scheduler.draw(result, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_the_figures_are_of_the_slowest_and_the_spread_over_requests() -> None:
    samples = [SAMPLE, replace(SAMPLE, requests=1000, round_ms=6.0, dispatch_us=20.0)]
    summary = scheduler.summarise(samples)
    assert summary["round_ms_10000"] == 6.0
    assert summary["round_spread_10000"] == 1.5
    assert summary["dispatch_us_10000"] == 30.0
    assert summary["round_over_sort_10000"] == 15.0
    targets = {name: scheduler.TARGETS[name] for name in summary if name in scheduler.TARGETS}
    assert report.missed(summary, targets) == []
    slow = scheduler.summarise([replace(SAMPLE, round_ms=11.0, dispatch_us=51.0)])
    assert len(report.missed(slow, targets)) == 2


@pytest.mark.long
def test_a_queue_is_looked_at_at_each_length() -> None:
    looks = queues.measure((1, 50), repeats=2)
    assert len(looks) == 8
    assert scheduler.table_of_looks(looks).row_count == 2
    found = scheduler.summarise_looks([replace(look, snapshot_us=look.waiting) for look in looks])
    assert found["snapshot_growth"] == 50.0
    assert found["list_us_50"] > 0.0


def test_policies_are_compared_by_means_over_seeds_and_workloads() -> None:
    def sample(policy: str, workload: str, seed: int, value: float, loss: float) -> policies.Sample:
        figures = dict.fromkeys(policies.FIGURES, value) | {policies.LOSS: loss}
        return policies.Sample(policy, workload, seed, figures)

    samples = [
        sample("llumnix", "a", 1, 1.0, 1.0),
        sample("llumnix", "a", 2, 3.0, 1.0),
        sample("llumnix", "b", 1, 1.0, 3.0),
        sample("kvmig", "a", 1, 1.0, 0.5),
        sample("kvmig", "a", 2, 0.0, 0.5),
        sample("kvmig", "b", 1, 1.0, 1.5),
    ]
    found = policies.ratios(samples, "kvmig")
    assert found["ttft_mean_s"] == pytest.approx(0.5)
    assert found[policies.LOSS] == pytest.approx(0.5)


@pytest.mark.long
def test_every_variant_of_the_policy_runs() -> None:
    run = Run(trace="L-L", policy="llumnix", rate=3.0, requests=30)
    for name in policies.variants():
        sample = policies.simulate((name, "L-L", run))
        assert sample.figures["ttft_mean_s"] > 0
