"""`python -m kvmig_tools.profile MODEL`: fit a cost model to real engines.

Starts a server of --instances engines and loads all of them alike, so that what they share
(cores, links) is in the figures; measures prompts of growing length, decode steps of growing
batches and migrations; writes the model as TOML and prints how far off it is.

With --shares it measures one instance on parts of the device instead (`share_profile`), and writes
the costs that `kvmig.placement` computes with.

--timeline FILE.svg draws the largest copy stage of these migrations, chunk by chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvmig.core.errors import ConfigError, KvmigError
from kvmig.models import BUNDLED
from kvmig.placement.step_costs import DeviceCosts
from kvmig_tools import cost_file
from kvmig_tools.demo.client import DemoFailed
from kvmig_tools.profile_measure import Measured, measure
from kvmig_tools.served import Served
from kvmig_tools.share_profile import model_name, profile_shares
from kvmig_tools.sim.cost import Capacity, CostModel, check
from kvmig_tools.sim.fit import (
    Error,
    StageTime,
    fit_copy,
    fit_decode,
    fit_prefill,
)
from kvmig_tools.stage_picture import picture_of

HOP_MS = 1.0
MOST_OFF = 15.0
"""Median error of a fit, in percent, above which the times are worth little."""
ADVICE = "The times scatter: measure where nothing else runs, or with more --repeats."


def model_of(found: Measured, name: str, capacity: Capacity) -> tuple[CostModel, dict[str, Error]]:
    """The fitted model and its errors. The median of each point is what is fitted."""
    stages = found.stages or [StageTime(1 << 20, 1.0)]
    prefill, prompt_error = fit_prefill(found.prompt_medians)
    decode, step_error = fit_decode(found.step_medians)
    copy, stage_error = fit_copy(stages, found.bytes_per_token, HOP_MS)
    model = CostModel(
        name=name, prefill=prefill, decode=decode, copy=copy, capacity=capacity,
        source="fitted by python -m kvmig_tools.profile",
    )  # fmt: skip
    return check(model, name), {"prefill": prompt_error, "decode": step_error, "copy": stage_error}


def errors(of: dict[str, Error]) -> Table:
    """As a table."""
    shown = Table(title="error of the fit")
    for heading in ("part", "root mean square", "largest"):
        shown.add_column(heading, justify="right")
    for name, error in of.items():
        shown.add_row(name, f"{100 * error.mean:.1f} %", f"{100 * error.most:.1f} %")
    return shown


def parser() -> argparse.ArgumentParser:
    """The flags; further ones go to the engines."""
    flags = argparse.ArgumentParser("python -m kvmig_tools.profile", description=__doc__)
    add = flags.add_argument
    add("model", nargs="?", default=str(BUNDLED))
    add("--instances", type=int, default=2)
    add("--block-size", type=int, default=32)
    add("--max-num-seqs", type=int, default=16)
    add("--max-num-batched-tokens", type=int, default=2048)
    add("--num-gpu-blocks-override", type=int, default=600)
    add("--repeats", type=int, default=3)
    add("--out", type=Path, required=True, help="the cost model, FILE.toml")
    add(
        "--shares",
        metavar="100,50",
        help="measure one instance on these percentages of a GPU's SMs or of the CPU's cores, and"
        " write the costs for kvmig.placement into --out, which keeps its other models",
    )
    add("--tp", default="1", metavar="1,2", help="with --shares: numbers of GPUs to measure on (1)")
    add("--device", default="", help="with --shares: what the device is called in the file")
    add("--name", default="", help="with --shares: what the model is called in the file")
    add("--timeline", type=Path, metavar="FILE.svg", help="a picture of the largest copy stage")
    return flags


def engine_flags(args: argparse.Namespace, more: Sequence[str]) -> list[str]:
    """What the server is started with."""
    return [
        f"--instances={args.instances}",
        f"--block-size={args.block_size}",
        f"--max-num-seqs={args.max_num_seqs}",
        f"--max-num-batched-tokens={args.max_num_batched_tokens}",
        f"--num-gpu-blocks-override={args.num_gpu_blocks_override}",
        *more,
    ]


def profile(args: argparse.Namespace, more: Sequence[str]) -> tuple[CostModel, dict[str, Error]]:
    """Start, measure, draw, fit. Raises KvmigError."""
    _check_counts({"--instances": args.instances, "--repeats": args.repeats})
    if args.timeline is not None and args.instances < 2:
        raise ConfigError(f"--instances is {args.instances}, must be 2 or more with --timeline")
    flags = [*engine_flags(args, more), "--policy=round-robin", "--shutdown-timeout=2"]
    with (
        Progress(console=Console(stderr=True), transient=True) as progress,
        Served(flags, model=args.model) as served,
    ):
        found = asyncio.run(measure(served.url, args.instances, args.repeats, progress))
        rows = served.get("instances")
        moves = served.get("migrations")
    found.blocks = min(row["blocks_total"] for row in rows)
    sizes = [s["bytes"] // s["blocks"] for one in moves for s in one["stages"] if s["blocks"]]
    found.bytes_per_token = (max(sizes) if sizes else args.block_size) // args.block_size
    if args.timeline is not None and found.largest is not None:
        title = f"{args.model}: a copy stage by {found.transport}"
        args.timeline.write_text(picture_of(found.largest, title), encoding="utf-8")
    capacity = Capacity(
        blocks=found.blocks,
        block_tokens=args.block_size,
        max_sequences=args.max_num_seqs,
        max_batch_tokens=args.max_num_batched_tokens,
        prefill="chunked",
        prefix_cache=True,  # vLLM's default
    )
    return model_of(found, args.out.stem, capacity)


def share_errors(name: str, device: DeviceCosts) -> Table:
    """How far the model's costs are off what was measured."""
    shown = Table(title=f"error of the fit, {name} on {device.name}")
    for heading in ("GPUs", "part", "median", "90th percentile"):
        shown.add_column(heading, justify="right")
    for size, cost in device.models[name].tp.items():
        for part in ("prefill", "decode"):
            middle, high = getattr(cost.errors, part)
            shown.add_row(size, part, f"{middle:.1f} %", f"{high:.1f} %")
            if middle > MOST_OFF:
                shown.caption = ADVICE
    return shown


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one sentence about what is wrong."""
    args, more = parser().parse_known_args(argv)
    try:
        if args.shares is not None:
            _check_counts({"--repeats": args.repeats})
            args.instances = 1
            device = profile_shares(args, [*engine_flags(args, more), "--shutdown-timeout=2"])
            text, shown = cost_file.to_toml(device), share_errors(model_name(args), device)
        else:
            model, off = profile(args, more)
            text, shown = to_toml(model), errors(off)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text, encoding="utf-8")
    except (KvmigError, DemoFailed) as error:
        print(f"kvmig_tools.profile: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"kvmig_tools.profile: --out {args.out} can't be written: {error}", file=sys.stderr)
        return 2
    Console().print(shown)
    print(args.out)
    return 0


def _check_counts(given: Mapping[str, int]) -> None:
    """Raises ConfigError."""
    for flag, value in given.items():
        if value < 1:
            raise ConfigError(f"{flag} is {value}, must be 1 or more")


def to_toml(model: CostModel) -> str:
    """As `kvmig_tools.sim.cost` reads it."""
    plain: dict[str, Any] = msgspec.to_builtins(model)
    tables = {name: part for name, part in plain.items() if isinstance(part, dict)}
    lines = [f"{name} = {_value(part)}" for name, part in plain.items() if name not in tables]
    for name, part in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in part.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, str):
        return msgspec.json.encode(value).decode()
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.6g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())
