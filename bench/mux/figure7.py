"""Figure 7: the 16 models of ChatLMSYS on 32 GPUs, at the five loads of the authors' files.

fig7_published.csv has what the authors' repository says (hao-ai-lab/MuxServe, benchmark/chatlmsys):
of yamls/*.yaml each model's kind and rate, of yamls/flexsm and yamls/spatial the placements with
their shares, of merged/*.json each model's requests and throughput. A load is called after the
factor by which its trace was condensed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import NamedTuple

import msgspec

from bench.mux.small import weighted
from bench.mux.systems import PAPERS, SEED, SYSTEMS, csv_rows, planned, stretched
from bench.report import Target
from kvmig.placement.estimator import PlanEstimator
from kvmig.placement.problem import GpuUnit, ModelLoad, PlacedInstance, Plan, cluster_of, ordered
from kvmig_tools.sim.mux import poisson, simulate

CLUSTER = "4x8:a100-80g"
PROMPT_TOKENS, OUTPUT_TOKENS = 100.17, 261.31
LOADS = (500, 800, 1200, 1600, 2000)
LONG, LONG_LOADS = 5, (1200, 2000)
"""Runs with that many times the requests, in which less of the time is their end."""


class PublishedModel(NamedTuple):
    """One model at one load, as the authors' files have it."""

    llm: ModelLoad
    requests: int
    unit: tuple[int, int]
    """Its unit in MuxServe's placement: GPUs, and the unit's number."""
    decode_share: float
    spatial_gpus: int
    throughput: Mapping[str, float]
    """Requests a second, by system."""


class Row(msgspec.Struct, frozen=True):
    """One run."""

    load: int
    system: str
    as_published: bool
    """Whether the placement is the authors'."""
    axis: float
    """Sum of rate x throughput / sum of rates, the figure's."""
    requests_per_s: float
    in_time: float
    """At SLO scale 8."""
    throughput: list[float]
    """Of each model."""
    long: bool = False
    """Whether it has `LONG` times the requests."""


def published(load: int) -> list[PublishedModel]:
    """The 16 models at one load."""
    return [
        PublishedModel(
            ModelLoad(
                row["llm"], row["model"], float(row["rate"]), PROMPT_TOKENS, OUTPUT_TOKENS
            ),
            int(row["requests"]),
            (int(row["gpus"]), int(row["unit"])),
            int(row["decode_share"]) / 100,
            int(row["spatial_gpus"]),
            {system: float(row[system]) for system in PAPERS},
        )
        for row in csv_rows("fig7_published.csv")
        if int(row["load"]) == load
    ]  # fmt: skip


def published_plan(models: Sequence[PublishedModel], system: str) -> Plan:
    """The authors' placement."""
    members = [PlacedInstance(at, one.llm.rate) for at, one in enumerate(models)]
    if system == "spatial":
        units = [
            GpuUnit(one.spatial_gpus, (at,)) for one, at in zip(models, members, strict=True)
        ]  # fmt: skip
        return ordered(units)
    placed = sorted(range(len(models)), key=lambda at: (models[at].unit, at))
    return ordered(
        [
            GpuUnit(gpus, tuple(members[at] for at in together))
            for (gpus, _), together in groupby(placed, lambda at: models[at].unit)
        ]
    )


def run(load: int, system: str, as_published: bool, share: float = 1.0) -> Row:
    """Simulate it; share: of the requests, for runs that are to be quick."""
    models = published(load)
    llms = [one.llm for one in models]
    shares: dict[str, float] = {}
    if as_published:
        estimator = PlanEstimator(llms, cluster_of(CLUSTER))
        plan = published_plan(models, system)
        if system != "spatial":
            shares = {one.llm.name: one.decode_share for one in models}
    else:
        estimator, plan = planned(system, llms, cluster_of(CLUSTER))
    loads = [
        stretched(poisson(one.llm, max(2, int(share * one.requests)), SEED + 2 * at))
        for at, one in enumerate(models)
    ]
    outcome = simulate(estimator, plan, loads, SYSTEMS[system].policy, decode_shares=shares)
    return Row(
        load, system, as_published, weighted(llms, outcome), outcome.requests_per_s,
        outcome.in_time[8], list(outcome.throughput), share > 1,
    )  # fmt: skip


def run_all(quick: bool) -> list[Row]:
    """All runs; quick: a tenth of the requests at the lowest and the highest load."""
    loads, share = ((LOADS[0], LOADS[-1]), 0.1) if quick else (LOADS, 1.0)
    rows = [
        run(load, system, as_published, share)
        for load in loads
        for as_published in (True, False)
        for system in (PAPERS if as_published else SYSTEMS)
    ]
    long = () if quick else LONG_LOADS
    return rows + [run(load, system, False, LONG) for load in long for system in SYSTEMS]


