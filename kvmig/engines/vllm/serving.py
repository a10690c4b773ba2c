"""One vLLM engine as a llumlet runs it: clients' requests in, outputs out, and migrations."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace as replace_fields
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.executor import Executor
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvmig.core.config import UnitConfig
from kvmig.core.errors import MigrationRefused, RequestGone
from kvmig.engines.base import (
    FIRST_GUEST,
    CacheSharing,
    CameBlocks,
    EmittedTokens,
    EndedRequest,
    EngineLoad,
    Frames,
    OnCallDone,
    OnExit,
    OnOutputs,
    RequestExport,
    RequestState,
    RequestTail,
    StagedBlocks,
    StepCadence,
    StepTime,
    too_large,
)
from kvmig.engines.identity import check_unchanged
from kvmig.engines.vllm.building import RequestBuilder
from kvmig.engines.vllm.cached_prefixes import (
    PrefixDestination,
    PrefixPool,
    PrefixSource,
    beginning_of,
)
from kvmig.engines.vllm.clearing_calls import ClearingCalls, ClientCall
from kvmig.engines.vllm.config import (
    Identify,
    after_call,
    identity_of_config,
    numerics_of,
)
from kvmig.engines.vllm.connectors import open_side_channel, without_load
from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.device_sharing import DeviceSharing
from kvmig.engines.vllm.grammars import GrammarLimits
from kvmig.engines.vllm.groups import one_device
from kvmig.engines.vllm.held_prefixes import watch_prefixes
from kvmig.engines.vllm.incoming import IncomingRequests
from kvmig.engines.vllm.load import RequestHoldings, RequestListing
from kvmig.engines.vllm.memory import BlockMemory
from kvmig.engines.vllm.migration import (
    Gather,
    VllmDestination,
    VllmProgress,
    VllmSource,
    check_awake,
    check_known,
    decode_progress,
    decode_request,
    encode_progress,
    encode_request,
)
from kvmig.engines.vllm.movability import unmovable_engine, unmovable_kinds
from kvmig.engines.vllm.offload import BeingOffloaded, CacheOffload
from kvmig.engines.vllm.own_requests import OWN_CLIENT, OwnRequests
from kvmig.engines.vllm.parking import VllmParking
from kvmig.engines.vllm.starting import StartClock, timed
from kvmig.engines.vllm.tail_copies import LastBlocks, TailGather
from kvmig.engines.vllm.warmup import WarmStep
from kvmig.engines.vllm.worker import renew_tied_heads

T = TypeVar("T")
_LOAD_PERIOD_S = 0.01
_LIST_WAIT_S = 1.0
"""Timeout of a step's end; front ends wait for twice that."""
_OFFLOADED_S = 0.2
_OFFLOADED_LOOK_S = 0.005
_LISTED_AT_ONCE = 256
"""Waiting requests of a list, until the event loop does something else: a millisecond."""


