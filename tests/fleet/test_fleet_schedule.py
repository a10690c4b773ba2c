"""Cron floors: which minutes an expression names."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.errors import ConfigError
from kvmig.fleet.schedule import ScheduledFloor, floor_at, parse_cron, zone_of


@pytest.mark.parametrize(
    ("expression", "moment", "named"),
    [
        ("* * * * *", "2026-11-23 06:40", True),
        ("* 8-17 * * mon-fri", "2026-11-23 08:00", True),  # a Monday
        ("* 8-17 * * mon-fri", "2026-11-23 17:59", True),
        ("* 8-17 * * mon-fri", "2026-11-23 18:00", False),
        ("* 8-17 * * mon-fri", "2026-11-22 12:00", False),
        ("*/15 * * * *", "2026-11-23 06:45", True),
        ("*/15 * * * *", "2026-11-23 06:44", False),
        ("5/20 * * * *", "2026-11-23 06:25", True),
        ("5/20 * * * *", "2026-11-23 06:05", True),
        ("5/20 * * * *", "2026-11-23 06:20", False),
        ("0-10/5,30 * * * *", "2026-11-23 06:10", True),
        ("0-10/5,30 * * * *", "2026-11-23 06:30", True),
        ("0-10/5,30 * * * *", "2026-11-23 06:35", False),
        ("* * * * 0", "2026-11-22 06:40", True),
        ("* * * * 7", "2026-11-22 06:40", True),
        ("* * * * fri-7", "2026-11-22 06:40", True),
        ("* * 1 * mon", "2026-11-23 06:40", True),  # both are limited: one is enough
        ("* * 1 * mon", "2026-11-01 06:40", True),
        ("* * 1 * mon", "2026-11-24 06:40", False),
        ("* * */2 * mon", "2026-11-24 06:40", False),
        ("* * * dec,jan *", "2026-11-23 06:40", False),
        ("* * * DEC,Nov *", "2026-11-23 06:40", True),
    ],
)
def test_an_expression_names_minutes(expression: str, moment: str, named: bool) -> None:
    assert parse_cron(expression).names(datetime.fromisoformat(moment)) == named


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("", "during is '', must be minute hour day month weekday"),
        ("@daily", "must be minute hour day month weekday"),
        ("* * * *", "must be minute hour day month weekday"),
        ("60 * * * *", "during has the minute '60', must be 0 to 59, *, A-B"),
        ("* 24 * * *", "during has the hour '24', must be 0 to 23"),
        ("* * 0 * *", "during has the day '0', must be 1 to 31"),
        ("* * * 13 *", "during has the month '13', must be 1 to 12, jan, feb"),
        ("* * * * fri-mon", "during has the weekday 'fri-mon', must be 0 to 7, sun, mon"),
        ("*/0 * * * *", "during has the minute '*/0'"),
        ("1,,2 * * * *", "during has the minute ''"),
        ("-1 * * * *", "during has the minute '-1'"),
        ("٣ * * * *", "during has the minute '٣'"),
        ("9" * 5000 + " * * * *", "during has the minute '999"),
        ("*/" + "9" * 5000 + " * * * *", "during has the minute '*/999"),
    ],
)
def test_a_wrong_expression_is_refused_in_one_sentence(expression: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_cron(expression)
    assert sentence in str(refused.value)


@given(st.text(alphabet="*/-,0123456789monja ", max_size=40))
def test_any_text_is_parsed_or_refused(expression: str) -> None:
    with suppress(ConfigError):
        assert parse_cron(expression).minutes <= frozenset(range(60))


@pytest.mark.parametrize("name", ["", "Mars/Olympus", "../etc/passwd", "/etc/localtime", "Europe"])
def test_an_unknown_timezone_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="must be UTC or one as Europe/Berlin"):
        zone_of(name)


def at(moment: str) -> float:
    return datetime.fromisoformat(moment).replace(tzinfo=UTC).timestamp()


def test_the_largest_floor_holds() -> None:
    schedule = [
        ScheduledFloor(during="* 8-17 * * *", min=1),
        ScheduledFloor(during="* 12 * * *", min=3),
    ]
    floors = [floor_at(schedule, at(f"2026-11-23 {time}")) for time in ("07:59", "08:00", "12:30")]
    assert floors == [0, 1, 3]


def test_hours_are_the_timezones_also_in_summer() -> None:
    schedule = [ScheduledFloor(during="* 8 * * *", min=1, timezone="Europe/Berlin")]
    moments = ("2026-11-23 07:30", "2026-11-23 08:30", "2026-07-01 06:30", "2026-07-01 07:30")
    assert [floor_at(schedule, at(moment)) for moment in moments] == [1, 0, 1, 0]
