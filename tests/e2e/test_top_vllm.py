"""`kvmig top` with real vLLM, two instances."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from textual.pilot import Pilot

from kvmig.cli.client import FleetClient
from kvmig.cli.top.app import TopApp
from kvmig.cli.top.sources import ServeSource, open_source
from kvmig_tools.served import Served
from tests.support.retries import SESSION, EndedEarly, until_moved
from tests.support.streams import Answer, Stream, count_from, run_unmoved
from tests.support.top_pilot import line, rows, running, shows

pytestmark = [pytest.mark.server, pytest.mark.long]

PATH = "/v1/completions"
BODY = count_from(17, 4000)


async def moved_by_key(app: TopApp, pilot: Pilot[None], served: Served) -> Answer:
    """The answer to a stream that `kvmig top` shows, and that its keys move."""
    stream = Stream(served, PATH, BODY)

    def on() -> str:
        """The instance that the stream is shown on; empty: it is not shown."""
        return next((one[2].split(" ")[0] for one in rows(app, "streams")), "")

    async def until_shown(holds: Callable[[], bool]) -> None:
        await shows(pilot, lambda: holds() or stream.task.done())
        if stream.task.done():
            raise EndedEarly("before it was shown so")

    try:
        await stream.reach(20)
        await until_shown(lambda: on() in ("i0", "i1"))
        before = on()
        await pilot.press("1", "m", "enter")
        await until_shown(lambda: before in moved_from(app))
        await until_shown(lambda: on() not in ("", before))
        await shows(pilot, lambda: "committed" in line(app, "#last"))
        answer = await stream.end()
        await shows(pilot, lambda: not rows(app, "streams"))
        return answer
    finally:
        await stream.leave()


def moved_from(app: TopApp) -> list[str]:
    """The sources of the migrations that are shown."""
    return [one[3].split(" ")[0] for one in rows(app, "moves")]


async def test_top_shows_a_real_servers_stream_and_moves_it_unchanged(served: Served) -> None:
    unmoved = await run_unmoved(served, PATH, BODY)

    async def attempt() -> Answer:
        source = await asyncio.to_thread(open_source, FleetClient("", served.url))
        assert isinstance(source, ServeSource)
        async with running(source) as (app, pilot):
            await shows(pilot, lambda: len(rows(app, "instances")) == 3)
            assert [one[1] for one in rows(app, "instances")] == ["serving"] * 3
            return await moved_by_key(app, pilot, served)

    (await until_moved(attempt, SESSION)).same_as(unmoved)