class ServingVllm:
    """One vLLM engine behind a llumlet: implements `kvmig.engines.base.ServingEngine`."""

    def __init__(
        self,
        config: VllmConfig,
        log_stats: bool = True,
        unit_tokens: int = 0,
        identify: Identify | None = None,
        unit: UnitConfig | None = None,
    ) -> None:
        """Load the model and take the KV cache: minutes. vLLM's own errors pass through.

        unit_tokens: of what is exchanged with other instances; 0: an engine's own block.
        identify: the weights; None: by `config`. Raises StartupError if they change meanwhile.
        unit: see `kvmig.engines.kind.EnginePlugin.make`.
        """
        alone = config.parallel_config.world_size == 1
        self._side_channel = open_side_channel(config.kv_transfer_config)
        self._identify = identify = identify or partial(identity_of_config, config)
        self._weights = weights = identify()
        """The identity of the weights, on the engine's thread."""
        self._device = DeviceSharing(config, unit)
        with one_device() if alone else contextlib.nullcontext(), self._device.making():
            executor = timed(Executor.get_class(config), clock := StartClock())
            self._core = StepCore(config, executor, log_stats, self._deliver)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_outputs: OnOutputs = lambda client, emitted, frames: None
        self._on_call_done: OnCallDone = lambda client, call_id, error, frames: None
        self._call_decoder = MsgpackDecoder()
        self._encoder = MsgpackEncoder()
        self._begun_before: set[str] = set()
        """Requests that were here when the weights were last updated."""
        try:
            check_unchanged(config.model_config.model, weights, identify())
            self.times = clock.times(config, self._core.model_executor)
            self._open(unit_tokens, weights)
        except BaseException:
            self._core.shutdown()  # workers are processes of their own
            self._device.close_streams()
            self._close_side_channel()
            raise

    def _open(self, unit_tokens: int, weights: str) -> None:
        """Make what moves requests, before the core runs."""
        core = self._core
        self._scheduler = scheduler = core.scheduler
        self._memory = memory = BlockMemory(core, unit_tokens)
        self.unmovable = unmovable_engine(core.vllm_config) or memory.unmovable
        self.max_tokens: int = core.vllm_config.model_config.max_model_len
        """Most tokens of a request."""
        offload, tables = CacheOffload(scheduler), memory.tables

        def weights_now() -> str:
            return self._weights

        self._source = VllmSource(core, tables, weights_now)
        self._destination = VllmDestination(core, tables, offload, weights_now)
        prefixes = PrefixPool(core, tables, offload, weights_now)
        self._prefix_source = PrefixSource(prefixes)
        self._prefix_destination = PrefixDestination(prefixes)
        self._sessions: dict[str, RequestExport] = {}
        """Sessions that are held, so that they can be moved, by the id of their move."""
        self._warm_step = WarmStep(core)
        self._seats = scheduler.max_num_active_reqs
        self._grammars = GrammarLimits(core.structured_output_manager)
        self._builder = builder = RequestBuilder(core)
        self._incoming = incoming = IncomingRequests(core, builder, offload)
        self._own = OwnRequests(core, incoming, builder, self._on_engine)
        self._parking = VllmParking(
            core, memory, incoming, self._own, self._arriving, self._on_engine
        )
        self._calls = ClearingCalls(
            core, lambda: self._source.suspended() or self._arriving(), self._on_engine
        )
        self._holdings = RequestHoldings(
            scheduler,
            tables,
            self.unmovable,
            core.vllm_config.kv_transfer_config,
            unmovable_kinds(core.vllm_config),
        )
        self.sharing: CacheSharing | str = self._device.open(core, memory, self._on_engine)
        self._load = self._seen_load()
        self._load_at = 0.0
        self._listed: list[RequestState] = []
        self._listed_at = 0.0
        self.layout = replace_fields(memory.layout, weights=weights)
        self.numerics = numerics_of(core)
        self.can_hold = True
        self.held_marks = watch_prefixes(scheduler)
        core.after_step = memory.after_step
        core.between_steps = self._between_steps
        core.called = self._called

    @property
    def kv_bytes(self) -> int:
        """Bytes that each worker has found to have for its KV cache."""
        return max(0, self._core.available_gpu_memory_for_kv_cache)

    # -- for clients

    def connect(self, on_outputs: OnOutputs, on_call_done: OnCallDone, on_exit: OnExit) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._on_outputs, self._on_call_done = on_outputs, on_call_done

        def exited(error: BaseException | None) -> None:
            loop.call_soon_threadsafe(on_exit, error)

        self._core.start(exited)

    def submit(
        self, client: int, request_id: str, payload: Frames, output_token_ids: Sequence[int] = ()
    ) -> None:
        self._incoming.submit(client, request_id, payload, output_token_ids)

    def step_s(self) -> float:
        began = self._core.step_began
        return 0.0 if began is None else time.monotonic() - began

    def abort(self, request_ids: Sequence[str]) -> None:
        self._incoming.abort(request_ids)

    def call(self, client: int, call_id: int, method: str, payload: Frames) -> None:
        args: Any = self._call_decoder.decode(payload)
        self._parking.check_call(method, tuple(args))
        self._calls.pass_on(ClientCall(client, call_id, method, tuple(args)))

    def describe(self) -> bytes:
        core = self._core
        return msgspec.msgpack.encode((core._make_ready_response(), core.get_supported_tasks()))

    async def warm_up(self) -> None:
        if canary := await self._own.probe():
            self.numerics = await self._on_engine(lambda: numerics_of(self._core, canary))
        await self._own.warm_up()

    async def park(self) -> None:
        await self._parking.park()

    async def unpark(self) -> None:
        await self._parking.unpark()

    async def step_times(self, limit_s: float) -> list[StepTime]:
        capacity = self.layout.block_tokens * self._load.total_blocks
        return await self._own.step_times(capacity, limit_s)

    async def close(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        stopped = await loop.run_in_executor(None, self._core.stop, timeout_s)
        try:
            self._memory.close()
        finally:
            self._calls.close()
            self._incoming.cancel()
            self._builder.close()
            if stopped:
                self._core.shutdown()
                self._device.close()
                self._close_side_channel()

    def _close_side_channel(self) -> None:
        if self._side_channel is not None:
            self._side_channel.close()

    def assign(self, request_id: str, client: int) -> None:
        self._destination.assign(request_id, client)

    # -- what it does and holds

    def cadence(self) -> StepCadence:
        return self._core.cadence_meter.cadence(time.monotonic())

    def load(self) -> EngineLoad:
        return self._load

    async def requests(self, most_waiting: int | None = None) -> list[RequestState]:
        def look() -> RequestListing:
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
        """The state, marked as unmovable if the request is too large to be moved."""
        size = self._incoming.why_too_large(state.request_id)
        return replace(state, unmovable=size) if size and not state.unmovable else state

    def _arriving(self) -> set[str]:
        """Ids of what holds blocks and is no request of the scheduler's."""
        sessions = self._prefix_source.leaving | self._prefix_destination.arriving
        return self._destination.arriving() | sessions

    # -- source

    async def hold_session(self, request_id: str, ended: EndedRequest) -> None:
        if self.unmovable:
            raise MigrationRefused("unsupported", self.unmovable)
        frames = [bytes(frame) for frame in ended.payload]
        submitted = beginning_of(decode_request(frames), request_id, ended.output_token_ids)
        request = await self._builder.hash_request(submitted)
        tokens = await self._on_engine(
            lambda: self._prefix_source.hold(request, ended.shared_tokens)
        )
        # One token more than is held: a prefix cache never has the last one of a prompt.
        submitted.prompt_token_ids = (submitted.prompt_token_ids or [])[: tokens + 1]
        adapter = self._core.adapters.identity(request.lora_request)
        self._sessions[request_id] = RequestExport(
            request_id, tokens, [b"", adapter.encode(), *encode_request(submitted)], idle=True
        )

    async def export(self, request_id: str) -> RequestExport:
        if request_id in self._sessions:
            return self._sessions[request_id]
        frames = self._incoming.submitted.get(request_id)
        if frames is None or self._destination.is_arriving(request_id):
            raise MigrationRefused("unknown_request", f"request {request_id} is not here")
        if request_id in self._begun_before:
            why = "the weights were updated after it had begun"
            raise MigrationRefused("incompatible", why)
        if size := too_large(frames):
            raise MigrationRefused("unsupported", size)

        weights = self.layout.weights  # of the requests that are here and not in `_begun_before`

        def look() -> tuple[VllmProgress, Request]:
            progress = self._source.export(request_id, weights)
            return progress, self._scheduler.requests[request_id]

        progress, request = await self._on_engine(look)
        adapter = self._core.adapters.identity(request.lora_request)
        return RequestExport(
            request_id=request_id,
            num_tokens=request.num_prompt_tokens + len(progress.output_token_ids),
            payload=[encode_progress(replace(progress, adapter=adapter)), *frames],
        )

    async def stage(self, request_id: str, sent: int) -> StagedBlocks:
        source = self._prefix_source if request_id in self._sessions else self._source
        return await self._on_engine(lambda: source.stage(request_id, sent))

    async def follow_prompt(
        self, request_id: str, sent: int, most_tokens: int
    ) -> StagedBlocks | RequestTail:
        return await self._take_out(
            request_id,
            None,
            lambda gather: self._source.follow_prompt(request_id, sent, most_tokens, gather),
        )

    async def suspend(
        self, request_id: str, sent: int, out: memoryview | None = None
    ) -> RequestTail:
        if request_id in self._sessions:
            return await self._on_engine(lambda: self._prefix_source.suspend(request_id, sent))
        tail = await self._take_out(
            request_id, out, lambda gather: self._source.suspend(request_id, sent, gather)
        )
        assert isinstance(tail, RequestTail)
        return tail

    async def _take_out(
        self,
        request_id: str,
        out: memoryview | None,
        suspend: Callable[[Gather], StagedBlocks | Future[RequestTail]],
    ) -> StagedBlocks | RequestTail:
        """What `suspend` returns, called on the engine; out: see `Engine.suspend`."""
        memory = self._memory
        gathering = TailGather(memory.copies, self.layout.block_bytes, memory.on_gpu, out)
        try:
            suspended = await self._on_engine(lambda: suspend(gathering.begin))
            if isinstance(suspended, StagedBlocks):
                return suspended
            try:
                return await gathering.finish(await asyncio.wrap_future(suspended))
            except RequestGone:
                raise
            except Exception:
                await self.resume(request_id)
                raise
        except BaseException:
            await gathering.give_up()
            raise

    async def gather(
        self, block_ids: Sequence[int], out: memoryview, urgent: bool = False
    ) -> list[int]:
        return await self._memory.copies.gather(block_ids, out, urgent)

    async def resume(self, request_id: str) -> None:
        def resume() -> None:
            self._prefix_source.resume(request_id)
            self._source.resume(request_id)

        self._sessions.pop(request_id, None)
        await self._on_engine(resume)

    async def release(self, request_id: str) -> None:
        if self._sessions.pop(request_id, None) is not None:
            await self._on_engine(lambda: self._prefix_source.release(request_id))
            return
        await self._on_engine(lambda: self._source.release(request_id))
        self._incoming.forget(request_id)

    # -- destination

    async def reserve(self, export: RequestExport) -> int:
        if export.idle:
            return await self._reserve_session(export)
        try:
            progress = decode_progress(export.payload[0])
            check_known(export.payload[1:])
            submitted = decode_request(export.payload[1:])
        except (msgspec.MsgspecError, IndexError) as error:
            raise MigrationRefused("incompatible", f"export of another kind: {error}") from error
        weights = self.layout.weights  # the source's: that was checked just now
        without_load(submitted)
        known = progress.output_token_ids
        waits = not known and not progress.num_computed_tokens
        request = await self._builder.build(submitted, known, waits=waits)
        if self._core.adapters.identity(request.lora_request) != progress.adapter:
            name = "" if submitted.lora_request is None else submitted.lora_request.lora_name
            raise MigrationRefused("incompatible", f"LoRA adapter {name} is another one here")
        hit = await self._once_offloaded(
            lambda: self._destination.reserve(request, progress, weights)
        )
        self._incoming.submitted[export.request_id] = list(export.payload[1:])
        return hit

    async def _reserve_session(self, export: RequestExport) -> int:
        try:
            adapter, frames = export.payload[1].decode(), export.payload[2:]
            check_known(frames)
            submitted = decode_request(frames)
        except (msgspec.MsgspecError, UnicodeDecodeError, IndexError) as error:
            raise MigrationRefused("incompatible", f"session of another kind: {error}") from error
        weights = self.layout.weights
        request = await self._builder.hash_request(submitted)
        if self._core.adapters.identity(request.lora_request) != adapter:
            raise MigrationRefused("incompatible", "its LoRA adapter is another one here")
        tokens = export.num_tokens
        return await self._once_offloaded(
            lambda: self._prefix_destination.reserve(request, tokens, weights)
        )

    async def grow(self, request_id: str, num_tokens: int) -> list[int]:
        if request_id in self._prefix_destination.arriving:
            return await self._on_engine(
                lambda: self._prefix_destination.grow(request_id, num_tokens)
            )
        started = self._destination.unstarted(request_id)
        if started is not None:
            await self._builder.compiled(started)  # it may come into the batch now
        return await self._once_offloaded(lambda: self._destination.grow(request_id, num_tokens))

    async def _once_offloaded(self, take_blocks: Callable[[], T]) -> T:
        """Call `take_blocks` on the engine, again while vLLM's offload still reads its blocks."""
        deadline = time.monotonic() + _OFFLOADED_S
        while True:
            try:
                return await self._on_engine(take_blocks)
            except BeingOffloaded:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_OFFLOADED_LOOK_S)

    async def scatter(
        self, block_ids: Sequence[int], fused: memoryview, urgent: bool = False
    ) -> list[int]:
        if block_ids:  # else only a GPU looks at the memory
            check_awake(self._core)
        return await self._memory.copies.scatter(block_ids, fused, urgent)

    async def prepare(self, request_id: str) -> None:
        await self._on_engine(self._warm_step.run)

    def expect(self, request_id: str, ms: float) -> None:
        self._core.hold.expect(request_id, time.monotonic() + ms / 1e3)
        if not self._destination.is_arriving(request_id):  # asked last: it may end meanwhile
            self._core.hold.over(request_id)

    async def commit(
        self, request_id: str, tail: RequestTail, last: CameBlocks | None = None
    ) -> None:
        if request_id in self._prefix_destination.arriving:
            await self._commit_session(request_id, last)
            return
        progress = decode_progress(tail.state)
        blocks: LastBlocks | None = None
        if last is not None:
            try:
                blocks = LastBlocks(last, self._memory.copies, self._memory.on_gpu)
            except BaseException:
                await self.cancel(request_id)
                raise

        def run() -> None:
            try:
                land = (lambda: None) if blocks is None else blocks.land
                self._destination.commit(request_id, progress, progress.generator, land)
            except Exception:
                if blocks is not None:
                    blocks.settle()
                self._destination.cancel(request_id)
                self._incoming.forget(request_id)
                raise
            finally:
                self._core.hold.over(request_id)

        try:
            if blocks is not None and self.step_s():
                await blocks.copied()  # others' steps don't wait for the copy
            await self._on_engine(run)
        except asyncio.CancelledError:
            if blocks is not None:
                await blocks.copied()  # its buffer is somebody else's next
            raise

    async def _commit_session(self, request_id: str, last: CameBlocks | None) -> None:
        try:
            if last is not None:
                last.check(await self.scatter(last.block_ids, last.fused, urgent=True))
            await self._on_engine(lambda: self._prefix_destination.commit(request_id))
        except BaseException:
            await self.cancel(request_id)
            raise

    async def cancel(self, request_id: str) -> None:
        def free() -> bool:
            self._prefix_destination.cancel(request_id)
            self._core.hold.over(request_id)
            self._destination.cancel(request_id)
            return request_id in self._scheduler.requests

        if not await self._on_engine(free):
            self._incoming.forget(request_id)

    async def _on_engine(self, function: Callable[[], T]) -> T:
        future: Future[T] = self._core.call(function)
        # Shielded: what runs on the engine's thread can't be taken back half-way.
        return await asyncio.shield(asyncio.wrap_future(future))

    # -- from the engine's thread

    def _deliver(self, item: tuple[int, EngineCoreOutputs]) -> None:
        self._grammars.explain(item[1])
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hand_out, *item)

    def _called(self, method: str, args: Sequence[Any]) -> None:
        """Note new weights, in order among the outputs: those after it are of the new weights."""
        if method == "collective_rpc" and args and args[0] == "reload_weights":
            self._core.model_executor.collective_rpc(renew_tied_heads)
        weights = after_call(self._weights, method, args, self._identify)
        if weights == self._weights:
            return
        self._weights = weights
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._reweigh, weights)

    def _between_steps(self) -> None:
        """Keep seats and load up to date; on the engine's thread, after each step and each call."""
        self._source.between_steps()
        # vLLM admits new requests up to this many, and dies of more than --max-num-seqs: those
        # that come, and those that may come back, keep their places.
        kept = self._source.may_come_back() + self._destination.to_come()
        self._scheduler.max_num_active_reqs = self._seats - kept
        news = self._device.between_steps()
        if self._device.closed:
            self._scheduler.max_num_active_reqs = 0
        now = time.monotonic()
        # After its last step an idle engine takes none that would renew the snapshot.
        if news or now - self._load_at >= _LOAD_PERIOD_S or not self._scheduler.running:
            self._load, self._load_at = self._seen_load(), now

    def _seen_load(self) -> EngineLoad:
        return self._device.shown_load(self._holdings.load())

    # -- on the event loop

    def _hand_out(self, client: int, outputs: EngineCoreOutputs) -> None:
        if outputs.utility_output is not None:
            done = outputs.utility_output
            self._on_call_done(
                client, done.call_id, None, list(self._encoder.encode(outputs.utility_output))
            )
            return
        if client == OWN_CLIENT and self._own.take_outputs(outputs):
            return
        emitted = [
            EmittedTokens(output.request_id, len(output.new_token_ids), output.finished)
            for output in outputs.outputs
        ]
        for entry in emitted:
            if entry.finished:
                self._incoming.forget(entry.request_id)
        if client >= FIRST_GUEST and outputs.scheduler_stats is not None:
            own = EngineCoreOutputs(
                timestamp=outputs.timestamp, scheduler_stats=outputs.scheduler_stats
            )
            outputs.scheduler_stats = None
            self._on_outputs(OWN_CLIENT, [], list(self._encoder.encode(own)))
        self._on_outputs(client, emitted, list(self._encoder.encode(outputs)))

    def _reweigh(self, weights: str) -> None:
        """The weights were updated: they have this identity now.

        A request that is here has begun with those before: no other instance has such any more.
        """
        self.layout = replace_fields(self.layout, weights=weights)
        self._begun_before = set(self._incoming.submitted)
