"""What `--check` holds the simulated evaluation to: ratios to the paper's figures and its gains."""

from __future__ import annotations

import math
from statistics import fmean

from bench.paper import loads, priorities, scaling
from bench.paper.scope import Results, Scope, mean
from bench.report import Target
from kvmig_tools.sim.workloads import WORKLOADS

LEAST_GAIN = {"e2e_mean_s": 1.2, "ttft_mean_s": 2.9, "ttft_p99_s": 3.6, "tpot_mean_s": 1.2}
"""Published gains of high priority, the least of each range."""
NORMAL_COST = 0.98
FEWER_INSTANCES = 0.36
LONG_RUN = (
    "llumnix_request_*",
    "llumnix_decode_*",
    "llumnix_prefill_p99_over_paper",
    "high_tpot_mean_s_gain",
)
"""What 1,500 requests at one load are too few for."""


def summary(scope: Scope, results: Results) -> dict[str, float]:
    """Each figure beside the paper's, as a ratio or a share."""
    found = {
        f"llumnix_{_word(metric)}_over_paper": _over_paper(scope, results, metric)
        for metric in loads.TARGETS
    }
    for name, part in (("high", priorities.high), ("normal", priorities.normal)):
        for field in LEAST_GAIN:
            found[f"{name}_{field}_gain"] = min(
                priorities.ratio(scope, results, "kvmig", cv, field, part)
                for cv in scope.some(priorities.CVS)
            )
    if not scope.one_load:
        found["fewer_instances"] = scaling.saving(scope, results, "kvmig", (10.0, 60.0))
    return found


def targets(scope: Scope) -> dict[str, Target]:
    """By figure; that of a curve needs all of its loads."""
    aims: dict[str, Target] = {
        f"llumnix_{_word(metric)}_over_paper": {"min": 1 / most, "max": most}
        for metric, most in loads.TARGETS.items()
    }
    aims |= {f"high_{field}_gain": {"min": least} for field, least in LEAST_GAIN.items()}
    aims["normal_e2e_mean_s_gain"] = {"min": NORMAL_COST}
    if not scope.one_load:
        aims["fewer_instances"] = {"min": FEWER_INSTANCES}
    return aims


def _over_paper(scope: Scope, results: Results, metric: str) -> float:
    """Geometric mean over the points of Llumnix that were simulated."""
    logs = []
    for (name, system, rate, what), published in loads.points().items():
        if (system, what) == ("Llumnix", metric) and rate in scope.some(WORKLOADS[name].rates):
            run = loads.run_of(name, system, rate)
            logs.append(math.log(mean(scope, results, run, loads.METRICS[metric]) / published))
    return math.exp(fmean(logs))


def _word(metric: str) -> str:
    return metric.lower().replace(" ", "_")
