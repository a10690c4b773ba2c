"""Prompts at instances of their own (`--prompt-instances`) beside prompts among what decodes.

16 modelled Llama-3-8B on H100 (`kvmig_tools.sim`), chunks of 2,048 tokens unless a load says
otherwise, drawn with several seeds. Each load runs with no instance set apart, which is today's
policy, and with some: the number is found with requests of another seed, as the one with the least
P99 TPOT whose P99 TTFT is at most 1.25 of today's, of those that the prompts keep busy and up to
two more. Times are virtual.

- handover_steps: from the moment when the last chunk is computed to the first token at the
  instance that decodes: the request's pause there, and the step after it, in steps of the median
  TPOT. Of moved requests.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from math import ceil
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, geometric_mean

import msgspec
import numpy as np
from numpy.random import RandomState
from rich.table import Table

from bench import report
from kvmig.controlplane.policy import policy_of
from kvmig.core.config import SchedulerConfig, instance_name
from kvmig.launcher.flags import PROMPT_MIGRATIONS
from kvmig_tools.sim import cost
from kvmig_tools.sim.cluster import SimCluster
from kvmig_tools.sim.cost import CostModel
from kvmig_tools.sim.outcomes import COLUMNS, Outcomes
from kvmig_tools.sim.policies import setting
from kvmig_tools.sim.request import SimRequest

INSTANCES = 16
GPU = "h100-llama3-8b"
SEEDS = (1, 2, 3)
CHOICE_SEED = 100
SPARE = (0, 1, 2)
"""Instances set apart that are tried beyond those that the prompts keep busy."""
MOST_TTFT = 1.25
"""Of the P99 of today's policy."""
FIGURES = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "e2e_mean_s")


@dataclass(frozen=True)
class PromptLoad:
    """prompt, output: mean tokens, drawn geometrically; rate: requests a second; chunk: tokens."""

    name: str
    prompt: int
    output: int
    rate: float
    chunk: int = 2048


LOADS = (
    PromptLoad("documents, 40/s", 4000, 250, 40.0),
    PromptLoad("documents, 60/s", 4000, 250, 60.0),
    PromptLoad("documents, 60/s, chunks of 8,192", 4000, 250, 60.0, chunk=8192),
    PromptLoad("long documents, 25/s", 8000, 150, 25.0),
    PromptLoad("chat, 100/s", 1000, 300, 100.0),
)
BEST = LOADS[:2] + LOADS[3:4]
"""Loads that it is made for: long prompts, short chunks."""


def requests_of(load: PromptLoad, count: int, seed: int) -> Iterator[SimRequest]:
    """In their order."""
    random = RandomState(seed)
    prompts = np.minimum(random.geometric(1 / load.prompt, count), 30_000)
    outputs = np.minimum(random.geometric(1 / load.output, count), 2000)
    arrivals = np.cumsum(random.exponential(1 / load.rate, count))
    for number in range(count):
        at, prompt, output = arrivals[number], prompts[number], outputs[number]
        yield SimRequest(number, float(at), int(prompt), int(output))


def model_of(load: PromptLoad) -> CostModel:
    """The GPU with the load's chunks."""
    model = cost.load(GPU)
    capacity = msgspec.structs.replace(model.capacity, max_batch_tokens=load.chunk)
    return msgspec.structs.replace(model, capacity=capacity)


def busy_with(load: PromptLoad, seed: int = 0) -> float:
    """Instances that the load's prompts keep busy."""
    model = model_of(load)
    times = [
        model.prompt_s(one.input_tokens)
        + model.prefill.base_ms / 1e3 * ceil(one.input_tokens / load.chunk)
        for one in requests_of(load, 2000, seed)
    ]
    return load.rate * fmean(times)


def tried(load: PromptLoad) -> list[int]:
    """Numbers of instances set apart that are tried."""
    return [min(ceil(busy_with(load)) + more, INSTANCES - 1) for more in SPARE]


def choose(load: PromptLoad, found: Sequence[Sample]) -> int:
    """How many instances compute its prompts, by runs with each number and one with none."""
    runs = [one for one in found if one.workload == load.name]
    (today,) = [one for one in runs if not one.apart]
    most_s = MOST_TTFT * today.figures["ttft_p99_s"]
    good = [one for one in runs if one.apart and one.figures["ttft_p99_s"] <= most_s]
    best = min(good, key=lambda one: one.figures["tpot_p99_s"], default=None)
    return tried(load)[-1] if best is None else best.apart


@dataclass(frozen=True)
class Sample:
    """One run. apart: instances that compute prompts; handover_steps: median and 99th percentile
    of those that moved; 0 if none did."""

    workload: str
    apart: int
    seed: int
    figures: dict[str, float]
    moved_share: float
    handover_steps: tuple[float, float] = (0.0, 0.0)


def simulate(job: tuple[PromptLoad, int, int, int]) -> Sample:
    """(load, instances set apart, requests, seed)."""
    load, apart, count, seed = job
    config = SchedulerConfig(prompt_instances=tuple(map(instance_name, range(apart))))
    around = setting("live")
    if apart:
        around = msgspec.structs.replace(around, max_migrations=PROMPT_MIGRATIONS)
    cluster = SimCluster(
        requests_of(load, count, seed), INSTANCES, model_of(load), policy_of(config), around,
        Outcomes(),
    )  # fmt: skip
    outcomes = cluster.run()
    summary, rows = outcomes.summary(), outcomes.table()
    moved = rows[rows[:, COLUMNS.index("migrations")] > 0]
    steps = (0.0, 0.0)
    if len(moved):
        step_s = summary["tpot_p50_s"]
        paused = moved[:, COLUMNS.index("paused_s")]
        middle, last = np.percentile((paused + step_s) / step_s, [50, 99]).tolist()
        steps = (middle, last)
    figures = {figure: summary[figure] for figure in FIGURES}
    return Sample(load.name, apart, seed, figures, len(moved) / len(rows), steps)


