"""What it is worth that idle sessions move by themselves: simulated.

- ahead of a turn: the session's instance is crowded, so its turn goes elsewhere, and its blocks go
  there first, where the link is faster than a prefill (`kvmig.controlplane.carry_ahead`);
- out of crowded instances: every round, where less than 20 % of an instance's blocks are free, its
  sessions go to instances with more than 40 %, until it has 30 % again. Judged here alone.

Mooncake's conversation trace (`bench.mooncake`) is replayed as it was, and faster. Besides, drawn
conversations (`bench.prefixes`), and some whose long answers leave memory short. Modelled
Llama-3-8B on H100; times are virtual.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, geometric_mean

import numpy as np
from msgspec.structs import replace
from numpy.random import RandomState
from rich.table import Table

from bench import prefixes, report
from bench.mooncake import turns_of_trace
from bench.pooled import work_through
from kvmig.controlplane.policy import POLICIES
from kvmig_tools.sim import cost
from kvmig_tools.sim.cluster import SimCluster
from kvmig_tools.sim.outcomes import Outcomes
from kvmig_tools.sim.policies import setting
from kvmig_tools.sim.request import SimRequest
from kvmig_tools.sim.session_moves import SessionRelief, SessionRules

GPU = "h100-llama3-8b"
LINKS = (25.0, 6.0, 1.25)
"""GB/s out of an instance, and into it: 400 Gbit/s half used, 50 and 10 Gbit/s."""
FIGURES = ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "e2e_mean_s")
STAY, AHEAD, RELIEF = "none moves", "ahead of a turn", "out of crowded instances"
RULES = {
    STAY: SessionRules(),
    AHEAD: SessionRules(ahead=True),
    RELIEF: SessionRules(relief=SessionRelief()),
}


@dataclass(frozen=True)
class IdleLoad:
    """Conversations. rate: of a trace, how many times as fast; else of those that begin, a
    second."""

    name: str
    kind: str
    instances: int
    rate: float
    seed: int = 0


LOADS = (
    IdleLoad("Mooncake, 8 instances", "trace", 8, 1.0),
    IdleLoad("Mooncake twice as fast, 16 instances", "trace", 16, 2.0),
    IdleLoad("Mooncake 3 times as fast, 16 instances", "trace", 16, 3.0),
    *(IdleLoad("conversations, 30/s, 16 instances", "turns", 16, 30.0, seed) for seed in (1, 2)),
    *(IdleLoad("long answers, 10/s, 8 instances", "long", 8, 10.0, seed) for seed in (1, 2)),
)


def long_answers(load: IdleLoad, count: int) -> Iterator[SimRequest]:
    """Conversations with answers of 1,500 tokens, read for a minute each."""
    random, began, number = RandomState(load.seed), 0.0, 0
    turns: list[tuple[float, int, int, int, int]] = []
    while len(turns) < count:
        began += random.exponential(1 / load.rate)
        at, said = began, int(random.randint(200, 3000))
        for turn in range(1 + random.randint(prefixes.TURNS)):
            asked = int(random.geometric(1 / 120)) + (said if turn == 0 else 0)
            answer = int(min(random.geometric(1 / 1500), 12_000))
            before = said if turn else 0
            turns.append((at, number, before + asked, answer, before))
            said = before + asked + answer
            at += 30.0 + random.exponential(60.0)
        number += 1
    turns.sort()
    for index, (at, session, prompt, answer, before) in enumerate(turns[:count]):
        yield SimRequest(
            index, at, prompt, answer, 0, f"c{session}", before, grows=True, session=session
        )


def requests_of(load: IdleLoad, count: int) -> Iterator[SimRequest]:
    """Its requests in their order."""
    if load.kind == "trace":
        return turns_of_trace(load.rate, 2 * count)
    if load.kind == "long":
        return long_answers(load, count)
    drawn = prefixes.PrefixLoad(load.name, "turns", load.rate)
    return prefixes.requests_of(drawn, count, load.seed)


@dataclass(frozen=True)
class Sample:
    """One run. hit_share: of prompts' tokens; moved: sessions."""

    rule: str
    workload: str
    link_gb_s: float
    seed: int
    hit_share: float
    moved: int
    figures: dict[str, float]


