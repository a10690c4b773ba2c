"""What the vLLM adapter says of a long queue, and what that costs: on vLLM's own scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from time import thread_time
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench import queues
from tests.support.examples import examples

if TYPE_CHECKING:
    from kvmig.engines.vllm.load import RequestHoldings

pytestmark = pytest.mark.engine

FEW, MANY = 10, 10_000


class Queue:
    """A vLLM scheduler in which requests only wait."""

    def __init__(self, policy: str) -> None:
        from kvmig.engines.vllm.load import RequestHoldings
        from kvmig.engines.vllm.subblocks import SubBlocks
        from kvmig.engines.vllm.tables import RequestTables

        self.scheduler: Any = queues.scheduler(policy)
        tables = RequestTables(self.scheduler, SubBlocks(queues.BLOCK_TOKENS))
        self.holdings: RequestHoldings = RequestHoldings(self.scheduler, tables, "")

    def clear(self) -> None:
        from vllm.v1.request import RequestStatus

        known = list(self.scheduler.requests)
        self.scheduler.finish_requests(known, RequestStatus.FINISHED_ABORTED)

    def fill(self, count: int) -> None:
        for number in range(len(self.scheduler.waiting), count):
            self.scheduler.add_request(queues.request(f"r{number}", 20 + number % 50, number % 2))

    def in_order(self) -> list[Any]:
        """By a walk through it, as vLLM itself would pop it."""
        return [*self.scheduler.kv_holding_waiting, *self.scheduler.waiting]

    def listed(self, most: int | None) -> list[str]:
        listing = self.holdings.listing(most, [], ())
        states = self.holdings.waiting_states(self.holdings.in_order(listing))
        return [one.request_id for one in states]


@pytest.fixture(scope="module", params=["fcfs", "priority"])
def one_of_each(request: pytest.FixtureRequest) -> Queue:
    return Queue(request.param)


@pytest.fixture
def queue(one_of_each: Queue) -> Queue:
    one_of_each.clear()
    return one_of_each


def least_us(work: Callable[[], object]) -> float:
    def once() -> float:
        began = thread_time()
        work()
        return (thread_time() - began) * 1e6

    return min(once() for _ in range(30))


def test_a_snapshot_costs_the_same_with_ten_and_ten_thousand_waiting(queue: Queue) -> None:
    queue.fill(FEW)
    few = least_us(queue.holdings.load)
    queue.fill(MANY)
    assert queue.holdings.load().waiting == MANY
    assert least_us(queue.holdings.load) < 5 * few


def test_a_list_of_the_first_costs_the_same_with_ten_and_ten_thousand_waiting(
    queue: Queue,
) -> None:
    queue.fill(FEW)
    few = least_us(lambda: queue.listed(FEW))
    queue.fill(MANY)
    assert queue.listed(FEW) == [one.request_id for one in queue.in_order()[:FEW]]
    assert least_us(lambda: queue.listed(FEW)) < 5 * few


def test_a_list_of_all_keeps_the_engine_for_a_millisecond_at_most(queue: Queue) -> None:
    queue.fill(MANY)
    assert len(queue.listed(None)) == MANY
    took_us = least_us(lambda: queue.holdings.listing(None, [], ()))
    assert took_us < 1000


ENTERS, STARTS, RETURNS, LEAVES = range(4)


@examples(60)
@given(moves=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(-1, 2))))
def test_what_is_told_of_a_queue_is_what_a_walk_through_it_finds(
    one_of_each: Queue, moves: list[tuple[int, int, int]]
) -> None:
    from vllm.v1.request import RequestStatus

    one_of_each.clear()
    scheduler, started = one_of_each.scheduler, []
    for number, (move, which, priority) in enumerate(moves):
        waiting = one_of_each.in_order()
        if move == ENTERS:
            scheduler.add_request(queues.request(f"r{number}", 1 + which, priority))
        elif move == STARTS and waiting:
            started.append(scheduler.waiting.pop_request())
        elif move == RETURNS and started:
            preempted = started.pop(which % len(started))
            preempted.status = RequestStatus.PREEMPTED
            preempted.append_output_token_ids([5] * which)
            scheduler.waiting.prepend_request(preempted)
        elif move == LEAVES and waiting:
            gone = waiting[which % len(waiting)].request_id
            scheduler.finish_requests(gone, RequestStatus.FINISHED_ABORTED)

    queue, load = one_of_each.in_order(), one_of_each.holdings.load()
    blocks = [-(-one.num_tokens // queues.BLOCK_TOKENS) for one in queue]
    by_priority = Counter(one.priority for one in queue)
    assert (load.waiting, load.waiting_blocks) == (len(queue), sum(blocks))
    assert load.head_blocks == (blocks[0] if blocks else 0)
    assert load.preempted_waiting == sum(one.status is RequestStatus.PREEMPTED for one in queue)
    assert {one.priority: one.waiting for one in load.classes} == (
        by_priority if any(by_priority) else {}
    )
    for most in (0, 1, 3, None):
        assert one_of_each.listed(most) == [one.request_id for one in queue][:most]
