"""Dispatch by prefixes on four real engines, beside policies that know none: conversations.

Each conversation begins with a text of its own, and each turn comes with all that was said before,
some seconds after the answer before it. One server of four vLLM instances for each policy, all up
at the same time; the same conversations go to one after the other, and the order turns from round
to round, in which the prompts are others. Before anything counts, each server gets `--burst` calls
at once that have nothing in common: `--load` of what the servers end a second is the rate of turns.

The engines compute the bundled model at the pace of a device (`bench.paced`): a step takes 15 ms
and 0.3 ms a token, so that four of them don't wait for this machine's cores. With another `--model`
they do. A paced run is simulated besides (`kvmig_tools.sim`), with the turns at the times when they
were sent and the pace as the cost model: the policies' order there and here is compared.

ttft: from when a turn is sent to its first token; tpot: the mean of its later tokens; e2e: to the
last one. Percentiles are over all turns of all rounds; hit_share: of prompts' tokens, by vLLM's own
counters.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from statistics import fmean

import aiohttp
import httpx
import numpy as np
import uvloop
from numpy.random import RandomState
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from bench import report
from bench.client import Stream, prompt_of, session
from bench.models import PACED, model_flags, model_folder
from bench.rounds import parse_options, play_rounds, servers_beside
from kvmig.controlplane.policy import POLICIES
from kvmig_tools.nursery import Nursery
from kvmig_tools.served import Served
from kvmig_tools.sim.cluster import SimCluster
from kvmig_tools.sim.cost import Capacity, Copy, CostModel, Decode, Prefill
from kvmig_tools.sim.outcomes import COLUMNS, Outcomes
from kvmig_tools.sim.policies import setting
from kvmig_tools.sim.request import SimRequest

INSTANCES = 4
TOKEN_MS = 0.3
BLOCKS, BLOCK_TOKENS, SEATS, CHUNK = 375, 32, 32, 512
"""Of an instance: 12,000 tokens hold a good half of the conversations that go on."""
RULES: dict[str, tuple[str, ...]] = {
    "round-robin": ("--policy=round-robin",),
    "least-loaded": ("--policy=least-loaded",),
    "kvmig without prefixes": ("--policy=kvmig", "--no-prefix-dispatch"),
    "kvmig": ("--policy=kvmig",),
}
OURS, BLIND = "kvmig", "kvmig without prefixes"
QUICK = ("round-robin", OURS)
TURNS, ASKED, ANSWERED = 6, 40, 40
"""Most turns; mean tokens of a question and of an answer."""
BEGINNING = (200, 900)
LONGEST_ANSWER = 160
THINK_S = (0.5, 1.5)
"""Least, and mean beyond that."""
FIGURES = (
    "ttft_mean_ms",
    "ttft_p50_ms",
    "ttft_p99_ms",
    "tpot_p50_ms",
    "tpot_p99_ms",
    "e2e_mean_ms",
)
APART = 0.1
"""Policies count as ordered by the simulator if their mean TTFT differ by more than this share."""
BURST_PROMPT, BURST_OUTPUT = 700, ANSWERED
Times = Sequence[float] | NDArray[np.float64]


# -- the conversations


@dataclass(frozen=True)
class PlannedTurn:
    """think_s: from the end of the answer before; asked: tokens that are new in its prompt."""

    think_s: float
    asked: int
    answer: int


@dataclass(frozen=True)
class Conversation:
    """at: seconds after the begin of the round."""

    number: int
    at: float
    turns: tuple[PlannedTurn, ...]


def conversations(rate: float, seconds: float, seed: int) -> list[Conversation]:
    """Those that begin within `seconds`. rate: of turns a second, once as many go on as end."""
    random = RandomState(seed)
    mean_turns = (1 + TURNS) / 2
    made: list[Conversation] = []
    at = 0.0
    while (at := at + random.exponential(mean_turns / rate)) < seconds or not made:
        turns = tuple(
            PlannedTurn(
                THINK_S[0] + float(random.exponential(THINK_S[1])),
                int(random.geometric(1 / ASKED)) + (0 if turn else int(random.randint(*BEGINNING))),
                int(np.clip(random.geometric(1 / ANSWERED), 2, LONGEST_ANSWER)),
            )
            for turn in range(1 + random.randint(TURNS))
        )
        made.append(Conversation(len(made), at, turns))
    return made


@dataclass(frozen=True)
class TurnSample:
    """What a client saw of one turn. at: s after the begin of the round; before: tokens of its
    prompt that were said before it."""

    policy: str
    repeat: int
    conversation: int
    at: float
    before: int
    prompt: int
    output: int
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float


@dataclass(frozen=True)
class RoundSample:
    """One policy's round. migrations: that committed."""

    policy: str
    repeat: int
    seconds: float
    hit_share: float
    preemptions: int
    migrations: int


