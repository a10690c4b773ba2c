"""Idle sessions that leave an instance that drains, over llumlets without engines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest

from kvmig.controlplane.front_messages import CarrySessions, SessionsCarried
from kvmig.controlplane.messages import LoadReport, Migrated, MoveSession
from kvmig.engines.client_request import ClientRequest
from kvmig.engines.held_marks import MARK_METHOD, PrefixNews, pack_marks
from kvmig.rpc.messages import RpcMessage
from tests.frontend.test_session_moves import key_of, of_session
from tests.support.fake_llumlet import LOAD, Cluster, FakeLlumlet, cluster, report
from tests.support.waiting import until

OWNERS = {name: key_of(name) for name in ("a", "b", "c")}


class MovingLlumlet:
    """Keeps the orders of a llumlet's sessions, and answers each with the next of `reasons`."""

    def __init__(self, llumlet: FakeLlumlet, *reasons: str) -> None:
        self.orders: list[MoveSession] = []
        self.reasons = list(reasons)
        self._llumlet = llumlet
        llumlet.on[MoveSession] = self.answer

    def answer(self, message: RpcMessage) -> RpcMessage:
        assert isinstance(message, MoveSession)
        self.orders.append(message)
        reason = self.reasons.pop(0) if self.reasons else ""
        done = report(message.request_id, self._llumlet.instance, message.destination, reason)
        return Migrated(message.call_id, done)


@asynccontextmanager
async def idle(*sessions: str, instances: int = 3) -> AsyncIterator[tuple[Cluster, FakeLlumlet]]:
    """Sessions whose requests have ended at one instance, with an answer of a token more each."""
    async with cluster(instances=instances) as it:
        source = it.llumlets[0]
        for llumlet in it.llumlets[1:]:
            llumlet.report(LOAD, "draining")
        await until(lambda: all(it.state(one) == "draining" for one in it.llumlets[1:]))
        for number, name in enumerate(sessions):
            with of_session(name):
                await it.router.submit(ClientRequest(name, "x", 20, 0, [b"payload"]))
            source.step((name, 0, 0, [7] * (number + 1)), last=[name])
            await until(lambda: not it.router.live())
        for llumlet in it.llumlets[1:]:
            llumlet.report(LOAD, "serving")
        await until(lambda: all(it.state(one) == "serving" for one in it.llumlets))
        yield it, source


async def drained(it: Cluster, source: FakeLlumlet) -> None:
    source.report(LOAD, "draining")
    await until(lambda: it.state(source) == "draining")


async def carry(
    it: Cluster, within_s: float = 60.0, owners: tuple[int, ...] | None = None
) -> SessionsCarried:
    answer = await it.router.sessions.reply(CarrySessions("0", within_s, owners))
    assert isinstance(answer, SessionsCarried)
    return answer


def places(it: Cluster, *sessions: str) -> list[str]:
    return [it.router.sessions.memory.find(OWNERS[name]).instance for name in sessions]


async def test_all_leave_one_after_the_other_and_give_way_to_requests() -> None:
    async with idle("a", "b") as (it, source):
        moves = MovingLlumlet(source)
        await drained(it, source)
        assert await carry(it) == SessionsCarried(2, 8000)
        assert [one.output_token_ids for one in moves.orders] == [(7, 7), (7,)], "the last first"
        assert all(one.patience_ms > 0 for one in moves.orders)
        assert "0" not in places(it, "a", "b")


async def test_none_leaves_before_the_instance_says_that_it_drains() -> None:
    async with idle("a") as (it, source):
        moves = MovingLlumlet(source)
        carrying = asyncio.create_task(carry(it))
        await asyncio.sleep(0.2)
        assert moves.orders == []
        await drained(it, source)
        assert (await carrying).moved == 1


