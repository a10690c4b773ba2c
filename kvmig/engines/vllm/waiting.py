"""vLLM's queues of waiting requests, which say at any length at once what waits in them.

A snapshot of the load is taken after every step, between two steps. A walk through 10,000
waiting requests would take longer than the step; so the queues keep sums of what enters and
leaves, and give their first requests without looking at the others.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice

from vllm.v1.core.sched.request_queue import (
    FCFSRequestQueue,
    PriorityRequestQueue,
    RequestQueue,
    SchedulingPolicy,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus


class CountingQueue(RequestQueue):
    """Mixed into a queue of vLLM's: each of its methods is vLLM's own, and counts."""

    def __init__(self, demand: Callable[[int], int]) -> None:
        """demand: blocks that admitting a request of so many tokens takes."""
        super().__init__()
        self.blocks = 0
        """That admitting all of these requests takes."""
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
        """What `first` gave, the next to start first. Needn't run on the engine's thread."""
        raise NotImplementedError

    def add_request(self, request: Request) -> None:
        """See `RequestQueue`."""
        super().add_request(request)
        self._enters(request)

    def pop_request(self) -> Request:
        """See `RequestQueue`."""
        request = super().pop_request()
        self._leaves(request)
        return request

    def prepend_request(self, request: Request) -> None:
        """See `RequestQueue`."""
        super().prepend_request(request)
        self._enters(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """See `RequestQueue`."""
        entering = list(requests)
        super().prepend_requests(entering)
        for request in entering:
            self._enters(request)

    def remove_request(self, request: Request) -> None:
        """See `RequestQueue`."""
        super().remove_request(request)
        self._leaves(request)

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """See `RequestQueue`."""
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
        """As they are."""
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
        """As vLLM compares requests."""
        return sorted(requests, key=lambda one: (one.priority, one.arrival_time, one.request_id))


def queues_of(
    scheduler: Scheduler, demand: Callable[[int], int]
) -> tuple[CountingQueue, CountingQueue]:
    """Its queues in the order in which it empties them; made counting ones while still empty."""
    kind = PriorityQueue if scheduler.policy is SchedulingPolicy.PRIORITY else FcfsQueue
    if not isinstance(scheduler.waiting, CountingQueue):
        assert not scheduler.waiting
        assert not scheduler.kv_holding_waiting
        scheduler.waiting = kind(demand)
        scheduler.kv_holding_waiting = kind(demand)
    return scheduler.kv_holding_waiting, scheduler.waiting
