"""Figure 5: 19 models on 32 GPUs, rates by a power law, as published and corrected.

As published: each model sends as many requests as in the authors' runs, where a sort by text
(llm-10 before llm-2) gave most models another one's number. Corrected: every model sends for
the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from time import process_time

import msgspec

from bench.mux.systems import ALPHAS, PAPERS, RATES, SEND_S, SYSTEMS, loads, planned, published
from bench.report import Target
from kvmig.placement.problem import cluster_of
from kvmig_tools.sim.mux import simulate

CLUSTER = "4x8:a100-80g"
LONG_S = 480.0
"""For the estimator: runs in which less of the time is their end."""


class Cell(msgspec.Struct, frozen=True):
    """One run."""

    alpha: float
    rate: int
    system: str
    as_published: bool
    share: float = 1.0
    """Of the requests."""
    send_s: float = SEND_S
    """How long models send, if not as published."""


class Row(msgspec.Struct, frozen=True):
    """What came of it."""

    cell: Cell
    axis: float
    requests_per_s: float
    in_time: dict[int, float]
    estimated_axis: float
    estimated: float
    """Requests a second that the estimator expects."""
    offered_axis: float
    offered: float
    estimate_errors: list[float]
    """Of each model: estimate / simulated throughput - 1."""
    requests: int
    instances: int
    cpu_s: float


def cells(quick: bool) -> list[Cell]:
    """All runs; quick: the corner loads with a twentieth of the requests."""
    alphas = (ALPHAS[0], ALPHAS[-1]) if quick else ALPHAS
    rates = (RATES[0], RATES[-1]) if quick else RATES
    share = 0.05 if quick else 1.0
    long = [
        Cell(alpha, 30, system, False, share, LONG_S)
        for alpha in (ALPHAS[0], ALPHAS[-1])
        for system in ("muxserve", "spatial")
    ]
    return long + [
        Cell(alpha, rate, system, as_published, share)
        for as_published in (True, False)
        for alpha in alphas
        for rate in rates
        for system in SYSTEMS
    ]


def run(cell: Cell) -> Row:
    """Place and simulate; the same cell gives the same figures."""
    began = process_time()
    load = loads(cell.alpha, cell.rate, cell.as_published, cell.share, cell.send_s)
    models = [one.llm for one in load]
    rates = [one.rate for one in models]
    estimator, plan = planned(cell.system, models, cluster_of(CLUSTER))
    outcome = simulate(estimator, plan, load, SYSTEMS[cell.system].policy)
    expected = [0.0] * len(models)
    for unit in plan:
        for member, one in zip(unit.members, estimator.unit(unit) or (), strict=True):
            expected[member.llm] += one.throughput
    return Row(
        cell=cell,
        axis=outcome.axis(rates),
        requests_per_s=outcome.requests_per_s,
        in_time=dict(outcome.in_time),
        estimated_axis=sum(a * b for a, b in zip(rates, expected, strict=True)) / len(rates),
        estimated=sum(expected),
        offered_axis=sum(one * one for one in rates) / len(rates),
        offered=sum(rates),
        estimate_errors=[a / b - 1 for a, b in zip(expected, outcome.throughput, strict=True)],
        requests=outcome.requests,
        instances=sum(len(unit.members) for unit in plan),
        cpu_s=process_time() - began,
    )


class Found:
    """Rows by what they are of."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self.rows = {
            (one.cell.as_published, one.cell.alpha, one.cell.rate, one.cell.system): one
            for one in rows
            if one.cell.send_s == SEND_S
        }
        self.loads = sorted({(one.cell.alpha, one.cell.rate) for one in self.rows.values()})

    def at(self, as_published: bool, load: tuple[float, int], system: str) -> Row:
        """One of them."""
        return self.rows[as_published, *load, system]


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """What units.md demands of Figure 5: S1 to S4."""
    found = Found(rows)
    return {
        **_as_published(found),
        **_corrected(found),
        **_headline(found),
        **_estimates(found),
        "estimate_error_median_long": median(
            abs(error) for one in rows if one.cell.send_s == LONG_S for error in one.estimate_errors
        ),
        "cpu_s": sum(one.cpu_s for one in rows),
    }


def _as_published(found: Found) -> dict[str, float]:
    """S1."""
    known = published()
    figures: dict[str, float] = {}
    every: list[float] = []
    for system in PAPERS:
        errors = [
            abs(
                found.at(True, load, system).requests_per_s / known[*load, system].requests_per_s
                - 1
            )
            for load in found.loads
        ]
        every += errors
        figures[f"published_{system}_requests_error_median"] = median(errors)
        figures[f"published_{system}_axis_error_median"] = median(
            abs(found.at(True, load, system).axis / known[*load, system].axis - 1)
            for load in found.loads
        )
    figures["published_requests_error_median"] = median(every)
    figures["published_requests_error_worst"] = max(every)
    figures["published_orders_right"] = sum(
        _order([found.at(True, load, one).axis for one in PAPERS])
        == _order([known[*load, one].axis for one in PAPERS])
        for load in found.loads
    ) / len(found.loads)
    figures["published_spatial_better_slo_right"] = sum(
        (found.at(True, load, "spatial").in_time[8] > found.at(True, load, "muxserve").in_time[8])
        == (known[*load, "spatial"].in_time[8] > known[*load, "muxserve"].in_time[8])
        for load in found.loads
        if load[0] == ALPHAS[0]
    ) / sum(load[0] == ALPHAS[0] for load in found.loads)
    return figures


def _order(values: Sequence[float]) -> list[int]:
    return sorted(range(len(values)), key=lambda at: values[at])