class Found:
    """Rows by what they are of, beside what is published."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = {(one.as_published, one.load, one.system): one for one in rows if not one.long}
        self.long = {(one.load, one.system): one for one in rows if one.long}
        self.loads = sorted({one.load for one in rows})
        self._known = {load: published(load) for load in self.loads}

    def rate(self, load: int) -> float:
        """The mean of the models' rates: the figure's x axis."""
        return sum(one.llm.rate for one in self._known[load]) / len(self._known[load])

    def known_axis(self, load: int, system: str) -> float:
        """As published."""
        models = self._known[load]
        return sum(one.llm.rate * one.throughput[system] for one in models) / sum(
            one.llm.rate for one in models
        )

    def known_requests(self, load: int, system: str) -> float:
        """As published."""
        return sum(one.throughput[system] for one in self._known[load])

    def axis(self, load: int, system: str, as_published: bool) -> float:
        """As simulated."""
        return self.rows[as_published, load, system].axis


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Figures of the page."""
    found = Found(rows)
    errors = {
        system: [
            abs(
                found.rows[True, load, system].requests_per_s / found.known_requests(load, system)
                - 1
            )
            for load in found.loads
        ]
        for system in PAPERS
    }
    every = [error for one in errors.values() for error in one]
    others = [one for one in SYSTEMS if one != "kvmig"]
    return {
        "figure_7_requests_error_median": median(every),
        "figure_7_requests_error_worst": max(every),
        **{
            f"figure_7_{system}_requests_error_median": median(errors[system]) for system in PAPERS
        },
        "figure_7_orders_right": sum(
            sorted(PAPERS, key=lambda one: found.axis(load, one, True))
            == sorted(PAPERS, key=lambda one: found.known_axis(load, one))
            for load in found.loads
        ) / len(found.loads),
        "figure_7_kvmig_axis_times_best_other_least": min(
            found.axis(load, "kvmig", False)
            / max(found.axis(load, other, False) for other in others)
            for load in found.loads
        ),
        "figure_7_kvmig_axis_times_published_muxserve_least": min(
            found.axis(load, "kvmig", False) / found.known_axis(load, "muxserve")
            for load in found.loads
        ),
        **_long(found),
    }  # fmt: skip


def _long(found: Found) -> dict[str, float]:
    """kvmig's axis beside the best other one in the longer runs; nothing where there are none."""
    loads = sorted({load for load, _ in found.long})
    if not loads:
        return {}
    return {
        "figure_7_kvmig_axis_times_best_other_long": min(
            found.long[load, "kvmig"].axis
            / max(one.axis for (at, name), one in found.long.items()
                  if at == load and name != "kvmig")
            for load in loads
        )
    }  # fmt: skip


TARGETS: dict[str, Target] = {
    "figure_7_requests_error_median": {"max": 0.15},
    "figure_7_requests_error_worst": {"max": 0.35},
    "figure_7_orders_right": {"min": 1.0},
    "figure_7_kvmig_axis_times_best_other_least": {"min": 0.98},
}
"""Those of Figure 5, fixed before the first run."""


def page(rows: Sequence[Row]) -> str:
    """Its part of docs/mux-paper.md."""
    found = Found(rows)
    lines = [
        "## Figure 7: ChatLMSYS",
        "",
        "16 models on 32 GPUs. Each model's rate, requests and throughput, and the placements of"
        " MuxServe and spatial with their shares, are in the authors' repository"
        " (`hao-ai-lab/MuxServe`, `benchmark/chatlmsys`; `bench/mux/fig7_published.csv` lists"
        " them). The trace itself isn't, nor is the distribution of lengths: arrivals here are"
        " Poisson, lengths log-normal with the published means, 100 and 261 tokens. Models send for"
        " 21 to 86 s. Rate: the mean of all models, as in the figure. Axis: sum of rate x"
        " throughput / sum of rates.",
        "",
        "Each cell: simulated on the authors' placement / published. Axis, then requests per"
        " second.",
        "",
        "| rate | " + " | ".join(f"{one} axis | req/s" for one in PAPERS) + " |",
        "|" + "---|" * (1 + 2 * len(PAPERS)),
    ]
    for load in found.loads:
        cells = [
            f"{found.axis(load, one, True):.2f} / {found.known_axis(load, one):.2f} |"
            f" {found.rows[True, load, one].requests_per_s:.1f} /"
            f" {found.known_requests(load, one):.1f}"
            for one in PAPERS
        ]
        lines.append(f"| {found.rate(load):.1f} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "On placements computed here. Each cell: axis, requests per second, % in time (SLO scale"
        " 8).",
        "",
        "| rate | " + " | ".join(SYSTEMS) + " |",
        "|" + "---|" * (1 + len(SYSTEMS)),
    ]
    for load in found.loads:
        lines.append(_line(found.rate(load), [found.rows[False, load, one] for one in SYSTEMS]))
    if long := sorted({load for load, _ in found.long}):
        lines += [
            "",
            f"The same with {LONG} times as many requests, so that less of the time is the end of"
            " the run:",
            "",
            "| rate | " + " | ".join(SYSTEMS) + " |",
            "|" + "---|" * (1 + len(SYSTEMS)),
        ]
        for load in long:
            lines.append(_line(found.rate(load), [found.long[load, one] for one in SYSTEMS]))
    return "\n".join([*lines, ""])


def _line(rate: float, rows: Sequence[Row]) -> str:
    """One line of a table: axis, requests per second and percent in time of each."""
    cells = [f"{one.axis:.2f}, {one.requests_per_s:.1f}, {100 * one.in_time:.0f}" for one in rows]
    return f"| {rate:.1f} | " + " | ".join(cells) + " |"
