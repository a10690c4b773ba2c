from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec import structs

from bench.paper import aims, scaling, single
from bench.paper.__main__ import SECTIONS, read, simulate, write
from bench.paper.loads import METRICS, points, run_of
from bench.paper.scope import Scope, spread
from kvmig_tools.sim.run import Result, Run
from kvmig_tools.sim.run import simulate as simulate_one
from kvmig_tools.sim.workloads import WORKLOADS


def runs_of(scope: Scope) -> list[Run]:
    runs = [one for section in SECTIONS for run in section.runs(scope) for one in scope.seeded(run)]
    return list(dict.fromkeys(runs))


@pytest.mark.long
def test_the_report_has_every_section_and_its_pictures(tmp_path: Path) -> None:
    scope = Scope(seeds=(1,), one_load=True)
    small = Run(trace="S-S", policy="llumnix", rate=34.0, requests=60, high_share=0.3)
    figures = simulate_one(small, sample_s=1.0).result
    results = {run: structs.replace(figures, run=run) for run in runs_of(scope)}
    write(scope, results, tmp_path)
    text = (tmp_path / "paper.md").read_text()
    for section in ("section 3", "section 6.3", "section 6.4", "section 6.5", "section 6.6"):
        assert section in text
    assert (tmp_path / "paper" / "loads.png").exists()
    summary = aims.summary(scope, results)
    assert aims.targets(scope).keys() <= summary.keys()
    assert summary["high_e2e_mean_s_gain"] == 1.0  # every run is the same one here


def test_a_run_that_was_ended_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.paper.__main__.SECTIONS", (single,))
    file = tmp_path / "paper.jsonl"
    scope = Scope(seeds=(1,), requests=20)
    results = simulate(scope, {}, 1, file)
    assert read(file) == results
    file.write_text(file.read_text() + '{"run": {')  # it was ended in the middle of a line
    assert simulate(scope, read(file), 1, file) == results


def test_every_point_of_the_paper_is_one_that_is_simulated() -> None:
    assert len(points()) == 315
    for name, system, rate, metric in points():
        assert rate in WORKLOADS[name].rates
        assert metric in METRICS
        assert run_of(name, system, rate).migration == (system == "Llumnix")


def test_a_spread_is_mean_least_and_most() -> None:
    assert spread([1.0, 2.0, 6.0]) == "3 (1-6)"


def test_a_result_survives_its_file() -> None:
    run = run_of("S-S", "Llumnix", 34.0)
    result = Result(run=run, figures={"x": 1.0})
    assert msgspec.json.decode(msgspec.json.encode(result), type=Result) == result


def test_infaas_moves_nothing_while_instances_come_and_go() -> None:
    moves = {run.policy: run.migration for run in scaling.runs(Scope())}
    assert moves == {"least-loaded": False, "llumnix": True, "kvmig": True}


def test_no_cluster_takes_less_than_full_instances_would() -> None:
    run = structs.replace(scaling.run_of("kvmig", 2.0, 1.0), requests=300, instances=4)
    hours = simulate_one(run).result.figures["instance_hours"]
    assert 0.5 * hours < scaling.least_instance_s(run) / 3600 < hours
