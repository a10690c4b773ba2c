from __future__ import annotations

from bench.simulator_speed import measure, runs


def test_each_workload_is_run_with_migration_and_the_large_ones_come_last() -> None:
    wanted = runs(10, [20, 30])
    assert len(wanted) == 16
    assert all(run.migration and run.instances == 16 for run in wanted[:-2])
    assert [(run.instances, run.requests) for run in wanted[-2:]] == [(1000, 20), (1000, 30)]


def test_a_run_is_measured_with_its_memory() -> None:
    cost = measure(runs(20, [])[0])
    assert cost.requests == 20
    assert cost.cpu_s > 0
    assert cost.peak_mib > 10
