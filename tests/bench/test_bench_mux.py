"""MuxServe's evaluation in the simulator: the bench's own arithmetic and its page."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench import report
from bench.mux import figure5, figure7, page, small
from bench.mux.__main__ import read, simulate
from bench.mux.figure5 import Cell, Row
from bench.mux.systems import (
    MODELS,
    PAPERS,
    SYSTEMS,
    loads,
    paper_spatial,
    planned,
    power_law,
    published,
)
from kvmig.placement.estimator import PlanEstimator
from kvmig.placement.problem import GpuUnit, ModelLoad, PlacedInstance, cluster_of
from kvmig_tools.sim import mux as sim

TINY = Cell(2.1, 20, "spatial", as_published=True, share=0.01)


@pytest.fixture(scope="module")
def tiny() -> Row:
    return figure5.run(TINY)


def rows_like(tiny: Row) -> list[Row]:
    """Every run, all with the same figures but for kvmig's."""
    return [
        msgspec.structs.replace(
            tiny, cell=cell, axis=tiny.axis * (2 if cell.system == "kvmig" else 1)
        )
        for cell in figure5.cells(quick=False)
    ]


def test_every_published_load_of_three_systems_is_simulated() -> None:
    cells = {(one.alpha, one.rate, one.system) for one in figure5.cells(quick=False)}
    assert len(published()) == 36
    assert published().keys() <= cells
    assert len(figure5.cells(quick=False)) == 2 * 12 * len(SYSTEMS) + 4


def test_as_published_counts_are_the_authors_and_corrected_ones_are_in_the_ratio_of_rates() -> None:
    theirs = [len(one.arrivals) for one in loads(2.1, 50, as_published=True)]
    ours = [len(one.arrivals) for one in loads(2.1, 50, as_published=False)]
    assert theirs[:3] == [4709, 3079, 85]
    assert ours[:3] == [6000, 1399, 597]


def test_rates_fall_by_the_power_law() -> None:
    models = power_law(1.3, 40)
    assert [one.model for one in models] == MODELS
    assert models[0].rate == 40
    assert models[1].rate == pytest.approx(40 * 2**-1.3)


def test_the_papers_spatial_baseline_fills_the_cluster() -> None:
    estimator = PlanEstimator(power_law(1.3, 40), cluster_of(figure5.CLUSTER))
    sizes = [unit.gpus for unit in paper_spatial(estimator)]
    assert sizes == [8, 4, 4] + [1] * 16
    assert sum(sizes) == 32


@pytest.mark.parametrize(
    "system",
    [pytest.param(one, marks=[pytest.mark.long] if one == "kvmig" else []) for one in SYSTEMS],
)
def test_every_system_finds_a_placement_for_figure_5(system: str) -> None:
    estimator, plan = planned(system, power_law(1.3, 20), cluster_of(figure5.CLUSTER))
    assert {one.llm for unit in plan for one in unit.members} == set(range(19))
    assert all(estimator.unit(unit) is not None for unit in plan)


def test_the_same_run_gives_the_same_figures(tiny: Row) -> None:
    again = figure5.run(TINY)
    assert msgspec.structs.replace(again, cpu_s=0.0) == msgspec.structs.replace(tiny, cpu_s=0.0)


def test_a_run_that_was_ended_goes_on_where_it_was(tmp_path: Path, tiny: Row) -> None:
    file = tmp_path / "mux.jsonl"
    assert simulate([TINY], {TINY: tiny}, 1, file) == [tiny]
    assert read(file) == {TINY: tiny}
    file.write_bytes(file.read_bytes() + b'{"cell": {')
    assert read(file) == {TINY: tiny}


def test_the_page_has_every_load_and_every_demand(tiny: Row) -> None:
    rows = rows_like(tiny)
    result = report.begin("mux", {})
    nine = dict.fromkeys(small.FIGURE_9, 2.0)
    ten = dict.fromkeys(small.FIGURE_10, 2.0)
    eight = dict.fromkeys(small.FIGURE_8, (1.0, 2.0))
    seven = rows_of_figure_7()
    result.summary = {
        **figure5.summary(rows),
        **figure7.summary(seven),
        "figure_9_adbs_times_fcfs": 1.0,
        "figure_9_adbs_times_round_robin": 1.0,
        "figure_9_adbs_times_round_robin_on_shares": 1.0,
    }
    result.targets = {**figure5.TARGETS, **figure7.TARGETS}
    text = page.written(rows, result, figure7.page(seven) + small.page(nine, ten, eight))
    assert text.count("\n| 0.7 | ") == text.count("\n| 2.1 | 20") * 4
    assert text.count(" met |") + text.count(" missed |") == len(result.targets)
    assert result.summary["corrected_axis_times_muxserve_least"] == 2.0
    for figure in ("Figure 5", "Figure 7", "Figure 9a", "Figures 3, 6, 8 and 10"):
        assert f"## {figure}" in text or figure in text
    assert all(system in text for system in PAPERS)


