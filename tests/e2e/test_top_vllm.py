"""`kvmig top` with real vLLM, two instances: of one server, and of a fleet's model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from textual.pilot import Pilot

from kvmig.cli.client import FleetClient
from kvmig.cli.top.app import LiveTable, TopApp
from kvmig.cli.top.sources import FleetSource, ServeSource, open_source
from kvmig.models import BUNDLED
from kvmig_tools.fleet import FleetUp
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL, Served
from tests.support.retries import SESSION, EndedEarly, until_moved
from tests.support.streams import Answer, Door, Stream, count_from, run_unmoved
from tests.support.top_pilot import line, rows, running, shows

pytestmark = [pytest.mark.server, pytest.mark.long]

PATH = "/v1/completions"
BODY = count_from(17, 4000)
"""For two engines, on a busy machine."""


class ShownStream:
    """A stream, and what `kvmig top` shows of it."""

    def __init__(self, app: TopApp, pilot: Pilot[None], stream: Stream) -> None:
        self.app = app
        self.pilot = pilot
        self.stream = stream

    @property
    def instance(self) -> str:
        """The instance that it is shown on; empty: it is not shown."""
        return next((one[2].split(" ")[0] for one in rows(self.app, "streams")), "")

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait while it runs. Raises EndedEarly."""
        await shows(self.pilot, lambda: holds() or self.stream.task.done())
        if self.stream.task.done():
            raise EndedEarly("before it was shown so")

    async def end(self) -> Answer:
        """The answer, once it is no longer shown."""
        answer = await self.stream.end()
        await shows(self.pilot, lambda: not rows(self.app, "streams"))
        return answer

    async def leave_instance(self, keys: Callable[[str], list[str]]) -> str:
        """Let it leave its instance, which is returned. keys: give the order to an instance."""
        await self.until(lambda: self.instance in names(self.app))
        before = self.instance
        await self.pilot.press(*keys(before))
        await self.until(lambda: before in moved_from(self.app))
        await self.until(lambda: self.instance not in ("", before))
        await shows(self.pilot, lambda: "committed" in line(self.app, "#last"))
        return before

    def move_keys(self, _: str) -> list[str]:
        """Keys that move it to the instance with the most room."""
        return ["1", "m", "enter"]

    def drain_keys(self, instance: str) -> list[str]:
        """Keys that drain an instance."""
        table = self.app.screen_stack[0].query_one("#instances", LiveTable)
        steps = names(self.app).index(instance) - table.cursor_row
        return ["escape", *["down" if steps > 0 else "up"] * abs(steps), "d", "y"]


@asynccontextmanager
async def shown_stream(
    app: TopApp, pilot: Pilot[None], served: Served | Door
) -> AsyncIterator[ShownStream]:
    stream = Stream(served, PATH, BODY)
    try:
        await stream.reach(20)
        yield ShownStream(app, pilot, stream)
    finally:
        await stream.leave()


def names(app: TopApp) -> list[str]:
    """Of the rows of instances, each after its model's."""
    return [one[0] for one in rows(app, "instances")]


def states(app: TopApp) -> list[str]:
    return [one[1] for one in rows(app, "instances")]


def moved_from(app: TopApp) -> list[str]:
    """The sources of the migrations that are shown."""
    return [one[3].split(" ")[0] for one in rows(app, "moves")]


async def test_top_shows_a_real_servers_stream_and_moves_it_unchanged(served: Served) -> None:
    unmoved = await run_unmoved(served, PATH, BODY)

    async def attempt() -> Answer:
        source = await asyncio.to_thread(open_source, FleetClient("", served.url))
        assert isinstance(source, ServeSource)
        async with running(source) as (app, pilot):
            await shows(pilot, lambda: states(app) == ["serving"] * 3)
            async with shown_stream(app, pilot, served) as shown:
                await shown.leave_instance(shown.move_keys)
                return await shown.end()

    (await until_moved(attempt, SESSION)).same_as(unmoved)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[FleetUp]:
    """Without a model."""
    with FleetUp(tmp_path) as made:
        yield made


async def test_top_shows_a_fleets_real_model_start_and_moves_and_drains_its_stream_away_unchanged(
    fleet: FleetUp,
) -> None:
    door = Door(fleet.url, "count", fleet.key)
    spec = {
        "name": "count", "source": f"path:{BUNDLED}", "flags": [*SMALL],
        "instances": {"min": 2, "max": 2},
    }  # fmt: skip
    source = await asyncio.to_thread(open_source, FleetClient("", fleet.url, fleet.key))
    assert isinstance(source, FleetSource)
    async with running(source) as (app, pilot):
        assert names(app) == []
        await asyncio.to_thread(fleet.add, spec)
        await shows(pilot, lambda: "starting" in states(app), SERVER_PATIENCE_S)
        assert names(app)[0] == "count"
        await shows(pilot, lambda: states(app) == ["serving"] * 3, SERVER_PATIENCE_S)
        unmoved = await run_unmoved(door, PATH, BODY)

        async def attempt(order: str) -> Answer:
            await shows(pilot, lambda: states(app) == ["serving"] * 3, SERVER_PATIENCE_S)
            async with shown_stream(app, pilot, door) as shown:
                keys = shown.move_keys if order == "move" else shown.drain_keys
                left = await shown.leave_instance(keys)
                answer = await shown.end()
            if order == "drain":
                await shows(pilot, lambda: left not in names(app))
            return answer

        for order in ("move", "drain"):
            (await until_moved(partial(attempt, order), SESSION)).same_as(unmoved)
