"""`python -m bench.simulator`: the simulator against the real system, by one and the same trace.

Replays short requests with Poisson arrivals against real engines, then simulates the same requests
on engines whose cost model was fitted to these (--gpu, or `python -m kvmig_tools.profile` before),
and prints both.

Who is preempted, and what moves, hangs on milliseconds: two runs of one trace differ, real or
simulated. So several traces are replayed, and each is simulated several times with every arrival
late by up to a step; the means are compared. Each pair of instances has moved a request both ways
before, as links are made at the first one.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from uuid import uuid4

import httpx
import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from bench import report
from bench.client import Stream, prompt_of, session
from bench.models import NAMES, model_flags, model_folder
from kvmig_tools import profile, profile_measure
from kvmig_tools.demo.client import Api, DemoFailed
from kvmig_tools.served import Served
from kvmig_tools.sim import cost
from kvmig_tools.sim.cost import CostModel
from kvmig_tools.sim.lengths import Zipf
from kvmig_tools.sim.run import Run, simulate

INPUTS, OUTPUTS = Zipf(96, 1.2), Zipf(128, 1.2)
LONGEST = 400
"""Tokens of a prompt, and of an answer."""
FIGURES = {
    **{f"{name}_{kind}_s": 0.15 for name in ("ttft", "tpot", "e2e") for kind in ("mean", "p99")},
    "preemptions": 0.20,
    "migrations": 0.20,
}
"""What is compared, and how far apart it may be."""
QUICK_REQUESTS = 200
LONG_RUN = ("ttft_*", "*_p99_*", "preemptions_*", "migrations_*")
"""One trace of 200 requests is too few for what hangs on milliseconds, and for a P99."""
"""Of one trace of 200 requests: how few wait, and how many move, is its chance."""
COUNTS = ("preemptions", "migrations")

Row = tuple[float, int, int]
"""arrival_s, input_tokens, output_tokens."""


def trace(requests: int, rate: float, seed: int) -> list[Row]:
    """The requests."""
    random = np.random.RandomState(seed)
    inputs = np.minimum(INPUTS.draw(random, requests), LONGEST)
    outputs = np.clip(OUTPUTS.draw(random, requests), 2, LONGEST)
    arrivals = np.concatenate([[0.0], np.cumsum(random.exponential(1 / rate, requests - 1))])
    rows = zip(arrivals, inputs, outputs, strict=True)
    return [(round(float(at), 4), int(first), int(then)) for at, first, then in rows]


async def replay(
    served: Served, rows: Sequence[Row], seed: int
) -> list[tuple[float, float, float]]:
    """(TTFT, time a token, end to end) in seconds of each request, as its client sees it."""
    async with session() as http:
        began = time.monotonic() + 0.5

        async def one(number: int, row: Row) -> tuple[float, float, float]:
            at, inputs, outputs = row
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            prompt = prompt_of(inputs, "simulator", seed, number)
            stream = Stream(http, served.url, served.model, prompt, outputs, f"{seed} {number}")
            async with stream:
                await stream.reach(outputs)
            first, last = stream.arrivals[0].at, stream.arrivals[-1].at
            tpot = (last - first) / (outputs - 1)
            return first - stream.sent_at, tpot, last - stream.sent_at

        return list(await asyncio.gather(*(one(n, row) for n, row in enumerate(rows))))


def real(served: Served, rows: Sequence[Row], seed: int) -> dict[str, float]:
    """The figures of real engines."""
    before = counters(served)
    times = np.array(asyncio.run(replay(served, rows, seed)))
    figures: dict[str, float] = {}
    for column, name in enumerate(("ttft", "tpot", "e2e")):
        figures[f"{name}_mean_s"] = float(times[:, column].mean())
        figures[f"{name}_p99_s"] = float(np.percentile(times[:, column], 99))
    return figures | {name: value - before[name] for name, value in counters(served).items()}


async def connect(served: Served) -> None:
    """One long stream goes from each instance to each other. Raises DemoFailed if it can't."""
    async with Api.at(served.url) as api:
        call = uuid4().hex
        bench = profile_measure.Bench(api, served.model, 1)
        task = asyncio.create_task(bench.stream(16, LONGEST, call))
        try:
            async with asyncio.timeout(60):
                here = await bench.place_of(call)
            for first, second in combinations(await api.instances(), 2):
                for there in (first, second, first):
                    if there != here and await api.migrate(call, there) is None:
                        raise DemoFailed(f"the request did not move from {here} to {there}")
                    here = there
        finally:
            task.cancel()


def counters(served: Served) -> dict[str, float]:
    """Preemptions and committed migrations so far, over all engines."""
    found = {"preemptions": 0.0, "migrations": 0.0}
    text = httpx.get(f"{served.url}/metrics", timeout=30).text
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "kvmig_preemptions_total":  # vLLM's loses those that move then
                found["preemptions"] += sample.value
            elif sample.name == "kvmig_migrations_total":
                found["migrations"] += sample.value * (sample.labels["outcome"] == "committed")
    return found


