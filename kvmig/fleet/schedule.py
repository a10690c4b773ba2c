"""Cron expressions: least numbers of instances at certain times. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, tzinfo
from functools import lru_cache
from typing import NamedTuple
from zoneinfo import ZoneInfo

import msgspec

from kvmig.core.errors import ConfigError

MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
DAYS = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
FORM = "minute hour day month weekday, as `* 8-17 * * mon-fri`"


class ScheduledFloor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A least number of instances in all minutes that a cron expression names."""

    during: str
    min: int
    timezone: str = "UTC"


class _Field(NamedTuple):
    name: str
    least: int
    most: int
    names: tuple[str, ...] = ()


_FIELDS = (
    _Field("minute", 0, 59),
    _Field("hour", 0, 23),
    _Field("day", 1, 31),
    _Field("month", 1, 12, ("", *MONTHS)),
    _Field("weekday", 0, 7, DAYS),
)


class CronFields(NamedTuple):
    """The values of each field."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    """0: Sunday."""
    both_days: bool
    """Whether a date must be of the days and of the weekdays; or of the ones or the others, which
    is cron's rule where both are limited."""

    def names(self, at: datetime) -> bool:
        """Whether the minute is one that the expression names."""
        day, weekday = at.day in self.days, at.isoweekday() % 7 in self.weekdays
        return (
            at.minute in self.minutes
            and at.hour in self.hours
            and at.month in self.months
            and ((day and weekday) if self.both_days else (day or weekday))
        )


def floor_at(schedule: Iterable[ScheduledFloor], at: float) -> int:
    """The largest of the floors that hold at a Unix time; 0: none does."""
    holding = (
        floor.min
        for floor in schedule
        if parse_cron(floor.during).names(datetime.fromtimestamp(at, zone_of(floor.timezone)))
    )
    return max(holding, default=0)


@lru_cache(maxsize=1024)
def zone_of(name: str) -> tzinfo:
    """Raises ConfigError."""
    try:
        return UTC if name == "UTC" else ZoneInfo(name)  # UTC is there without time zone files
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"timezone is {name!r:.100}, must be UTC or one as Europe/Berlin"
        ) from error


@lru_cache(maxsize=1024)
def parse_cron(expression: str) -> CronFields:
    """Raises ConfigError with the field, its value and what is allowed."""
    words = expression.lower().split()
    if len(words) != len(_FIELDS):
        raise ConfigError(f"during is {expression!r:.100}, must be {FORM}")
    minutes, hours, days, months, weekdays = (
        frozenset(value for part in word.split(",") for value in _values(part, field))
        for word, field in zip(words, _FIELDS, strict=True)
    )
    both = words[2].startswith("*") or words[4].startswith("*")
    return CronFields(minutes, hours, days, months, frozenset(day % 7 for day in weekdays), both)


def _values(part: str, field: _Field) -> range:
    """The values of `*`, `A`, `A-B`, each with `/STEP` or without."""
    span, slash, step = part.partition("/")
    first, dash, last = span.partition("-")
    if span == "*":
        begin, end = field.least, field.most
    else:
        begin = _value(first, field, part)
        end = _value(last, field, part) if dash else field.most if slash else begin
    every = _number(step) if slash else 1
    if begin > end or every < 1:
        raise _wrong(part, field)
    return range(begin, end + 1, every)


def _value(word: str, field: _Field, part: str) -> int:
    if word and word in field.names:
        return field.names.index(word)
    if not field.least <= _number(word) <= field.most:
        raise _wrong(part, field)
    return _number(word)


def _number(word: str) -> int:
    """-1: it is none, or far too large."""
    return int(word) if word.isdecimal() and word.isascii() and len(word) < 9 else -1


def _wrong(part: str, field: _Field) -> ConfigError:
    names = ", ".join(name for name in field.names if name)
    return ConfigError(
        f"during has the {field.name} {part!r:.50}, must be {field.least} to {field.most}"
        f"{f', {names},' if names else ','} *, A-B, or one of them with /STEP"
    )