def rows_of_figure_7() -> list[figure7.Row]:
    """Every run of Figure 7, as published and 1.5 times as good for kvmig."""
    found: list[figure7.Row] = []
    for load in figure7.LOADS:
        models = figure7.published(load)
        rates = [one.llm.rate for one in models]
        for as_published in (True, False):
            for system in PAPERS if as_published else SYSTEMS:
                known = system if system in PAPERS else "muxserve"
                factor = 1.5 if system == "kvmig" else 1.0
                served = [factor * one.throughput[known] for one in models]
                axis = sum(a * b for a, b in zip(rates, served, strict=True)) / sum(rates)
                found.append(
                    figure7.Row(load, system, as_published, axis, sum(served), 0.5, served)
                )
    return found


def test_figure_7s_rates_are_those_of_the_authors_files() -> None:
    models = figure7.published(2000)
    kinds = [one.llm.model for one in models]
    assert [kinds.count(f"llama-{size}b") for size in (7, 13, 30, 65)] == [4, 6, 3, 3]
    assert sum(one.requests for one in models) == 4089
    means = [figure7.Found(rows_of_figure_7()).rate(load) for load in figure7.LOADS]
    assert means == pytest.approx([3.0, 4.8, 7.1, 9.5, 11.9], abs=0.05)


@pytest.mark.parametrize("load", figure7.LOADS)
@pytest.mark.parametrize("system", PAPERS)
def test_figure_7s_published_placements_hold_every_model_once(load: int, system: str) -> None:
    models = figure7.published(load)
    plan = figure7.published_plan(models, system)
    estimator = PlanEstimator([one.llm for one in models], cluster_of(figure7.CLUSTER))
    assert sorted(one.llm for unit in plan for one in unit.members) == list(range(16))
    assert sum(unit.gpus for unit in plan) <= 32
    assert all(estimator.unit(unit) is not None for unit in plan)


def test_longer_runs_of_figure_7_have_a_table_and_a_figure_of_their_own() -> None:
    rows = rows_of_figure_7()
    assert "figure_7_kvmig_axis_times_best_other_long" not in figure7.summary(rows)
    long = [
        msgspec.structs.replace(one, long=True, axis=one.axis * (2 if one.system == "kvmig" else 1))
        for one in rows
        if not one.as_published and one.load in figure7.LONG_LOADS
    ]
    found = figure7.summary(rows + long)
    assert found["figure_7_kvmig_axis_times_best_other_long"] == pytest.approx(3)
    assert found["figure_7_kvmig_axis_times_best_other_least"] == pytest.approx(1.5)
    assert figure7.page(rows + long).count("\n| 7.1 |") == 3


def test_figure_7_as_published_has_no_error_and_muxserve_above_both() -> None:
    found = figure7.summary(rows_of_figure_7())
    assert found["figure_7_requests_error_worst"] == pytest.approx(0)
    assert found["figure_7_orders_right"] == 1
    assert found["figure_7_kvmig_axis_times_best_other_least"] == pytest.approx(1.5)
    rows = figure7.Found(rows_of_figure_7())
    for load in rows.loads:
        others = [rows.known_axis(load, one) for one in ("temporal", "spatial")]
        assert rows.known_axis(load, "muxserve") > max(others)


def test_models_whose_shares_dont_fit_together_decode_in_turn() -> None:
    models = [ModelLoad(name, "llama-7b", 4.0) for name in ("a", "b")]
    estimator = PlanEstimator(models, cluster_of("1x1:a100-80g"))
    plan = (GpuUnit(1, tuple(PlacedInstance(at, one.rate) for at, one in enumerate(models))),)
    coming = small.loads(models, 20.0)
    together, in_turn = (
        sim.simulate(estimator, plan, coming, decode_shares=dict.fromkeys("ab", share))
        for share in (0.6, 0.9)
    )
    assert in_turn.requests_per_s < together.requests_per_s


def test_figure_6_is_its_formula() -> None:
    assert small.figure_6(0.9, 19) == pytest.approx(0.54, abs=0.01)
    assert small.figure_6(2.1, 100) == pytest.approx(0.98, abs=0.01)


def test_figure_9_orders_the_policies_as_published() -> None:
    found = small.figure_9(seconds=30.0)
    assert found["adbs"] >= 1.5 * found["fcfs"]
    assert found["round-robin"] > found["fcfs"]


def test_figure_8s_baseline_puts_each_model_where_most_memory_is_free() -> None:
    kinds = ["llama-7b", "llama-30b", "llama-13b"]
    models = [ModelLoad(f"m{at}", kind, 3.0 - at) for at, kind in enumerate(kinds)]
    plan = small.by_free_memory(PlanEstimator(models, cluster_of("1x8:a100-80g")))
    assert [[one.llm for one in unit.members] for unit in plan] == [[0, 2], [1]]
