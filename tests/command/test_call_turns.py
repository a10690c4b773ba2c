"""Turns of calls at servers: the one with the fewest, no more than it may have, fair to tenants."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from kvmig.command.call_turns import CallTurns


@dataclass(eq=False)
class Server:
    state: str = "serving"
    running: int = 0
    sent: int = 0

    def begin_call(self) -> None:
        self.running += 1
        self.sent += 1


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_each_call_goes_to_the_server_with_the_fewest() -> None:
    servers = [Server(), Server(), Server(state="draining")]
    turns = CallTurns(lambda: servers, 0)
    for _ in range(10):
        await turns.take_place("a")
    assert [one.running for one in servers] == [5, 5, 0]


async def test_servers_that_could_not_answer_are_not_asked_again() -> None:
    servers = [Server(), Server()]
    turns = CallTurns(lambda: servers, 0)
    first = await turns.take_place("a")
    assert first is not None
    second = await turns.take_place("a", {first})
    assert second not in (None, first)
    assert await turns.take_place("a", set(servers)) is None


async def test_what_has_no_place_waits_and_tenants_take_turns() -> None:
    server = Server()
    turns = CallTurns(lambda: [server], 1)
    await turns.take_place("first")
    order: list[str] = []

    async def call(tenant: str) -> None:
        await turns.take_place(tenant)
        order.append(tenant)

    tasks = [asyncio.create_task(call(one)) for one in ("a", "a", "a", "b")]
    await settled()
    assert order == []
    for number in range(1, 5):
        server.running -= 1
        turns.grant()
        await settled()
        assert (len(order), server.running) == (number, 1)
    await asyncio.gather(*tasks)
    assert order == ["a", "b", "a", "a"]


async def test_no_newcomer_takes_the_place_of_who_waits() -> None:
    server = Server()
    turns = CallTurns(lambda: [server], 1)
    await turns.take_place("a")
    waiting = asyncio.create_task(turns.take_place("a"))
    await settled()
    server.running -= 1
    turns.grant()
    newcomer = asyncio.create_task(turns.take_place("b"))
    await settled()
    assert (waiting.done(), newcomer.done(), server.running) == (True, False, 1)
    newcomer.cancel()
    await asyncio.wait([newcomer])


async def test_a_place_that_a_waiting_call_gives_up_goes_to_the_next() -> None:
    server = Server()
    turns = CallTurns(lambda: [server], 1)
    await turns.take_place("a")
    leaves, stays = (asyncio.create_task(turns.take_place("a")) for _ in range(2))
    await settled()
    server.running -= 1
    turns.grant()
    leaves.cancel()
    await settled()
    assert stays.done()
    assert server.running == 1


async def test_calls_wait_for_a_server_that_starts_and_end_when_none_will() -> None:
    server = Server(state="starting")
    turns = CallTurns(lambda: [server], 0)
    waiting = [asyncio.create_task(turns.take_place("a")) for _ in range(3)]
    await settled()
    assert not any(one.done() for one in waiting)
    server.state = "failed"
    turns.grant()
    assert await asyncio.gather(*waiting) == [None] * 3


async def test_a_server_that_has_started_gets_all_that_wait() -> None:
    servers = [Server(running=2), Server(state="starting")]
    turns = CallTurns(lambda: servers, 2)
    waiting = [asyncio.create_task(turns.take_place("a")) for _ in range(3)]
    await settled()
    servers[1].state = "serving"
    turns.grant()
    await settled()
    assert [one.done() for one in waiting] == [True, True, False]
    assert [one.running for one in servers] == [2, 2]
    waiting[2].cancel()
    await asyncio.wait(waiting)


async def test_a_call_that_a_server_could_not_answer_waits_for_another_that_starts() -> None:
    tried, starting = Server(), Server(state="starting")
    turns = CallTurns(lambda: [tried, starting], 0)
    call = asyncio.create_task(turns.take_place("a", {tried}))
    await settled()
    assert not call.done()
    starting.state = "serving"
    turns.grant()
    assert await call is starting


async def test_a_call_does_not_wait_for_a_server_that_it_has_tried_to_start_again() -> None:
    tried = Server(state="starting")
    turns = CallTurns(lambda: [tried], 0)
    assert await turns.take_place("a", {tried}) is None


async def test_a_call_that_waits_for_another_server_ends_when_that_fails() -> None:
    tried, starting = Server(), Server(state="starting")
    turns = CallTurns(lambda: [tried, starting], 0)
    call = asyncio.create_task(turns.take_place("a", {tried}))
    await settled()
    starting.state = "failed"
    turns.grant()
    assert await call is None


async def test_a_place_that_a_call_may_not_have_wakes_it_once_and_goes_to_others() -> None:
    looks = 0
    tried, full = Server(running=1), Server(running=1)

    def servers() -> list[Server]:
        nonlocal looks
        looks += 1
        return [tried, full]

    turns = CallTurns(servers, 1)
    again = asyncio.create_task(turns.take_place("a", {tried}))
    new = asyncio.create_task(turns.take_place("b"))
    await settled()
    tried.running -= 1
    turns.grant()
    await settled()
    assert (again.done(), new.done(), tried.running) == (False, True, 1)
    before = looks
    await settled()
    assert looks == before, "nothing turns round while nothing changes"
    full.running -= 1
    turns.grant()
    assert await again is full


async def test_a_call_that_leaves_while_it_waits_for_another_server_is_forgotten() -> None:
    tried, starting = Server(), Server(state="starting")
    turns = CallTurns(lambda: [tried, starting], 1)
    call = asyncio.create_task(turns.take_place("a", {tried}))
    await settled()
    call.cancel()
    await asyncio.wait([call])
    starting.state = "serving"
    turns.grant()
    assert await turns.take_place("b", {tried}) is starting


async def test_a_call_turns_round_no_more_while_only_a_server_that_it_has_tried_is_free() -> None:
    looks = 0
    tried, full = Server(), Server(running=1)

    def servers() -> list[Server]:
        nonlocal looks
        looks += 1
        return [tried, full]

    turns = CallTurns(servers, 1)
    call = asyncio.create_task(turns.take_place("a", {tried}))
    await settled()
    turns.grant()
    await settled()
    before = looks
    await settled()
    assert looks == before
    full.running -= 1
    turns.grant()
    assert await call is full
