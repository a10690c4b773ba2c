"""`python -m kvmig_tools.profile MODEL`: fit a cost model of the simulator to real engines.

Starts a server of --instances engines and loads all of them alike, so that what they share
(cores, links) is in the figures; measures prompts of growing length, decode steps of growing
batches and migrations; writes the model as TOML and prints how far off it is.

--timeline FILE.svg draws the largest copy stage of these migrations, chunk by chunk.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvmig.core.errors import ConfigError, KvmigError
from kvmig.kvtransfer.report import StageReport
from kvmig.models import BUNDLED
from kvmig_tools.demo.client import Api, Chunk, DemoFailed
from kvmig_tools.served import Served
from kvmig_tools.sim.cost import Capacity, CostModel, check
from kvmig_tools.sim.fit import (
    Error,
    PromptTime,
    StageTime,
    StepTime,
    fit_copy,
    fit_decode,
    fit_prefill,
)
from kvmig_tools.stage_picture import picture_of

PROMPTS = (16, 64, 128, 256, 512, 1024)
BATCHES = (1, 2, 4, 8)
CONTEXTS = (32, 256)
STEPS = 48
"""Tokens of each stream of a batch; the first `SETTLE` and the last are left out."""
SETTLE = 8
MOVED = (128, 512, 1024)
"""Prompts of the requests that migrate."""
HOP_MS = 1.0


@dataclass
class Measured:
    """What the engines showed."""

    prompts: list[PromptTime] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)
    stages: list[StageTime] = field(default_factory=list)
    bytes_per_token: int = 0
    blocks: int = 0
    transport: str = ""
    largest: StageReport | None = None
    """The copy stage of most bytes, by `transport`."""

    def add_report(self, report: dict[str, Any]) -> None:
        """A migration's, as the admin API has it."""
        for stage in msgspec.convert(report["stages"], list[StageReport]):
            self.stages.append(StageTime(stage.bytes, stage.ms))
            if self.largest is None or stage.bytes > self.largest.bytes:
                self.largest, self.transport = stage, report["transport"]


class Bench:
    """Streams to one server."""

    def __init__(self, api: Api, model: str, instances: int) -> None:
        self._api = api
        self._model = model
        self._instances = instances
        self._drawn = 0

    async def stream(self, prompt: int, output: int, call_id: str = "") -> list[Chunk]:
        """All its chunks. No two prompts are alike, so that no cache knows one."""
        self._drawn += 1
        tokens = [(self._drawn * 7919 + place * 31) % 251 + 1 for place in range(prompt)]
        body = {
            "model": self._model, "prompt": tokens, "max_tokens": output, "ignore_eos": True,
            "temperature": 0, "cache_salt": uuid.uuid4().hex,
        }  # fmt: skip
        name = call_id or uuid.uuid4().hex
        return [chunk async for chunk in self._api.stream(name, body) if chunk.tokens]

    async def prompt(self, tokens: int) -> PromptTime:
        """To the first token, with nothing else on the server."""
        begin = asyncio.get_running_loop().time()
        chunks = await self.stream(tokens, 1)
        return PromptTime(tokens, (chunks[0].at - begin) * 1e3)

    async def batch(self, sequences: int, prompt: int) -> StepTime:
        """The mean step while all of them decode, on each instance so many."""
        several = await asyncio.gather(
            *(self.stream(prompt, STEPS) for _ in range(sequences * self._instances))
        )
        begin = max(_reached(chunks, SETTLE) for chunks in several)
        end = min(_reached(chunks, STEPS - 1) for chunks in several)
        times = [ms for chunks in several if (ms := _pace(chunks, begin, end)) > 0]
        context = sequences * (prompt + STEPS / 2)
        return StepTime(sequences, context, fmean(times) if times else 0.0)

    async def migration(self, prompt: int) -> list[dict[str, Any]]:
        """Move one request once; its report, if it was moved."""
        call_id = uuid.uuid4().hex
        task = asyncio.create_task(self.stream(prompt, 4 * STEPS, call_id))
        try:
            async with asyncio.timeout(60):
                here = await self.place_of(call_id)
            others = [one for one in await self._api.instances() if one != here]
            report = await self._api.migrate(call_id, others[0])
            await task
        finally:
            task.cancel()
        return [report] if report is not None and report["state"] == "committed" else []

    async def place_of(self, call_id: str) -> str:
        """The instance that runs the call, once its first tokens are out."""
        await asyncio.sleep(0.5)
        here = await self._api.instance_of(call_id)
        return here if here is not None else await self.place_of(call_id)


def _reached(chunks: Sequence[Chunk], tokens: int) -> float:
    """When the stream had so many tokens. Raises DemoFailed if it ended before."""
    count = 0
    for chunk in chunks:
        count += chunk.tokens
        if count >= tokens:
            return chunk.at
    raise DemoFailed(f"a stream ended after {count} tokens, {tokens} were asked for")


def _pace(chunks: Sequence[Chunk], begin: float, end: float) -> float:
    """Milliseconds a token in the window; 0 if nothing came."""
    inside = [chunk for chunk in chunks if begin <= chunk.at <= end]
    tokens = sum(chunk.tokens for chunk in inside[1:])
    return (inside[-1].at - inside[0].at) * 1e3 / tokens if tokens else 0.0


async def measure(url: str, instances: int, repeats: int, progress: Progress) -> Measured:
    """Everything, `repeats` times. Raises DemoFailed if the server refuses."""
    found = Measured()
    async with Api.at(url) as api:
        bench = Bench(api, await api.model(), instances)
        await bench.batch(2, 64)  # caches warm up
        jobs = repeats * (len(PROMPTS) + len(BATCHES) * len(CONTEXTS) + len(MOVED))
        bar = progress.add_task("measured", total=jobs)
        for _ in range(repeats):
            for tokens in PROMPTS:
                found.prompts.append(await bench.prompt(tokens))
                progress.advance(bar)
            for sequences in BATCHES:
                for prompt in CONTEXTS:
                    step = await bench.batch(sequences, prompt)
                    found.steps += [step] if step.ms else []
                    progress.advance(bar)
            for prompt in MOVED if instances > 1 else ():
                for report in await bench.migration(prompt):
                    found.add_report(report)
                progress.advance(bar)
    return found


def model_of(found: Measured, name: str, capacity: Capacity) -> tuple[CostModel, dict[str, Error]]:
    """The fitted model and its errors. The median of each point is what is fitted."""
    prompts = [
        PromptTime(tokens, median(one.ms for one in found.prompts if one.tokens == tokens))
        for tokens in sorted({one.tokens for one in found.prompts})
    ]
    steps = [
        StepTime(*key, median(one.ms for one in found.steps if (one.sequences, one.context) == key))
        for key in sorted({(one.sequences, one.context) for one in found.steps})
    ]
    stages = found.stages or [StageTime(1 << 20, 1.0)]
    prefill, prompt_error = fit_prefill(prompts)
    decode, step_error = fit_decode(steps)
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
    for field_, value in (("--instances", args.instances), ("--repeats", args.repeats)):
        if value < 1:
            raise ConfigError(f"{field_} is {value}, must be 1 or more")
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


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one sentence about what is wrong."""
    args, more = parser().parse_known_args(argv)
    try:
        model, off = profile(args, more)
    except (KvmigError, DemoFailed) as error:
        print(f"kvmig_tools.profile: {error}", file=sys.stderr)
        return 2
    args.out.write_text(to_toml(model), encoding="utf-8")
    Console().print(errors(off))
    print(args.out)
    return 0


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
