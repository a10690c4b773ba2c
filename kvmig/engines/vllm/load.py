"""The load of an engine, read between two steps; blocks are those of `Units`."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import islice
from typing import Any, NamedTuple

from vllm.config import KVTransferConfig
from vllm.v1.core.sched.request_queue import (
    FCFSRequestQueue,
    PriorityRequestQueue,
    RequestQueue,
    SchedulingPolicy,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from kvmig.engines.base import ClassLoad, EngineLoad, PreemptionCount, RequestState
from kvmig.engines.vllm.connectors import NATIVE
from kvmig.engines.vllm.movability import NO_KINDS, UnmovableKinds, unmovable
from kvmig.engines.vllm.tables import RequestTables


class RequestListing(NamedTuple):
    """The requests at one moment between two steps."""

    states: list[RequestState]
    """States of the requests that run or are suspended."""
    waiting: list[list[Request]]
    """The requests of each queue, see `RequestHoldings.in_order`."""


class RequestHoldings:
    """The requests of one engine. Made before the first of them comes."""

    def __init__(
        self,
        scheduler: Scheduler,
        tables: RequestTables,
        unmovable_here: str,
        transfer: KVTransferConfig | None = None,
        unmovable_kinds: UnmovableKinds = NO_KINDS,
    ) -> None:
        """unmovable_here: why none of the requests can be moved, if so. transfer: the engine's KV
        connector, which may hold some. unmovable_kinds: why those of a kind can't."""
        self._scheduler = scheduler
        self._tables = tables
        self._preemptions = PreemptionCounter(scheduler)
        self._unread = UnreadRequests(scheduler)
        if transfer is not None and transfer.kv_connector != NATIVE:
            self._unread.watch_ends()
        self._queues = queues_of(scheduler, tables.demand)
        self._unmovable_here = unmovable_here
        self._transfer = transfer
        self._unmovable_kinds = unmovable_kinds

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
            unread=len(self._unread.kept),
        )

    def listing(
        self,
        most_waiting: int | None,
        suspended: Iterable[Request],
        arriving: Collection[str],
    ) -> RequestListing:
        """List all but those that arrive, which still run elsewhere; on the engine's thread.

        most_waiting: how many of the queue, from its head. O(running and `most_waiting`).
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
        return RequestListing(states, waiting)

    # -- from any thread: a request that waits doesn't change but by beginning to run

    def in_order(self, listing: RequestListing) -> list[Request]:
        """Waiting requests, the next to start first."""
        return [
            request
            for queue, waiting in zip(self._queues, listing.waiting, strict=True)
            for request in queue.in_order(waiting)
        ]

    def waiting_states(self, waiting: Iterable[Request]) -> list[RequestState]:
        """The states of requests that wait."""
        return [self._state(request, "waiting") for request in waiting]

    # -- helpers

    def _state(self, request: Request, state: str) -> RequestState:
        block_ids = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return RequestState(
            request_id=request.request_id,
            state=state,
            tokens=request.num_tokens,
            output_tokens=request.num_output_tokens,
            blocks=self._tables.count_blocks(block_ids),
            priority=request.priority,
            unmovable=unmovable(
                request, self._unmovable_here, self._transfer, self._unmovable_kinds
            ),
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
        """Load by priority; none while all are 0. A block that requests share counts for each."""
        running = self._scheduler.running
        waits = self._queues[0].by_priority + self._queues[1].by_priority
        if not any(waits) and not any(request.priority for request in running):
            return ()
        used: Counter[int] = Counter()
        for request in running:
            block_ids = self._scheduler.kv_cache_manager.get_block_ids(request.request_id)
            used[request.priority] += self._tables.count_blocks(block_ids)
        runs = Counter(request.priority for request in running)
        return tuple(
            ClassLoad(priority, runs[priority], waits[priority], used[priority])
            for priority in sorted({*runs, *waits})
        )


class PreemptionCounter:
    """Counts one engine's preemptions by priority, on its thread; vLLM's own count says neither
    whose nor why."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Puts itself before the scheduler's one place that preempts."""
        self._scheduler = scheduler
        self._times: Counter[int] = Counter()
        self._below: Counter[int] = Counter()
        self._preempt = scheduler._preempt_request
        scheduler._preempt_request = self._count

    def counts(self) -> tuple[PreemptionCount, ...]:
        """The preemptions of each priority that was ever preempted."""
        return tuple(
            PreemptionCount(priority, times, self._below[priority])
            for priority, times in sorted(self._times.items())
        )

    def _count(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self._times[request.priority] += 1
        if any(other.priority < request.priority for other in self._scheduler.running):
            self._below[request.priority] += 1
        self._preempt(request, *args, **kwargs)


class UnreadRequests:
    """The ended requests of one engine whose blocks its KV connector keeps, on the engine's thread.

    vLLM goes on to make steps while there are some, in which it learns what was read; after NIXL's
    lease it frees what was not.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.kept: set[str] = set()
        """Their ids."""
        self._scheduler = scheduler

    def watch_ends(self) -> None:
        """Wraps the scheduler's two methods that end a request and free its blocks."""
        self._end, self._free = self._scheduler._free_request, self._scheduler._free_blocks
        self._scheduler._free_request = self._end_request
        self._scheduler._free_blocks = self._free_blocks

    def _end_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        told = self._end(request, *args, **kwargs)
        if request.request_id in self._scheduler.requests:
            self.kept.add(request.request_id)
        return told

    def _free_blocks(self, request: Request) -> None:
        self.kept.discard(request.request_id)
        self._free(request)


class CountingQueue(RequestQueue):
    """Mixed into a queue of vLLM's: each of its methods is vLLM's own, and counts.

    A snapshot of the load is taken after every step. A walk through 10,000 waiting requests would
    take longer than the step; so the queues keep sums of what enters and leaves, and give their
    first requests without looking at the others.
    """

    def __init__(self, demand: Callable[[int], int]) -> None:
        """demand: blocks that it takes to admit a request, by its tokens."""
        super().__init__()
        self.blocks = 0
        """Blocks that admitting all of these requests takes."""
        self.preempted = 0
        """Requests that ran here already."""
        self.by_priority: Counter[int] = Counter()
        """Requests of each priority."""
        self._demand = demand
        self._counted: dict[Request, tuple[int, bool]] = {}

    def first(self, most: int | None) -> list[Request]:
        """The `most` requests that start first (None: all), in any order."""
        raise NotImplementedError

    def in_order(self, requests: list[Request]) -> list[Request]:
        """The requests that `first` gave, the next to start first. On any thread."""
        raise NotImplementedError

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        self._enters(request)

    def pop_request(self) -> Request:
        request = super().pop_request()
        self._leaves(request)
        return request

    def prepend_request(self, request: Request) -> None:
        super().prepend_request(request)
        self._enters(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        entering = list(requests)
        super().prepend_requests(entering)
        for request in entering:
            self._enters(request)

    def remove_request(self, request: Request) -> None:
        super().remove_request(request)
        self._leaves(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        leaving = list(requests)
        super().remove_requests(leaving)
        for request in leaving:
            self._leaves(request)

    def _enters(self, request: Request) -> None:
        if request in self._counted:
            return  # one of vLLM's methods calls another one
        blocks = self._demand(request.num_tokens)
        preempted = request.status is RequestStatus.PREEMPTED
        self._counted[request] = blocks, preempted
        self.blocks += blocks
        self.preempted += preempted
        self.by_priority[request.priority] += 1

    def _leaves(self, request: Request) -> None:
        if request not in self._counted:
            return  # it waits in another queue
        blocks, preempted = self._counted.pop(request)
        self.blocks -= blocks
        self.preempted -= preempted
        self.by_priority[request.priority] -= 1
        if not self.by_priority[request.priority]:
            del self.by_priority[request.priority]


class FcfsQueue(CountingQueue, FCFSRequestQueue):
    """First come, first served."""

    def first(self, most: int | None) -> list[Request]:
        """O(most)."""
        return list(islice(self, most))

    def in_order(self, requests: list[Request]) -> list[Request]:
        """The requests as they are."""
        return requests


class PriorityQueue(CountingQueue, PriorityRequestQueue):
    """A heap."""

    def first(self, most: int | None) -> list[Request]:
        """O(most log most): no entry of the heap goes before the one above it."""
        heap = self._heap
        if most is None or most >= len(heap):
            return list(heap)
        found: list[Request] = []
        reached = [(heap[0], 0)] if heap else []
        while reached and len(found) < most:
            request, place = heapq.heappop(reached)
            found.append(request)
            for below in (2 * place + 1, 2 * place + 2):
                if below < len(heap):
                    heapq.heappush(reached, (heap[below], below))
        return found

    def in_order(self, requests: list[Request]) -> list[Request]:
        """The requests as vLLM compares them."""
        return sorted(requests, key=lambda one: (one.priority, one.arrival_time, one.request_id))


def queues_of(
    scheduler: Scheduler, demand: Callable[[int], int]
) -> tuple[CountingQueue, CountingQueue]:
    """The scheduler's queues in the order in which it empties them, replaced by counting ones."""
    kind = PriorityQueue if scheduler.policy is SchedulingPolicy.PRIORITY else FcfsQueue
    if not isinstance(scheduler.waiting, CountingQueue):
        assert not scheduler.waiting
        assert not scheduler.kv_holding_waiting
        scheduler.waiting = kind(demand)
        scheduler.kv_holding_waiting = kind(demand)
    return scheduler.kv_holding_waiting, scheduler.waiting
