"""Prompts computed at instances set apart, on four real engines, beside prompts among what decodes.

One server of four vLLM instances for each way, all up at the same time; the same calls, long
prompts with short answers, go to one after the other, and the order turns from round to round, in
which the prompts are others. The engines compute the bundled model at the pace of a device, as in
`bench.prefixes_real`. Arrivals are open: a call is sent when it is due, whatever became of those
before. Before anything counts, each server gets `--burst` of the calls at once: `--load` of what
the servers end a second is the rate.

tpot: the mean of a call's later tokens. Percentiles are over all calls of all rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median

import numpy as np
import uvloop
from numpy.random import RandomState
from rich.table import Table

from bench import report
from bench.client import session
from bench.models import model_folder
from bench.prefixes_real import BLOCK_TOKENS, INSTANCES, engine_flags
from bench.rounds import parse_options, play_rounds, servers_beside
from bench.serving import Site
from bench.serving_calls import FIGURES, STATISTICS, Answer, Call, Run, statistics_of
from kvmig_tools.nursery import Nursery
from kvmig_tools.served import Served

BLOCKS, CHUNK = 625, 256
WAYS: dict[str, tuple[str, ...]] = {
    "mixed": (),
    "set apart": ("--prompt-instances=i0,i1",),
}
MIXED = "mixed"
PROMPT, LONGEST_PROMPT = 900, 3000
OUTPUT, LONGEST_OUTPUT = 60, 240
"""Means, drawn geometrically, and most."""


def calls_of(rate: float, count: int, seed: int) -> list[Call]:
    """Long prompts. rate: a second."""
    random = RandomState(seed)
    prompts = np.minimum(random.geometric(1 / PROMPT, count), LONGEST_PROMPT)
    outputs = np.clip(random.geometric(1 / OUTPUT, count), 2, LONGEST_OUTPUT)
    arrivals = np.cumsum(random.exponential(1 / rate, count))
    return [
        Call(float(at), int(prompt), int(output))
        for at, prompt, output in zip(arrivals, prompts, outputs, strict=True)
    ]


async def compare(
    servers: dict[str, Served], options: argparse.Namespace, settings: dict[str, object]
) -> tuple[list[Run], list[Answer]]:
    """See `play_rounds`."""

    async def burst(site: Site) -> float:
        await site.play(calls_of(1e9, INSTANCES, 0), -2)  # first calls take long
        run, _ = await site.play(calls_of(1e9, options.burst, 0), -1)
        return float(options.burst / run.seconds)

    def plans_of(rate: float) -> list[list[Call]]:
        count = max(int(rate * options.seconds), 4)
        return [calls_of(rate, count, 1 + repeat) for repeat in range(options.repeats)]

    async with session() as http:
        sites = {name: Site(name, served, http) for name, served in servers.items()}
        return await play_rounds(sites, options, settings, burst, plans_of, Site.play)


def flags_of(way: str, model: str) -> list[str]:
    """Of one server."""
    return [*engine_flags(model, BLOCKS, CHUNK), *WAYS[way]]


def summarize(runs: Sequence[Run], answers: Sequence[Answer]) -> dict[str, float]:
    """`way.figure.statistic` over all rounds, then each way beside prompts among what decodes."""
    summary: dict[str, float] = {}
    ways = list(dict.fromkeys(run.policy for run in runs))
    for way in ways:
        found = statistics_of(one for one in answers if one.policy == way)
        for figure in FIGURES:
            for statistic in STATISTICS:
                summary[f"{way}.{figure}.{statistic}"] = found[figure][statistic]
        mine = [run for run in runs if run.policy == way]
        summary[f"{way}.migrations"] = median(sum(run.migrations.values()) for run in mine)
        summary[f"{way}.aborted"] = median(run.migrations_aborted for run in mine)
    for way in ways:
        for name in ("tpot_ms.p99", "tpot_ms.p50", "ttft_ms.p99", "ttft_ms.p50", "e2e_ms.mean"):
            if way != MIXED:
                summary[f"{way}.{name}_over_mixed"] = (
                    summary[f"{way}.{name}"] / summary[f"{MIXED}.{name}"]
                )
    return summary


TARGETS: dict[str, report.Target] = {"set apart.tpot_ms.p99_over_mixed": {"max": 0.6}}


def tables(summary: dict[str, float]) -> list[Table]:
    """A row a way."""
    columns = [f"{figure}.{one}" for figure in FIGURES for one in STATISTICS] + ["migrations"]
    ways = [name.removesuffix(".migrations") for name in summary if name.endswith(".migrations")]
    rows = [(way, *(summary[f"{way}.{name}"] for name in columns)) for way in ways]
    return [report.table("prompts on four real engines", ("way", *columns), rows)]


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, ("*_over_mixed",))
    options = parse_options(
        root, argv, each="way", unit="calls", load=0.6, seconds=(8.0, 40.0),
        seconds_help="of calls in a round",
    )  # fmt: skip
    names = ("model", "repeats", "seconds", "burst", "load")
    settings = {name: getattr(options, name) for name in names} | {
        "ways": WAYS, "instances": INSTANCES, "blocks": BLOCKS, "block_tokens": BLOCK_TOKENS,
        "chunk": CHUNK,
    }  # fmt: skip
    result = report.begin("prompts_real", settings)
    model = model_folder(options.model)
    flags = {way: flags_of(way, options.model) for way in WAYS}
    with Nursery("vllm") as nursery, servers_beside(flags, model, nursery) as servers:
        runs, answers = uvloop.run(compare(servers, options, result.settings))
    result.samples = [{"kind": "run", **asdict(run)} for run in runs]
    result.samples += [{"kind": "answer", **asdict(one)} for one in answers]
    result.summary, result.targets = summarize(runs, answers), TARGETS
    return report.finish(result, options, tables(result.summary))


if __name__ == "__main__":
    sys.exit(main())
