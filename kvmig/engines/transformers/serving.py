"""The Engine port over transformers' continuous batching, as a llumlet runs it."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import torch
import transformers
from msgspec.structs import replace

from kvmig.core.errors import ConfigError, MigrationRefused, NotParked
from kvmig.engines import device_copies
from kvmig.engines.base import (
    CacheSharing,
    CameBlocks,
    EmittedTokens,
    EndedRequest,
    EngineLoad,
    Frame,
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
)
from kvmig.engines.block_copies import BlockCopies, HostCopies
from kvmig.engines.held_marks import HeldMarks
from kvmig.engines.identity import check_unchanged, numerics_class
from kvmig.engines.transformers.config import EngineConfig, identify
from kvmig.engines.transformers.loop import StepLoop
from kvmig.engines.transformers.migration import TransformersDestination, TransformersSource
from kvmig.engines.transformers.model import make_manager
from kvmig.engines.transformers.payload import (
    MOST_LOGPROBS,
    RequestProgress,
    StepOutput,
    SubmittedRequest,
    decode,
    encode,
)
from kvmig.engines.transformers.pool import SharedPool
from kvmig.engines.transformers.requests import (
    CacheBlocks,
    HeldRequest,
    SchedulerRequests,
    engine_load,
    make_state,
    request_states,
)
from kvmig.kernels.driver import current_device

T = TypeVar("T")
_LOAD_PERIOD_S = 0.01
_WARM_UP_TIMEOUT_S = 300.0
_STARVED_RETRY_S = 0.01
"""An engine of a pool that has no room for any of its requests looks again so often."""
_IDLE_LOOK_S = 0.1
"""One that has no requests renews its load so often."""


class ServingTransformers:
    """One model behind a llumlet: `kvmig.engines.base.ServingEngine`. Payloads are msgpack of
    `payload`'s."""

    can_hold = False
    unmovable = ""
    sharing: CacheSharing | str = "only vLLM's engines do, from process to process"
    held_marks: HeldMarks | None = None

    def __init__(self, config: EngineConfig, pool: SharedPool | None = None) -> None:
        """Load the model and take the KV cache, or join `pool`: seconds. Raises KvmigError."""
        self.config = config
        weights = identify(config)
        manager, logprobs = make_manager(config, pool)
        check_unchanged(config.model, weights, identify(config))
        processor = manager.batch_processor
        self._blocks = CacheBlocks(processor.cache, manager.model.config.to_json_string(), weights)
        self.max_request_tokens = self._blocks.most * self._blocks.tokens
        """Most tokens of one request, prompt and outputs: more could never be computed here."""
        self._requests = SchedulerRequests(processor.scheduler, self._blocks, logprobs)
        self._source = TransformersSource(self._requests)
        self._destination = TransformersDestination(self._requests, self.max_request_tokens)
        processor.scheduler.elsewhere = lambda: (
            self._requests.may_come_back() + self._destination.to_come()
        )
        self._loop = StepLoop(manager, self._stepped)
        self._loop.between_steps = self._between_steps
        if (share := self._blocks.share) is not None:
            self._loop.memory, self._loop.idle_s = share.pool.lock, self._idle_s
            share.is_short = processor.scheduler.is_short
        self.layout = self._blocks.layout
        self.numerics = _numerics(config)
        self._device_copies = self._on_gpu() if config.device == "cuda" else None
        if self._device_copies is not None:
            self.layout = dataclasses.replace(self.layout, gpu=self._device_copies.gpu)
        by = self._device_copies or HostCopies(self._blocks.plan())
        self._copies = BlockCopies(self.layout, by)
        self.gather, self.scatter = self._copies.gather, self._copies.scatter
        self._load = engine_load(self._requests)
        self._load_at = 0.0
        self._events: asyncio.AbstractEventLoop | None = None
        self._on_outputs: OnOutputs = lambda client, emitted, frames: None
        self._on_call_done: OnCallDone = lambda client, call_id, error, frames: None
        self._warming: dict[str, asyncio.Future[None]] = {}

    def _on_gpu(self) -> device_copies.DeviceCopies:
        # A step's tokens are known when all that it queued is done: no step overlaps another.
        copies = device_copies.load(self._blocks.plan(), current_device(), steps_overlap=False)
        self._loop.after_step = lambda: copies.after_step(self._loop.stream.cuda_stream)
        copies.width.engine_idle = lambda: self._loop.at_rest
        return copies

    # -- what it does and holds

    def cadence(self) -> StepCadence:
        return self._loop.cadence_meter.cadence(time.monotonic())

    def load(self) -> EngineLoad:
        return self._load

    async def requests(self, most_waiting: int | None = None) -> list[RequestState]:
        return await self._between(lambda: request_states(self._requests, most_waiting))

    # -- source

    async def export(self, request_id: str) -> RequestExport:
        return await self._between(lambda: self._source.export(request_id))

    async def stage(self, request_id: str, sent: int) -> StagedBlocks:
        return await self._between(lambda: self._source.stage(request_id, sent))

    async def follow_prompt(
        self, request_id: str, sent: int, most_tokens: int
    ) -> StagedBlocks | RequestTail:
        def follow() -> StagedBlocks | RequestTail:
            stage = self._source.stage(request_id, sent)
            if not stage.decoding or stage.num_tokens > most_tokens:
                return stage
            return self._source.suspend(request_id, sent)

        return await self._between(follow)

    async def suspend(
        self, request_id: str, sent: int, out: memoryview | None = None
    ) -> RequestTail:
        return await self._between(lambda: self._source.suspend(request_id, sent))

    async def resume(self, request_id: str) -> None:
        await self._between(lambda: self._source.resume(request_id))

    async def release(self, request_id: str) -> None:
        await self._between(lambda: self._source.release(request_id))

    # -- destination

    async def reserve(self, export: RequestExport) -> int:
        try:
            progress = decode(export.payload[0], RequestProgress)
            submitted = decode(export.payload[1], SubmittedRequest)
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
        """Do nothing: a step after a pause is like any other."""

    def expect(self, request_id: str, ms: float) -> None:
        """Do nothing: no step waits for a request."""

    async def commit(
        self, request_id: str, tail: RequestTail, last: CameBlocks | None = None
    ) -> None:
        if last is not None:
            try:
                last.check(await self.scatter(last.block_ids, last.fused, urgent=True))
            except BaseException:
                await self.cancel(request_id)
                raise

        def commit() -> None:
            try:
                self._destination.commit(request_id, decode(tail.state, RequestProgress))
            except Exception:
                self._destination.cancel(request_id)
                raise

        await self._between(commit)

    async def cancel(self, request_id: str) -> None:
        await self._between(lambda: self._destination.cancel(request_id))

    def _close_memory(self) -> None:
        """No step and no copy may follow."""
        self._copies.close()
        if self._blocks.share is not None:
            self._blocks.share.leave()
        if self._device_copies is not None:
            self._device_copies.close()

    # -- clients, see `ServingEngine`

    def connect(self, on_outputs: OnOutputs, on_call_done: OnCallDone, on_exit: OnExit) -> None:
        self._events = events = asyncio.get_running_loop()
        self._on_outputs, self._on_call_done = on_outputs, on_call_done

        def exited(error: BaseException | None) -> None:
            if error is not None and self._blocks.share is not None:
                self._close_memory()  # what it held is for the pool's other engines
            if not events.is_closed():
                events.call_soon_threadsafe(on_exit, error)

        self._loop.start(exited)

    def submit(
        self, client: int, request_id: str, payload: Frames, output_token_ids: Sequence[int] = ()
    ) -> None:
        frame, known = b"".join(payload), list(output_token_ids)
        self._loop.call(lambda: self._enter(client, request_id, frame, known))

    def step_s(self) -> float:
        began = self._loop.step_began
        return 0.0 if began is None else time.monotonic() - began

    def abort(self, request_ids: Sequence[str]) -> None:
        ids = list(request_ids)
        self._loop.call(lambda: self._requests.drop(ids))

    def call(self, client: int, call_id: int, method: str, payload: Frames) -> None:
        error = f"a transformers engine has no method {method}"
        if self._events is not None:
            self._events.call_soon(self._on_call_done, client, call_id, error, [])

    async def hold_session(self, request_id: str, ended: EndedRequest) -> None:
        raise MigrationRefused(
            "unsupported", "a transformers engine keeps nothing of ended requests"
        )

    async def park(self) -> None:
        raise NotParked("a transformers engine can't be parked")

    async def unpark(self) -> None:
        """Do nothing: it is never parked."""

    def assign(self, request_id: str, client: int) -> None:
        # On the loop of the engine's thread by then: a commit comes after this.
        self._loop.call(lambda: self._destination.assign(request_id, client))

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(
            {
                "engine": "transformers",
                "model": self.config.model,
                "block_tokens": self._blocks.tokens,
                "num_blocks": self._blocks.total,
                "max_request_tokens": self.max_request_tokens,
            }
        )

    async def warm_up(self) -> None:
        events = asyncio.get_running_loop()
        for temperature in (0.0, 1.0):
            request_id = f"warm-up-{temperature}"
            self._warming[request_id] = events.create_future()
            request = SubmittedRequest(
                prompt_token_ids=[0] * (self._blocks.tokens + 1),
                max_tokens=2,
                temperature=temperature,
            )
            self.submit(0, request_id, [encode(request)])
        await asyncio.wait_for(asyncio.gather(*self._warming.values()), _WARM_UP_TIMEOUT_S)
        self._warming.clear()

    async def step_times(self, limit_s: float) -> list[StepTime]:
        """No step times: none are known."""
        return []

    async def close(self, timeout_s: float) -> None:
        events = asyncio.get_running_loop()
        if await events.run_in_executor(None, self._loop.stop, timeout_s):
            await events.run_in_executor(None, self._close_memory)
        else:
            self._copies.close()  # the rest is still in use

    # -- what clients send and get, see kvmig.testing

    def encode_request(
        self, prompt: Sequence[int], max_tokens: int, seed: int | None = None
    ) -> list[Frame]:
        """A payload for `submit`; greedy without a seed."""
        temperature = 0.0 if seed is None else 1.0
        request = SubmittedRequest(
            prompt_token_ids=list(prompt), max_tokens=max_tokens, temperature=temperature, seed=seed
        )
        return [encode(request)]

    def decode_outputs(self, frames: Frames) -> list[StepOutput]:
        """The outputs that `connect`'s `on_outputs` got."""
        return decode(frames[0], list[StepOutput])

    # -- on the engine's thread

    async def _between(self, function: Callable[[], T]) -> T:
        """Run a function on the engine's thread between two steps."""
        future: Future[T] = self._loop.call(function)
        # Shielded: what runs there can't be taken back half-way.
        return await asyncio.shield(asyncio.wrap_future(future))

    def _idle_s(self) -> float:
        """Time until the next look at the pool, where other engines give and take."""
        waits = self._requests.scheduler.has_pending_requests()
        return _STARVED_RETRY_S if waits else _IDLE_LOOK_S

    def _between_steps(self) -> None:
        now = time.monotonic()
        # After its last step an idle engine takes none that would renew the snapshot.
        if now - self._load_at >= _LOAD_PERIOD_S or not self._requests.scheduler.active_requests:
            self._load, self._load_at = engine_load(self._requests), now

    def _enter(self, client: int, request_id: str, frame: bytes, known: list[int]) -> None:
        try:
            submitted = self._checked(request_id, decode(frame, SubmittedRequest), known)
        except (msgspec.MsgspecError, ConfigError) as error:
            self._deliver(client, [StepOutput(request_id, [], "error", error=str(error))])
            return
        state = make_state(request_id, submitted, known)
        self._requests.add(request_id, HeldRequest(submitted, client), state)

    def _checked(
        self, request_id: str, submitted: SubmittedRequest, known: list[int]
    ) -> SubmittedRequest:
        """The request, with a seed if it samples. Raises ConfigError if it can't run."""
        most = len(submitted.prompt_token_ids) + submitted.max_tokens
        rules = (
            (request_id not in self._requests, f"request {request_id} is here already"),
            (request_id not in self._destination, f"request {request_id} is about to come"),
            (bool(submitted.prompt_token_ids), "prompt_token_ids is empty"),
            (submitted.max_tokens >= 1, f"max_tokens is {submitted.max_tokens}, must be 1 or more"),
            (
                submitted.temperature >= 0,
                f"temperature is {submitted.temperature}, must be 0 or more",
            ),
            (
                most <= self.max_request_tokens,
                f"prompt and max_tokens are {most} tokens, at most {self.max_request_tokens} fit",
            ),
            (len(known) < submitted.max_tokens, f"all {submitted.max_tokens} tokens are known"),
            (submitted.top_k >= 0, f"top_k is {submitted.top_k}, must be 0 or more"),
            (
                0 < submitted.top_p <= 1,
                f"top_p is {submitted.top_p}, must be more than 0 and at most 1",
            ),
            (0 <= submitted.min_p <= 1, f"min_p is {submitted.min_p}, must be from 0 to 1"),
            (
                0 <= (submitted.logprobs or 0) <= MOST_LOGPROBS,
                f"logprobs is {submitted.logprobs}, must be from 0 to {MOST_LOGPROBS}",
            ),
        )
        for holds, sentence in rules:
            if not holds:
                raise ConfigError(sentence)
        if submitted.temperature and submitted.seed is None:
            return replace(submitted, seed=secrets.randbits(63))
        return submitted

    def _stepped(self, batch: list[Any]) -> None:
        for client, outputs in self._requests.took(batch).items():
            self._deliver(client, outputs)

    def _deliver(self, client: int, outputs: list[StepOutput]) -> None:
        if self._events is not None and not self._events.is_closed():
            self._events.call_soon_threadsafe(self._hand_out, client, outputs)

    # -- on the event loop

    def _hand_out(self, client: int, outputs: list[StepOutput]) -> None:
        emitted: list[EmittedTokens] = []
        for one in outputs:
            if one.finish_reason and one.request_id in self._warming:
                self._warming[one.request_id].set_result(None)
            emitted.append(
                EmittedTokens(one.request_id, len(one.token_ids), bool(one.finish_reason))
            )
        self._on_outputs(client, emitted, [encode(outputs)])


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
