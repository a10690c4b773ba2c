"""The events of the live picture: who gets what, and that nothing runs while nobody looks."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import pytest

from kvmig.core.api_records import InstanceRow
from kvmig.core.errors import KvmigError
from kvmig.core.live_records import LiveFleet, LiveInstance, LiveModel
from kvmig.pages import live_feed
from kvmig.pages.live_feed import LiveFeed


class Fleet:
    """What the feed looks at."""

    def __init__(self) -> None:
        self.looks = 0
        self.running = 0
        self.error = ""

    async def look(self) -> LiveFleet:
        self.looks += 1
        if self.error:
            raise KvmigError(self.error)
        row = InstanceRow(id="i0", state="serving", running=self.running)
        return LiveFleet(
            at=0.0,
            models=(LiveModel(name="qwen", state="serving"),),
            instances=(LiveInstance(model="qwen", deployment="d", worker="local", row=row),),
        )


@pytest.fixture
async def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
async def feed(fleet: Fleet) -> AsyncIterator[LiveFeed]:
    made = LiveFeed(fleet.look, pause_s=0.01)
    yield made
    await made.close()


async def following(events: AsyncGenerator[bytes]) -> tuple[str, dict[str, Any]]:
    async with asyncio.timeout(5):
        raw = (await anext(events)).decode()
    name, data = raw.strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_a_page_gets_the_whole_picture_and_then_what_differs(
    fleet: Fleet, feed: LiveFeed
) -> None:
    events = feed.events(lambda: True)
    name, found = await following(events)
    assert (name, sorted(found["regions"])) == ("picture", ["models", "moves", "workers"])
    fleet.running = 3
    name, found = await following(events)
    assert (name, found["regions"], list(found["parts"])) == ("change", {}, ["i:qwen/d/i0"])
    assert "3 running" in found["parts"]["i:qwen/d/i0"]
    await events.aclose()


async def test_nothing_is_looked_at_while_no_page_is_open(fleet: Fleet, feed: LiveFeed) -> None:
    events = feed.events(lambda: True)
    await following(events)
    await events.aclose()
    assert feed.viewers == 0
    await asyncio.sleep(0.03)
    looks = fleet.looks
    await asyncio.sleep(0.1)
    assert fleet.looks == looks


async def test_many_pages_share_the_looks(fleet: Fleet, feed: LiveFeed) -> None:
    pages = [feed.events(lambda: True) for _ in range(20)]
    await asyncio.gather(*map(following, pages))
    assert fleet.looks < 20
    for one in pages:
        await one.aclose()


async def test_a_page_that_has_missed_changes_gets_the_whole_picture(
    fleet: Fleet, feed: LiveFeed
) -> None:
    slow, quick = feed.events(lambda: True), feed.events(lambda: True)
    await following(slow)
    await following(quick)
    for running in (1, 2):
        fleet.running = running
        assert (await following(quick))[0] == "change"
    assert (await following(slow))[0] == "picture"
    await slow.aclose()
    await quick.aclose()


async def test_a_person_who_may_look_no_more_is_told_so(
    feed: LiveFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_feed, "BEAT_S", 0.02)
    may = True
    events = feed.events(lambda: may)
    await following(events)
    may = False
    found = [raw async for raw in events]
    assert found[-1].startswith(b"event: closed")


async def test_closing_ends_all_pages(feed: LiveFeed) -> None:
    events = feed.events(lambda: True)
    await following(events)
    await feed.close()
    assert (await following(events))[0] == "closed"


async def test_a_look_that_fails_is_tried_again(fleet: Fleet, feed: LiveFeed) -> None:
    fleet.error = "not now"
    events = feed.events(lambda: True)
    first = asyncio.create_task(following(events))
    await asyncio.sleep(0.05)
    assert not first.done()
    fleet.error = ""
    assert (await first)[0] == "picture"
    await events.aclose()


async def test_a_page_is_told_since_when_its_picture_is_not_live_and_when_it_is_again(
    fleet: Fleet, feed: LiveFeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_feed, "BEAT_S", 0.02)
    monkeypatch.setattr(live_feed, "STALE_S", 0.05)
    events = feed.events(lambda: True)
    began = time.time()
    assert [(await following(events))[0] for _ in range(2)] == ["picture", "live"]
    fleet.error = "not now"
    while (found := await following(events))[0] == "live":
        pass
    name, data = found
    assert name == "stale"
    assert began < data["since"] < time.time() - 0.05
    assert await following(events) == ("stale", data)
    fleet.error = ""
    while (name := (await following(events))[0]) == "stale":
        pass
    assert name == "live"
    await events.aclose()
