"""A tenant with many requests makes another's wait no longer than its share."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.background import cancel_tasks
from kvmig.core.errors import NoInstance
from kvmig.core.fair_queue import FairQueue
from kvmig.frontend.dispatch_turns import FRESH, QUEUED, DispatchTurns, QueueLengths


def test_the_first_of_another_tenant_waits_for_one_request_and_not_for_all() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(500):
        queue.enter(0, "many", f"many {number}")
    queue.enter(0, "one", "one 0")
    assert [queue.pop(), queue.pop(), queue.pop()] == ["many 0", "one 0", "many 1"]


def test_a_class_that_goes_first_goes_first() -> None:
    queue: FairQueue[str] = FairQueue()
    for priority, tenant in ((0, "a"), (1, "b"), (-1, "a"), (-1, "a"), (-1, "c")):
        queue.enter(priority, tenant, f"{priority} {tenant}")
    assert [queue.pop() for _ in range(6)] == ["-1 a", "-1 c", "-1 a", "0 a", "1 b", None]


TENANTS = st.sampled_from("abc")


@given(st.lists(st.tuples(TENANTS, st.sampled_from(["enter", "pop", "leave"])), max_size=80))
def test_nobody_is_passed_over_twice_by_the_same_tenant(events: list[tuple[str, str]]) -> None:
    queue: FairQueue[int] = FairQueue()
    waiting: dict[int, str] = {}
    turns: dict[str, list[str]] = {}  # of whom each waiting tenant has seen go since it came
    for number, (tenant, what) in enumerate(events):
        mine = [one for one, whose in waiting.items() if whose == tenant]
        if what == "enter":
            queue.enter(0, tenant, number)
            waiting[number] = tenant
            turns.setdefault(tenant, [])
        elif what == "leave" and mine:
            queue.remove_waiting(0, tenant, mine[0])
            del waiting[mine[0]]
        elif what == "pop" and waiting:
            one = queue.pop()
            assert one is not None
            whose = waiting.pop(one)
            assert all(one < other for other, owner in waiting.items() if owner == whose)
            for other, seen in turns.items():
                if other != whose:
                    seen.append(whose)
                    assert len(seen) == len(set(seen))
            turns[whose] = []
        turns = {one: seen for one, seen in turns.items() if one in waiting.values()}
        assert len(queue) == len(waiting)


class Engines:
    """What instances tell, and what was sent to them."""

    def __init__(self, instances: int = 1) -> None:
        self.queues = QueueLengths(instances, 0)
        self.fresh: set[str] = set()
        self.sent: list[str] = []
        self.turns = DispatchTurns(lambda: self.queues, self.fresh.__contains__)

    async def submit(self, name: str, tenant: str, priority: int = 0) -> None:
        await self.turns.wait(name, priority, tenant)
        self.fresh.add(name)
        self.sent.append(name)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_many_are_held_back_and_the_other_tenants_goes_next() -> None:
    engines = Engines()
    tasks = [asyncio.create_task(engines.submit(f"m{n}", "many")) for n in range(100)]
    await settle()
    assert len(engines.sent) == FRESH
    tasks.append(asyncio.create_task(engines.submit("one", "one")))
    await settle()
    assert len(engines.turns) == 101 - FRESH
    engines.fresh -= {"m0", "m1"}  # they have their first tokens
    engines.turns.grant_turns()
    await settle()
    assert engines.sent[FRESH:] == [f"m{FRESH}", "one"]
    await cancel_tasks(*tasks)
    assert len(engines.turns) == 0


async def test_none_goes_on_while_the_queues_of_instances_are_long() -> None:
    engines = Engines(instances=2)
    engines.queues = QueueLengths(2, 2 * QUEUED)
    task = asyncio.create_task(engines.submit("a", "a"))
    await settle()
    engines.turns.grant_turns()
    await settle()
    assert not engines.sent
    engines.queues = QueueLengths(2, 2 * QUEUED - 1)
    engines.turns.grant_turns()
    await task


async def test_one_that_leaves_gives_its_turn_to_the_next() -> None:
    engines = Engines()
    engines.queues = QueueLengths(1, QUEUED)
    tasks = [asyncio.create_task(engines.submit(name, "a")) for name in "abc"]
    await settle()
    tasks[0].cancel()
    await settle()
    engines.queues = QueueLengths(1, 0)
    engines.turns.grant_turns()
    await asyncio.gather(*tasks[1:])
    assert engines.sent == ["b", "c"]


async def test_without_an_instance_and_at_the_end_nobody_waits() -> None:
    engines = Engines()
    engines.queues = QueueLengths(0, 0)
    await engines.submit("a", "a")
    engines.queues = QueueLengths(1, QUEUED)
    task = asyncio.create_task(engines.submit("b", "a"))
    await settle()
    engines.turns.give_up("the server stops")
    with pytest.raises(NoInstance, match="the server stops"):
        await task
    with pytest.raises(NoInstance):
        await engines.submit("c", "a")


async def test_reports_that_come_at_once_send_no_more_than_there_is_room_for() -> None:
    engines = Engines(instances=2)
    tasks = [asyncio.create_task(engines.submit(f"m{n}", "many")) for n in range(200)]
    await settle()
    assert len(engines.sent) == 2 * FRESH
    engines.fresh.clear()  # they have their first tokens
    engines.turns.grant_turns()
    engines.turns.grant_turns()
    await settle()
    assert len(engines.sent) == 4 * FRESH
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_one_that_leaves_as_its_turn_comes_takes_no_room() -> None:
    engines = Engines()
    engines.queues = QueueLengths(1, QUEUED)
    tasks = [asyncio.create_task(engines.submit(f"m{n}", "a")) for n in range(2 * FRESH)]
    await settle()
    engines.queues = QueueLengths(1, 0)
    engines.turns.grant_turns()
    for task in tasks[:FRESH]:
        task.cancel()
    await settle()
    engines.turns.grant_turns()
    await asyncio.gather(*tasks[FRESH:])
    assert len(engines.sent) == FRESH
