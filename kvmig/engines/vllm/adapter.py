"""The Engine port over one vLLM EngineCore: migrations. `serving` adds clients."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace as replace_fields
from typing import TypeVar

import msgspec
from msgspec.structs import replace
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kvmig.engines.base import (
    Cadence,
    CameBlocks,
    EngineLoad,
    Export,
    RequestState,
    Stage,
    Tail,
    too_large,
)
from kvmig.engines.vllm.building import Builder
from kvmig.engines.vllm.config import numerics_of
from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.load import Holdings, Listing
from kvmig.engines.vllm.lora import Adapters
from kvmig.engines.vllm.memory import BlockMemory
from kvmig.engines.vllm.sides import (
    Destination,
    Progress,
    Source,
    decode_progress,
    decode_request,
    encode_progress,
    unmovable_engine,
)
from kvmig.engines.vllm.warmup import WarmStep
from kvmig.ground.errors import MigrationRefused

T = TypeVar("T")
_LOAD_PERIOD_S = 0.01
_LIST_WAIT_S = 1.0
"""For the end of a step; front ends wait for twice that."""
_LISTED_AT_ONCE = 256
"""Waiting requests of a list, until the event loop does something else: a millisecond."""


class VllmEngine:
    """One vLLM engine behind a llumlet; implements `kvmig.engines.base.Engine`.

    Made before the core runs.
    """

    def __init__(self, core: StepCore, unit_tokens: int = 0, weights: str = "") -> None:
        """unit_tokens: see `BlockMemory`; weights: the identity of those that are loaded."""
        scheduler = core.scheduler
        assert isinstance(scheduler, Scheduler)
        self._core = core
        self._scheduler = scheduler
        self._memory = memory = BlockMemory(core, unit_tokens)
        self.gather, self.scatter = memory.copies.gather, memory.copies.scatter
        self.unmovable = unmovable_engine(core.vllm_config) or memory.unmovable
        self._source = Source(core, self._memory.tables)
        self._destination = Destination(core, self._memory.tables)
        self._warm_step = WarmStep(core)
        self._seats = scheduler.max_num_active_reqs
        self._submitted: dict[str, list[bytes]] = {}
        self._adapters = Adapters()
        self._begun_before: set[str] = set()
        """Requests that were here when the weights were last updated."""
        self._builder = Builder(core)
        self._holdings = Holdings(scheduler, self._memory.tables, self.unmovable)
        self._load = self._holdings.load()
        self._load_at = 0.0
        self._listed: list[RequestState] = []
        self._listed_at = 0.0
        self.layout = replace_fields(self._memory.layout, weights=weights)
        self.numerics = numerics_of(core)
        self.can_hold = True
        core.after_step = self._memory.after_step
        core.between_steps = self.between_steps

    def reweigh(self, weights: str) -> None:
        """The weights were updated: they have this identity now.

        A request that is here has begun with those before: nobody else has such any more.
        """
        self.layout = replace_fields(self.layout, weights=weights)
        self._begun_before = set(self._submitted)

    def assign(self, request_id: str, client: int) -> None:
        """A reserved request's outputs will go to this client."""
        self._destination.assign(request_id, client)

    def between_steps(self) -> None:
        """On the engine's thread, after each step and each call."""
        self._source.between_steps()
        # vLLM admits new requests up to this many, and dies of more than --max-num-seqs: those
        # that come, and those that may come back, keep their places.
        kept = self._source.may_come_back() + self._destination.to_come()
        self._scheduler.max_num_active_reqs = self._seats - kept
        now = time.monotonic()
        # After its last step an idle engine takes none that would renew the snapshot.
        if now - self._load_at >= _LOAD_PERIOD_S or not self._scheduler.running:
            self._load, self._load_at = self._holdings.load(), now

    # -- what it does and holds

    def cadence(self) -> Cadence:
        return self._core.cadence_meter.cadence(time.monotonic())

    def load(self) -> EngineLoad:
        return self._load

    async def requests(self, most_waiting: int | None = None) -> list[RequestState]:
        def look() -> Listing:
            return self._holdings.listing(
                most_waiting, self._source.suspended(), self._destination.arriving()
            )

        try:
            async with asyncio.timeout(_LIST_WAIT_S):
                listing = await self._on_engine(look)
        except TimeoutError:
            age_ms = (time.monotonic() - self._listed_at) * 1e3
            return [replace(state, age_ms=age_ms) for state in self._listed]
        at, states = time.monotonic(), [self._sized(state) for state in listing.states]
        waiting = self._holdings.in_order(listing)
        for first in range(0, len(waiting), _LISTED_AT_ONCE):
            some = self._holdings.waiting_states(waiting[first : first + _LISTED_AT_ONCE])
            states += [self._sized(state) for state in some]
            await asyncio.sleep(0)
        self._listed, self._listed_at = states, at
        return states

    def _sized(self, state: RequestState) -> RequestState:
        """With the word that it is too large to be moved, if it is."""
        size = too_large(self._submitted.get(state.request_id, ()))
        return replace(state, unmovable=size) if size and not state.unmovable else state

    # -- source

    async def export(self, request_id: str) -> Export:
        frames = self._submitted.get(request_id)
        if frames is None or self._destination.is_arriving(request_id):
            raise MigrationRefused("unknown_request", f"request {request_id} is not here")
        if request_id in self._begun_before:
            why = "the weights were updated after it had begun"
            raise MigrationRefused("incompatible", why)
        if size := too_large(frames):
            raise MigrationRefused("unsupported", size)

        def look() -> tuple[Progress, Request]:
            return self._source.export(request_id), self._scheduler.requests[request_id]

        entered = self._scheduler.requests.get(request_id)
        lora = None if entered is None else entered.lora_request
        # Before the source takes note of anything: this may refuse.
        adapter = await asyncio.to_thread(self._adapters.identity, lora)
        progress, request = await self._on_engine(look)
        return Export(
            request_id=request_id,
            num_tokens=request.num_prompt_tokens + len(progress.output_token_ids),
            payload=[encode_progress(replace(progress, adapter=adapter)), *frames],
        )

    async def stage(self, request_id: str, sent: int) -> Stage:
        return await self._on_engine(lambda: self._source.stage(request_id, sent))

    async def suspend(self, request_id: str, sent: int, out: memoryview | None = None) -> Tail:
        loop = asyncio.get_running_loop()
        tail: asyncio.Future[Tail] = loop.create_future()
        copying, wanted = threading.Lock(), not self._memory.on_gpu

        def gather(block_ids: list[int]) -> list[int]:
            size = len(block_ids) * self.layout.block_bytes
            with copying:
                if not (wanted and out) or size > out.nbytes:
                    return []
                return self._memory.copies.gather_now(block_ids, out[:size])

        def settle(result: Tail | Exception) -> None:
            if tail.done():
                return
            if isinstance(result, Exception):
                tail.set_exception(result)
            else:
                tail.set_result(result)

        def done(result: Tail | Exception) -> None:
            loop.call_soon_threadsafe(settle, result)

        try:
            await self._on_engine(lambda: self._source.suspend(request_id, sent, gather, done))
            return await tail
        except BaseException:
            with copying:  # `out` is somebody else's next: no copy may be running or begin
                wanted = False
            raise

    async def resume(self, request_id: str) -> None:
        await self._on_engine(lambda: self._source.resume(request_id))

    async def release(self, request_id: str) -> None:
        await self._on_engine(lambda: self._source.release(request_id))
        self._submitted.pop(request_id, None)

    # -- destination

    async def reserve(self, export: Export) -> int:
        try:
            progress = decode_progress(export.payload[0])
            submitted = decode_request(export.payload[1:])
        except (msgspec.MsgspecError, IndexError) as error:
            raise MigrationRefused("incompatible", f"export of another kind: {error}") from error
        adapter = submitted.lora_request
        if await asyncio.to_thread(self._adapters.identity, adapter) != progress.adapter:
            name = "" if adapter is None else adapter.lora_name
            raise MigrationRefused("incompatible", f"LoRA adapter {name} is another one here")
        known = progress.output_token_ids
        waits = not known and not progress.num_computed_tokens
        request = await self._builder.build(submitted, known, waits=waits)
        hit = await self._on_engine(lambda: self._destination.reserve(request, progress))
        self._submitted[export.request_id] = list(export.payload[1:])
        return hit

    async def grow(self, request_id: str, num_tokens: int) -> list[int]:
        return await self._on_engine(lambda: self._destination.grow(request_id, num_tokens))

    async def prepare(self, request_id: str) -> None:
        await self._on_engine(self._warm_step.run)

    def expect(self, request_id: str, ms: float) -> None:
        self._core.hold.expect(request_id, time.monotonic() + ms / 1e3)
        if not self._destination.is_arriving(request_id):  # asked last: it may end meanwhile
            self._core.hold.over(request_id)

    async def commit(self, request_id: str, tail: Tail, last: CameBlocks | None = None) -> None:
        progress = decode_progress(tail.state)
        if last is not None and self._memory.on_gpu:
            try:
                last.check(await self.scatter(last.block_ids, last.fused, urgent=True))
            except BaseException:
                await self.cancel(request_id)
                raise
            last = None

        def run() -> None:
            try:
                if last is not None:
                    last.check(self._memory.copies.scatter_now(last.block_ids, last.fused))
                self._destination.commit(request_id, progress, progress.generator)
            except Exception:
                self._destination.cancel(request_id)
                self._submitted.pop(request_id, None)
                raise
            finally:
                self._core.hold.over(request_id)

        await self._on_engine(run)

    async def cancel(self, request_id: str) -> None:
        def free() -> bool:
            self._core.hold.over(request_id)
            self._destination.cancel(request_id)
            return request_id in self._scheduler.requests

        if not await self._on_engine(free):
            self._submitted.pop(request_id, None)

    # -- helpers

    async def _on_engine(self, function: Callable[[], T]) -> T:
        future: Future[T] = self._core.call(function)
        # Shielded: what runs on the engine's thread can't be taken back half-way.
        return await asyncio.shield(asyncio.wrap_future(future))
