"""What an engine holds, read between two steps; blocks are those of `Units`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kvmig.engines.base import ClassLoad, EngineLoad, RequestState
from kvmig.engines.vllm.movable import unmovable
from kvmig.engines.vllm.preemptions import Preemptions
from kvmig.engines.vllm.tables import Tables
from kvmig.engines.vllm.waiting import queues_of


class Listing(NamedTuple):
    """The requests at one moment between two steps."""

    states: list[RequestState]
    """Of those that run or are suspended."""
    waiting: list[list[Request]]
    """Of each queue, see `Holdings.in_order`."""


class Holdings:
    """One engine's requests. Made before the first of them comes."""

    def __init__(self, scheduler: Scheduler, tables: Tables, unmovable_here: str) -> None:
        """unmovable_here: why none of the requests can be moved, if so."""
        self._scheduler = scheduler
        self._tables = tables
        self._preemptions = Preemptions(scheduler)
        self._queues = queues_of(scheduler, tables.demand)
        self._unmovable_here = unmovable_here

    def load(self) -> EngineLoad:
        """Blocks and counts, on the engine's thread. O(running requests), however many wait."""
        scheduler, per_block = self._scheduler, self._tables.units.per_block
        pool = scheduler.kv_cache_manager.block_pool
        total = pool.num_gpu_blocks - 1  # one is vLLM's null block
        head = next((queue.peek_request() for queue in self._queues if len(queue)), None)
        return EngineLoad(
            total_blocks=total * per_block,
            used_blocks=(total - pool.get_num_free_blocks()) * per_block,
            running=len(scheduler.running),
            waiting=sum(len(queue) for queue in self._queues),
            head_blocks=0 if head is None else self._tables.demand(head.num_tokens),
            waiting_blocks=sum(queue.blocks for queue in self._queues),
            classes=self._classes(),
            preempted=self._preemptions.counts(),
            seats=scheduler.max_num_running_reqs,
            preempted_waiting=sum(queue.preempted for queue in self._queues),
            prefill_blocks=sum(self._left(request) for request in scheduler.running),
        )

    def listing(
        self,
        most_waiting: int | None,
        suspended: Iterable[Request],
        arriving: Collection[str],
    ) -> Listing:
        """On the engine's thread: all but those that arrive, for they run elsewhere still.

        most_waiting: of the queue only so many, from its head. O(running and `most_waiting`).
        """
        states = [
            self._state(request, "running")
            for request in self._scheduler.running
            if request.request_id not in arriving
        ]
        states += [self._state(request, "suspended") for request in suspended]
        waiting: list[list[Request]] = []
        for queue in self._queues:
            left = None if most_waiting is None else most_waiting - sum(map(len, waiting))
            first = queue.first(left)
            if arriving:
                first = [one for one in first if one.request_id not in arriving]
            waiting.append(first)
        return Listing(states, waiting)

    # -- from any thread: a request that waits doesn't change but by beginning to run

    def in_order(self, listing: Listing) -> list[Request]:
        """All that wait, the next to start first."""
        return [
            request
            for queue, waiting in zip(self._queues, listing.waiting, strict=True)
            for request in queue.in_order(waiting)
        ]

    def waiting_states(self, waiting: Iterable[Request]) -> list[RequestState]:
        """Of requests that wait."""
        return [self._state(request, "waiting") for request in waiting]

    # -- helpers

    def _state(self, request: Request, state: str) -> RequestState:
        block_ids = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return RequestState(
            request_id=request.request_id,
            state=state,
            tokens=request.num_tokens,
            output_tokens=request.num_output_tokens,
            blocks=self._tables.held(block_ids),
            priority=request.priority,
            unmovable=unmovable(request, self._unmovable_here),
            wanted_blocks=self._tables.demand(request.num_tokens) if state == "waiting" else 0,
            arrived_s=request.arrival_time,
        )

    def _left(self, request: Request) -> int:
        """Blocks whose KV a running request lacks before it decodes; steps in flight count as done.

        One that decodes has its last token to compute, and no more.
        """
        tokens = request.num_tokens - request.num_computed_tokens
        return 0 if tokens <= 1 else self._tables.demand(tokens)

    def _classes(self) -> tuple[ClassLoad, ...]:
        """By priority; none while all are 0. A block that requests share counts for each."""
        running = self._scheduler.running
        waits = self._queues[0].by_priority + self._queues[1].by_priority
        if not any(waits) and not any(request.priority for request in running):
            return ()
        used: Counter[int] = Counter()
        for request in running:
            block_ids = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
            used[request.priority] += self._tables.held(block_ids)
        runs = Counter(request.priority for request in running)
        return tuple(
            ClassLoad(priority, runs[priority], waits[priority], used[priority])
            for priority in sorted({*runs, *waits})
        )
