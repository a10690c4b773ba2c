"""Dispatch that knows where prompts' beginnings are, beside others' rules: simulated.

Requests with system prompts, of which a few are hot, also where an instance is added, drained or
killed half-way; conversations, whose turns come back with all that was said, drawn ones and
Mooncake's (`bench.mooncake`); long prompts with a short beginning that all share. At several loads,
drawn with several seeds. 16 modelled Llama-3-8B on H100
(`kvmig_tools.sim`). Each rule knows exactly what each instance's cache holds:

- round-robin, least-loaded, and kvmig's policy without prefixes know nothing of it;
- most-held: where most is held, whatever the load: sticky sessions;
- sglang: SGLang's gateway by its published rule (`cache_threshold` 0.3; the shortest queue where
  loads differ by more than 64 requests and by more than 1.5 times);
- llm-d: its scorers' published weights, prefix 3, queue 2, KV cache 2;
- kvmig: half a request for each block to compute and each request that this stops, by the most of
  the prompt that any holds.

"kvmig by sessions alone" knows no prefix, but where each session's last request was sent: a
conversation is a session of its own, and elsewhere the ids say nothing of the prompts.

Only kvmig's move requests. Times are virtual; the figures are means over the workloads of a ratio
to round-robin, and the share of prompts' tokens that needn't be computed. It is counted as vLLM's
`prefix_cache_hits` is, without requests that begin again after a preemption.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import fmean, geometric_mean

import msgspec
import numpy as np
from numpy.random import RandomState
from rich.table import Table

from bench import report
from bench.mooncake import turns_of_trace
from bench.pooled import work_through
from kvmig.controlplane.dispatch import DispatchPolicy, NewRequest, TieRotation, candidates
from kvmig.controlplane.policy import POLICIES, Policy
from kvmig.controlplane.view import ClusterView, Column, InstanceView
from kvmig_tools.sim import cost
from kvmig_tools.sim.cluster import SimCluster
from kvmig_tools.sim.outcomes import Outcomes
from kvmig_tools.sim.policies import setting
from kvmig_tools.sim.request import SimRequest

INSTANCES = 16
GPU = "h100-llama3-8b"
SEEDS = (1, 2)
FIGURES = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s", "e2e_mean_s")
BASE = "round-robin"
SESSIONS = "kvmig by sessions alone"
OTHERS = ("least-loaded", "most-held", "sglang", "llm-d")


# -- others' rules, in terms of what a view has


class ScoredDispatch:
    """The instance with the highest score, ties in turn."""

    def __init__(self, score: Callable[[ClusterView, Column, float], Column]) -> None:
        """score: of each instance, by the view, the blocks that each holds, and the demand."""
        self._score = score
        self._rotation = TieRotation()

    def pick(self, view: ClusterView, request: NewRequest) -> InstanceView:
        held = np.array([request.held_blocks.get(one.instance, 0.0) for one in view.instances])
        good = candidates(view, request.demand_blocks)
        scores = np.where(good, self._score(view, held, request.demand_blocks), -np.inf)
        rows = np.flatnonzero(scores == scores.max())
        return view.instances[self._rotation.take_row(rows)]


def most_held(view: ClusterView, held: Column, demand: float) -> Column:
    """What is held, then the fewest requests."""
    return held * 1e6 - view.columns.requests


def sglang(view: ClusterView, held: Column, demand: float) -> Column:
    """`cache_aware`: balance_abs_threshold 64, balance_rel_threshold 1.5, cache_threshold 0.3."""
    loads = view.columns.requests
    if loads.max() - loads.min() > 64 and loads.max() > 1.5 * loads.min():
        return -loads
    if held.max() > 0.3 * demand:
        return held
    return view.columns.free


def llm_d(view: ClusterView, held: Column, demand: float) -> Column:
    """Prefix 3, queue 2, KV-cache utilisation 2, each scaled to between 0 and 1."""
    columns = view.columns
    waiting = columns.waiting
    queue = 1 - waiting / max(waiting.max(), 1)
    memory = 1 - columns.used / np.maximum(columns.total, 1)
    score: Column = 3 * held / max(demand, 1) + 2 * queue + 2 * memory
    return score


@dataclass(frozen=True)
class Rule:
    """A policy, and what its dispatch knows."""

    policy: Policy
    by_prefixes: bool = False
    by_sessions: bool = False


def rules() -> dict[str, Rule]:
    """Each policy by name."""
    replace = msgspec.structs.replace
    named = {str(key): value for key, value in POLICIES.items()}
    plain = named["round-robin"]

    def other(score: Callable[[ClusterView, Column, float], Column]) -> Policy:
        def made() -> DispatchPolicy:
            return ScoredDispatch(score)

        return replace(plain, dispatcher=made)

    return {
        BASE: Rule(plain),
        "least-loaded": Rule(named["least-loaded"]),
        "most-held": Rule(other(most_held), True),
        "sglang": Rule(other(sglang), True),
        "llm-d": Rule(other(llm_d), True),
        "kvmig without prefixes": Rule(named["kvmig"]),
        SESSIONS: Rule(named["kvmig"], by_sessions=True),
        "kvmig, nothing moves": Rule(replace(named["kvmig"], rounds=None), True),
        "kvmig": Rule(named["kvmig"], True),
    }


# -- workloads


@dataclass(frozen=True)
class PrefixLoad:
    """Requests of one kind.

    rate: of requests, or of conversations that begin, a second; of a trace, how many times as fast.
    """

    name: str
    kind: str
    rate: float
    skew: float = 1.1
    """Exponent of the Zipf law by which system prompts are drawn."""
    event: str = ""
    """What becomes of an instance when half of the requests have come."""


LOADS = tuple(
    [PrefixLoad(f"system prompts, {rate:g}/s", "system", rate) for rate in (60.0, 120.0, 180.0)]
    + [PrefixLoad("one hot system prompt, 120/s", "system", 120.0, skew=3.0)]
    + [PrefixLoad(f"conversations, {rate:g}/s", "turns", rate) for rate in (10.0, 20.0, 30.0)]
    + [PrefixLoad("Mooncake, 3 times as fast", "trace", 3.0)]
    + [
        PrefixLoad(f"system prompts, 120/s, one is {event}", "system", 120.0, event=event)
        for event in ("added", "drained", "killed")
    ]
    + [PrefixLoad("a short beginning, 60/s", "short", 60.0)]
)
PROMPTS, PROMPT_TOKENS = 200, 6000
TURNS, THINK_S = 8, 30.0
USERS = 97
"""Users whose ids say nothing of their prompts: hints that mislead."""


def system_prompts(load: PrefixLoad, count: int, random: RandomState) -> list[SimRequest]:
    """Requests that begin with one of 200 system prompts of 2,000 to 6,000 tokens."""
    weights = np.arange(1, PROMPTS + 1, dtype=np.float64) ** -load.skew
    which = random.choice(PROMPTS, size=count, p=weights / weights.sum())
    sizes = random.randint(PROMPT_TOKENS // 3, PROMPT_TOKENS, size=PROMPTS)
    own = random.geometric(1 / 200, count)
    outputs = np.minimum(random.geometric(1 / 250, count), 2000)
    arrivals = np.cumsum(random.exponential(1 / load.rate, count))
    return [
        SimRequest(
            number, float(arrivals[number]), int(sizes[prompt] + own[number]),
            int(outputs[number]), 0, f"s{prompt}", int(sizes[prompt]), session=number % USERS,
        )
        for number, prompt in enumerate(which)
    ]  # fmt: skip


def conversations(load: PrefixLoad, count: int, random: RandomState) -> list[SimRequest]:
    """Turns of conversations: each comes some 30 s after it, with all that was said before."""
    turns: list[tuple[float, str, int, int, int]] = []
    began, number = 0.0, 0
    while len(turns) < count:
        began += random.exponential(1 / load.rate)
        at, said = began, int(random.randint(200, 3000))  # a system prompt of its own, or a file
        for turn in range(1 + random.randint(TURNS)):
            asked = int(random.geometric(1 / 120)) + (said if turn == 0 else 0)
            answer = int(min(random.geometric(1 / 250), 2000))
            before = said if turn else 0
            turns.append((at, f"c{number}", before + asked, answer, before))
            said = before + asked + answer
            at += 5.0 + random.exponential(THINK_S)
        number += 1
    turns.sort()
    return [
        SimRequest(index, at, prompt, answer, 0, name, before, grows=True, session=int(name[1:]))
        for index, (at, name, prompt, answer, before) in enumerate(turns[:count])
    ]


def short_beginnings(load: PrefixLoad, count: int, random: RandomState) -> list[SimRequest]:
    """Long prompts that all begin with the same 256 tokens."""
    own = np.minimum(random.geometric(1 / 4000, count), 30_000)
    outputs = np.minimum(random.geometric(1 / 250, count), 2000)
    arrivals = np.cumsum(random.exponential(1 / load.rate, count))
    return [
        SimRequest(
            number, float(arrivals[number]), int(256 + own[number]), int(outputs[number]), 0,
            "s", 256, session=number % USERS,
        )
        for number in range(count)
    ]  # fmt: skip


MADE = {"system": system_prompts, "turns": conversations, "short": short_beginnings}


def requests_of(load: PrefixLoad, count: int, seed: int) -> Iterator[SimRequest]:
    """Its requests in their order."""
    if load.kind == "trace":
        return turns_of_trace(load.rate, 2 * count)
    random = RandomState(seed)
    return iter(MADE[load.kind](load, count, random))


# -- runs


@dataclass(frozen=True)
class Sample:
    """One policy on one workload. hit_share: of prompts' tokens."""

    policy: str
    workload: str
    seed: int
    hit_share: float
    figures: dict[str, float]