# -- real engines


class PolicySite:
    """One policy's server."""

    def __init__(self, policy: str, served: Served, http: aiohttp.ClientSession) -> None:
        self.policy = policy
        self._served = served
        self._http = http

    async def burst(self, calls: int) -> float:
        """Calls a second that it ends, of `calls` that come at once and have nothing in common."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(calls):
                prompt = prompt_of(BURST_PROMPT, "burst", self.policy, number)
                group.create_task(self._answer(prompt, BURST_OUTPUT))
        return calls / (time.monotonic() - began)

    async def play(
        self, plan: Sequence[Conversation], repeat: int
    ) -> tuple[RoundSample, list[TurnSample]]:
        """All conversations. Raises StreamFailed if a call fails."""
        before = await asyncio.to_thread(self._counters)
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._converse(one, began, repeat)) for one in plan]
        seconds = time.monotonic() - began
        after = await asyncio.to_thread(self._counters)
        grown = {name: value - before[name] for name, value in after.items()}
        row = RoundSample(
            self.policy, repeat, round(seconds, 3), grown["hits"] / max(grown["asked"], 1.0),
            int(grown["preemptions"]), int(grown["migrations"]),
        )  # fmt: skip
        return row, [turn for task in tasks for turn in task.result()]

    async def _converse(self, plan: Conversation, began: float, repeat: int) -> list[TurnSample]:
        await asyncio.sleep(max(began + plan.at - time.monotonic(), 0.0))
        said: list[int] = []
        rows: list[TurnSample] = []
        for number, turn in enumerate(plan.turns):
            if number:
                await asyncio.sleep(turn.think_s)
            new = prompt_of(turn.asked, "conversations", repeat, plan.number, number)
            prompt = said + new
            stream = await self._answer(prompt, turn.answer)
            first, last = stream.arrivals[0].at, stream.arrivals[-1].at
            rows.append(
                TurnSample(
                    self.policy, repeat, plan.number, round(stream.sent_at - began, 4), len(said),
                    len(prompt), turn.answer, round((first - stream.sent_at) * 1e3, 2),
                    round((last - first) * 1e3 / (turn.answer - 1), 3),
                    round((last - stream.sent_at) * 1e3, 2),
                )
            )  # fmt: skip
            said = prompt + stream.tokens
        return rows

    async def _answer(self, prompt: list[int], output: int) -> Stream:
        served = self._served
        async with Stream(self._http, served.url, served.model, prompt, output) as stream:
            await stream.reach(output)
        return stream

    def _counters(self) -> dict[str, float]:
        """Over all instances, so far: prompts' tokens and those of them that were found."""
        found = {"asked": 0.0, "hits": 0.0, "preemptions": 0.0, "migrations": 0.0}
        text = httpx.get(f"{self._served.url}/metrics", verify=False, timeout=60).text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "vllm:prefix_cache_queries_total":
                    found["asked"] += sample.value
                elif sample.name == "vllm:prefix_cache_hits_total":
                    found["hits"] += sample.value
                elif sample.name == "kvmig_preemptions_total":
                    found["preemptions"] += sample.value
                elif sample.name == "kvmig_migrations_total":
                    found["migrations"] += sample.value * (sample.labels["outcome"] == "committed")
        return found


