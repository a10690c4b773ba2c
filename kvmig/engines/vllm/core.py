"""vLLM's EngineCoreProc without its sockets: the stock busy loop on a thread of ours.

The queues of EngineCoreProc are its seam: what vLLM's input thread would put into
`input_queue` a llumlet puts there, and what its output thread would send goes to
`deliver`. One more kind of input is a plain call, run between two steps.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar
from unittest.mock import patch

import torch
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine import core as core_module
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.engine.utils import EngineZmqAddresses
from vllm.v1.executor import Executor
from vllm.v1.request import Request, RequestStatus

from kvmig.core.background import answer_call
from kvmig.core.shm_cleanup import remove, shared_by
from kvmig.engines.base import OnExit
from kvmig.engines.engine_thread import EngineThread
from kvmig.engines.steps import CadenceMeter, StepHold, limit_s
from kvmig.engines.vllm import runner
from kvmig.engines.vllm.grammar_caches import SaltedGrammars
from kvmig.engines.vllm.lora import (
    LoraAdapters,
    decode_adapter,
    given_name,
    media_name,
    replaced_waiting,
    unloaded_output,
)
from kvmig.engines.vllm.openmp import let_team_go
from kvmig.engines.vllm.worker import end_at_once

logger = logging.getLogger(__name__)
T = TypeVar("T")
Deliver = Callable[[tuple[int, EngineCoreOutputs]], None]
_CALL = object()
_LOOK_S = 0.5
"""How often the files of adapters that requests wait for are looked at."""


class StepGuard(Protocol):
    """Decides when the next step may be made, and what it may compute: `phase.Phase`."""

    throttles: bool
    """Whether the present step leaves prompts alone."""

    def step(self) -> bool:
        """Make one step when it may be made; whether it computed anything."""


class StepCore(EngineCoreProc):
    """An EngineCore that a llumlet drives; `deliver` gets each step's (client, outputs)."""

    scheduler: Scheduler
    """vLLM's own: `config.refuse_settings` refuses others."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        executor_class: type[Executor],
        log_stats: bool,
        deliver: Deliver,
    ) -> None:
        self.between_steps: Callable[[], None] = lambda: None
        """Called on the engine's thread after each step and each request or call."""
        self.after_step: Callable[[], None] = lambda: None
        """Called on the engine's thread after each step, before that."""
        self.rest_s: Callable[[], float] = lambda: 0.0
        """How long another step would be in vain after one that computed nothing, unless something
        comes for the engine."""
        self.called: Callable[[str, Sequence[Any]], None] = lambda method, args: None
        """Called on the engine's thread after each call of a client's: (method, arguments)."""
        self.stepping: AbstractContextManager[object] = nullcontext()
        """Held while the model computes."""
        self.engine_thread = EngineThread(self.fail_calls)
        self.step_began: float | None = None
        """When the present step began, or the present request or call between two steps
        (time.monotonic); None while there is nothing to do."""
        self.adapters = LoraAdapters()
        self._loaded: set[int] = set()
        """Adapters that were loaded once."""
        self._adapters_at = 0.0
        """When their files are looked at again."""
        self.cadence_meter = CadenceMeter()
        self.hold = StepHold()
        self.clears = False
        """Whether a client's call waits that clears the caches: no migration may hold blocks."""
        self.phase: StepGuard | None = None
        """The decision on what each step may compute, where others share the device."""
        with patch.object(core_module, "StructuredOutputManager", SaltedGrammars):
            super().__init__(
                vllm_config,
                local_client=True,
                handshake_address="",
                executor_class=executor_class,
                log_stats=log_stats,
            )
        # Hands each batch on at once, on the engine's thread.
        self.output_queue = SimpleNamespace(put_nowait=deliver)
        # Freed blocks may still be written by a step in flight when steps overlap;
        # a migration would fill them under that step (vLLM does the same for connectors).
        if vllm_config.max_concurrent_batches > 1:
            self.scheduler.defer_block_free = True
            self.cadence_meter = CadenceMeter(overlap=True)
        runner.prepare_workers(self)
        # Of several workers; a single one is this process.
        workers = getattr(self.model_executor, "workers", ())
        if workers:
            self.model_executor.collective_rpc(end_at_once, timeout=runner.WORKER_TIMEOUT_S)
        self._shared = shared_by(worker.proc.pid for worker in workers)

    # -- in the place of vLLM's sockets

    @contextmanager
    def _perform_handshakes(self, *args: Any, **options: Any) -> Iterator[EngineZmqAddresses]:
        yield EngineZmqAddresses(inputs=[], outputs=[])

    def process_input_sockets(
        self, inputs: Any, coordinator: Any, identity: bytes, ready: threading.Event
    ) -> None:
        """Report readiness: nothing comes by a socket."""
        ready.set()

    def process_output_sockets(self, outputs: Any, coordinator: Any, index: int) -> None:
        """Do nothing: nothing goes by a socket."""

    # -- from any thread

    def preprocess_add_request(self, request: EngineCoreRequest) -> tuple[Request, int]:
        """vLLM's, of a request whose adapter is called as this engine calls it."""
        return super().preprocess_add_request(self._with_own_adapter(request))

    def hash_request(self, request: EngineCoreRequest) -> Request:
        """The request with its blocks' hashes, as a prefix cache knows it; it never runs."""
        return Request.from_engine_core_request(
            self._with_own_adapter(request), self.request_block_hasher
        )

    def _with_own_adapter(self, request: EngineCoreRequest) -> EngineCoreRequest:
        if request.lora_request is not None:
            request = copy.copy(request)
            own = request.lora_request = self.adapters.resolve_adapter(request.lora_request)
            lora = self.vllm_config.lora_config
            if lora is not None and lora.enable_tower_connector_lora and request.mm_features:
                # What encoders make of media depends on the adapter, too.
                request.mm_features = [
                    replace(one, identifier=media_name(own, one.identifier))
                    for one in request.mm_features
                ]
        return request

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the engine's thread between two steps."""
        future: Future[T] = Future()
        # In a list that is emptied: vLLM's frames keep what they took out of the queue, and are
        # kept by an error that the call raises, and with it by the future.
        self.input_queue.put_nowait((_CALL, [(future, function)]))
        if self.engine_thread.failed is not None:
            self.fail_calls()
        return future

    def add(self, request: EngineCoreRequest) -> None:
        """Queue a new request, as vLLM's input thread does."""
        self.input_queue.put_nowait(
            (EngineCoreRequestType.ADD, self.preprocess_add_request(request))
        )

    def abort(self, request_ids: list[str]) -> None:
        """Abort requests, at the latest before the running step's outputs are processed."""
        self.aborts_queue.put_nowait(request_ids)
        self.input_queue.put_nowait((EngineCoreRequestType.ABORT, request_ids))

    def utility(self, client_index: int, call_id: int, method: str, args: Any) -> None:
        """Run a utility method; the answer comes through `deliver` as a UtilityOutput."""
        self.input_queue.put_nowait(
            (EngineCoreRequestType.UTILITY, (client_index, call_id, method, args))
        )

    def start(self, on_exit: OnExit) -> None:
        """Run the busy loop on its own thread; `on_exit` is called at its end, on that thread.

        To be called on the thread that made the core: it computes no more.
        """
        let_team_go()
        # Both are a thread's own: weights, warm-up and graphs are on those of this thread.
        stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

        def run() -> None:
            if stream is not None:
                torch.cuda.set_device(stream.device)
                torch.cuda.set_stream(stream)
            # The busy loop's way to say that shutdown is complete.
            with contextlib.suppress(SystemExit):
                self.run_busy_loop()

        self.engine_thread.start(run, on_exit)

    def stop(self, timeout_s: float) -> bool:
        """Stop the busy loop after the current step; False if it didn't within `timeout_s`."""
        self.shutdown_state = EngineShutdownState.REQUESTED
        self.wake()
        return self.engine_thread.join(timeout_s)

    def shutdown(self) -> None:
        """End the workers, and remove what one that was killed has left."""
        super().shutdown()
        remove(self._shared)

    def wake(self) -> None:
        """Let the engine's thread look again at what it waits for."""
        self.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    # -- on the engine's thread

    def add_request(self, request: Request, request_wave: int = 0) -> None:
        """vLLM's, of a request whose adapter was loaded before: not in a step, which others share.

        One whose adapter can't be is ended as an error.
        """
        own = request.lora_request
        if own is None or own.lora_int_id in self._loaded or self.has_adapter(request, own):
            super().add_request(request, request_wave)
            if request.abort_immediately:  # the KV connector had to know it; the router waits
                self._send_abort_outputs_to_client([request.request_id], request.client_index)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter for a client, which means its files of now."""
        self.load_adapter(self.adapters.resolve_adapter(decode_adapter(lora_request)))
        return True

    def has_adapter(self, request: Request, own: LoRARequest) -> bool:
        """Load the adapter of a request that isn't in the engine; else end the request."""
        try:
            self.load_adapter(own)
        except Exception as error:  # noqa: BLE001 - whatever a broken file makes of it
            logger.error("LoRA adapter %s can't be loaded: %s", given_name(own), error)
            self.output_queue.put_nowait((request.client_index, unloaded_output(request)))
            return False
        return True

    def end_replaced(self) -> None:
        """End requests that wait for adapters which can't be loaded any more: in a step that would
        end the engine."""
        if self.scheduler.lora_config is None or time.monotonic() < self._adapters_at:
            return
        self._adapters_at = time.monotonic() + _LOOK_S
        for request in replaced_waiting(self.scheduler, self.list_loras):
            self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
            self.output_queue.put_nowait((request.client_index, unloaded_output(request)))

    def load_adapter(self, own: LoRARequest) -> None:
        """Have an adapter in the workers' slots. Raises what vLLM does."""
        super().add_lora(own)
        self._loaded.add(own.lora_int_id)

    def _handle_client_request(self, request_type: Any, request: Any) -> None:
        self.step_began = time.monotonic()
        try:
            if request_type is _CALL:
                calls: Any = request
                answer_call(*calls.pop())
            else:
                super()._handle_client_request(request_type, request)
            if request_type is EngineCoreRequestType.UTILITY:
                self.called(*request[2:])
        finally:
            self.between_steps()
            self.step_began = None

    def _await_arrivals(self) -> None:
        """Requests that come in a moment go into this step, not into the next: see `steps`."""
        began = time.monotonic()
        step_s = self.cadence_meter.cadence(began).step_ms / 1e3
        free_s = self.cadence_meter.free_s(began) if self.batch_queue else 0.0
        awaited = self.hold.awaited(began, step_s, free_s)
        while self.hold.coming(awaited):
            left = began + free_s + limit_s(step_s) - time.monotonic()
            if left <= 0 or not self._handle_next_request(left):
                return

    def _await_memory(self) -> None:
        """Rest where nothing can run for lack of memory. Another step would be in vain: vLLM would
        take a thousand a second."""
        in_flight = (output for _, output, _ in self.batch_queue or ())
        if any(one.total_num_scheduled_tokens for one in in_flight):
            return
        if rest_s := self.rest_s():
            self._handle_next_request(rest_s)

    def _handle_next_request(self, within_s: float) -> bool:
        """Handle the next request of the queue; False where none comes in time."""
        try:
            request = self.input_queue.get(timeout=within_s)
        except queue.Empty:
            return False
        self._handle_client_request(*request)
        return True

    def _should_throttle_prefills(self) -> bool:
        return self.phase is not None and self.phase.throttles

    def _process_engine_step(self) -> bool:
        self._await_arrivals()
        executed = self.step_once() if self.phase is None else self.phase.step()
        if not executed:
            self._await_memory()
        return executed

    def collect(self) -> None:
        """Take the results of steps that are in flight, and begin none (async scheduling)."""
        while self.batch_queue:
            with patch.object(self.scheduler, "has_requests", lambda: False):
                self.step_once()

    def step_once(self) -> bool:
        """vLLM's step, with what kvmig does around it; whether it computed anything."""
        began = self.step_began = time.monotonic()
        only_launches = self.batch_queue is not None and not self.batch_queue
        try:
            with self.stepping:
                executed = super()._process_engine_step()
            if executed and not only_launches:
                self.cadence_meter.step(began, time.monotonic())
            self.after_step()
            self.end_replaced()
            self.between_steps()
        finally:
            self.step_began = None
        return executed

    def execute_dummy_batch(self) -> None:
        """vLLM's step of nothing."""
        with self.stepping:
            super().execute_dummy_batch()

    def fail_calls(self) -> None:
        """Fail all calls that wait: no step comes any more."""
        while True:
            try:
                request_type, request = self.input_queue.get_nowait()
            except queue.Empty:
                return
            if request_type is _CALL:
                future, _ = request.pop()
                if future.set_running_or_notify_cancel():
                    future.set_exception(RuntimeError("the engine has stopped"))
