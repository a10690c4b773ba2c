"""Policies beside each other: a trace of requests replayed against the running system.

One server for each policy, all up at the same time; the same calls go to one after the other,
and the order turns from repeat to repeat. Arrivals are open: a call is sent when the trace has
it, whatever became of those before, and its times count from then on.

The trace is scaled as a whole: `--scale` is that of prompts, answers and KV cache. At 1 each
instance has 13,616 tokens, as one of LLaMA-7B on an A10 (24 GB) in the Llumnix paper, so memory
is as tight for the requests at any scale: batches grow until they are preempted. Before
anything counts, each server gets `--burst` calls at once. How many it ends a second is what it
can do; `--load` of the mean over the servers is the rate of the trace (or `--rate`, as it is).

ttft: to the first token; tpot: the mean of a call's later tokens; e2e: to the last token.
Each figure is made for a run, and the median over the repeats is shown. The P99 of a hundred
calls is the worst but one: take many, and many repeats, before you trust it.

With `--high SHARE`, that share of the calls, drawn by `--seed`, has a priority class above the
others, with a quarter of the KV cache as its headroom; the figures are shown by class, too.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import aiohttp
import httpx
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from rich.table import Table

from bench import report
from bench.arrivals import Arrival
from bench.client import Stream, prompt_of, session
from bench.models import NAMES, model_flags, model_folder
from bench.rounds import play_rounds, servers_beside
from bench.serving_calls import (
    FIGURES,
    STATISTICS,
    Answer,
    Call,
    Run,
    answer_of,
    calls_of,
    summarise,
)
from bench.serving_plot import draw_serving
from kvmig.controlplane.policy import POLICIES
from kvmig.core.errors import ConfigError
from kvmig_tools.served import Served

TRACE = Path(__file__).parent / "traces" / "sharegpt_600.csv"
KV_TOKENS = 13_616
BLOCK_TOKENS = 32
HIGH = -10


class Site:
    """One server, and what its counters said when last asked."""

    def __init__(self, policy: str, served: Served, http: aiohttp.ClientSession) -> None:
        self.policy = policy
        self._served = served
        self._http = http

    async def play(self, calls: list[Call], repeat: int) -> tuple[Run, list[Answer]]:
        """All calls, when they are due. Raises StreamFailed if one fails."""
        before = await asyncio.to_thread(self._counters)
        begin = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self._call(call, begin, (repeat, number)))
                for number, call in enumerate(calls)
            ]
        seconds = time.monotonic() - begin
        counts = await asyncio.to_thread(self._counters)
        counts.subtract(before)
        run = Run(
            self.policy,
            repeat,
            round(seconds, 3),
            counts.pop("preemptions", 0),
            {why: n for why, n in counts.items() if n and why != "aborted"},
            counts["aborted"],
        )
        answers = [
            answer_of(call, self.policy, repeat, task.result())
            for call, task in zip(calls, tasks, strict=True)
        ]
        return run, answers

    async def _call(self, call: Call, begin: float, name: object) -> list[Arrival]:
        prompt = prompt_of(call.prompt, "serving", name)
        await asyncio.sleep(max(begin + call.at - time.monotonic(), 0))
        served = self._served
        priority = HIGH if call.high else 0
        async with Stream(
            self._http, served.url, served.model, prompt, call.output, priority=priority
        ) as stream:
            await stream.reach(call.output)
        due = begin + call.at
        return [one._replace(at=one.at - due) for one in stream.arrivals]

    def _counters(self) -> Counter[str]:
        """Preemptions; migrations that committed, by `why`; those that were aborted."""
        text = httpx.get(f"{self._served.url}/metrics", verify=False, timeout=60).text
        counts: Counter[str] = Counter()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "kvmig_preemptions_total":
                    counts["preemptions"] += int(sample.value)
                elif sample.name == "kvmig_migrations_total":
                    committed = sample.labels["outcome"] == "committed"
                    counts[sample.labels["why"] if committed else "aborted"] += int(sample.value)
        return counts


async def compare(
    servers: dict[str, Served], options: argparse.Namespace, settings: dict[str, object]
) -> tuple[list[Run], list[Answer]]:
    """See `play_rounds`; each round has the same calls."""

    async def burst(site: Site) -> float:
        calls = _calls(options, 1e9, options.burst)
        run, _ = await site.play(calls, -1)
        return len(calls) / run.seconds

    def plans_of(rate: float) -> list[list[Call]]:
        return [_calls(options, rate, options.requests)] * int(options.repeats)

    async with session() as http:
        sites = {name: Site(name, served, http) for name, served in servers.items()}
        return await play_rounds(sites, options, settings, burst, plans_of, Site.play)


def _calls(options: argparse.Namespace, rate: float, count: int) -> list[Call]:
    return calls_of(
        options.trace,
        count,
        rate=rate,
        scale=options.scale,
        longest=int(KV_TOKENS * options.scale * 0.9),
        high=options.high,
        seed=options.seed,
    )


def flags_of(policy: str, options: argparse.Namespace) -> list[str]:
    """Of one server. Blocks: one more than the KV cache holds, vLLM's null block."""
    blocks = int(KV_TOKENS * options.scale) // BLOCK_TOKENS
    flags = [
        "--enforce-eager",
        f"--block-size={BLOCK_TOKENS}",
        "--max-num-seqs=64",
        f"--num-gpu-blocks-override={blocks + 1}",
        f"--max-model-len={blocks * BLOCK_TOKENS}",
        f"--instances={options.instances}",
        f"--policy={policy}",
        "--shutdown-timeout=2",
    ]
    if options.high:
        flags.append(f"--priority-class=high={HIGH},headroom={blocks * BLOCK_TOKENS // 4}")
    return flags


