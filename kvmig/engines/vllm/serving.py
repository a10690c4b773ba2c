"""One vLLM engine as a llumlet runs it: clients' requests in, each step's outputs out."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec
from vllm.config import VllmConfig
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
from vllm.v1.executor import Executor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from kvmig.engines.base import Emitted, Frame, OnCallDone, OnOutputs, StepTime
from kvmig.engines.identity import check_unchanged
from kvmig.engines.vllm.adapter import VllmEngine
from kvmig.engines.vllm.building import go_on, not_again, without_what_was_sent
from kvmig.engines.vllm.config import (
    Identify,
    after_call,
    identity_of_config,
    replaced_adapter,
)
from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.sides import encode_request
from kvmig.engines.vllm.warmup import (
    StepTimes,
    profile_path,
    read_profile,
    warm_up_requests,
    write_profile,
)
from kvmig.ground.errors import MigrationRefused

_WARM_UP_TIMEOUT_S = 300.0


class ServingVllm(VllmEngine):
    """Implements `kvmig.engines.base.ServingEngine`."""

    def __init__(
        self,
        config: VllmConfig,
        log_stats: bool = True,
        unit_tokens: int = 0,
        identify: Identify | None = None,
    ) -> None:
        """Load the model and take the KV cache: minutes. vLLM's own errors pass through.

        unit_tokens: of what is exchanged with other instances; 0: an engine's own block.
        identify: the weights; None: by `config`. Raises StartupError if they change meanwhile.
        """
        identify = identify or partial(identity_of_config, config)
        weights = identify()
        core = StepCore(config, Executor.get_class(config), log_stats, self._deliver)
        try:
            check_unchanged(config.model_config.model, weights, identify())
            super().__init__(core, unit_tokens, weights)
        except BaseException:
            core.shutdown()  # workers are processes of their own
            raise
        self._identify = identify
        self._weights = weights
        """Their identity, on the engine's thread."""
        core.called = self._called
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_outputs: OnOutputs = lambda client, emitted, frames: None
        self._on_call_done: OnCallDone = lambda client, call_id, error, frames: None
        self._request_decoder = MsgpackDecoder(EngineCoreRequest)
        self._call_decoder = MsgpackDecoder()
        self._encoder = MsgpackEncoder()
        self._warming: dict[str, asyncio.Future[None]] = {}
        self._measuring: StepTimes | None = None
        self._entering: dict[str, asyncio.Task[None] | Future[None]] = {}
        """Requests that are not in the engine yet."""

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
        return msgspec.msgpack.encode(self._core._make_ready_response())

    async def warm_up(self) -> None:
        loop = asyncio.get_running_loop()
        for request in warm_up_requests(self._core.vllm_config):
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

    # -- on their way into the engine

    def _add(self, request: EngineCoreRequest) -> None:
        try:
            self._note(request)
            self._core.add(request)
        except Exception:  # noqa: BLE001 - reported there
            self._refuse(request)

    def _note(self, request: EngineCoreRequest) -> None:
        """Of its LoRA adapter, what vLLM is about to load if it hasn't yet."""
        with contextlib.suppress(MigrationRefused):  # that matters where it is to move
            self._adapters.identity(request.lora_request)

    async def _go_on(self, request: EngineCoreRequest, output_token_ids: Sequence[int]) -> None:
        """It ran elsewhere. Cancelled before its end it never enters."""
        try:
            reason = not_again(request, self._core.vllm_config)
            if reason:
                raise MigrationRefused("unsupported", reason)
            await asyncio.to_thread(self._note, request)
            without_what_was_sent(request)
            built = await self._builder.build(request, output_token_ids, waits=False)
            generator = await self._builder.generator_after(
                request.sampling_params, len(output_token_ids)
            )
        except Exception:  # noqa: BLE001 - reported there
            self._refuse(request)
            return

        def enter() -> None:
            try:
                go_on(self._core, built, generator)
            except Exception:  # noqa: BLE001 - reported there
                self._refuse(request)

        self._core.call(enter)

    def _abort_entered(self, request_id: str, _: object) -> None:
        self._core.abort([request_id])

    def _refuse(self, request: EngineCoreRequest) -> None:
        """vLLM's own answer to one that can't be built: logged, and ended as an error."""
        self._core._handle_request_preproc_error(request)

    # -- from the engine's thread

    def _deliver(self, item: tuple[int, EngineCoreOutputs]) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hand_out, *item)

    def _called(self, method: str, args: Sequence[Any]) -> None:
        """In its order among the outputs: those after it are of the new weights."""
        weights = after_call(self._weights, method, args, self._identify)
        loaded_anew = replaced_adapter(method, args)
        if loaded_anew is not None:
            self._adapters.forget(loaded_anew)
        if weights == self._weights and loaded_anew is None:
            return
        self._weights = weights
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.reweigh, weights)

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
