"""The source's side, on the engine's thread between two steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from kvmig.engines.base import Stage, Tail
from kvmig.engines.vllm import lora, runner
from kvmig.engines.vllm.movable import check_movable
from kvmig.engines.vllm.payload import Progress, encode_progress
from kvmig.engines.vllm.tables import Sent, Tables
from kvmig.ground.errors import RequestGone

Gather = Callable[[list[int]], list[int]]
"""Copies blocks at once and returns their checksums; none if that isn't wanted."""


@dataclass
class Leaving:
    """A request whose export was taken."""

    request: Request
    num_preemptions: int
    exported_outputs: int
    sent: Sent | None = None
    """Known from the first stage, or the tail, on."""
    suspended: bool = False
    on_drained: Callable[[], None] | None = None


class Source:
    """Exports, stages, suspends and gives up requests of one engine."""

    def __init__(self, core: EngineCore, tables: Tables) -> None:
        self._core = core
        self._tables = tables
        self._leaving: dict[str, Leaving] = {}

    @property
    def _scheduler(self) -> Scheduler:
        scheduler = self._core.scheduler
        assert isinstance(scheduler, Scheduler)
        return scheduler

    def export(self, request_id: str) -> Progress:
        """Watch the request from now on; how far it is now."""
        request = self._live(request_id)
        check_movable(request, self._core.vllm_config)
        self._leaving[request_id] = Leaving(
            request, request.num_preemptions, request.num_output_tokens
        )
        return self._progress(request, 0)

    def stage(self, request_id: str, sent: int) -> Stage:
        """The full blocks after the first `sent`: no step writes them any more."""
        leaving = self._checked(request_id)
        request, known = leaving.request, self._sent(leaving, sent)
        block_ids = self._scheduler.kv_cache_manager.get_block_ids(request_id)
        places, ids = self._tables.full(block_ids, _computed(request), known)
        known.places += places
        decoding = request.status == RequestStatus.RUNNING and not request.is_prefill_chunk
        num_tokens = request.num_tokens if self._tables.held(block_ids) else 0
        return Stage(ids, num_tokens, decoding, places)

    def suspend(
        self, request_id: str, sent: int, gather: Gather, done: Callable[[Tail | Exception], None]
    ) -> None:
        """Take the request out of the batch; `done` gets its tail once no step holds it."""
        leaving = self._checked(request_id)
        request, scheduler = leaving.request, self._scheduler
        leaving.suspended = True
        if request.status == RequestStatus.RUNNING:
            scheduler.running.remove(request)
        else:
            _leave_queue(scheduler, request)

        def drained() -> None:
            try:
                tail = self._tail(request_id, sent)
                done(replace(tail, checksums=gather(tail.block_ids)))
            except RequestGone as gone:
                done(gone)

        if request.num_in_flight_tokens == 0:
            drained()
        else:
            leaving.on_drained = drained

    def between_steps(self) -> None:
        """Finish suspensions whose last step has returned (async)."""
        for leaving in list(self._leaving.values()):
            request = leaving.request
            if leaving.on_drained and (request.num_in_flight_tokens == 0 or request.is_finished()):
                finish, leaving.on_drained = leaving.on_drained, None
                finish()

    def resume(self, request_id: str) -> None:
        """Put a suspended request back where it was; watch it no more."""
        leaving = self._leaving.pop(request_id, None)
        if leaving is None or not leaving.suspended or leaving.request.is_finished():
            return
        if self._scheduler.requests.get(request_id) is not leaving.request:
            return
        if leaving.request.status == RequestStatus.RUNNING:
            self._rejoin(leaving.request)
        elif leaving.request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            self._scheduler._enqueue_waiting_request(leaving.request)
        else:
            self._scheduler.waiting.prepend_request(leaving.request)

    def _rejoin(self, request: Request) -> None:
        if lora.has_slot(self._scheduler, request):
            self._scheduler.running.append(request)
            return
        # Others have taken its adapter's place: it waits for one, with its blocks.
        request.status = RequestStatus.PREEMPTED
        self._scheduler._enqueue_waiting_request(request)

    def release(self, request_id: str) -> None:
        """Free a suspended request: it runs elsewhere now. No output is emitted for it."""
        leaving = self._leaving.pop(request_id, None)
        if leaving is not None and leaving.suspended:
            self._scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def may_come_back(self) -> int:
        """Suspended requests that were running: `resume` puts them back into the batch."""
        return sum(
            one.suspended and one.request.status == RequestStatus.RUNNING
            for one in self._leaving.values()
        )

    def suspended(self) -> list[Request]:
        """Requests that are out of the batch, or the queue, on our behalf."""
        return [
            one.request
            for one in self._leaving.values()
            if one.suspended and not one.request.is_finished()
        ]

    def _tail(self, request_id: str, sent: int) -> Tail:
        leaving = self._checked(request_id)
        request, known = leaving.request, self._sent(leaving, sent)
        block_ids = self._scheduler.kv_cache_manager.get_block_ids(request_id)
        places, ids = self._tables.rest(block_ids, _computed(request), known)
        known.places += places
        progress = self._progress(request, leaving.exported_outputs)
        return Tail(
            block_ids=ids,
            num_tokens=request.num_tokens,
            num_output_tokens=request.num_output_tokens,
            state=encode_progress(progress),
            places=places,
        )

    def _sent(self, leaving: Leaving, sent: int) -> Sent:
        """What the destination has; at first that is what its prefix cache held."""
        if leaving.sent is None:
            leaving.sent = Sent(sent * self._tables.block_tokens, sent)
        leaving.sent.back_to(sent)
        return leaving.sent

    def _progress(self, request: Request, since: int) -> Progress:
        stats, now = request.prefill_stats, time.monotonic()
        return Progress(
            output_token_ids=list(request.output_token_ids[since:]),
            num_computed_tokens=_computed(request),
            prefilled=stats is None,
            cached_tokens=0 if stats is None else stats.num_cached_tokens,
            generator=runner.generator_state(self._core, request.request_id),
            draft_token_ids=list(request.spec_token_ids),
            events=[(int(one.type), now - one.timestamp) for one in request.events],
        )

    def _live(self, request_id: str) -> Request:
        request = self._scheduler.requests.get(request_id)
        if request is None or request.is_finished():
            raise RequestGone("finished", f"request {request_id} is not running here any more")
        return request

    def _checked(self, request_id: str) -> Leaving:
        """The post-check: same request, still alive, not preempted since the export."""
        leaving = self._leaving.get(request_id)
        if leaving is None:
            raise RequestGone("unknown_request", f"request {request_id} was not exported")
        try:
            request = self._live(request_id)
        except RequestGone:
            del self._leaving[request_id]
            raise
        if request is not leaving.request or request.num_preemptions != leaving.num_preemptions:
            self.resume(request_id)
            raise RequestGone("preempted", f"request {request_id} was preempted at the source")
        return leaving


def _computed(request: Request) -> int:
    """Tokens whose KV is there, whatever steps are in flight.

    Of a request that was preempted a step in flight computes tokens that don't count any more.
    """
    return max(0, request.num_computed_tokens - request.num_in_flight_tokens)


def _leave_queue(scheduler: Scheduler, request: Request) -> None:
    scheduler.waiting.remove_requests([request])
    scheduler.kv_holding_waiting.remove_requests([request])
    scheduler.deferred_waiting.discard(request)
