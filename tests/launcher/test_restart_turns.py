"""A restart as front ends and fleets see it before an instance's turn comes, and its reads of the
weights."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import msgspec
import pytest

from kvmig.asgi.errors import OrderFailed
from kvmig.controlplane.messages import AddInstances, RestartInstances
from kvmig.core.order_fence import OrderToken
from kvmig.core.storage_reads import StorageReads
from kvmig.launcher import cluster
from kvmig.launcher.instance import TURN
from tests.support.made_up_cluster import World, world
from tests.support.waiting import until


async def restart(it: World, tree: str | None = None) -> tuple[str, ...]:
    return await it.link.order(lambda number: RestartInstances(number, (), None, tree))


def details(it: World) -> dict[str, str]:
    """What front ends know of each state."""
    return {one.instance: one.detail for one in it.front.members}


async def test_those_that_await_their_turn_show_it_once_the_order_is_answered() -> None:
    """A fleet's server gives no second order then, however long it takes."""
    async with world() as it:
        it.launcher.loaded.clear()
        await restart(it)
        assert details(it) == {"i0": TURN, "i1": TURN}
        assert it.front.states() == {"i0": "serving", "i1": "serving"}
        it.launcher.loaded.set()
        await until(lambda: "rolling restart: done" in it.said)
        await until(lambda: details(it) == {"i0": "", "i1": ""})


async def test_those_whose_turn_does_not_come_show_nothing_any_more() -> None:
    async with world() as it:
        it.launcher.bad_tree = "/new"
        await restart(it, tree="/new")
        await until(lambda: any("rolling restart: stopped" in words for words in it.said))
        await until(lambda: details(it) == {"i0": "", "i1": ""})


async def test_orders_are_carried_out_while_the_storage_of_the_weights_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()

    def look() -> str:
        answers.wait(3.0)
        return "old"

    monkeypatch.setattr(cluster, "StorageReads", partial(StorageReads, silent_s=0.3))
    async with world(max_instances=3) as it:
        it.launcher.look = look
        restarting = asyncio.create_task(restart(it))
        assert await it.link.order(AddInstances) == ("i2",)
        words = "model MODEL: MODEL can't be read: its storage does not answer within 0.3 s"
        with pytest.raises(OrderFailed, match=words):
            await restarting
        answers.set()


async def test_an_order_whose_server_is_followed_by_another_meanwhile_is_not_carried_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = threading.Event()

    def look() -> str:
        answers.wait(5.0)
        return "old"

    async with world() as it:
        it.launcher.look = look
        late = RestartInstances(0, ("i0",), token=OrderToken(6, 1))
        restarting = asyncio.create_task(
            it.link.order(lambda number: msgspec.structs.replace(late, call_id=number))
        )
        await until(lambda: any(one.name.startswith("reads ") for one in threading.enumerate()))
        await it.link.raise_fence(OrderToken(6, 2))
        answers.set()
        with pytest.raises(OrderFailed, match=r"must be 6\.2 or higher"):
            await restarting
        assert [one.launch.instance for one in it.launcher.starts] == ["i0", "i1"]
