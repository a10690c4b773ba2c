"""What one vLLM step may compute, by its scheduler's own knobs; nothing of vLLM is replaced.

A step that may compute no prompts is what vLLM's data-parallel engines call a throttled one. That
says nothing while `prefill_capacity_bound` is set, which is why it is reset here, nor where nothing
decodes, which is why such a step isn't made at all. A step that may compute prompts takes the
engine's own decodes along.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import Request

from kvmig.engines.entrance import StepAdmission
from kvmig.engines.gate import EVERYTHING, NOTHING, StepGate, StepGrant, StepRequest
from kvmig.engines.vllm.core import StepCore

RETRY_S = 0.05
"""How long prompts aren't asked for after a step that couldn't start the next one, unless another
is next, or blocks come free: its grammar may be made, its cache may come from the host."""


class StepPhase:
    """The gate of one engine, on its thread."""

    def __init__(
        self,
        core: StepCore,
        gate: StepGate,
        on_parts: Callable[[int], AbstractContextManager[object]] = lambda parts: nullcontext(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_parts: held while a step is made, by the parts of the device that it takes; 0: all."""
        self.throttles = False
        """Whether the present step leaves prompts alone."""
        self.entrance = StepAdmission(gate, self._serve)
        self._core = core
        self._scheduler = core.scheduler
        self._own_tokens = core.scheduler.max_num_scheduled_tokens
        self._on_parts = on_parts
        self._clock = clock
        self._stuck: tuple[Request, int, float] | None = None
        """The head of the queue that a step couldn't start, the blocks that were free, and until
        when it isn't asked for."""
        gate.on_answer = core.wake

    def step(self) -> bool:
        """Wait for a grant, then make one step with it; whether it computed anything."""
        core, entrance = self._core, self.entrance
        if entrance.gate.alone or not core.is_running():
            return self._make(EVERYTHING)
        core.collect()
        grant = entrance.enter(self.next_request)
        if grant is None:
            if not self._scheduler.has_unfinished_requests() or self._scheduler.finished_req_ids:
                self._flush()
            elif core.is_running():
                entrance.wait_for_work()
            return False
        if entrance.gate.alone:
            entrance.finish_step(False)  # nobody waits for the end of this step
            return self._make(grant)
        head, starts = self._head(), any(one.is_prefill_chunk for one in self._scheduler.running)
        executed = False
        try:
            executed = self._make(grant)
            core.collect()
        finally:
            entrance.finish_step(executed)
        if head is not None and grant.prompts and not starts and self._head() is head:
            self._stuck = head, self._free_blocks, self._clock() + RETRY_S
        return executed

    def next_request(self) -> StepRequest:
        """What the next step could compute."""
        scheduler = self._scheduler
        if scheduler.pause_state is PauseState.PAUSED_ALL or not self._core.is_running():
            return NOTHING
        begun = [one for one in scheduler.running if one.is_prefill_chunk]
        decoding = [one for one in scheduler.running if not one.is_prefill_chunk]
        head = self._head()
        if head is not None and self._is_stuck(head):
            head = None
        prompts = begun if head is None else [*begun, head]
        return StepRequest(
            prompt_tokens=sum(one.num_tokens - one.num_computed_tokens for one in prompts),
            decodes=len(decoding),
            oldest_prompt=min((one.arrival_time for one in prompts), default=0.0),
            oldest_decode=min((one.arrival_time for one in decoding), default=0.0),
        )

    def _is_stuck(self, head: Request) -> bool:
        if self._stuck is None:
            return False
        request, free, until = self._stuck
        if request is head and self._free_blocks <= free and self._clock() < until:
            return True
        self._stuck = None
        return False

    def _head(self) -> Request | None:
        """The request that starts next, if there is a seat for it."""
        scheduler = self._scheduler
        waiting = scheduler.kv_holding_waiting
        if not waiting and scheduler.pause_state is PauseState.UNPAUSED:
            waiting = scheduler.waiting
        if not waiting or len(scheduler.running) >= scheduler.max_num_active_reqs:
            return None
        return waiting.peek_request()

    @property
    def _free_blocks(self) -> int:
        return self._scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def _make(self, grant: StepGrant) -> bool:
        scheduler = self._scheduler
        self.throttles = not grant.prompts
        if self.throttles:
            scheduler.prefill_capacity_bound = False
        if grant.tokens:
            # Fewer than one for each that decodes, and the last of them would never get any.
            least = len(scheduler.running) * (1 + scheduler.num_spec_tokens)
            scheduler.max_num_scheduled_tokens = min(self._own_tokens, max(grant.tokens, least))
        try:
            with self._on_parts(grant.parts):
                return self._core.step_once()
        finally:
            scheduler.max_num_scheduled_tokens = self._own_tokens
            self.throttles = False

    def _flush(self) -> None:
        """Make a step that computes nothing: workers learn of requests that have ended, and what
        waits for them or for blocks from the host goes on."""
        self._scheduler.max_num_scheduled_tokens = 0
        try:
            self._core.step_once()
            self._core.collect()
        finally:
            self._scheduler.max_num_scheduled_tokens = self._own_tokens

    def _serve(self, timeout_s: float) -> None:
        core = self._core
        try:
            item = core.input_queue.get(timeout=timeout_s)
        except queue.Empty:
            return
        core._handle_client_request(*item)
