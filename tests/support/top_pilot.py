"""`kvmig top` driven by its keys, and what it shows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from textual.pilot import Pilot
from textual.widgets import Static

from kvmig.cli.top.app import LiveTable, TopApp
from kvmig.cli.top.sources import LiveSource
from tests.support.waiting import PATIENCE_S


@asynccontextmanager
async def running(source: LiveSource) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    app = TopApp(source, pause_s=0.2)
    async with app.run_test(size=(80, 24)) as pilot:
        yield app, pilot


def rows(app: TopApp, table: str) -> list[list[str]]:
    found = app.screen_stack[0].query_one(f"#{table}", LiveTable)
    return [[str(one).strip() for one in found.get_row_at(at)] for at in range(found.row_count)]


def line(app: TopApp, name: str) -> str:
    return str(app.screen_stack[0].query_one(name, Static).render())


async def shows(
    pilot: Pilot[None], holds: Callable[[], object], within_s: float = PATIENCE_S
) -> None:
    async def looked() -> None:
        while not holds():
            await pilot.pause(0.1)

    await asyncio.wait_for(looked(), within_s)
