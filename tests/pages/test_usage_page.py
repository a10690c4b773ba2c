"""The page of what was used: its plot, its table, its CSV."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from kvmig.accounts.usage import UsageRecord, UsageSpool
from kvmig.fleet.ledger import merge
from kvmig.fleet.pages.usage import differing, plain_cell
from kvmig.pages.plots import COLOURS, HEIGHT, OTHERS, WIDTH, DayValue, stacked_days
from tests.support.page_api import Pages, text_of

TODAY = datetime.now(UTC)


async def use(pages: Pages, prefix: str, seq: int, output: int, model: str = "qwen") -> None:
    rows = (await pages.ask("GET", "keys"))[1]["data"]
    account = next(one["key_id"] for one in rows if one["prefix"] == prefix)
    path = pages.folder / f"front-{seq}.sqlite"
    at = TODAY.timestamp()
    record = UsageRecord(
        seq=seq, call_id="c", account=account, model=model, began=at, ended=at, prompt=5,
        output=output, status="finished",
    )  # fmt: skip
    UsageSpool(path).write([record])
    await pages.backend.stored(merge, pages.store.database, path)


async def test_the_page_plots_what_each_model_has_used(pages: Pages) -> None:
    prefix = await pages.log_in("bea", "admin")
    await use(pages, prefix, 1, 1234)
    answer = await pages.browse("usage")
    assert f"{TODAY:%Y-%m-%d} qwen: 1,234" in answer.text
    assert "1,234" in text_of(answer)
    assert (await pages.browse("usage?by=user&what=calls")).status_code == 200


async def test_a_user_sees_the_users_own_usage_only(pages: Pages) -> None:
    other = await pages.log_in("bea", "admin")
    await use(pages, other, 1, 777, "theirs")
    own = await pages.log_in("tom", "infer", "read")
    await use(pages, own, 2, 42, "mine")
    seen = text_of(await pages.browse("usage?by=model"))
    assert "mine" in seen
    assert "theirs" not in seen
    assert "777" not in (await pages.browse("usage.csv")).text


async def test_the_csv_has_a_row_for_each_day(pages: Pages) -> None:
    prefix = await pages.log_in("bea", "admin")
    await use(pages, prefix, 1, 9)
    answer = await pages.browse("usage.csv?by=key")
    assert answer.headers["content-type"].startswith("text/csv")
    head, row = answer.text.strip().splitlines()
    assert head.startswith("key,day,calls,prompt,cached,output")
    assert row.startswith(f"{prefix},{TODAY:%Y-%m-%d},1,5,0,9")


@pytest.mark.parametrize("query", ["by=nonsense", "since=yesterday", "until=2026-02-30"])
async def test_a_wrong_query_is_refused_in_words(pages: Pages, query: str) -> None:
    await pages.log_in("bea", "admin")
    answer = await pages.browse(f"usage?{query}")
    assert (answer.status_code, "must be" in answer.text) == (400, True)


@pytest.mark.parametrize("name", ["=1+1", "@x", "-2"])
def test_a_cell_is_no_formula(name: str) -> None:
    assert plain_cell(name) == f"'{name}"


def test_of_two_states_the_audit_shows_the_fields_that_differ() -> None:
    before, after = {"name": "a", "priority": 0, "gone": 1}, {"name": "a", "priority": 7}
    assert differing(before, after) == ({"priority": 0, "gone": 1}, {"priority": 7, "gone": None})
    assert differing(None, after) == (None, after)


# -- plots


def test_bars_of_a_day_stand_on_each_other_within_the_drawing() -> None:
    values = [DayValue("2026-11-01", "a", 30.0), DayValue("2026-11-01", "b", 10.0)]
    plot = stacked_days(values, "", "")
    first, second = plot.bars
    assert first.y == pytest.approx(HEIGHT - first.height)
    assert second.y == pytest.approx(first.y - second.height, abs=0.02)
    assert second.y >= 0
    assert first.height == pytest.approx(3 * second.height, rel=0.01)


def test_each_day_has_its_place_also_without_a_value() -> None:
    values = [DayValue("2026-11-03", "a", 1.0)]
    plot = stacked_days(values, "2026-11-01", "2026-11-04")
    assert (plot.first, plot.last) == ("2026-11-01", "2026-11-04")
    assert plot.bars[0].x == pytest.approx(2 * WIDTH / 4 + WIDTH / 40)


def test_many_names_share_the_last_colour() -> None:
    values = [DayValue("2026-11-01", f"m{at}", 100.0 - at) for at in range(20)]
    plot = stacked_days(values, "", "")
    assert len(plot.names) == COLOURS
    assert plot.names[-1] == OTHERS
    assert max(bar.colour for bar in plot.bars) == COLOURS - 1


def test_nothing_used_is_no_bar() -> None:
    assert stacked_days([], "", "").bars == []
    assert stacked_days([DayValue("2026-11-01", "a", 0.0)], "2026-11-01", "2026-11-02").bars == []


def test_days_of_years_are_bounded() -> None:
    plot = stacked_days([DayValue("2026-11-01", "a", 1.0)], "0001-01-01", "2026-11-01")
    assert plot.first > "2025-01-01"


def test_days_the_wrong_way_round_are_no_bar() -> None:
    assert stacked_days([DayValue("2026-11-01", "a", 1.0)], "2026-11-05", "2026-11-01").bars == []
