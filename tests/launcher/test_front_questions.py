"""Front ends that ask each other by way of their launcher, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvmig.asgi.errors import LauncherGone
from kvmig.controlplane.front_messages import (
    CarrySessions,
    FindSession,
    FrontAnswer,
    FrontAsked,
    FrontQuestion,
    FrontReply,
    KnownSession,
    SessionsCarried,
    SessionsFound,
)
from kvmig.controlplane.messages import StopDrain
from kvmig.frontend.launcher_link import LauncherLink
from kvmig.launcher.front_questions import FrontQuestions
from kvmig.rpc.messages import RpcMessage
from tests.support.made_up_cluster import SECRET, World, drain
from tests.support.waiting import until


class TalkingFront:
    """A front end that answers with its number, and keeps what it was asked."""

    def __init__(self, it: World, name: str, number: int) -> None:
        self.asked: list[FrontAsked] = []
        self.number = number
        self.heard = 0
        self.silent = False
        self.carried = asyncio.Event()
        self.report = SessionsCarried()
        self.link = LauncherLink(it.control.endpoint, SECRET, name, self.hear)
        self.link.reply = self.reply

    def hear(self, news: object) -> None:
        self.heard += 1

    async def reply(self, asked: FrontAsked) -> FrontReply:
        self.asked.append(asked)
        if isinstance(asked, CarrySessions):
            await self.carried.wait()
            return self.report
        if self.silent:
            await asyncio.Event().wait()
        return SessionsFound((KnownSession(self.number, 1.5),))


@asynccontextmanager
async def talking(it: World, name: str, number: int) -> AsyncIterator[TalkingFront]:
    made = TalkingFront(it, name, number)
    try:
        await until(lambda: made.heard)
        yield made
    finally:
        await made.link.close()


@pytest.fixture
async def second(it: World) -> AsyncIterator[TalkingFront]:
    async with talking(it, "front-2", 2) as made:
        yield made


@pytest.fixture
async def third(it: World) -> AsyncIterator[TalkingFront]:
    async with talking(it, "front-3", 2**64 - 1) as made:
        yield made


async def test_all_others_are_asked_and_their_replies_come_together(
    it: World, second: TalkingFront, third: TalkingFront
) -> None:
    replies = await it.link.ask_fronts(FindSession(7))
    assert {
        name: [session.owner for session in told.sessions]
        for name, told in replies.items()
        if isinstance(told, SessionsFound)
    } == {"front-2": [2], "front-3": [2**64 - 1]}
    assert second.asked == third.asked == [FindSession(7)]


async def test_one_of_them_can_be_asked_alone(
    it: World, second: TalkingFront, third: TalkingFront
) -> None:
    assert list(await it.link.ask_fronts(FindSession(7), "front-3")) == ["front-3"]
    assert (second.asked, third.asked) == ([], [FindSession(7)])
    assert await it.link.ask_fronts(FindSession(7), "front-9") == {}


async def test_one_that_is_gone_or_silent_keeps_no_answer_back(
    it: World, second: TalkingFront, third: TalkingFront
) -> None:
    second.silent = True
    assert list(await it.link.ask_fronts(FindSession(7), timeout_s=0.2)) == ["front-3"]
    await third.link.close()
    second.silent = False
    await until(lambda: len(second.asked) == 1)
    replies = await it.link.ask_fronts(FindSession(7), timeout_s=5.0)
    assert "front-2" in replies


async def test_who_asks_without_a_launcher_gets_an_error(it: World) -> None:
    await it.control.close()
    with pytest.raises(LauncherGone):
        await it.link.ask_fronts(FindSession(7), timeout_s=0.1)


async def test_an_answer_of_another_front_end_is_none() -> None:
    sent: list[tuple[bytes, RpcMessage]] = []

    def send(front: bytes, message: RpcMessage) -> bool:
        sent.append((front, message))
        return front != b"gone"

    questions = FrontQuestions(send)
    asking = asyncio.create_task(questions.ask_all(FindSession(7), [b"a", b"gone"], 5.0))
    await until(lambda: len(sent) == 2)
    (_, question), _ = sent
    assert isinstance(question, FrontQuestion)
    questions.take_answer(b"b", FrontAnswer(question.call_id, SessionsFound(running=(1,))))
    questions.take_answer(b"a", FrontAnswer(question.call_id, SessionsFound(running=(2,))))
    questions.take_answer(b"a", FrontAnswer(question.call_id, SessionsFound(running=(3,))))
    assert await asking == {"a": SessionsFound(running=(2,))}
    assert len(questions) == 0


def orders(front: TalkingFront) -> list[CarrySessions]:
    return [one for one in front.asked if isinstance(one, CarrySessions)]


async def test_a_drain_ends_once_the_idle_sessions_have_gone_and_reports_them(
    it: World, second: TalkingFront, third: TalkingFront
) -> None:
    third.carried.set()
    third.report = SessionsCarried(1, 500_000, {"no_room": 1})
    await it.link.order(drain("i0"))
    await until(lambda: it.launcher.process("i0").state == "draining" and orders(second))
    await asyncio.sleep(0.2)
    assert it.front.members[0].detail == ""
    second.report = SessionsCarried(2, 1_000_000)
    second.carried.set()
    # Each is asked again once nothing runs there: what it has left then stays.
    words = "6 idle sessions moved (3.0 MB), 1 did not (1 no_room)"
    await until(lambda: it.front.members[0].detail == f"it is empty; {words}")
    assert f"instance i0: {words}" in it.said
    first, _ = orders(second)
    assert (first.instance, first.owners) == ("i0", (2,))
    assert 0 < first.within_s <= 300
    assert [one.owners for one in orders(third)] == [(2**64 - 1,)] * 2


async def test_no_session_keeps_an_instance_longer_than_its_deadline(
    it: World, second: TalkingFront
) -> None:
    await it.link.order(drain("i0", deadline_s=0.1, leave=True))
    await it.hears(i1="serving")
    assert orders(second)[0].within_s <= 0.1


async def test_a_drain_waits_for_no_front_end_that_is_gone(
    it: World, second: TalkingFront, third: TalkingFront
) -> None:
    third.carried.set()
    await it.link.order(drain("i0"))
    await until(lambda: orders(second))
    await second.link.close()
    # Its launcher starts another one in its place.
    async with talking(it, "front-4", 4) as another:
        another.carried.set()
        await until(lambda: it.front.members[0].detail == "it is empty")


async def test_an_instance_that_is_let_serve_again_waits_for_no_sessions(
    it: World, second: TalkingFront
) -> None:
    await it.link.order(drain("i0"))
    await until(lambda: orders(second))
    await it.hears(i0="draining", i1="serving")
    await it.link.order(lambda number: StopDrain(number, "i0"))
    await it.hears(i0="serving", i1="serving")


async def test_a_drain_of_an_instance_without_sessions_reports_none(it: World) -> None:
    await it.link.order(drain("i0"))
    await until(lambda: it.front.members[0].detail == "it is empty")