def simulate(job: tuple[str, PrefixLoad, int, int]) -> Sample:
    """One run."""
    name, load, count, seed = job
    rule = rules()[name]
    cluster = SimCluster(
        requests_of(load, count, seed), INSTANCES, cost.load(GPU), rule.policy, setting("live"),
        Outcomes(), by_prefixes=rule.by_prefixes, by_sessions=rule.by_sessions,
    )  # fmt: skip
    if load.event:
        change: dict[str, Callable[[], None]] = {
            "added": cluster.add_instance,
            "drained": partial(cluster.drain_instance, "i0"),
            "killed": partial(cluster.kill_instance, "i0"),
        }
        cluster.events.at(count / 2 / load.rate, change[load.event])
    summary = cluster.run().summary()
    asked, hit = np.array([one.engine.prompt_tokens for one in cluster.llumlets.values()]).sum(0)
    figures = {figure: summary[figure] for figure in (*FIGURES, "migrations")}
    return Sample(name, load.name, seed, float(hit / max(asked, 1)), figures)


def mean_of(samples: Sequence[Sample], policy: str, workload: str, figure: str) -> float:
    """Over the seeds. figure: one of FIGURES, migrations or hit_share."""
    some = [one for one in samples if (one.policy, one.workload) == (policy, workload)]
    return fmean(one.hit_share if figure == "hit_share" else one.figures[figure] for one in some)