def mean_of(samples: Sequence[Sample], load: PromptLoad, figure: str, *, apart: bool) -> float:
    """Over the seeds."""
    return fmean(
        one.figures[figure]
        for one in samples
        if one.workload == load.name and bool(one.apart) == apart
    )


def ratio(samples: Sequence[Sample], load: PromptLoad, figure: str) -> float:
    """With instances set apart, over without."""
    return mean_of(samples, load, figure, apart=True) / mean_of(samples, load, figure, apart=False)


def summarize(samples: Sequence[Sample]) -> dict[str, float]:
    """Ratios, as geometric means over the loads with long prompts and short chunks."""

    def mean_ratio(figure: str) -> float:
        return geometric_mean(ratio(samples, load, figure) for load in BEST)

    best = {load.name for load in BEST}
    handed = [one.handover_steps for one in samples if one.apart and one.workload in best]
    return {
        "tpot_p99": mean_ratio("tpot_p99_s"),
        "tpot_p99_worst": max(ratio(samples, load, "tpot_p99_s") for load in BEST),
        "tpot_p50": mean_ratio("tpot_p50_s"),
        "ttft_p50": mean_ratio("ttft_p50_s"),
        "ttft_p99": mean_ratio("ttft_p99_s"),
        "e2e_mean": mean_ratio("e2e_mean_s"),
        "handover_steps_p50": fmean(middle for middle, _ in handed),
        "handover_steps_p99": fmean(last for _, last in handed),
        "tpot_p99_long_chunks": ratio(samples, LOADS[2], "tpot_p99_s"),
        "tpot_p99_chat": ratio(samples, LOADS[4], "tpot_p99_s"),
        "e2e_mean_chat": ratio(samples, LOADS[4], "e2e_mean_s"),
    }


TARGETS: dict[str, report.Target] = {
    "tpot_p99": {"max": 0.6},
    "ttft_p99": {"max": 1.5},
    "handover_steps_p50": {"max": 2.0},
}


def table_of(samples: Sequence[Sample]) -> Table:
    """Two rows a load."""
    rows: list[tuple[str | float, ...]] = []
    for load in LOADS:
        for apart in (False, True):
            some = [
                one for one in samples if one.workload == load.name and bool(one.apart) == apart
            ]
            rows.append(
                (
                    load.name,
                    some[0].apart,
                    *(mean_of(samples, load, figure, apart=apart) for figure in FIGURES),
                    fmean(one.moved_share for one in some),
                    fmean(one.handover_steps[0] for one in some),
                    fmean(one.handover_steps[1] for one in some),
                )
            )
    columns = ("load", "apart", *FIGURES, "moved", "handover p50", "p99")
    return report.table("prompts at instances of their own", columns, rows)


def draw(samples: Sequence[Sample], file: Path) -> None:
    """P99 of TPOT and TTFT, without and with instances set apart, a pair of bars a load."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4))
    places = np.arange(len(LOADS))
    titles = (("tpot_p99_s", "P99 TPOT, ms"), ("ttft_p99_s", "P99 TTFT, ms"))
    for axis, (name, title) in zip(axes, titles, strict=True):
        for shift, apart, label, colour in (
            (-0.2, False, "prompts among what decodes", "#b3402e"),
            (0.2, True, "prompts at instances of their own", "#1f6fb2"),
        ):
            heights = [1e3 * mean_of(samples, load, name, apart=apart) for load in LOADS]
            axis.bar(places + shift, heights, 0.38, label=label, color=colour)
        axis.set_xticks(places, [one.name.replace(", ", "\n") for one in LOADS], fontsize="x-small")
        axis.set_title(title)
        axis.grid(visible=True, axis="y", alpha=0.3)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=2, frameon=False, fontsize="small")
    figure.tight_layout(rect=(0, 0, 1, 0.94))
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, ("tpot_p99", "ttft_p99", "handover_steps_p50"))
    root.add_argument("--workers", type=int, default=1, help="processes")
    options = root.parse_args(argv)
    count, seeds = (500, SEEDS[:1]) if options.quick else (2000, SEEDS)
    result = report.begin(
        "prompts", {"requests": count, "seeds": list(seeds), "instances": INSTANCES, "gpu": GPU}
    )
    with (
        ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool,
        report.progress() as bar,
    ):
        jobs = [(load, apart, count, CHOICE_SEED) for load in LOADS for apart in {0, *tried(load)}]
        found = list(bar.track(pool.map(simulate, jobs), total=len(jobs), description="numbers"))
        jobs = [
            (load, apart, count, seed)
            for load in LOADS
            for apart in (0, choose(load, found))
            for seed in seeds
        ]
        runs = bar.track(pool.map(simulate, jobs), total=len(jobs), description="runs")
        samples = list(runs)
    result.samples = [asdict(one) for one in (*found, *samples)]
    result.summary = summarize(samples)
    result.targets = TARGETS
    if options.plot is not None:
        draw(samples, options.plot)
    return report.finish(result, options, [table_of(samples)])


if __name__ == "__main__":
    sys.exit(main())
