"""Section 6.3, Figure 11: seven workloads at the paper's rates, in its artifact's configuration."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.paper.scope import Results, Scope, mean, table, values
from kvmig_tools.sim.run import Run
from kvmig_tools.sim.workloads import WORKLOADS

REAL = ("ShareGPT", "BurstGPT")
METRICS = {
    "Request Mean": "e2e_mean_s",
    "Request P99": "e2e_p99_s",
    "Prefill Mean": "ttft_mean_s",
    "Prefill P99": "ttft_p99_s",
    "Decode Mean": "tpot_mean_s",
    "Decode P99": "tpot_p99_s",
    "Preemption Loss": "loss_mean_s",
}
LEAST_LOSS_S = 0.01
"""Losses below this are as good as none: their ratios say nothing."""
PUBLISHED = (
    ("real", "Round-Robin", "Request Mean", 2.0),
    ("real", "Round-Robin", "Request P99", 2.9),
    ("real", "Round-Robin", "Prefill Mean", 26.6),
    ("real", "Round-Robin", "Prefill P99", 34.4),
    ("real", "Round-Robin", "Decode P99", 2.0),
    ("real", "INFaaS++", "Prefill Mean", 2.2),
    ("real", "INFaaS++", "Prefill P99", 5.5),
    ("real", "INFaaS++", "Decode P99", 1.3),
    ("generated", "INFaaS++", "Request Mean", 1.5),
    ("generated", "INFaaS++", "Request P99", 1.6),
    ("generated", "INFaaS++", "Prefill Mean", 7.7),
    ("generated", "INFaaS++", "Prefill P99", 14.8),
    ("generated", "INFaaS++", "Decode P99", 2.0),
)
"""Largest ratios over rates that the paper states: traces, baseline, metric, baseline / Llumnix."""
TARGETS = {"Request Mean": 1.1, "Request P99": 1.1, "Decode Mean": 1.1, "Decode P99": 1.25,
           "Prefill P99": 2.5}  # fmt: skip


WHY = """
What differs, and why:

- *First tokens come sooner here*, with all systems. In queues a few per cent of capacity make a
  large factor, and the seed alone makes a larger one: of our three, S-S at 34 requests/s has a P99
  of 1.5 to 41 s with Llumnix. The paper shows one run of each; its seed is known (0xcade), and with
  that seed alone our results are a little nearer (the columns with that seed).
- *The largest ratio over round robin of whole requests* comes from BurstGPT, for which there are no
  points; the points of ShareGPT give the last column, and our ratio is within 1.2 of it.
- *Over INFaaS++ on real traces first tokens gain less*, because INFaaS++ queues later here: its P99
  on ShareGPT exceeds 1 s at 7.75 requests/s, in the paper at 7.25. Mean decode agrees within 4 %,
  so the steps' model isn't the cause; the simulator doesn't model what the paper's system lost
  outside of its steps.
- *Over INFaaS++ on generated traces the mean first token* has its largest ratio with M-M in both,
  4.7 and 7.7: at 7.8 requests/s the paper's one run has a P99 of 240 s, ours 2.5 to 62 s by seed.
"""


def systems(workload: str) -> tuple[str, ...]:
    """Those that the paper shows."""
    return ("Round-Robin", "INFaaS++", "Llumnix") if workload in REAL else ("INFaaS++", "Llumnix")


def run_of(workload: str, system: str, rate: float) -> Run:
    """INFaaS++ is the artifact's: its dispatch, without migration."""
    threshold = 10.0 if workload in ("M-M", "S-L") else 3.0
    return Run(
        trace=workload,
        policy="round-robin" if system == "Round-Robin" else "llumnix-artifact",
        migration=system == "Llumnix",
        rate=rate,
        gpu="a10-llama7b-artifact",
        setting="artifact",
        source_below=threshold,
        destination_above=threshold,
    )


def runs(scope: Scope) -> list[Run]:
    """All workloads, systems and rates."""
    return [
        run_of(name, system, rate)
        for name, workload in WORKLOADS.items()
        for system in systems(name)
        for rate in scope.some(workload.rates)
    ]


@cache
def points() -> dict[tuple[str, str, float, str], float]:
    """(workload, system, rate, metric) -> seconds, read off the paper's figure."""
    with Path(__file__).with_name("fig11_points.csv").open(encoding="utf-8") as file:
        return {
            (row["row"], row["system"], float(row["rate"]), row["metric"]): float(row["value_s"])
            for row in csv.DictReader(file)
        }


def report(scope: Scope, results: Results, pictures: Path) -> str:
    """Errors against the points, the paper's ratios, and a picture of every point."""
    _draw(scope, results, pictures / "loads.png")
    return (
        "## Serving performance (section 6.3, Figure 11)\n\n"
        "16 instances, LLaMA-7B on A10 as in the artifact (785 blocks, loads one step old);"
        " lines are ours (mean of the seeds, the band from least to most), crosses the"
        " paper's points.\n\n![Figure 11](paper/loads.png)\n\n"
        "Ours / the paper's point, geometric mean over workloads and rates with points"
        f" ({', '.join(sorted({key[0] for key in points()}))}):\n\n"
        + _errors(scope, results)
        + "\nLargest ratio over rates, baseline / Llumnix (means of the seeds); a number in bold"
        " is off by more than a factor of 1.6:\n\n" + _ratios(scope, results) + "\n"
        + _losses(scope, results) + WHY
    )  # fmt: skip