def ratio(samples: Sequence[Sample], policy: str, base: str, figure: str) -> float:
    """Geometric mean over the workloads."""
    names = dict.fromkeys(one.workload for one in samples)
    return geometric_mean(
        mean_of(samples, policy, name, figure) / mean_of(samples, base, name, figure)
        for name in names
    )


def summarize(samples: Sequence[Sample]) -> dict[str, float]:
    """kvmig's figures beside the best of the others, workload by workload."""
    names = list(dict.fromkeys(one.workload for one in samples))

    def worst(figure: str) -> list[float]:
        return [
            mean_of(samples, "kvmig", name, figure)
            / min(mean_of(samples, other, name, figure) for other in (BASE, *OTHERS))
            for name in names
        ]

    hits = [
        max(mean_of(samples, other, name, "hit_share") for other in OTHERS)
        - mean_of(samples, "kvmig", name, "hit_share")
        for name in names
    ]
    return {
        "ttft_p99_over_the_best": geometric_mean(worst("ttft_p99_s")),
        "ttft_p99_over_the_best_hot": worst("ttft_p99_s")[names.index(LOADS[3].name)],
        "tpot_p99_over_the_best": geometric_mean(worst("tpot_p99_s")),
        "e2e_mean_over_the_best": geometric_mean(worst("e2e_mean_s")),
        "hit_points_below_the_best": 100 * max(hits),
        "ttft_p99_over_no_prefixes": ratio(
            samples, "kvmig", "kvmig without prefixes", "ttft_p99_s"
        ),
        "ttft_p99_over_no_prefixes_short": ratio(
            [one for one in samples if one.workload == LOADS[-1].name],
            "kvmig", "kvmig without prefixes", "ttft_p99_s",
        ),
    }  # fmt: skip


TARGETS: dict[str, report.Target] = {
    "ttft_p99_over_the_best_hot": {"max": 0.7},
    "hit_points_below_the_best": {"max": 2.0},
    "ttft_p99_over_no_prefixes": {"max": 1.0},
    "ttft_p99_over_no_prefixes_short": {"max": 1.05},
}


def tables(samples: Sequence[Sample]) -> list[Table]:
    """The ratios to round-robin, then a table a workload."""
    names = list(rules())
    rows = [(one, *(ratio(samples, one, BASE, figure) for figure in FIGURES)) for one in names]
    made = [report.table(f"beside {BASE}, over all workloads", ("policy", *FIGURES), rows)]
    for workload in dict.fromkeys(one.workload for one in samples):
        columns = ("hit_share", *FIGURES, "migrations")
        rows = [
            (one, *(mean_of(samples, one, workload, name) for name in columns)) for one in names
        ]
        made.append(report.table(workload, ("policy", *columns), rows))
    return made


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, ("ttft_p99_over_the_best_hot", "hit_points_below_the_best"))
    root.add_argument("--workers", type=int, default=1, help="processes")
    options = root.parse_args(argv)
    count, seeds = (1500, SEEDS[:1]) if options.quick else (6000, SEEDS)
    result = report.begin(
        "prefixes", {"requests": count, "seeds": list(seeds), "instances": INSTANCES, "gpu": GPU}
    )
    jobs = [
        (name, load, count, seed)
        for name in rules()
        for load in LOADS
        for seed in (seeds[:1] if load.kind == "trace" else seeds)
    ]
    samples = work_through(simulate, jobs, options.workers)
    result.samples = [asdict(one) for one in samples]
    result.summary = summarize(samples)
    result.targets = TARGETS
    return report.finish(result, options, tables(samples))


if __name__ == "__main__":
    sys.exit(main())
