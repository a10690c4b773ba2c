"""`python -m bench.simulator`: the simulator against the real system, by one and the same trace.

Replays short requests with Poisson arrivals against real engines of the bundled model, then
simulates the same requests on engines whose cost model was fitted to these (--gpu, or
`python -m kvmig.profile` before), and prints both.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from bench import report
from bench.client import Stream, prompt_of, session
from kvmig import profile
from kvmig.cli.served import Served
from kvmig.models import BUNDLED
from kvmig.sim import cost
from kvmig.sim.cost import CostModel
from kvmig.sim.lengths import Zipf
from kvmig.sim.run import Run, simulate

INPUTS, OUTPUTS = Zipf(96, 1.2), Zipf(128, 1.2)
LONGEST = 400
"""Tokens of a prompt, and of an answer."""
FIGURES = {
    **{f"{name}_{kind}_s": 0.15 for name in ("ttft", "tpot", "e2e") for kind in ("mean", "p99")},
    "preemptions": 0.20,
    "migrations": 0.20,
}
"""What is compared, and how far apart it may be."""

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


async def replay(served: Served, rows: Sequence[Row]) -> list[tuple[float, float, float]]:
    """(TTFT, time a token, end to end) in seconds of each request, as its client sees it."""
    async with session() as http:
        began = time.monotonic() + 0.5

        async def one(number: int, row: Row) -> tuple[float, float, float]:
            at, inputs, outputs = row
            await asyncio.sleep(max(0.0, began + at - time.monotonic()))
            prompt = prompt_of(inputs, "simulator", number)
            stream = Stream(http, served.url, served.model, prompt, outputs, str(number))
            async with stream:
                await stream.reach(outputs)
            first, last = stream.arrivals[0].at, stream.arrivals[-1].at
            tpot = (last - first) / (outputs - 1)
            return first - stream.sent_at, tpot, last - stream.sent_at

        return list(await asyncio.gather(*(one(n, row) for n, row in enumerate(rows))))


def real(served: Served, rows: Sequence[Row]) -> dict[str, float]:
    """The figures of real engines."""
    times = np.array(asyncio.run(replay(served, rows)))
    figures: dict[str, float] = {}
    for column, name in enumerate(("ttft", "tpot", "e2e")):
        figures[f"{name}_mean_s"] = float(times[:, column].mean())
        figures[f"{name}_p99_s"] = float(np.percentile(times[:, column], 99))
    figures["preemptions"] = _preemptions(httpx.get(f"{served.url}/metrics", timeout=30).text)
    return figures


def _moved(served: Served) -> set[str]:
    """Ids of the migrations that were committed, of the last that the server remembers."""
    return {move["id"] for move in served.get("migrations") if move["state"] == "committed"}


def _preemptions(metrics: str) -> float:
    """vLLM's own counter, over all engines."""
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:num_preemptions_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def simulated(rows: Sequence[Row], model: CostModel, args: argparse.Namespace) -> dict[str, float]:
    """The figures of modelled ones."""
    capacity = msgspec.structs.replace(model.capacity, blocks=args.blocks)
    model = msgspec.structs.replace(model, capacity=capacity)
    with tempfile.TemporaryDirectory() as folder:
        gpu, requests = Path(folder) / "fitted.toml", Path(folder) / "trace.csv"
        gpu.write_text(profile.to_toml(model), encoding="utf-8")
        with requests.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("arrival_s", "input_tokens", "output_tokens"), *rows])
        run = Run(trace=str(requests), policy=args.policy, instances=args.instances, gpu=str(gpu))
        return simulate(run).result.figures


def main() -> int:
    """Exit code 1 if --check and something is too far apart."""
    args = _parser().parse_args()
    rows = trace(args.requests, args.rate, args.seed)
    model = cost.load(str(args.gpu)) if args.gpu else _fitted(args)
    flags = [
        *profile.engine_flags(_engines(args, args.blocks), ENGINE),
        f"--policy={args.policy}",
        "--drain-timeout=2",
    ]
    with Served(flags, model=BUNDLED) as served:
        asyncio.run(replay(served, rows[:8]))  # caches warm up
        known = _moved(served)
        before = _preemptions(httpx.get(f"{served.url}/metrics", timeout=30).text)
        ours = real(served, rows)
        ours["migrations"] = float(len(_moved(served) - known))
        ours["preemptions"] -= before
    figures = simulated(rows, model, args)
    Console(width=110).print(_table(ours, figures))
    if args.out is not None:
        args.out.write_text(json.dumps(_json(args, model, ours, figures), indent=1) + "\n")
    far = [name for name in FIGURES if not _near(name, ours[name], figures[name])]
    for name in far:
        print(f"{name}: simulated {figures[name]:.4g}, real {ours[name]:.4g}", file=sys.stderr)
    return 1 if args.check and far else 0


ENGINE = ("--enforce-eager", "--max-model-len=1024")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m bench.simulator", description=__doc__)
    add = parser.add_argument
    add("--gpu", type=Path, help="a fitted cost model, FILE.toml (default: fit one now)")
    add("--policy", default="kvmig")
    add("--instances", type=int, default=2)
    add("--requests", type=int, default=150)
    add("--rate", type=float, default=1.5, help="requests a second")
    add("--blocks", type=int, default=40, help="KV blocks of 32 tokens an instance")
    add("--seed", type=int, default=1)
    add("--out", type=Path, metavar="FILE.json")
    add("--check", action="store_true", help="exit 1 if a figure is too far apart")
    return parser


def _engines(args: argparse.Namespace, blocks: int) -> argparse.Namespace:
    given = profile.parser().parse_args(
        [f"--instances={args.instances}", f"--num-gpu-blocks-override={blocks}", "--out=fit.toml"]
    )
    assert isinstance(given, argparse.Namespace)
    return given


def _fitted(args: argparse.Namespace) -> CostModel:
    model, off = profile.profile(_engines(args, 600), ("--enforce-eager",))
    Console().print(profile.errors(off))
    return model


def _near(name: str, ours: float, simulated_: float) -> bool:
    """Within the tolerance; counts may differ by two at any rate."""
    slack = 2.0 if name in ("preemptions", "migrations") else 0.0
    return abs(simulated_ - ours) <= max(FIGURES[name] * ours, slack)


def _table(ours: dict[str, float], figures: dict[str, float]) -> Table:
    shown = Table(title="real engines and the simulator")
    for heading in ("", "real", "simulated", "simulated / real", "within"):
        shown.add_column(heading, justify="right")
    for name, tolerance in FIGURES.items():
        a, b = ours[name], figures[name]
        ratio = f"{b / a:.2f}" if a else "-"
        near = "yes" if _near(name, a, b) else f"no (±{100 * tolerance:.0f} %)"
        shown.add_row(name, f"{a:.4g}", f"{b:.4g}", ratio, near)
    return shown


def _json(
    args: argparse.Namespace, model: CostModel, ours: dict[str, float], figures: dict[str, float]
) -> dict[str, Any]:
    settings = {
        name: getattr(args, name)
        for name in ("policy", "instances", "requests", "rate", "blocks", "seed")
    }
    return {
        "name": "simulator",
        "settings": settings,
        "machine": report.machine(),
        "versions": report.versions(),
        "cost_model": msgspec.to_builtins(model),
        "real": ours,
        "simulated": {name: figures[name] for name in FIGURES},
    }


if __name__ == "__main__":
    sys.exit(main())