def _errors(scope: Scope, results: Results) -> str:
    logs: dict[tuple[str, str], list[float]] = defaultdict(list)
    for (name, system, rate, metric), published in points().items():
        if rate not in scope.some(WORKLOADS[name].rates):
            continue
        ours = mean(scope, results, run_of(name, system, rate), METRICS[metric])
        if metric == "Preemption Loss" and max(ours, published) < LEAST_LOSS_S:
            continue
        floor = LEAST_LOSS_S if metric == "Preemption Loss" else 0.0
        logs[metric, system].append(math.log(max(ours, floor) / max(published, floor)))
        first = values(scope, results, run_of(name, system, rate), METRICS[metric])[0]
        logs[metric, f"{system} first"].append(math.log(max(first, floor) / max(published, floor)))
    rows = []
    for metric in METRICS:
        cells = [
            f"{math.exp(fmean(logs[metric, system])):.2f}" if logs[metric, system] else "-"
            for system in ("Llumnix", "INFaaS++", "Round-Robin", "Llumnix first", "INFaaS++ first")
        ]
        most = TARGETS.get(metric)
        aim = f"within {most:g}x" if most else "-"
        rows.append([metric, *cells, aim])
    seed = f"seed {scope.seeds[0]:#x}"
    header = ["", "Llumnix", "INFaaS++", "Round-Robin", f"Llumnix, {seed}", f"INFaaS++, {seed}"]
    return table([*header, "aim for Llumnix"], rows)


def _best_ratio(
    scope: Scope, results: Results, names: list[str], baseline: str, metric: str
) -> float:
    field = METRICS[metric]
    return max(
        mean(scope, results, run_of(name, baseline, rate), field)
        / mean(scope, results, run_of(name, "Llumnix", rate), field)
        for name in names
        for rate in scope.some(WORKLOADS[name].rates)
    )


def _best_of_points(names: list[str], baseline: str, metric: str) -> float | None:
    """The same of the paper's points; None where it has none."""
    known = points()
    return max(
        (
            seconds / known[name, "Llumnix", rate, metric]
            for (name, system, rate, what), seconds in known.items()
            if name in names and system == baseline and what == metric
            and (name, "Llumnix", rate, metric) in known
        ),
        default=None,
    )  # fmt: skip


def _ratios(scope: Scope, results: Results) -> str:
    rows = []
    for kind, baseline, metric, published in PUBLISHED:
        names = [name for name in WORKLOADS if (name in REAL) == (kind == "real")]
        ours = _best_ratio(scope, results, names, baseline, metric)
        off = max(ours / published, published / ours) > 1.6
        shown = f"**{ours:.2f}**" if off else f"{ours:.2f}"
        read = _best_of_points(names, baseline, metric)
        rows.append(
            [kind, baseline, metric, shown, f"{published:g}", f"{read:.2f}" if read else ""]
        )
    return table(["traces", "over", "metric", "ours", "paper", "of its points"], rows)


def _losses(scope: Scope, results: Results) -> str:
    def less(names: list[str], baseline: str) -> float:
        pairs = [
            tuple(
                mean(scope, results, run_of(name, system, rate), "loss_mean_s")
                for system in (baseline, "Llumnix")
            )
            for name in names
            for rate in scope.some(WORKLOADS[name].rates)
        ]
        return 100 * (1 - sum(pair[1] for pair in pairs) / max(sum(p[0] for p in pairs), 1e-9))

    generated = [name for name in WORKLOADS if name not in REAL]
    return (
        f"Preemption loss with Llumnix, all rates together: {less(list(REAL), 'Round-Robin'):.0f} %"
        f" less than round robin on the real traces (paper 84 %),"
        f" {less(generated, 'INFaaS++'):.0f} % less than INFaaS++ on the generated ones"
        " (paper 70 %).\n"
    )


def _draw(scope: Scope, results: Results, file: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    colours = {"Round-Robin": "#777777", "INFaaS++": "#c98a1b", "Llumnix": "#1f6fb2"}
    figure, axes = pyplot.subplots(len(WORKLOADS), len(METRICS), figsize=(22, 19))
    for row, (name, workload) in enumerate(WORKLOADS.items()):
        rates = scope.some(workload.rates)
        for column, (metric, field) in enumerate(METRICS.items()):
            axis = axes[row][column]
            for system in systems(name):
                found = [values(scope, results, run_of(name, system, r), field) for r in rates]
                _line(axis, rates, found, colours[system], system)
                known = [(r, points().get((name, system, r, metric))) for r in workload.rates]
                shown = [(r, value) for r, value in known if value is not None]
                axis.plot(*zip(*shown, strict=True) if shown else ([], []), "x",
                          color=colours[system])  # fmt: skip
            axis.set(yscale="log", title=f"{name}: {metric}" if row == 0 else "")
            axis.grid(visible=True, alpha=0.3)
        axes[row][0].set_ylabel(f"{name}, s")
    axes[0][-1].legend(frameon=False, fontsize="small")
    figure.tight_layout()
    figure.savefig(file, dpi=60)
    pyplot.close(figure)


def _line(
    axis: Any, rates: tuple[float, ...], found: list[list[float]], colour: str, label: str
) -> None:
    shown = [[max(value, 1e-4) for value in one] for one in found]  # the axis is logarithmic
    axis.plot(rates, [fmean(one) for one in shown], "o-", color=colour, label=label, markersize=3)
    low, high = [min(one) for one in shown], [max(one) for one in shown]
    axis.fill_between(rates, low, high, color=colour, alpha=0.2)
