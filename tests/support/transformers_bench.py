"""Engines of transformers in this process, and what their requests got."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import torch

from kvmig.core.config import MigrationConfig
from kvmig.engines.base import EmittedTokens, Frame
from kvmig.engines.transformers.payload import StepOutput, SubmittedRequest, decode, encode
from kvmig.engines.transformers.requests import engine_load
from kvmig.engines.transformers.serving import ServingTransformers
from kvmig.migrator import Migrator

PATIENT = MigrationConfig(transport="tcp", reply_timeout_ms=20000, lease_ms=60000)


class Bench:
    """Engines by name. Make it inside a running event loop."""

    def __init__(self, engines: Mapping[str, ServingTransformers]) -> None:
        self.engines = dict(engines)
        self.got: dict[str, list[StepOutput]] = {}
        self.changed = asyncio.Event()
        self._numbers = iter(range(1, 100_000))
        for engine in self.engines.values():
            engine.connect(self._take, lambda *done: None, lambda error: None)

    def _take(self, client: int, emitted: list[EmittedTokens], frames: list[Frame]) -> None:
        for output in decode(bytes(frames[0]), list[StepOutput]):
            self.got.setdefault(output.request_id, []).append(output)
        self.changed.set()

    def send(self, name: str, prompt: list[int], max_tokens: int, **fields: Any) -> str:
        """The new request's id."""
        request_id = f"r{next(self._numbers)}"
        request: dict[str, Any] = {"prompt_token_ids": prompt, "max_tokens": max_tokens} | fields
        self.engines[name].submit(1, request_id, [encode(SubmittedRequest(**request))])
        return request_id

    def has_ended(self, request_id: str) -> bool:
        return bool(self.got.get(request_id) and self.got[request_id][-1].finish_reason)

    async def reach(self, request_id: str, tokens: int) -> list[StepOutput]:
        """What it has got once that is so many outputs, or all."""
        async with asyncio.timeout(60):
            while True:
                got = self.got.get(request_id, [])
                if len(got) >= tokens or (got and got[-1].finish_reason):
                    return got
                self.changed.clear()
                await self.changed.wait()

    async def finish(self, request_id: str) -> list[int]:
        """All its tokens."""
        got = await self.reach(request_id, 1 << 30)
        assert got[-1].finish_reason in ("length", "stop"), got[-1]
        return [token for output in got for token in output.token_ids]

    @contextmanager
    def slow(self, name: str, step_s: float = 0.05) -> Iterator[None]:
        """Steps of at least so long: requests stay what they are while others do something."""
        with self.after_step(name, lambda: time.sleep(step_s)):
            yield

    @contextmanager
    def after_step(self, name: str, call: Callable[[], None]) -> Iterator[None]:
        """Call this after each step of an engine inside the block."""
        loop = self.engines[name]._loop
        before, loop.after_step = loop.after_step, call
        try:
            yield
        finally:
            loop.after_step = before

    @contextmanager
    def prefill_blocks(self, name: str) -> Iterator[list[int]]:
        """What is left, after each step inside the block, of prompts that run."""
        engine, left = self.engines[name], list[int]()
        with self.after_step(
            name, lambda: left.append(engine_load(engine._requests).prefill_blocks)
        ):
            yield left

    async def settle(self) -> None:
        """Nothing is left of any request."""
        async with asyncio.timeout(20):
            for engine in self.engines.values():
                while await engine.requests() or engine.load().used_blocks:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                assert len(engine._destination) == 0

    @asynccontextmanager
    async def migrator(self) -> AsyncIterator[Migrator]:
        """Whoever leaves it has left nothing."""

        def assign(request_id: str, name: str) -> None:
            self.engines[name].assign(request_id, 1)

        async with Migrator(self.engines, PATIENT, on_commit=assign, close_timeout_s=1) as made:
            try:
                yield made
            finally:
                for engine in self.engines.values():
                    engine.abort(list(self.got))
        await self.settle()


B = TypeVar("B", bound=Bench)


@asynccontextmanager
async def benched(make: Callable[[], B]) -> AsyncIterator[B]:
    """One, with steps on one thread; closed at the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = make()
    try:
        yield made
    finally:
        await asyncio.gather(*(engine.close(10) for engine in made.engines.values()))
        torch.set_num_threads(threads)
