"""`python -m kvmig_tools.simulate`: try policies on modelled engines before production."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvmig.core.errors import ConfigError
from kvmig_tools.sim import cost
from kvmig_tools.sim.placed import simulate_placement
from kvmig_tools.sim.plots import draw
from kvmig_tools.sim.policies import NAMES, SETTINGS, policy, setting
from kvmig_tools.sim.run import Finished, Result, Run, simulate_all
from kvmig_tools.sim.workloads import PAPER_SEED, WORKLOADS

SHOWN = (
    ("ttft_mean_s", "TTFT mean", "s"),
    ("ttft_p99_s", "P99", "s"),
    ("tpot_mean_s", "TPOT mean", "ms"),
    ("tpot_p99_s", "P99", "ms"),
    ("e2e_mean_s", "end to end mean", "s"),
    ("e2e_p99_s", "P99", "s"),
    ("loss_mean_s", "preemption loss", "s"),
    ("preempted_share", "preempted", "%"),
    ("migrations", "migrations", ""),
    ("instances_mean", "instances", ""),
)
_SCALES = {"s": 1.0, "ms": 1e3, "%": 100.0, "": 1.0}


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser("python -m kvmig_tools.simulate", description=__doc__)
    add = flags.add_argument
    add(
        "--placement",
        type=Path,
        metavar="FILE.toml",
        help="instead of a trace: what kvmig.placement wrote, under its models' rates",
    )
    add("--models", type=Path, metavar="FILE.toml", help="with --placement, as for kvmig.placement")
    add("--cluster", metavar="NODESxGPUS:DEVICE", help="with --placement, as for kvmig.placement")
    add(
        "--trace",
        help=f"{', '.join(WORKLOADS)}, or a CSV file with arrival_s,input_tokens,output_tokens",
    )
    add("--rate", type=float, action="append", help="requests a second; may be repeated")
    add("--cv", type=float, default=1.0, help="of the gaps between arrivals; 1: Poisson")
    add("--requests", type=int, default=10_000)
    add("--instances", type=int, default=16)
    add("--policy", action="append", help=f"{', '.join(NAMES)}; may be repeated")
    add("--no-migration", action="store_true", help="dispatch only")
    add("--setting", default="live", help=f"around the policies: {', '.join(SETTINGS)}")
    add("--gpu", default="a10-llama7b", help=f"{', '.join(cost.known())}, or a .toml file")
    add("--high-share", type=float, default=0.0, help="share of requests with high priority")
    add("--headroom", type=int, default=0, help="tokens of headroom of the high priority")
    add("--scale", metavar="X,Y", help="autoscaling: keep the mean freeness between X and Y")
    add("--min-instances", type=int, default=1, help="with --scale; --instances are the most")
    add("--seed", type=int, action="append", help="may be repeated")
    add("--out", type=Path, help="folder for results.json and plots")
    add("--workers", type=int, help="processes (default: one a core)")
    return flags


def runs_of(args: argparse.Namespace) -> list[Run]:
    """One a rate, policy and seed. Raises ConfigError."""
    for name, value in (("--instances", args.instances), ("--requests", args.requests)):
        if value < 1:
            raise ConfigError(f"{name} is {value}, must be 1 or more")
    if args.headroom < 0:
        raise ConfigError(f"--headroom is {args.headroom}, must be 0 or more")
    scale = _scale(args.scale)
    cost.load(args.gpu)
    setting(args.setting)
    policies = args.policy or ["kvmig"]
    for name in policies:
        policy(name)
    if args.trace is None:
        raise ConfigError("--trace is missing, or --placement")
    is_file = args.trace.endswith((".csv", ".csv.gz"))
    if not is_file and args.trace not in WORKLOADS:
        raise ConfigError(
            f"--trace is {args.trace}, must be a .csv or .csv.gz file or {' or '.join(WORKLOADS)}"
        )
    rates = args.rate or [0.0 if is_file else WORKLOADS[args.trace].rates[2]]
    return [
        Run(
            trace=args.trace,
            policy=name,
            rate=rate,
            cv=args.cv,
            requests=args.requests,
            instances=args.instances,
            gpu=args.gpu,
            setting=args.setting,
            seed=seed,
            high_share=args.high_share,
            headroom_tokens=args.headroom,
            migration=not args.no_migration,
            scale=scale,
            min_instances=args.min_instances,
        )
        for rate, name, seed in product(rates, policies, args.seed or [PAPER_SEED])
    ]


def _scale(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--scale is {text}, must be two numbers X,Y") from None
    return low, high


def table(results: Sequence[Result]) -> Table:
    """A row a run; under each, what it is times the first policy's at the same rate and seed."""
    shown = Table(title=f"{results[0].run.trace}, {results[0].run.instances} instances")
    for heading in ("policy", "req/s", "seed"):
        shown.add_column(heading, no_wrap=True)
    for _, heading, unit in SHOWN:
        shown.add_column(f"{heading} {unit}".strip(), justify="right")
    first: dict[tuple[float, int], Result] = {}
    for result in results:
        run = result.run
        base = first.setdefault((run.rate, run.seed), result)
        values = [result.figures[name] * _SCALES[unit] for name, _, unit in SHOWN]
        shown.add_row(
            run.policy, f"{run.rate:g}", f"{run.seed}", *(f"{value:.4g}" for value in values)
        )
        if base is not result:
            ratios = (
                f"{result.figures[name] / base.figures[name]:.2f}x" if base.figures[name] else "-"
                for name, _, _ in SHOWN
            )
            shown.add_row("", "", "", *ratios, style="dim")
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one sentence about what is wrong."""
    args = parser().parse_args(argv)
    console = Console(stderr=True)
    try:
        if args.placement is not None:
            return _placement(args)
        runs = runs_of(args)
        finished = _simulate(runs, args.workers, console, 1.0 if args.out else 0.0)
    except ConfigError as error:
        print(f"kvmig_tools.simulate: {error}", file=sys.stderr)
        return 2
    results = [one.result for one in finished]
    Console(width=None if sys.stdout.isatty() else 200).print(table(results))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        encoded = msgspec.json.format(msgspec.json.encode(results), indent=1)
        (args.out / "results.json").write_bytes(encoded + b"\n")
        draw(finished, args.out)
    return 0


def _placement(args: argparse.Namespace) -> int:
    """Print how a placement does. Raises ConfigError."""
    if args.models is None or args.cluster is None or args.trace is not None:
        raise ConfigError("--placement wants --models and --cluster, and no --trace")
    if args.requests < 1:
        raise ConfigError(f"--requests is {args.requests}, must be 1 or more")
    (seed,) = (args.seed or [PAPER_SEED])[:1]
    shown = simulate_placement(args.placement, args.models, args.cluster, args.requests, seed)
    Console(width=None if sys.stdout.isatty() else 200).print(shown)
    return 0


def _simulate(
    runs: list[Run], workers: int | None, console: Console, sample_s: float
) -> list[Finished]:
    columns = (
        TextColumn("simulated"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(runs))
        return simulate_all(runs, lambda _: progress.advance(bar), workers, sample_s)


if __name__ == "__main__":
    sys.exit(main())
