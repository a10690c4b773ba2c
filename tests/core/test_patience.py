"""An answer that came while the loop stood still came in time."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvmig.core.patience import wait_for_answer


async def test_an_answer_that_came_while_the_loop_stood_still_is_taken() -> None:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[int] = loop.create_future()
    loop.call_soon(time.sleep, 0.4)
    loop.call_later(0.5, answer.set_result, 7)
    assert await wait_for_answer(answer, 0.3) == 7


async def test_nobody_waits_for_longer_than_said_while_the_loop_turns() -> None:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[int] = loop.create_future()
    began = loop.time()
    with pytest.raises(TimeoutError):
        await wait_for_answer(answer, 0.2)
    assert 0.19 < loop.time() - began < 2
    assert not answer.cancelled()


@pytest.mark.long
async def test_a_loop_that_stands_still_again_and_again_ends_the_wait_some_time() -> None:
    answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def hold() -> None:
        while True:
            time.sleep(0.06)  # noqa: ASYNC251 - as work that holds the loop
            await asyncio.sleep(0)

    holding = asyncio.create_task(hold())
    with pytest.raises(TimeoutError):
        await wait_for_answer(answer, 0.001)
    holding.cancel()