def simulate(job: tuple[str, IdleLoad, float, int]) -> Sample:
    """One run."""
    name, load, link, count = job
    model = cost.load(GPU)
    model = replace(model, copy=replace(model.copy, bandwidth=link * 1e9))
    policy = {str(key): value for key, value in POLICIES.items()}["kvmig"]
    cluster = SimCluster(
        requests_of(load, count), load.instances, model, policy, setting("live"), Outcomes(),
        by_prefixes=True, session_rules=RULES[name],
    )  # fmt: skip
    summary = cluster.run().summary()
    asked, hit = np.array([one.engine.prompt_tokens for one in cluster.llumlets.values()]).sum(0)
    moves = cluster.session_moves
    figures = {figure: summary[figure] for figure in FIGURES}
    return Sample(
        name, load.name, link, load.seed, float(hit / asked), moves.ahead + moves.relieved, figures
    )


def mean_of(samples: Sequence[Sample], rule: str, workload: str, link: float, name: str) -> float:
    """Over the seeds. name: one of FIGURES, hit_share or moved."""
    some = [
        one for one in samples
        if (one.rule, one.workload, one.link_gb_s) == (rule, workload, link)
    ]  # fmt: skip
    return fmean(
        float(getattr(one, name)) if hasattr(one, name) else one.figures[name] for one in some
    )


def ratios(
    samples: Sequence[Sample], rule: str, link: float, figure: str, kind: str
) -> list[float]:
    """To where none moves, of each workload of a kind (empty: of all)."""
    names = dict.fromkeys(one.name for one in LOADS if kind in ("", one.kind))
    return [
        mean_of(samples, rule, name, link, figure) / mean_of(samples, STAY, name, link, figure)
        for name in names
    ]


def summarize(samples: Sequence[Sample]) -> dict[str, float]:
    """Ratios to where none moves: the trace's mean, the worst of all workloads."""
    fast, middle, slow = LINKS
    trace = {
        figure: geometric_mean(ratios(samples, AHEAD, fast, figure, "trace")) for figure in FIGURES
    }
    mooncakes = dict.fromkeys(one.name for one in LOADS if one.kind == "trace")
    gained = [
        mean_of(samples, AHEAD, name, fast, "hit_share")
        - mean_of(samples, STAY, name, fast, "hit_share")
        for name in mooncakes
    ]
    return {
        **{f"ahead_{figure.removesuffix('_s')}": value for figure, value in trace.items()},
        "ahead_hit_points": 100 * fmean(gained),
        "ahead_ttft_mean_worst": max(ratios(samples, AHEAD, fast, "ttft_mean_s", "")),
        "ahead_tpot_p99_worst": max(ratios(samples, AHEAD, fast, "tpot_p99_s", "")),
        "ahead_6_gb_s_ttft_mean": geometric_mean(
            ratios(samples, AHEAD, middle, "ttft_mean_s", "trace")
        ),
        "ahead_10_gbit_s_moved": sum(
            mean_of(samples, AHEAD, one.name, slow, "moved") for one in LOADS
        ),
        "relief_ttft_mean": geometric_mean(ratios(samples, RELIEF, fast, "ttft_mean_s", "")),
        "relief_moved": sum(mean_of(samples, RELIEF, one.name, fast, "moved") for one in LOADS),
    }


TARGETS: dict[str, report.Target] = {
    "ahead_ttft_mean": {"max": 1.0},
    "ahead_ttft_mean_worst": {"max": 1.05},
    "ahead_tpot_p99_worst": {"max": 1.05},
    "ahead_10_gbit_s_moved": {"max": 0.0},
}


def tables(samples: Sequence[Sample]) -> list[Table]:
    """One for each workload: rule and link down, figures across."""
    made = []
    columns = ("hit_share", *FIGURES, "moved")
    for workload in dict.fromkeys(one.workload for one in samples):
        runs = dict.fromkeys(
            (one.rule, one.link_gb_s) for one in samples if one.workload == workload
        )
        rows = [
            (
                f"{rule}, {link:g} GB/s",
                *(mean_of(samples, rule, workload, link, name) for name in columns),
            )
            for rule, link in runs
        ]
        made.append(report.table(workload, ("", *columns), rows))
    return made


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, tuple(TARGETS)[:3])
    root.add_argument("--workers", type=int, default=1, help="processes")
    options = root.parse_args(argv)
    count = 1000 if options.quick else 6016
    result = report.begin("idle_sessions", {"requests": count, "gpu": GPU, "links": list(LINKS)})
    jobs = [
        (name, load, link, count)
        for load in LOADS
        for link in LINKS
        for name in RULES
        if name != RELIEF or link == LINKS[0]
    ]
    samples = work_through(simulate, jobs, options.workers)
    result.samples = [asdict(one) for one in samples]
    result.summary = summarize(samples)
    result.targets = TARGETS
    return report.finish(result, options, tables(samples))


if __name__ == "__main__":
    sys.exit(main())
