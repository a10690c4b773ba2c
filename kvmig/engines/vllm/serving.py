"""One vLLM engine as a llumlet runs it: clients' requests in, outputs out, and migrations."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace as replace_fields
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.executor import Executor
from vllm.v1.request import Request
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvmig.core.config import UnitConfig
from kvmig.core.errors import MigrationRefused, NotParked, UnsupportedLayout
from kvmig.engines.backing import Backing, Madvise, Vmm
from kvmig.engines.base import (
    Cadence,
    CameBlocks,
    Emitted,
    EngineLoad,
    Export,
    Frame,
    OnCallDone,
    OnOutputs,
    RequestState,
    Sharing,
    Stage,
    StepTime,
    Tail,
    too_large,
)
from kvmig.engines.gate import StepGate
from kvmig.engines.identity import check_unchanged
from kvmig.engines.vllm.allocation import without_pages
from kvmig.engines.vllm.balloon import Balloon, VllmSharing, unshared
from kvmig.engines.vllm.building import Builder, go_on, not_again, without_what_was_sent
from kvmig.engines.vllm.compat import refuse
from kvmig.engines.vllm.config import (
    Identify,
    after_call,
    identity_of_config,
    numerics_of,
)
from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.grammars import GrammarLimits
from kvmig.engines.vllm.groups import one_device
from kvmig.engines.vllm.load import Holdings, Listing
from kvmig.engines.vllm.memory import BlockMemory
from kvmig.engines.vllm.migration import (
    Destination,
    Progress,
    Source,
    check_known,
    decode_progress,
    decode_request,
    encode_progress,
    encode_request,
    unmovable_engine,
)
from kvmig.engines.vllm.offload import BeingOffloaded, Offload
from kvmig.engines.vllm.phase import Phase
from kvmig.engines.vllm.share_streams import streams_for
from kvmig.engines.vllm.warmup import (
    Probe,
    StepTimes,
    WarmStep,
    profile_path,
    read_profile,
    warm_up_requests,
    write_profile,
)

T = TypeVar("T")
_WARM_UP_TIMEOUT_S = 300.0
_LOAD_PERIOD_S = 0.01
_LIST_WAIT_S = 1.0
"""For the end of a step; front ends wait for twice that."""
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
        unit: see `kvmig.engines.kind.EngineKind.make`.
        """
        alone = config.parallel_config.world_size == 1
        lazily = unit is not None and not unshared(config)
        self._identify = identify = identify or partial(identity_of_config, config)
        self._weights = weights = identify()
        """The identity of the weights, on the engine's thread."""
        device = config.device_config.device_type
        with (
            without_pages(device) if lazily else contextlib.nullcontext() as taken,
            one_device() if alone else contextlib.nullcontext(),
            streams_for(config, unit if lazily else None) as self._streams,
        ):
            self._core = StepCore(config, Executor.get_class(config), log_stats, self._deliver)
        self._addresses = None if taken is None else taken.addresses
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_outputs: OnOutputs = lambda client, emitted, frames: None
        self._on_call_done: OnCallDone = lambda client, call_id, error, frames: None
        self._request_decoder = MsgpackDecoder(EngineCoreRequest)
        self._call_decoder = MsgpackDecoder()
        self._encoder = MsgpackEncoder()
        self._warming: dict[str, asyncio.Future[None]] = {}
        self._probe: Probe | None = None
        self._canary = ""
        """What the probe told at the start; empty: none is possible."""
        self._measuring: StepTimes | None = None
        self._submitted: dict[str, list[bytes]] = {}
        self._entering: dict[str, asyncio.Task[None] | Future[None]] = {}
        """Requests that are not in the engine yet."""
        self._begun_before: set[str] = set()
        """Requests that were here when the weights were last updated."""
        try:
            check_unchanged(config.model_config.model, weights, identify())
            self._open(unit_tokens, weights, unit is not None)
        except BaseException:
            self._core.shutdown()  # workers are processes of their own
            self._close_streams()
            raise

    def _open(self, unit_tokens: int, weights: str, shared: bool) -> None:
        """Make what moves requests, before the core runs."""
        core = self._core
        self._scheduler = scheduler = core.scheduler
        self._memory = memory = BlockMemory(core, unit_tokens)
        self.gather, self.scatter = memory.copies.gather, memory.copies.scatter
        self.unmovable = unmovable_engine(core.vllm_config) or memory.unmovable
        self._source = Source(core, self._memory.tables)
        self._offload = Offload(scheduler)
        self._destination = Destination(core, self._memory.tables, self._offload)
        self._warm_step = WarmStep(core)
        self._seats = scheduler.max_num_active_reqs
        self._grammars = GrammarLimits(core.structured_output_manager)
        self._builder = Builder(core)
        self._holdings = Holdings(scheduler, self._memory.tables, self.unmovable)
        self._balloon: Balloon | None = None
        self.sharing: Sharing | str = "it wasn't told to"
        if shared:
            self._share()
        self._load = self._seen_load()
        self._load_at = 0.0
        self._listed: list[RequestState] = []
        self._listed_at = 0.0
        self.layout = replace_fields(self._memory.layout, weights=weights)
        self.numerics = numerics_of(core)
        self.can_hold = True
        core.after_step = self._memory.after_step
        core.between_steps = self._between_steps
        core.called = self._called

    def _share(self) -> None:
        """Let its KV cache shrink and grow, if that can be."""
        core, memory, addresses = self._core, self._memory, self._addresses
        self.sharing = unshared(core.vllm_config, memory.tables, memory.unmovable)
        backing: Backing | None = None
        if not self.sharing:
            try:
                if addresses is None:
                    backing = Madvise(memory.regions, memory.num_blocks)
                else:
                    backing = Vmm(addresses, memory.regions, memory.num_blocks)
            except UnsupportedLayout as error:
                self.sharing = str(error)
        if addresses is not None:
            addresses.driver.settle()  # vLLM's warm-up
            addresses.drop(addresses.pages)
            if backing is None:
                addresses.put(addresses.pages)
            else:
                backing.take([0])  # of the null block
        if backing is None:
            return
        self._balloon = balloon = Balloon(
            self._scheduler, memory.tables, backing, memory.copies, core.call
        )
        core.rest_s = balloon.rest_s
        unlimited = self._streams if isinstance(self._streams, str) else ""
        self.sharing = VllmSharing(balloon, self._on_engine, self.share, unlimited)

    def share(self, gate: StepGate) -> None:
        """Ask `gate` before each step from now on; before `connect`, or on the engine's thread."""
        streams = self._streams
        if isinstance(streams, str):
            self._core.phase = Phase(self._core, gate)
        else:
            self._core.phase = Phase(self._core, gate, partial(streams.step, self._core))

    # -- for clients

    def connect(
        self,
        on_outputs: OnOutputs,
        on_call_done: OnCallDone,
        on_exit: Callable[[BaseException | None], None],
    ) -> None:
        self._loop = loop = asyncio.get_running_loop()
        self._on_outputs, self._on_call_done = on_outputs, on_call_done

        def exited(error: BaseException | None) -> None:
            loop.call_soon_threadsafe(on_exit, error)

        self._core.start(exited)

    def submit(
        self,
        client: int,
        request_id: str,
        payload: Sequence[Frame],
        output_token_ids: Sequence[int] = (),
    ) -> None:
        frames = [bytes(frame) for frame in payload]
        request: EngineCoreRequest = self._request_decoder.decode(frames)
        request.client_index = client
        if request.request_id != request_id:
            request.request_id = request_id
            frames = encode_request(request)
        self._submitted[request_id] = frames
        entering: asyncio.Task[None] | Future[None]
        if output_token_ids:
            entering = asyncio.ensure_future(self._go_on(request, output_token_ids))
        else:
            entering = self._builder.add(request, lambda: self._add(request))
        self._entering[request_id] = entering
        entering.add_done_callback(lambda _: self._entering.pop(request_id, None))

    def step_s(self) -> float:
        began = self._core.step_began
        return 0.0 if began is None else time.monotonic() - began

    def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._submitted.pop(request_id, None)
            entering = self._entering.get(request_id)
            if entering is not None and not entering.cancel():  # a thread is at it
                entering.add_done_callback(partial(self._abort_entered, request_id))
        self._core.abort([one for one in request_ids if one not in self._entering])

    def call(self, client: int, call_id: int, method: str, payload: Sequence[Frame]) -> None:
        args: Any = self._call_decoder.decode(payload)
        self._core.utility(client, call_id, method, tuple(args))

    def describe(self) -> bytes:
        core = self._core
        return msgspec.msgpack.encode((core._make_ready_response(), core.get_supported_tasks()))

    async def warm_up(self) -> None:
        config = self._core.vllm_config
        if Probe.possible(config):
            self._canary = canary = await self._told_by_probe()
            self.numerics = await self._on_engine(lambda: numerics_of(self._core, canary))
        await self._warm(warm_up_requests(config))

    async def _told_by_probe(self) -> str:
        self._probe = probe = Probe(self._core.vllm_config)
        try:
            await self._warm([probe.request])
        finally:
            self._probe = None
        return probe.digest()

    async def park(self) -> None:
        if not self._canary:
            raise NotParked("nothing shows whether it computes the same afterwards")
        if self._submitted:
            raise NotParked("it has requests")
        await self._on_engine(self._give_back)

    def _give_back(self) -> None:
        """On the engine's thread."""
        arriving = self._destination.arriving()
        if self._scheduler.has_requests() or arriving or not self._core.reset_prefix_cache():
            raise NotParked("it has requests")
        self._memory.give_back()

    async def unpark(self) -> None:
        told = await self._told_by_probe()
        if told != self._canary:
            raise NotParked(f"it computes {told} where it computed {self._canary} at its start")

    async def _warm(self, requests: Sequence[EngineCoreRequest]) -> None:
        loop = asyncio.get_running_loop()
        for request in requests:
            self._warming[request.request_id] = loop.create_future()
            self.submit(0, request.request_id, encode_request(request))
        await asyncio.wait_for(asyncio.gather(*self._warming.values()), _WARM_UP_TIMEOUT_S)
        self._warming.clear()

    async def step_times(self, limit_s: float) -> list[StepTime]:
        config = self._core.vllm_config
        if config.model_config.runner_type == "pooling":
            return []
        capacity = self.layout.block_tokens * self._load.total_blocks
        path = profile_path(config, capacity)
        times = read_profile(path)
        if not times:
            times = await self._measure(capacity, limit_s)
            write_profile(path, times)
        return times

    async def _measure(self, capacity: int, limit_s: float) -> list[StepTime]:

        def submit(request: EngineCoreRequest) -> None:
            self.submit(0, request.request_id, encode_request(request))

        measuring = self._measuring = StepTimes(self._core.vllm_config, capacity, submit)
        try:
            async with asyncio.timeout(limit_s):
                await measuring.ended.wait()
        except TimeoutError:
            pass  # what was found by then has to do
        finally:
            measuring.ended.set()
            self.abort(measuring.started)
            await self._builder.flush()
            await self._on_engine(lambda: None)
            self._measuring = None
        return measuring.found

    async def close(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        stopped = await loop.run_in_executor(None, self._core.stop, timeout_s)
        try:
            self._memory.close()
        finally:
            for entering in list(self._entering.values()):
                entering.cancel()
            self._builder.close()
            if stopped:
                self._core.shutdown()
                self._close_streams()
                if self._addresses is not None:
                    self._addresses.close()

    def _close_streams(self) -> None:
        if not isinstance(self._streams, str):
            self._streams.close()

    def assign(self, request_id: str, client: int) -> None:
        self._destination.assign(request_id, client)

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

        progress, request = await self._on_engine(look)
        adapter = self._core.adapters.identity(request.lora_request)
        return Export(
            request_id=request_id,
            num_tokens=request.num_prompt_tokens + len(progress.output_token_ids),
            payload=[encode_progress(replace(progress, adapter=adapter)), *frames],
        )

    async def stage(self, request_id: str, sent: int) -> Stage:
        return await self._on_engine(lambda: self._source.stage(request_id, sent))

    async def suspend(self, request_id: str, sent: int, out: memoryview | None = None) -> Tail:
        copying, wanted = threading.Lock(), not self._memory.on_gpu

        def gather(block_ids: list[int]) -> list[int]:
            size = len(block_ids) * self.layout.block_bytes
            with copying:
                if not (wanted and out) or size > out.nbytes:
                    return []
                return self._memory.copies.gather_now(block_ids, out[:size])

        try:
            tail = await self._on_engine(lambda: self._source.suspend(request_id, sent, gather))
            return await asyncio.wrap_future(tail)
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
            check_known(export.payload[1:])
            submitted = decode_request(export.payload[1:])
        except (msgspec.MsgspecError, IndexError) as error:
            raise MigrationRefused("incompatible", f"export of another kind: {error}") from error
        known = progress.output_token_ids
        waits = not known and not progress.num_computed_tokens
        request = await self._builder.build(submitted, known, waits=waits)
        if self._core.adapters.identity(request.lora_request) != progress.adapter:
            name = "" if submitted.lora_request is None else submitted.lora_request.lora_name
            raise MigrationRefused("incompatible", f"LoRA adapter {name} is another one here")
        hit = await self._once_offloaded(lambda: self._destination.reserve(request, progress))
        self._submitted[export.request_id] = list(export.payload[1:])
        return hit

    async def grow(self, request_id: str, num_tokens: int) -> list[int]:
        return await self._once_offloaded(lambda: self._destination.grow(request_id, num_tokens))

    async def _once_offloaded(self, take_blocks: Callable[[], T]) -> T:
        """Call it on the engine, again while vLLM's offload still reads the blocks it gets."""
        deadline = time.monotonic() + _OFFLOADED_S
        while True:
            try:
                return await self._on_engine(take_blocks)
            except BeingOffloaded:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_OFFLOADED_LOOK_S)

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

    async def _on_engine(self, function: Callable[[], T]) -> T:
        future: Future[T] = self._core.call(function)
        # Shielded: what runs on the engine's thread can't be taken back half-way.
        return await asyncio.shield(asyncio.wrap_future(future))

    # -- on their way into the engine

    def _add(self, request: EngineCoreRequest) -> None:
        try:
            self._core.add(request)
        except Exception as error:  # noqa: BLE001 - reported there
            refuse(self._core, request, error)

    async def _go_on(self, request: EngineCoreRequest, output_token_ids: Sequence[int]) -> None:
        """Let a request that ran elsewhere go on here. Cancelled before its end it never enters."""
        try:
            reason = not_again(request, self._core.vllm_config)
            if reason:
                raise MigrationRefused("unsupported", reason)
            without_what_was_sent(request)
            built = await self._builder.build(request, output_token_ids, waits=False)
            generator = await self._builder.generator_after(
                request.sampling_params, len(output_token_ids)
            )
        except Exception as error:  # noqa: BLE001 - reported there
            refuse(self._core, request, error)
            return

        def enter() -> None:
            own = built.lora_request
            if own is not None and not self._core.has_adapter(built, own):
                return
            try:
                go_on(self._core, built, generator)
                self._offload.entered(built)
            except Exception as error:  # noqa: BLE001 - reported there
                refuse(self._core, request, error)

        self._core.call(enter)

    def _abort_entered(self, request_id: str, _: object) -> None:
        self._core.abort([request_id])

    # -- from the engine's thread

    def _deliver(self, item: tuple[int, EngineCoreOutputs]) -> None:
        self._grammars.explain(item[1])
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hand_out, *item)

    def _called(self, method: str, args: Sequence[Any]) -> None:
        """In its order among the outputs: those after it are of the new weights."""
        weights = after_call(self._weights, method, args, self._identify)
        if weights == self._weights:
            return
        self._weights = weights
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._reweigh, weights)

    def _between_steps(self) -> None:
        """On the engine's thread, after each step and each call."""
        self._source.between_steps()
        # vLLM admits new requests up to this many, and dies of more than --max-num-seqs: those
        # that come, and those that may come back, keep their places.
        kept = self._source.may_come_back() + self._destination.to_come()
        self._scheduler.max_num_active_reqs = self._seats - kept
        news = False
        if self._balloon is not None:
            news = self._balloon.between_steps()
            if self._balloon.closed:
                self._scheduler.max_num_active_reqs = 0
        now = time.monotonic()
        # After its last step an idle engine takes none that would renew the snapshot.
        if news or now - self._load_at >= _LOAD_PERIOD_S or not self._scheduler.running:
            self._load, self._load_at = self._seen_load(), now

    def _seen_load(self) -> EngineLoad:
        load = self._holdings.load()
        return load if self._balloon is None else self._balloon.look(load)

    # -- on the event loop

    def _hand_out(self, client: int, outputs: EngineCoreOutputs) -> None:
        if outputs.utility_output is not None:
            done = outputs.utility_output
            self._on_call_done(
                client, done.call_id, None, list(self._encoder.encode(outputs.utility_output))
            )
            return
        if client == 0 and self._warming:
            for output in outputs.outputs:
                if self._probe is not None:
                    self._probe.take(output)
                if output.finished and output.request_id in self._warming:
                    self._warming[output.request_id].set_result(None)
                    self._submitted.pop(output.request_id, None)
            return
        if client == 0 and self._measuring is not None:
            self._measuring.take(outputs)
            return
        emitted = [
            Emitted(output.request_id, len(output.new_token_ids), output.finished)
            for output in outputs.outputs
        ]
        for entry in emitted:
            if entry.finished:
                self._submitted.pop(entry.request_id, None)
        self._on_outputs(client, emitted, list(self._encoder.encode(outputs)))

    def _reweigh(self, weights: str) -> None:
        """The weights were updated: they have this identity now.

        A request that is here has begun with those before: nobody else has such any more.
        """
        self.layout = replace_fields(self.layout, weights=weights)
        self._begun_before = set(self._submitted)