async def compare(
    servers: dict[str, Served], options: argparse.Namespace, settings: dict[str, object]
) -> tuple[list[RoundSample], list[TurnSample]]:
    """See `play_rounds`."""

    async def burst(site: PolicySite) -> float:
        await site.burst(INSTANCES)  # first calls take long
        return await site.burst(options.burst)

    def plans_of(rate: float) -> list[list[Conversation]]:
        return [conversations(rate, options.seconds, repeat) for repeat in range(options.repeats)]

    async with session() as http:
        sites = {name: PolicySite(name, served, http) for name, served in servers.items()}
        return await play_rounds(sites, options, settings, burst, plans_of, PolicySite.play)


def engine_flags(model: str, blocks: int, chunk: int) -> list[str]:
    """Of a server of paced engines. blocks: of each; vLLM's null block is one more."""
    return [
        "--enforce-eager", f"--block-size={BLOCK_TOKENS}", f"--max-num-seqs={SEATS}",
        f"--max-num-batched-tokens={chunk}", f"--num-gpu-blocks-override={blocks + 1}",
        f"--instances={INSTANCES}", "--max-model-len=4096", "--shutdown-timeout=2",
        *model_flags(model, TOKEN_MS if PACED.fullmatch(model) else None),
    ]  # fmt: skip


def flags_of(policy: str, model: str) -> list[str]:
    """Of one policy's server."""
    return [*engine_flags(model, BLOCKS, CHUNK), *RULES[policy]]


# -- the same in the simulator


def cost_of(model: str) -> CostModel | None:
    """The pace as a cost model; None: the model has none."""
    paced = PACED.fullmatch(model)
    if paced is None:
        return None
    step_ms = float(paced[1])
    return CostModel(
        model,
        Prefill(step_ms, TOKEN_MS),
        Decode(step_ms, TOKEN_MS, 0.0),
        Copy(1.0, 4096, 1e9),
        Capacity(BLOCKS, BLOCK_TOKENS, SEATS, CHUNK, "chunked", prefix_cache=True),
    )


def simulate(policy: str, turns: Sequence[TurnSample], cost: CostModel) -> dict[str, float]:
    """One round, with its turns when they were sent: its figures, and the share of hits."""
    ordered = sorted(turns, key=lambda one: one.at)
    requests = [
        SimRequest(
            number, one.at, one.prompt, one.output, 0, f"c{one.conversation}", one.before,
            grows=True,
        )
        for number, one in enumerate(ordered)
    ]  # fmt: skip
    rule = {str(name): one for name, one in POLICIES.items()}[policy.split()[0]]
    cluster = SimCluster(
        requests, INSTANCES, cost, rule, setting("live"), Outcomes(), by_prefixes=policy == OURS
    )
    rows = cluster.run().table()
    asked, hit = np.array([one.engine.prompt_tokens for one in cluster.llumlets.values()]).sum(0)
    ttft, tpot, e2e = (1e3 * rows[:, COLUMNS.index(name)] for name in ("ttft_s", "tpot_s", "e2e_s"))
    return figures_of(ttft, tpot, e2e) | {"hit_share": float(hit / max(asked, 1))}


def figures_of(ttft: Times, tpot: Times, e2e: Times) -> dict[str, float]:
    """FIGURES of times in ms."""
    made = {"ttft_mean_ms": float(np.mean(ttft)), "e2e_mean_ms": float(np.mean(e2e))}
    for name, times in (("ttft", ttft), ("tpot", tpot)):
        for share in (50, 99):
            made[f"{name}_p{share}_ms"] = float(np.percentile(times, share))
    return made


# -- what came of it


def measured(
    policy: str, rows: Sequence[RoundSample], turns: Sequence[TurnSample]
) -> dict[str, float]:
    """FIGURES of a policy over all its rounds, and means of what its rounds counted."""
    mine = [one for one in turns if one.policy == policy]
    rounds = [one for one in rows if one.policy == policy]
    figures = figures_of(
        [one.ttft_ms for one in mine], [one.tpot_ms for one in mine], [one.e2e_ms for one in mine]
    )
    counts = ("hit_share", "preemptions", "migrations")
    return figures | {name: fmean(getattr(one, name) for one in rounds) for name in counts}


