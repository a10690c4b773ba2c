"""transformers' generation loop on a thread of ours, with calls between two steps."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from transformers.generation.continuous_batching.utils import stream_context

from kvmig.core.background import answer_call
from kvmig.engines.base import OnExit
from kvmig.engines.engine_thread import EngineThread
from kvmig.engines.steps import CadenceMeter

T = TypeVar("T")
Call = tuple[Callable[[], Any], "Future[Any]"]


class StepLoop:
    """Steps a batch processor as `ContinuousBatchingManager` does, synchronously."""

    def __init__(self, manager: Any, on_step: Callable[[list[Any]], None]) -> None:
        """on_step: on the loop's thread after each step, with the requests that took part."""
        self._manager = manager
        self._processor = manager.batch_processor
        self._on_step = on_step
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self.between_steps: Callable[[], None] = lambda: None
        """Called on the loop's thread after each step and each call."""
        self.memory: AbstractContextManager[Any] = nullcontext()
        """Held while anything looks at blocks: a lock, where engines share them."""
        self.idle_s: Callable[[], float | None] = lambda: None
        """How long to wait for a call at most when there was nothing to do; None: no limit."""
        self.stream: Any = self._processor.inputs_and_outputs.compute_stream
        """The stream that steps are queued on; None on a CPU."""
        self.after_step: Callable[[], None] = lambda: None
        """Called on the loop's thread after each step, before all else."""
        self.step_began: float | None = None
        """When the present step began (time.monotonic); None between steps."""
        self.at_rest = True
        """Whether there was nothing to do when this last looked."""
        self.cadence_meter = CadenceMeter()
        self._thread = EngineThread(self._fail_calls)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Run `function` on the loop's thread between two steps; from any thread."""
        future: Future[T] = Future()
        self._calls.put((function, future))
        if self._thread.failed is not None:
            self._fail_calls()
        return future

    def start(self, on_exit: OnExit) -> None:
        """Begin to step; `on_exit` is called at the end, on the loop's thread."""

        def run() -> None:
            # transformers queues a step's inputs on the thread's stream, and the step itself on
            # its own: on one stream the one comes after the other.
            with torch.no_grad(), stream_context(self.stream):
                self._run()

        self._thread.start(run, on_exit)

    def stop(self, timeout_s: float) -> bool:
        """End after the present step; whether it did in time."""
        self._calls.put(None)
        return self._thread.join(timeout_s)

    def _run(self) -> None:
        worked = False
        while self._take_calls(wait=not worked):
            worked = self._step()
            with self.memory:
                self.between_steps()
            if worked:
                # After the snapshot of the load: who hears of a request's end finds it gone.
                self._on_step(self._processor.inputs_and_outputs.requests_in_batch)

    def _take_calls(self, wait: bool) -> bool:
        """Run what was asked for; False at the end. wait: there is nothing else to do."""
        try:
            call = self._calls.get(block=wait, timeout=self.idle_s())
            while True:
                if call is None:
                    return False
                with self.memory:
                    function, future = call
                    answer_call(future, function)
                    del function, future, call
                    self.between_steps()
                call = self._calls.get(block=False)
        except queue.Empty:
            return True

    def _step(self) -> bool:
        """Whether there was something to do."""
        began = self.step_began = time.monotonic()
        try:
            with self.memory:
                self.at_rest = not self._processor.prepare_next_batch()
            if self.at_rest:
                return False
            self._processor._generation_step(self._manager.model)
            with self.memory:
                self._processor.update_batch()
            self.after_step()
        finally:
            self.step_began = None
        self.cadence_meter.step(began, time.monotonic())
        return True

    def _fail_calls(self) -> None:
        while True:
            try:
                call = self._calls.get(block=False)
            except queue.Empty:
                return
            if call is not None and call[1].set_running_or_notify_cancel():
                error = RuntimeError(f"the engine has ended: {self._thread.failed!r}")
                call[1].set_exception(error)
