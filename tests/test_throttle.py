from __future__ import annotations

import asyncio

import pytest

from kvmig.ground.errors import MigrationRefused
from kvmig.kvtransfer.bandwidth import UNLIMITED, Throttle


async def test_without_caps_a_turn_is_had_at_once() -> None:
    line = UNLIMITED.line("a", "x")
    await line.reserve(1 << 40)
    line.commit(1 << 40)
    line.release()


async def test_those_who_wait_get_their_turns_in_order() -> None:
    throttle = Throttle(1e7, 0.0, timeout_s=10.0)
    order: list[str] = []

    async def send(name: str) -> None:
        line = throttle.line(name, "x")
        for _ in range(3):
            await line.reserve(250_000)  # more than the burst
            line.commit(250_000)
            order.append(name)
        line.release()

    await asyncio.gather(*(send(name) for name in "abc"))
    assert sorted(order[:3]) == sorted(order[-3:]) == ["a", "b", "c"]


async def test_a_turn_is_waited_for_no_longer_than_the_time_out() -> None:
    throttle = Throttle(1.0, 0.0, timeout_s=0.02)
    first, second = throttle.line("a", "x"), throttle.line("b", "x")
    await first.reserve(1000)
    with pytest.raises(MigrationRefused, match=r"no bandwidth for 5 bytes within 0\.02 s"):
        await second.reserve(5)
    first.release()
    await second.reserve(5)


async def test_a_wait_that_is_given_up_holds_up_nobody() -> None:
    throttle = Throttle(1.0, 0.0, timeout_s=10.0)
    first, second, third = (throttle.line(name, "x") for name in "abc")
    await first.reserve(1000)
    waiting = asyncio.create_task(second.reserve(1000))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    first.release()
    await third.reserve(5)


async def test_a_turn_in_hand_serves_the_next_chunk() -> None:
    throttle = Throttle(1.0, 0.0, timeout_s=0.02)
    line = throttle.line("a", "x")
    await line.reserve(10)
    await line.reserve(10)
    line.commit(10)
    with pytest.raises(MigrationRefused):
        await line.reserve(10)
