"""Not in the paper: our policy against all others, under what kvmig's llumlets report."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

from bench.paper.scope import Results, Scope, mean, table
from kvmig.sim.run import Run
from kvmig.sim.workloads import WORKLOADS

OTHERS = ("round-robin", "least-loaded", "freeness", "llumnix", "llumnix-artifact")
METRICS = {
    "TTFT P99": "ttft_p99_s",
    "end to end mean": "e2e_mean_s",
    "preemption loss": "loss_mean_s",
}
LEAST_LOSS_S = 0.01
"""A loss below this counts as this: ratios of next to nothing say nothing."""


def run_of(workload: str, policy: str) -> Run:
    """At the paper's highest rate for the workload."""
    return Run(trace=workload, policy=policy, rate=WORKLOADS[workload].rates[-1], setting="live")


def runs(scope: Scope) -> list[Run]:
    """Every workload and policy."""
    return [run_of(name, policy) for name in WORKLOADS for policy in (*OTHERS, "kvmig")]


def report(scope: Scope, results: Results, pictures: Path) -> str:
    """Ratios: above 1 kvmig is better."""
    text = (
        "## `--policy kvmig` and the others\n\n"
        "Each workload at the paper's highest rate, 851 blocks, reports and rounds as kvmig has"
        " them. The other policy / kvmig, means of the seeds: above 1 kvmig is better.\n"
    )
    for title, field in METRICS.items():
        rows = []
        for policy in OTHERS:
            ratios = [_ratio(scope, results, name, policy, field) for name in WORKLOADS]
            together = math.exp(fmean(math.log(ratio) for ratio in ratios))
            rows.append([policy, *(f"{ratio:.2f}" for ratio in ratios), f"{together:.2f}"])
        ours = [f"{mean(scope, results, run_of(name, 'kvmig'), field):.3g} s" for name in WORKLOADS]
        rows.append(["kvmig itself", *ours, ""])
        text += f"\n{title}:\n\n" + table(["over", *WORKLOADS, "geometric mean"], rows)
    return text


def _ratio(scope: Scope, results: Results, name: str, policy: str, field: str) -> float:
    floor = LEAST_LOSS_S if field == "loss_mean_s" else 0.0
    other, own = (mean(scope, results, run_of(name, one), field) for one in (policy, "kvmig"))
    return max(other, floor) / max(own, floor)
