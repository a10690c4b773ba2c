"""What goes on after an answer is held by the connection of the fleet's door, and ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.types import Message

from kvmig.asgi.call import HttpCall
from kvmig.frontend.background import OpenAnswer
from tests.support.waiting import until

LAST: Message = {"type": "http.response.body", "body": b"{}", "more_body": False}
END: Message = {"type": "http.response.body", "body": b"", "more_body": False}


class Client:
    """Takes what is sent, and leaves when it is told to."""

    def __init__(self) -> None:
        self.got: list[Message] = []
        self.leaves = asyncio.Event()

    async def send(self, message: Message) -> None:
        self.got.append(message)

    async def receive(self) -> Message:
        await self.leaves.wait()
        return {"type": "http.disconnect"}


@asynccontextmanager
async def answered(call: HttpCall, client: Client) -> AsyncIterator[asyncio.Task[None]]:
    """The middleware's part after the application has sent all of its answer."""
    answer = OpenAnswer(call, client.send)
    await answer.send(LAST)
    call.end_answer()
    waiting = asyncio.create_task(answer.wait(client.receive))
    yield waiting
    await asyncio.wait_for(waiting, 5)


async def test_an_answer_ends_when_the_work_of_its_call_has_ended() -> None:
    call, client, ends = HttpCall("c", "key"), Client(), asyncio.Event()
    call.background = asyncio.create_task(ends.wait())
    async with answered(call, client) as waiting:
        assert client.got == [{**LAST, "more_body": True}]
        await asyncio.sleep(0.01)
        assert not waiting.done()
        ends.set()
    assert client.got[1:] == [END]
    assert (call.answered, call.left) == (True, False)


async def test_the_work_of_a_call_ends_when_the_door_leaves() -> None:
    call, client = HttpCall("c", "key"), Client()
    call.background = work = asyncio.create_task(asyncio.sleep(30))
    async with answered(call, client):
        client.leaves.set()
        await until(work.done)
    assert work.cancelled()
    assert (call.answered, call.left) == (False, True)


@pytest.mark.parametrize("works", [False, True])
async def test_without_a_door_or_without_work_an_answer_ends_at_once(works: bool) -> None:
    call, client = HttpCall("c", "" if works else "key"), Client()
    work = call.background = asyncio.create_task(asyncio.sleep(30)) if works else None
    async with answered(call, client) as waiting:
        await asyncio.wait_for(waiting, 1)
    assert client.got == [LAST]
    if work is not None:
        assert not work.done()
        work.cancel()
