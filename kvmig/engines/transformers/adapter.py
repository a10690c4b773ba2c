"""The Engine port over transformers' continuous batching: migrations. `serving` adds clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import torch
import transformers

from kvmig.engines import device_copies
from kvmig.engines.base import (
    Cadence,
    CameBlocks,
    EngineLoad,
    Export,
    RequestState,
    Stage,
    Tail,
)
from kvmig.engines.block_copies import BlockCopies
from kvmig.engines.block_copies import Blocks as Whole
from kvmig.engines.numerics import numerics_class
from kvmig.engines.transformers.blocks import Blocks
from kvmig.engines.transformers.config import EngineConfig, identify
from kvmig.engines.transformers.destination import Destination
from kvmig.engines.transformers.load import engine_load, request_states
from kvmig.engines.transformers.loop import StepLoop
from kvmig.engines.transformers.model import make_manager
from kvmig.engines.transformers.payload import Progress, Submitted, decode
from kvmig.engines.transformers.requests import Requests
from kvmig.engines.transformers.source import Source
from kvmig.engines.weights import check_unchanged
from kvmig.ground.errors import MigrationRefused

T = TypeVar("T")
_LOAD_PERIOD_S = 0.01


class TransformersEngine:
    """One model behind a llumlet; implements `kvmig.engines.base.Engine`."""

    can_hold = False
    unmovable = ""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model and take the KV cache: seconds. Raises KvmigError."""
        self.config = config
        weights = identify(config)
        manager, logprobs = make_manager(config)
        check_unchanged(config.model, weights, identify(config))
        processor = manager.batch_processor
        self._blocks = Blocks(processor.cache, manager.model.config.to_json_string(), weights)
        self.max_request_tokens = self._blocks.total * self._blocks.tokens
        """Of one request, prompt and outputs: more could never be computed here."""
        self._requests = Requests(processor.scheduler, self._blocks, logprobs)
        self._source = Source(self._requests)
        self._destination = Destination(self._requests, self.max_request_tokens)
        processor.scheduler.elsewhere = lambda: (
            self._requests.may_come_back() + self._destination.to_come()
        )
        self._loop = StepLoop(manager, self._stepped)
        self._loop.between_steps = self._between_steps
        self.layout = self._blocks.layout
        self.numerics = _numerics(config)
        self._device_copies = self._on_gpu() if config.device == "cuda" else None
        self._copies = BlockCopies(self.layout, self._device_copies)
        self.gather, self.scatter = self._copies.gather, self._copies.scatter
        self._load = engine_load(self._requests)
        self._load_at = 0.0

    def _on_gpu(self) -> device_copies.DeviceCopies:
        # A step's tokens are known when all that it queued is done: no step overlaps another.
        copies = device_copies.load(Whole(self.layout), steps_overlap=False)
        self._loop.after_step = lambda: copies.after_step(self._loop.stream.cuda_stream)
        return copies

    def _stepped(self, batch: list[Any]) -> None:
        """On the engine's thread, after each step."""

    def _between_steps(self) -> None:
        now = time.monotonic()
        # After its last step an idle engine takes none that would renew the snapshot.
        if now - self._load_at >= _LOAD_PERIOD_S or not self._requests.scheduler.active_requests:
            self._load, self._load_at = engine_load(self._requests), now

    # -- what it does and holds

    def cadence(self) -> Cadence:
        return self._loop.cadence_meter.cadence(time.monotonic())

    def load(self) -> EngineLoad:
        return self._load

    async def requests(self, most_waiting: int | None = None) -> list[RequestState]:
        return await self._between(lambda: request_states(self._requests, most_waiting))

    # -- source

    async def export(self, request_id: str) -> Export:
        return await self._between(lambda: self._source.export(request_id))

    async def stage(self, request_id: str, sent: int) -> Stage:
        return await self._between(lambda: self._source.stage(request_id, sent))

    async def suspend(self, request_id: str, sent: int, out: memoryview | None = None) -> Tail:
        return await self._between(lambda: self._source.suspend(request_id, sent))

    async def resume(self, request_id: str) -> None:
        await self._between(lambda: self._source.resume(request_id))

    async def release(self, request_id: str) -> None:
        await self._between(lambda: self._source.release(request_id))

    # -- destination

    async def reserve(self, export: Export) -> int:
        try:
            progress = decode(export.payload[0], Progress)
            submitted = decode(export.payload[1], Submitted)
        except (msgspec.MsgspecError, IndexError) as error:
            raise MigrationRefused("incompatible", f"export of another kind: {error}") from error
        return await self._between(
            lambda: self._destination.reserve(export.request_id, submitted, progress)
        )

    async def grow(self, request_id: str, num_tokens: int) -> list[int]:
        def grow() -> list[int]:
            try:
                return self._destination.grow(request_id, num_tokens)
            except MigrationRefused:
                self._destination.cancel(request_id)
                raise

        return await self._between(grow)

    async def prepare(self, request_id: str) -> None:
        """Nothing: a step after a pause is like any other."""

    def expect(self, request_id: str, ms: float) -> None:
        """Nothing: its steps wait for nobody."""

    async def commit(self, request_id: str, tail: Tail, last: CameBlocks | None = None) -> None:
        if last is not None:
            try:
                last.check(await self.scatter(last.block_ids, last.fused, urgent=True))
            except BaseException:
                await self.cancel(request_id)
                raise

        def commit() -> None:
            try:
                self._destination.commit(request_id, decode(tail.state, Progress))
            except Exception:
                self._destination.cancel(request_id)
                raise

        await self._between(commit)

    async def cancel(self, request_id: str) -> None:
        await self._between(lambda: self._destination.cancel(request_id))

    def _close_memory(self) -> None:
        """No step and no copy may follow."""
        self._copies.close()
        if self._device_copies is not None:
            self._device_copies.close()

    # -- helpers

    async def _between(self, function: Callable[[], T]) -> T:
        """Run it on the engine's thread between two steps."""
        future: Future[T] = self._loop.call(function)
        # Shielded: what runs there can't be taken back half-way.
        return await asyncio.shield(asyncio.wrap_future(future))


def _numerics(config: EngineConfig) -> str:
    """The class of an engine with this configuration in this process."""
    on_cpu = config.device == "cpu"
    return numerics_class(
        engine="transformers-" + ".".join(transformers.__version__.split(".")[:2]),
        torch=".".join(torch.__version__.split(".")[:2]),
        dtype=config.dtype,
        device=(
            f"cpu-{torch.backends.cpu.get_cpu_capability().lower()}"
            if on_cpu
            else torch.cuda.get_device_name()
        ),
        threads=torch.get_num_threads() if on_cpu else 0,
    )
