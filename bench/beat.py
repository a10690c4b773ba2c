"""`kvmig` against the best of the others, workload by workload, and against what is possible.

Reads what `bench.policies` wrote; simulates nothing. The floor is the P99 of the first token
when each request has an instance to itself: its prompt's own time, which no policy changes.
Above 1 in a ratio means that kvmig is better. Migration's worth is told by preemption loss.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean

import numpy as np

from bench import report
from bench.paper.scope import table
from bench.policies import BASE, COMPARED, LOSS, workloads
from kvmig_tools.sim import cost
from kvmig_tools.sim.run import Run, requests_of

ROOT = Path(__file__).parents[1]
OURS, ARTIFACT = "kvmig", "llumnix-artifact"
TARGETS: dict[str, report.Target] = {
    "ttft_p99_artifact_over_kvmig": {"min": 1.5},
    "ttft_p99_best_over_kvmig_least": {"min": 0.95},
    "e2e_mean_best_over_kvmig_least": {"min": 1.0},
    "loss_over_artifact": {"max": 0.5},
}
LONG_RUN = ("*",)
"""All are about a whole run of `bench.policies`; none is made here."""
GPU = "a10-llama7b"
HEADER = (
    "P99 of the first token, s",
    "floor",
    OURS,
    ARTIFACT,
    "best other",
    "artifact / kvmig",
    "artifact / floor",
    "best / kvmig",
    "end to end: best / kvmig",
    "lost, s a request: kvmig",
    ARTIFACT,
)
Means = Mapping[tuple[str, str, str], float]
"""(policy, workload, figure) -> mean over seeds."""


def means(samples: Iterable[Mapping[str, object]]) -> Means:
    """Of a file's samples."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for one in samples:
        figures = one["figures"]
        assert isinstance(figures, dict)
        for name, value in figures.items():
            found.setdefault((str(one["policy"]), str(one["workload"]), name), []).append(value)
    return {key: fmean(values) for key, values in found.items()}


def floor_s(runs: Iterable[Run]) -> float:
    """P99 of the prompts' own times, mean over the runs."""
    model = cost.load(GPU)
    base = model.prefill.base_ms / 1e3
    tails = []
    for run in runs:
        fitting = (one for one in requests_of(run) if one.final_tokens <= model.capacity.largest)
        alone = [base + model.prompt_s(one.input_tokens, 0) for one in fitting]
        tails.append(float(np.percentile(alone, 99)))
    return fmean(tails)


def rows(of: Means, floors: Mapping[str, float]) -> list[list[str]]:
    """A row a workload, then geometric means (of the losses: sums)."""
    others = [name for name in COMPARED if name != OURS]
    ratios: list[list[float]] = []
    made = []
    for name, floor in floors.items():
        tails = {one: of[one, name, "ttft_p99_s"] for one in (*others, OURS)}
        best = min(others, key=lambda one: tails[one])
        ends = min(of[one, name, "e2e_mean_s"] for one in others)
        ratio = [
            tails[ARTIFACT] / tails[OURS],
            tails[ARTIFACT] / floor,
            tails[best] / tails[OURS],
            ends / of[OURS, name, "e2e_mean_s"],
        ]
        ratios.append(ratio)
        seconds = [f"{value:.2f}" for value in (floor, tails[OURS], tails[ARTIFACT], tails[best])]
        losses = [f"{of[one, name, LOSS]:.3f}" for one in (OURS, ARTIFACT)]
        made.append([name, *seconds[:3], f"{seconds[3]} ({best})", *_short(ratio), *losses])
    total = [geometric_mean(column) for column in zip(*ratios, strict=True)]
    lost = [fmean(of[one, name, LOSS] for name in floors) for one in (OURS, ARTIFACT)]
    made.append(["all", "", "", "", "", *_short(total), *(f"{value:.3f}" for value in lost)])
    return made


def summary(of: Means, names: Sequence[str]) -> dict[str, float]:
    """The figures that have targets, over all workloads."""
    others = [name for name in COMPARED if name != OURS]

    def best_over_ours(name: str, figure: str) -> float:
        return min(of[one, name, figure] for one in others) / of[OURS, name, figure]

    lost = {one: sum(of[one, name, LOSS] for name in names) for one in (OURS, ARTIFACT)}
    tails = [of[ARTIFACT, name, "ttft_p99_s"] / of[OURS, name, "ttft_p99_s"] for name in names]
    return {
        "ttft_p99_artifact_over_kvmig": geometric_mean(tails),
        "ttft_p99_best_over_kvmig_least": min(best_over_ours(n, "ttft_p99_s") for n in names),
        "e2e_mean_best_over_kvmig_least": min(best_over_ours(n, "e2e_mean_s") for n in names),
        "loss_over_artifact": lost[OURS] / lost[ARTIFACT],
    }


def _short(values: Sequence[float]) -> list[str]:
    return [f"{value:.2f}" if math.isfinite(value) else "-" for value in values]


def main(argv: list[str] | None = None) -> int:
    """Print Markdown; exit code 1 if --check finds a target missed."""
    root = report.parser(__doc__, LONG_RUN)
    root.add_argument("--results", type=Path, default=ROOT / "bench/results/policies.json")
    root.add_argument("--traces", type=Path, help="folder with Azure's traces as CSV")
    options = root.parse_args(argv)
    document = json.loads(options.results.read_text())
    of = means(document["samples"])
    seeds, requests = document["settings"]["seeds"], document["settings"]["requests"]
    runs: dict[str, list[Run]] = {}
    for name, run in (
        *workloads(requests, seeds, options.traces),
        *workloads(requests, seeds, None, unseen=True),
    ):
        runs.setdefault(name, []).append(run)
    floors = {name: floor_s(some) for name, some in runs.items() if (BASE, name, LOSS) in of}
    made = rows(of, floors)
    print(table(HEADER, made), end="")
    result = report.begin("beat", document["settings"])
    result.summary, result.targets = summary(of, list(floors)), TARGETS
    return report.finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
