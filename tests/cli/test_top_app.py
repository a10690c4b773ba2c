"""`kvmig top` as its keys drive it, at 80x24, over made-up looks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from msgspec.structs import replace
from textual.pilot import Pilot
from textual.widgets import Static

from kvmig.cli.top.app import LiveTable, TopApp
from kvmig.core.live_records import LiveModel
from tests.support.live_fleets import MadeSource, instance, stream, two_models
from tests.support.waiting import until


@pytest.fixture
def source() -> MadeSource:
    return MadeSource(two_models())


@asynccontextmanager
async def running(source: MadeSource) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    """After the first look."""
    app = TopApp(source, pause_s=0.05)
    async with app.run_test(size=(80, 24)) as pilot:
        await seen(pilot, source)
        yield app, pilot


async def seen(pilot: Pilot[None], source: MadeSource) -> None:
    """What `source` has now is on the screen."""
    looks = source.looks
    await until(lambda: source.looks > looks + 1)
    await pilot.pause()


def table_of(app: TopApp, name: str) -> LiveTable:
    return app.screen_stack[0].query_one(f"#{name}", LiveTable)


def column(app: TopApp, table: str, at: int = 0) -> list[str]:
    found = table_of(app, table)
    return [str(found.get_cell_at((row, at))).strip() for row in range(found.row_count)]  # type: ignore[arg-type]


def text(app: TopApp, name: str) -> str:
    return str(app.screen_stack[0].query_one(name, Static).render())


async def test_all_of_it_is_on_a_small_terminal(source: MadeSource) -> None:
    async with running(source) as (app, _):
        assert column(app, "instances") == ["a", "i0", "i1", "b"]
        assert column(app, "streams") == ["cmpl-1", "cmpl-2"]
        assert "2 models · 2 of 2 instances" in text(app, "#summary")
        lines = app.export_screenshot()
        for word in ("Drain", "Move", "Quit", "cmpl-1"):
            assert word in lines
    assert source.closed


@pytest.mark.long
async def test_rows_come_and_go_and_the_cursor_stays_on_its_own(source: MadeSource) -> None:
    async with running(source) as (app, pilot):
        await pilot.press("down", "down")
        table = table_of(app, "instances")
        assert table.chosen == ("a", "d-a", "i1")
        source.fleet = replace(
            source.fleet,
            models=(LiveModel(name="Z", state="serving"), *source.fleet.models),
            instances=(instance("Z", "i0"), *source.fleet.instances),
        )
        await seen(pilot, source)
        assert column(app, "instances") == ["Z", "i0", "a", "i0", "i1", "b"]
        assert table.chosen == ("a", "d-a", "i1")


@pytest.mark.long
async def test_a_filter_leaves_what_has_its_words_until_escape(source: MadeSource) -> None:
    async with running(source) as (app, pilot):
        await pilot.press("slash", *"i1")
        assert column(app, "instances") == ["a", "i1"]
        assert column(app, "streams") == []
        await pilot.press("enter")
        assert column(app, "instances") == ["a", "i1"]
        await pilot.press("escape")
        assert column(app, "instances") == ["a", "i0", "i1", "b"]


@pytest.mark.long
async def test_a_table_is_ordered_by_the_next_column_and_reversed(source: MadeSource) -> None:
    async with running(source) as (app, pilot):
        await pilot.press("1", "s")
        assert column(app, "streams") == ["cmpl-1", "cmpl-2"]
        await pilot.press("r")
        assert column(app, "streams") == ["cmpl-2", "cmpl-1"]


async def test_an_instance_is_drained_once_that_is_confirmed(source: MadeSource) -> None:
    async with running(source) as (_, pilot):
        await pilot.press("down", "d", "n")
        await pilot.pause()
        assert source.orders == []
        await pilot.press("d", "y")
        await until(lambda: source.orders == [("drain", "a", "i0")])
        await pilot.press("u", "y")
        await until(lambda: source.orders[1:] == [("undrain", "a", "i0")])


@pytest.mark.long
async def test_on_a_model_there_is_nothing_to_drain(source: MadeSource) -> None:
    async with running(source) as (app, pilot):
        await pilot.press("d", "y")
        await pilot.pause()
        assert len(app.screen_stack) == 1
        assert source.orders == []


@pytest.mark.long
@pytest.mark.parametrize(("keys", "to"), [(("enter",), "None"), (("down", "enter"), "i1")])
async def test_a_stream_is_moved_to_the_instance_that_is_chosen(
    source: MadeSource, keys: tuple[str, ...], to: str
) -> None:
    async with running(source) as (_, pilot):
        await pilot.press("1", "down", "m", *keys)
        await until(lambda: source.orders == [("move", "a", "cmpl-2", to)])


@pytest.mark.long
async def test_an_order_that_is_refused_ends_nothing(source: MadeSource) -> None:
    async with running(source) as (app, pilot):
        source.fails = "it is the only one that serves"
        await pilot.press("down", "d", "y")
        await until(lambda: any(source.fails in one.message for one in app._notifications))
        source.fails = ""
        await seen(pilot, source)
        assert "2 models" in text(app, "#summary")


async def test_a_server_that_is_away_is_said_so_and_what_was_seen_stays(
    source: MadeSource,
) -> None:
    async with running(source) as (app, pilot):
        source.fails = "http://fleet does not answer"
        await seen(pilot, source)
        assert "s old: http://fleet does not answer" in text(app, "#summary")
        assert column(app, "instances") == ["a", "i0", "i1", "b"]
        source.fails = ""
        await seen(pilot, source)
        assert "2 models" in text(app, "#summary")


HOSTILE = ("[red]x[/red]", "[@click=app.quit]x[/]", "\x1b[2J\x07x", "[/", "a\nb", "\u202ex")


@pytest.mark.long
@pytest.mark.parametrize("name", HOSTILE)
async def test_a_hostile_name_is_text_everywhere(source: MadeSource, name: str) -> None:
    found = two_models()
    source.fleet = replace(
        found,
        models=(LiveModel(name=name, state="serving", why=name),),
        instances=(instance(name, "i0", detail=name), instance(name, "i1")),
        streams=(stream(name, name, "i0"),),
    )
    async with running(source) as (app, pilot):
        await pilot.press("down", "d")
        await pilot.pause()
        await pilot.press("n", "1", "m")
        await pilot.pause()
        assert "\x1b[2J" not in app.export_screenshot()
        assert table_of(app, "streams").row_count == 1
        await pilot.press("enter")
        order = ("move", name, name, "None")
        await until(lambda: source.orders == [order])


@pytest.mark.long
async def test_the_help_is_one_key_away(source: MadeSource) -> None:
    async with running(source) as (app, pilot):
        await pilot.press("question_mark")
        await pilot.pause()
        assert "drain the instance under the cursor" in app.export_screenshot().replace(
            "\xa0", " "
        ).replace("&#160;", " ")
        await pilot.press("escape")
        await pilot.pause()
        assert len(app.screen_stack) == 1