def as_simulated(real: dict[str, float], simulated: dict[str, float]) -> float:
    """Of the pairs of policies that the simulator sets apart, the share that have its order here.

    real, simulated: mean TTFT by policy. 1 if it sets none apart.
    """
    alike = [
        (real[low] < real[high])
        for low, high in (
            sorted(pair, key=lambda name: simulated[name]) for pair in combinations(real, 2)
        )
        if simulated[high] > (1 + APART) * simulated[low]
    ]
    return fmean(alike) if alike else 1.0


def summarize(
    real: dict[str, dict[str, float]], simulated: dict[str, dict[str, float]]
) -> dict[str, float]:
    """By policy, then kvmig's beside the others'."""
    summary = {
        f"{policy}.{name}": value for policy, one in real.items() for name, value in one.items()
    }
    ours, others = real[OURS], [one for name, one in real.items() if name != OURS]
    for name in ("ttft_mean_ms", "ttft_p50_ms", "ttft_p99_ms", "tpot_p99_ms", "e2e_mean_ms"):
        summary[f"{name}_over_the_best"] = ours[name] / min(one[name] for one in others)
    summary["hit_points_above_the_best"] = 100 * (
        ours["hit_share"] - max(one["hit_share"] for one in others)
    )
    if simulated:
        means = [
            {name: one["ttft_mean_ms"] for name, one in some.items()} for some in (real, simulated)
        ]
        summary["order_as_simulated"] = as_simulated(*means)
        summary["simulated_ttft_mean_ms_over_the_best"] = means[1][OURS] / min(
            value for name, value in means[1].items() if name != OURS
        )
    return summary


TARGETS: dict[str, report.Target] = {
    "ttft_mean_ms_over_the_best": {"max": 1.0},
    "order_as_simulated": {"min": 1.0},
}


def tables(
    real: dict[str, dict[str, float]], simulated: dict[str, dict[str, float]]
) -> list[Table]:
    """A row a policy."""
    made = []
    for title, some in (("on four real engines", real), ("the same turns, simulated", simulated)):
        columns = ("hit_share", *FIGURES)
        rows = [(policy, *(one[name] for name in columns)) for policy, one in some.items()]
        made.append(report.table(title, ("policy", *columns), rows))
    return made[: 2 if simulated else 1]


def options_of(argv: list[str] | None) -> argparse.Namespace:
    root = report.parser(__doc__, ("ttft_*", "order_*"))
    options = parse_options(
        root, argv, each="policy", unit="turns", load=0.7, seconds=(6.0, 25.0),
        seconds_help="in which conversations begin",
    )  # fmt: skip
    options.policies = QUICK if options.quick else tuple(RULES)
    return options


def main(argv: list[str] | None = None) -> int:
    options = options_of(argv)
    names = ("model", "policies", "repeats", "seconds", "burst", "load")
    settings = {name: getattr(options, name) for name in names} | {
        "instances": INSTANCES, "blocks": BLOCKS, "block_tokens": BLOCK_TOKENS, "chunk": CHUNK,
    }  # fmt: skip
    result = report.begin("prefixes_real", settings)
    model, cost = model_folder(options.model), cost_of(options.model)
    flags = {policy: flags_of(policy, options.model) for policy in options.policies}
    with Nursery("vllm") as nursery, servers_beside(flags, model, nursery) as servers:
        rows, turns = uvloop.run(compare(servers, options, result.settings))
    result.samples = [{"kind": "round", **asdict(one)} for one in rows]
    result.samples += [{"kind": "turn", **asdict(one)} for one in turns]
    real = {policy: measured(policy, rows, turns) for policy in options.policies}
    simulated: dict[str, dict[str, float]] = {}
    if cost is not None:
        for policy in options.policies:
            each = [
                simulate(
                    policy, [t for t in turns if (t.policy, t.repeat) == (policy, repeat)], cost
                )
                for repeat in range(options.repeats)
            ]
            result.samples += [{"kind": "simulated", "policy": policy, **one} for one in each]
            simulated[policy] = {name: fmean(one[name] for one in each) for name in each[0]}
    result.summary, result.targets = summarize(real, simulated), TARGETS
    return report.finish(result, options, tables(real, simulated))


if __name__ == "__main__":
    sys.exit(main())