def _corrected(found: Found) -> dict[str, float]:
    """S2: ours beside MuxServe and beside the best of all others."""
    hot = [load for load in found.loads if load[0] >= 1.3 and load[1] == 50]
    others = [one for one in SYSTEMS if one != "kvmig"]
    return {
        "corrected_in_time_least": min(found.at(False, one, "kvmig").in_time[8] for one in hot),
        "corrected_axis_times_muxserve_least": min(
            found.at(False, one, "kvmig").axis / found.at(False, one, "muxserve").axis
            for one in hot
        ),
        "published_axis_times_muxserve_least": min(
            found.at(True, one, "kvmig").axis / found.at(True, one, "muxserve").axis for one in hot
        ),
        "corrected_in_time_minus_best_other_least": min(
            found.at(False, one, "kvmig").in_time[8]
            - max(found.at(False, one, other).in_time[8] for other in others)
            for one in found.loads
        ),
        "corrected_axis_times_best_other_least": min(
            found.at(False, one, "kvmig").axis
            / max(found.at(False, one, other).axis for other in others)
            for one in found.loads
        ),
    }


def _headline(found: Found) -> dict[str, float]:
    """S3: against the paper's baselines, as simulated here and as published."""
    known = published()
    hot, cool = (2.1, 50), (2.1, 20)
    ours = {load: found.at(True, load, "kvmig") for load in (hot, cool)}
    figures: dict[str, float] = {}
    for name, axis, in_time in (
        (
            "simulated",
            max(found.at(True, hot, one).axis for one in PAPERS[1:]),
            max(found.at(True, cool, one).in_time[8] for one in PAPERS[1:]),
        ),
        (
            "published",
            max(known[*hot, one].axis for one in PAPERS[1:]),
            max(known[*cool, one].in_time[8] for one in PAPERS[1:]),
        ),
    ):
        figures[f"headline_axis_times_{name}_baselines"] = ours[hot].axis / axis
        figures[f"headline_in_time_times_{name}_baselines"] = ours[cool].in_time[8] / in_time
    best = found.at(True, hot, "spatial-best")
    figures["headline_axis_times_spatial_best"] = ours[hot].axis / best.axis
    return figures


def _estimates(found: Found) -> dict[str, float]:
    """S4: the estimator beside the simulator, models of Figure 5's placements one by one."""
    return {
        f"estimate_error_median_{name}": median(
            abs(error)
            for one in found.rows.values()
            if not one.cell.as_published and one.cell.system in systems
            for error in one.estimate_errors
        )
        for name, systems in (("papers", PAPERS), ("all", tuple(SYSTEMS)))
    }


TARGETS: dict[str, Target] = {
    "published_requests_error_median": {"max": 0.15},
    "published_requests_error_worst": {"max": 0.35},
    "published_orders_right": {"min": 11 / 12},
    "published_spatial_better_slo_right": {"min": 1.0},
    "corrected_in_time_least": {"min": 0.95},
    "corrected_axis_times_muxserve_least": {"min": 1.4},
    "corrected_axis_times_best_other_least": {"min": 0.98},
    "headline_axis_times_simulated_baselines": {"min": 1.8},
    "headline_in_time_times_simulated_baselines": {"min": 2.9},
    "estimate_error_median_papers": {"max": 0.15},
}
LONG_RUN = (
    "published_requests_error_*",
    "published_orders_right",
    "corrected_axis_times_muxserve_least",
    "headline_*",
    "estimate_error_median_papers",
)
"""What a twentieth of the requests is too few for."""


def page(rows: Sequence[Row]) -> str:
    """Its part of docs/mux-paper.md."""
    found = Found(rows)
    return "\n".join([*_published_table(found), *_corrected_table(found)])


def _published_table(found: Found) -> list[str]:
    known = published()
    lines = [
        "### As published",
        "",
        "Each cell: simulated / published. Axis: the mean of rate x throughput, the figure's own."
        " Then requests per second, and the share of requests in time (SLO scale 8).",
        "",
        "| alpha | rate | "
        + " | ".join(f"{one} axis | req/s | in time %" for one in PAPERS)
        + " |",
        "|" + "---|" * (2 + 3 * len(PAPERS)),
    ]
    for load in found.loads:
        row = f"| {load[0]} | {load[1]} |"
        for system in PAPERS:
            ours, theirs = found.at(True, load, system), known[*load, system]
            row += (
                f" {ours.axis:.1f} / {theirs.axis:.1f} |"
                f" {ours.requests_per_s:.1f} / {theirs.requests_per_s:.1f} |"
                f" {ours.in_time[8]:.0%} / {theirs.in_time[8]:.0%} |".replace("%", "")
            )
        lines.append(row)
    return [*lines, ""]


def _corrected_table(found: Found) -> list[str]:
    lines = [
        "### Corrected, with the baselines that the paper leaves out",
        "",
        "Each cell: axis, requests per second, % in time (SLO scale 8).",
        "",
        "| alpha | rate | offered | " + " | ".join(SYSTEMS) + " |",
        "|" + "---|" * (3 + len(SYSTEMS)),
    ]
    for load in found.loads:
        some = found.at(False, load, "kvmig")
        cells_ = [
            f"{one.axis:.1f}, {one.requests_per_s:.1f}, {100 * one.in_time[8]:.0f}"
            for one in (found.at(False, load, system) for system in SYSTEMS)
        ]
        offered = f"{some.offered_axis:.1f}, {some.offered:.1f}"
        lines.append(f"| {load[0]} | {load[1]} | {offered} | " + " | ".join(cells_) + " |")
    return [*lines, ""]
