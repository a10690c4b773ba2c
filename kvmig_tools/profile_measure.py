"""Measures prompts, decode steps and migrations of a server's engines, from outside."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import msgspec
from rich.progress import Progress

from kvmig.kvtransfer.report import StageReport
from kvmig_tools.demo.client import Api, Chunk, DemoFailed
from kvmig_tools.sim.fit import PromptTime, StageTime, StepTime

PROMPTS = (16, 64, 128, 256, 512, 1024)
POINTS = tuple((sequences, prompt) for sequences in (1, 2, 4, 8) for prompt in (32, 256))
"""Batches that decode: sequences on each instance, and their prompts."""
STEPS = 48
"""Tokens of each stream of a batch; the first `SETTLE` and the last are left out."""
SETTLE = 8
MOVED = (128, 512, 1024)
"""Prompts of the requests that migrate."""


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

    @property
    def prompt_medians(self) -> list[PromptTime]:
        """One of each length."""
        return [
            PromptTime(tokens, median(one.ms for one in self.prompts if one.tokens == tokens))
            for tokens in sorted({one.tokens for one in self.prompts})
        ]

    @property
    def step_medians(self) -> list[StepTime]:
        """One of each batch."""
        keys = sorted({(one.sequences, one.context) for one in self.steps})
        return [
            StepTime(
                *key, median(one.ms for one in self.steps if (one.sequences, one.context) == key)
            )
            for key in keys
        ]

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


async def measure(
    url: str,
    instances: int,
    repeats: int,
    progress: Progress,
    what: str = "measured",
    points: Sequence[tuple[int, int]] = POINTS,
) -> Measured:
    """Everything, `repeats` times. Raises DemoFailed if the server refuses."""
    found = Measured()
    async with Api.at(url) as api:
        bench = Bench(api, await api.model(), instances)
        await bench.batch(2, 64)  # caches warm up
        moved = MOVED if instances > 1 else ()
        jobs = repeats * (len(PROMPTS) + len(points) + len(moved))
        bar = progress.add_task(what, total=jobs)
        for _ in range(repeats):
            for tokens in PROMPTS:
                found.prompts.append(await bench.prompt(tokens))
                progress.advance(bar)
            for sequences, prompt in points:
                step = await bench.batch(sequences, prompt)
                found.steps += [step] if step.ms else []
                progress.advance(bar)
            for prompt in moved:
                for report in await bench.migration(prompt):
                    found.add_report(report)
                progress.advance(bar)
    return found