def simulated(
    rows: Sequence[Row], model: CostModel, args: argparse.Namespace, seed: int
) -> dict[str, float]:
    """The figures of modelled ones: means over `args.draws` runs."""
    random = np.random.RandomState(seed)
    late_s = model.decode.base_ms / 1e3
    runs = []
    for _ in range(args.draws):
        late = random.uniform(0, late_s, len(rows))
        moved = sorted((at + by, *rest) for (at, *rest), by in zip(rows, late, strict=True))
        runs.append(_simulated(moved, model, args))
    return {name: fmean(one[name] for one in runs) for name in FIGURES}


def _simulated(
    rows: Sequence[Sequence[float]], model: CostModel, args: argparse.Namespace
) -> dict[str, float]:
    capacity = msgspec.structs.replace(model.capacity, blocks=args.blocks)
    model = msgspec.structs.replace(model, capacity=capacity)
    with tempfile.TemporaryDirectory() as folder:
        gpu, requests = Path(folder) / "fitted.toml", Path(folder) / "trace.csv"
        gpu.write_text(profile.to_toml(model), encoding="utf-8")
        with requests.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("arrival_s", "input_tokens", "output_tokens"), *rows])
        run = Run(trace=str(requests), policy=args.policy, instances=args.instances, gpu=str(gpu))
        return simulate(run).result.figures


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    repeats = 1 if args.quick else args.repeats
    if args.quick:
        args.requests = min(args.requests, QUICK_REQUESTS)
    names = ("model", "policy", "instances", "requests", "rate", "blocks", "draws", "seed")
    settings = {name: getattr(args, name) for name in names} | {"repeats": repeats}
    result = report.begin("simulator", settings)
    model = cost.load(str(args.gpu)) if args.gpu else _fitted(args)
    result.settings["cost_model"] = msgspec.to_builtins(model)
    flags = [
        # One block more: vLLM keeps one for itself.
        *profile.engine_flags(_engines(args, args.blocks + 1), (*ENGINE, *model_flags(args.model))),
        f"--policy={args.policy}",
        "--shutdown-timeout=2",
    ]
    with Served(flags, model=model_folder(args.model)) as served:
        asyncio.run(replay(served, trace(8, args.rate, args.seed), -1))  # caches warm up
        asyncio.run(connect(served))
        for seed in range(args.seed, args.seed + repeats):
            rows = trace(args.requests, args.rate, seed)
            ours = real(served, rows, seed)
            theirs = simulated(rows, model, args, seed)
            result.samples.append({"seed": seed, "real": ours, "simulated": theirs})
            report.say(f"trace {len(result.samples)} of {repeats}")
    compare(result)
    return report.finish(result, args, [_table(result)])


def compare(result: report.Result) -> None:
    """Means over the traces, and how far apart they may be; counts by two at any rate."""
    for name, far in FIGURES.items():
        ours, theirs = means(result, name)
        slack = max(far, 2.0 / ours if name in COUNTS and ours else 0.0)
        ratio = f"{name}_simulated_over_real"
        if ours:
            result.summary[ratio] = theirs / ours
            result.targets[ratio] = {"min": 1 - slack, "max": 1 + slack}


def means(result: report.Result, name: str) -> tuple[float, float]:
    """Of a figure: real, simulated."""
    samples = result.samples
    return fmean(one["real"][name] for one in samples), fmean(
        one["simulated"][name] for one in samples
    )


ENGINE = ("--enforce-eager", "--max-model-len=1024")


def _parser() -> argparse.ArgumentParser:
    parser = report.parser(__doc__, LONG_RUN)
    add = parser.add_argument
    add("--model", default="device20ms", help=f"{', '.join(NAMES)} or a folder")
    add("--gpu", type=Path, help="a fitted cost model, FILE.toml (default: fit one now)")
    add("--policy", default="kvmig")
    add("--instances", type=int, default=4)
    add("--requests", type=int, default=600, help="of a trace")
    add("--repeats", type=int, default=5, help="traces, of which the means are compared")
    add("--draws", type=int, default=8, help="simulations of each trace")
    add("--rate", type=float, default=6.0, help="requests a second")
    add("--blocks", type=int, default=40, help="KV blocks of 32 tokens an instance")
    add("--seed", type=int, default=1, help="of the first trace")
    return parser


def _engines(args: argparse.Namespace, blocks: int) -> argparse.Namespace:
    given = profile.parser().parse_args([
        str(model_folder(args.model)),
        f"--instances={args.instances}",
        f"--num-gpu-blocks-override={blocks}",
        *(("--repeats=1",) if args.quick else ()),
        "--out=fit.toml",
    ])  # fmt: skip
    assert isinstance(given, argparse.Namespace)
    return given


def _fitted(args: argparse.Namespace) -> CostModel:
    model, off = profile.profile(_engines(args, 600), ("--enforce-eager", *model_flags(args.model)))
    Console(stderr=True).print(profile.errors(off))
    return model


def _table(result: report.Result) -> Table:
    rows = [(name, *means(result, name)) for name in FIGURES]
    return report.table(
        "Real engines and the simulator",
        ("", "real", "simulated", "simulated / real"),
        [(name, a, b, b / a if a else "-") for name, a, b in rows],
    )


if __name__ == "__main__":
    sys.exit(main())