async def test_one_that_gave_way_to_a_request_is_tried_again() -> None:
    async with idle("a") as (it, source):
        moves = MovingLlumlet(source, "busy", "busy")
        await drained(it, source)
        assert await carry(it) == SessionsCarried(1, 4000)
        assert len(moves.orders) == 3


async def test_what_stays_is_counted_by_its_reason() -> None:
    async with idle("a", "b", "c") as (it, source):
        MovingLlumlet(source, "no_blocks", "finished")
        await drained(it, source)
        assert await carry(it) == SessionsCarried(1, 4000, {"no_blocks": 1})
        assert places(it, "c", "b") == ["0", "0"]


async def test_where_sessions_can_not_move_one_answer_is_enough() -> None:
    async with idle("a", "b", "c") as (it, source):
        moves = MovingLlumlet(source, "unsupported")
        await drained(it, source)
        assert await carry(it) == SessionsCarried(0, 0, {"unsupported": 3})
        assert len(moves.orders) == 1


@pytest.mark.parametrize("reasons", [(), ("busy",) * 999])
async def test_at_the_deadline_the_rest_stays(reasons: tuple[str, ...]) -> None:
    async with idle("a", "b") as (it, source):
        moves = MovingLlumlet(source, *reasons)
        await drained(it, source)
        left = await carry(it, 0.3 if reasons else 0.0)
        assert left == SessionsCarried(0, 0, {"deadline": 2})
        assert len(moves.orders) > 0 if reasons else moves.orders == []


async def test_without_an_instance_of_the_same_arithmetic_all_stay() -> None:
    async with idle("a", "b", instances=2) as (it, source):
        it.llumlets[1].numerics = "other"
        it.llumlets[1].report()
        await drained(it, source)
        await until(lambda: it.router.fleet.rooms_beside("0") == {})
        assert await carry(it) == SessionsCarried(0, 0, {"no_destination": 2})


async def test_only_those_whose_last_call_was_served_here_leave() -> None:
    async with idle("a", "b") as (it, source):
        moves = MovingLlumlet(source)
        await drained(it, source)
        assert (await carry(it, owners=(OWNERS["a"],))).moved == 1
        assert [one.output_token_ids for one in moves.orders] == [(7,)]
        assert places(it, "b") == ["0"]


async def test_an_instance_that_serves_again_keeps_its_sessions() -> None:
    async with idle("a") as (it, source):
        MovingLlumlet(source, *["busy"] * 999)
        await drained(it, source)
        carrying = asyncio.create_task(carry(it))
        await asyncio.sleep(0.1)
        source.report(LOAD, "serving")
        assert await carrying == SessionsCarried(0, 0, {"not_draining": 1})


async def test_what_reports_show_decides_what_leaves() -> None:
    async with cluster(instances=2) as it:
        source, other = it.llumlets
        other.report(LOAD, "draining")
        await until(lambda: it.state(other) == "draining")
        prompts = {"a": [5, 6], "b": [5, 8]}
        for name in prompts:
            with of_session(name):
                marks = partial(prompts.__getitem__, name)
                await it.router.submit(ClientRequest(name, "x", 256, 0, [b"p"], marks=marks))
            source.step((name, 0, 0, [7]), last=[name])
        await until(lambda: not it.router.live())
        moves = MovingLlumlet(source)
        for llumlet, state, held in (
            (source, "draining", [5, 6, 8]), (other, "serving", [5, 6]),
        ):  # fmt: skip
            llumlet.report(LOAD, state)
            news = PrefixNews(1, True, pack_marks(held), method=MARK_METHOD)
            told = LoadReport(
                llumlet.instance, 9999, LOAD, 0, 0, state, numerics="n", prefixes=news
            )
            llumlet.send(told)
        await until(lambda: it.router.fleet.held_elsewhere([5, 6], "0") == (256, {"1": 256}))
        done = await carry(it)
        assert (done.moved, done.stayed) == (2, {})  # the answer of "a" is nowhere else
        assert [len(one.output_token_ids) for one in moves.orders] == [1, 1]