def tables(summary: dict[str, float], runs: list[Run]) -> list[Table]:
    """Policies as rows, one table a figure; then what happened."""
    names = [name.removesuffix(".ttft_ms.mean") for name in summary if ".ttft_ms.mean" in name]
    made = [
        report.table(
            figure.removesuffix("_ms") + ", ms",
            ("policy", *STATISTICS),
            [[name, *(summary[f"{name}.{figure}.{one}"] for one in STATISTICS)] for name in names],
        )
        for figure in FIGURES
    ]
    rows = []
    for policy in dict.fromkeys(run.policy for run in runs):
        mine = [run for run in runs if run.policy == policy]
        whys = sum((Counter(run.migrations) for run in mine), Counter[str]())
        rows.append((
            policy,
            summary[f"{policy}.preemptions"],
            summary[f"{policy}.migrations"],
            ", ".join(f"{count} {why}" for why, count in whys.most_common()),
            sum(run.migrations_aborted for run in mine),
        ))  # fmt: skip
    columns = ("policy", "preemptions a run", "migrations a run", "of all runs", "aborted")
    return [*made, report.table("What happened", columns, rows)]


def options_of(argv: list[str] | None) -> argparse.Namespace:
    root = report.parser(__doc__)
    root.add_argument(
        "--policy",
        action="append",
        choices=sorted(POLICIES),
        help="may be given several times; default: round-robin, llumnix and kvmig",
    )
    root.add_argument("--trace", type=Path, default=TRACE, help="CSV, plain or gzip")
    root.add_argument("--model", help=f"{', '.join(NAMES)} or a folder; default device30ms")
    root.add_argument("--requests", type=int, help="of the trace, in each run; default 400")
    root.add_argument("--repeats", type=int, help="runs for each policy; default 5")
    root.add_argument("--scale", type=float, default=0.25, help="of lengths and KV cache")
    root.add_argument("--load", type=float, default=0.9, help="share of what a burst gives")
    root.add_argument("--rate", type=float, default=0.0, help="calls a second; 0: by --load")
    root.add_argument("--burst", type=int, help="calls at once before the runs; default 400")
    root.add_argument("--instances", type=int, help="of each server; default 4")
    root.add_argument("--high", type=float, default=0.0, metavar="SHARE", help="with a priority")
    root.add_argument("--seed", type=int, default=1)
    options = root.parse_args(argv)
    quick = options.quick
    options.policy = options.policy or (
        ["round-robin", "kvmig"] if quick else ["round-robin", "llumnix", "kvmig"]
    )
    options.model = options.model or ("count" if quick else "device30ms")
    options.requests = options.requests or (60 if quick else 400)
    options.repeats = options.repeats or (1 if quick else 5)
    if options.instances is None:
        options.instances = 2 if quick else 4
    options.burst = options.burst or (16 if quick else 400)
    rules = (
        (options.requests > 1, "--requests", options.requests, "2 or more"),
        (options.repeats > 0, "--repeats", options.repeats, "1 or more"),
        (0 < options.scale <= 1, "--scale", options.scale, "more than 0, at most 1"),
        (options.load > 0, "--load", options.load, "more than 0"),
        (options.rate >= 0, "--rate", options.rate, "0 or more"),
        (0 <= options.high < 1, "--high", options.high, "0 or more, less than 1"),
        (options.instances >= 1, "--instances", options.instances, "1 or more"),
    )
    for holds, flag, value, allowed in rules:
        if not holds:
            root.error(f"{flag} is {value}, must be {allowed}")
    return options


def main(argv: list[str] | None = None) -> int:
    options = options_of(argv)
    try:
        _calls(options, 1.0, options.requests)
    except ConfigError as error:
        raise SystemExit(str(error)) from error
    names = ("policy", "model", "requests", "repeats", "scale", "load", "burst", "instances",
             "high", "seed")  # fmt: skip
    settings = {name: getattr(options, name) for name in names} | {"trace": options.trace.name}
    result = report.begin("serving", settings)
    model = model_folder(options.model)
    own = model_flags(options.model)
    flags = {policy: [*flags_of(policy, options), *own] for policy in options.policy}
    with servers_beside(flags, model) as servers:
        runs, answers = uvloop.run(compare(servers, options, result.settings))
    result.samples = [{"kind": "run", **asdict(run)} for run in runs]
    result.samples += [{"kind": "answer", **asdict(one)} for one in answers]
    result.summary = summarise(answers, runs)
    return report.finish(result, options, tables(result.summary, runs), draw_serving)


if __name__ == "__main__":
    sys.exit(main())
