"""MuxServe's evaluation in the simulator: the bench's own arithmetic and its page."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from bench import report
from bench.mux import figure5, page, small
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
from kvmig.placement.estimator import Estimator
from kvmig.placement.problem import ModelLoad, cluster_of

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
    estimator = Estimator(power_law(1.3, 40), cluster_of(figure5.CLUSTER))
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
    result.summary = {
        **figure5.summary(rows),
        "figure_9_adbs_times_fcfs": 1.0,
        "figure_9_adbs_times_round_robin": 1.0,
        "figure_9_adbs_times_round_robin_on_shares": 1.0,
    }
    result.targets = dict(figure5.TARGETS)
    text = page.written(rows, result, small.page(nine, ten, eight))
    assert text.count("\n| 0.7 | ") == text.count("\n| 2.1 | 20") * 4
    assert text.count(" met |") + text.count(" missed |") == len(figure5.TARGETS)
    assert result.summary["corrected_axis_times_muxserve_least"] == 2.0
    for figure in ("Figure 5", "Figure 9a", "Figures 3, 6, 8 and 10"):
        assert f"## {figure}" in text or figure in text
    assert all(system in text for system in PAPERS)


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
    plan = small.by_free_memory(Estimator(models, cluster_of("1x8:a100-80g")))
    assert [[one.llm for one in unit.members] for unit in plan] == [[0, 2], [1]]
