"""Calls decode their media in a few places, by turns of users."""

from __future__ import annotations

import asyncio

import pytest

from kvmig.asgi.call import HttpCall
from kvmig.frontend.media_budget import MediaBudget
from kvmig.frontend.media_room import CallMedia, MediaRoom, NoPlace


def call_of(room: MediaRoom, tenant: str) -> CallMedia:
    return CallMedia(room, tenant, MediaBudget(100))


async def decode(media: CallMedia, order: list[str], name: str) -> None:
    async with media.decoding():
        order.append(name)


async def test_a_user_with_many_calls_makes_another_one_wait_for_one_of_them() -> None:
    room = MediaRoom(places=1)
    first, order = call_of(room, "a"), list[str]()
    await decode(first, order, "first")
    many = [call_of(room, "a") for _ in range(5)]
    other = call_of(room, "b")
    tasks = [asyncio.create_task(decode(one, order, "a")) for one in many]
    await asyncio.sleep(0.01)
    tasks.append(asyncio.create_task(decode(other, order, "b")))
    await asyncio.sleep(0.01)
    assert order == ["first"]
    for one in (first, many[0], other, *many[1:]):
        one.give_back()
        await asyncio.sleep(0.01)
    await asyncio.gather(*tasks)
    assert order[:3] == ["first", "a", "b"]
    assert room.free == 1


async def test_a_call_that_waits_too_long_has_no_place_and_takes_none() -> None:
    room = MediaRoom(places=1, wait_s=0.02)
    first = call_of(room, "a")
    await decode(first, [], "")
    with pytest.raises(NoPlace, match=r"over 0\.02 s, try again"):
        await decode(call_of(room, "b"), [], "")
    first.close()
    first.close()
    assert room.free == 1


async def test_a_call_that_is_over_takes_no_place_when_its_turn_comes() -> None:
    room = MediaRoom(places=1)
    first, late = call_of(room, "a"), call_of(room, "b")
    await decode(first, [], "")
    task = asyncio.create_task(decode(late, [], ""))
    await asyncio.sleep(0.01)
    late.close()
    first.close()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert room.free == 1


async def test_one_that_is_cancelled_as_its_turn_comes_gives_it_back() -> None:
    room = MediaRoom(places=1)
    first = call_of(room, "a")
    await decode(first, [], "")
    task = asyncio.create_task(decode(call_of(room, "b"), [], ""))
    await asyncio.sleep(0.01)
    first.close()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert room.free == 1


async def test_a_call_that_still_fetches_takes_no_place() -> None:
    room, order = MediaRoom(places=1), list[str]()
    media = call_of(room, "a")
    with media.fetching():
        task = asyncio.create_task(decode(media, order, "a"))
        await asyncio.sleep(0.01)
        assert (room.free, order) == (1, [])
    await task
    assert (room.free, order) == (0, ["a"])


async def test_media_of_one_call_are_decoded_one_after_the_other() -> None:
    media, at_once = call_of(MediaRoom(), "a"), list[int]()
    running = 0

    async def one() -> None:
        nonlocal running
        async with media.decoding():
            running += 1
            at_once.append(running)
            await asyncio.sleep(0.001)
            running -= 1

    await asyncio.gather(*(one() for _ in range(5)))
    assert at_once == [1] * 5


@pytest.mark.parametrize("end", [HttpCall.rendered, HttpCall.end_call])
async def test_a_call_gives_its_place_back_with_its_prompt_or_its_end(end: object) -> None:
    room = MediaRoom()
    call = HttpCall()
    call.media = media = call_of(room, "")
    await decode(media, [], "")
    before = room.free
    end(call)  # type: ignore[operator]
    assert room.free == before + 1
