"""Plots as SVG that the server makes: bars by day, stacked. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import date
from typing import NamedTuple

WIDTH, HEIGHT = 720.0, 200.0
"""The drawing area, in units of the SVG."""
MOST_DAYS = 400
"""Days of a plot; of more, the last ones are shown."""
COLOURS = 8
"""Colours of the style sheet; the smallest names share the last one."""
OTHERS = "others"


class DayValue(NamedTuple):
    """A value of one name on one day."""

    day: str
    name: str
    value: float


class PlotBar(NamedTuple):
    """A part of a day's bar."""

    x: float
    y: float
    width: float
    height: float
    colour: int
    label: str
    """What a pointer that rests on it shows."""


class PlotLine(NamedTuple):
    """A line across, with its value."""

    y: float
    label: str


class DayPlot(NamedTuple):
    """A plot."""

    bars: Sequence[PlotBar]
    names: Sequence[str]
    """Names by colour."""
    lines: Sequence[PlotLine]
    first: str
    """The first day."""
    last: str


def stacked_days(values: Iterable[DayValue], since: str, until: str) -> DayPlot:
    """Bars by day from `since` to `until`; empty: from the first day with a value, or to the
    last."""
    found = [one for one in values if one.value > 0]
    days = _days([one.day for one in found], since, until)
    names = _names(found)
    colours = {name: at for at, name in enumerate(names)}
    of_day: dict[str, dict[int, float]] = {day: defaultdict(float) for day in days}
    for one in found:
        if one.day in of_day:
            of_day[one.day][colours.get(one.name, len(names) - 1)] += one.value
    top = _top(max((sum(parts.values()) for parts in of_day.values()), default=0.0))
    step = WIDTH / max(1, len(days))
    bars = []
    for at, day in enumerate(days):
        y = HEIGHT
        for colour, value in sorted(of_day[day].items()):
            height = HEIGHT * value / top
            y -= height
            bars.append(
                PlotBar(
                    round(at * step + step * 0.1, 2),
                    round(y, 2),
                    round(step * 0.8, 2),
                    round(height, 2),
                    colour,
                    f"{day} {names[colour]}: {value:,.0f}",
                )
            )
    lines = [PlotLine(HEIGHT * (1 - part), f"{top * part:,.0f}") for part in (0.0, 0.5, 1.0)]
    return DayPlot(bars, names, lines, days[0] if days else "", days[-1] if days else "")


def _days(seen: Sequence[str], since: str, until: str) -> list[str]:
    """The days of the plot."""
    if not seen and not (since and until):
        return []
    first = date.fromisoformat(since or min(seen)).toordinal()
    last = date.fromisoformat(until or max(seen)).toordinal()
    return [
        date.fromordinal(day).isoformat()
        for day in range(max(first, last - MOST_DAYS + 1), last + 1)
    ]


def _names(values: Sequence[DayValue]) -> list[str]:
    """The names that have a colour, the largest first; the rest is together."""
    whole: dict[str, float] = defaultdict(float)
    for one in values:
        whole[one.name] += one.value
    ranked = sorted(whole, key=lambda name: (-whole[name], name))
    return ranked if len(ranked) <= COLOURS else [*ranked[: COLOURS - 1], OTHERS]


def _top(value: float) -> float:
    """A round number that is not less."""
    if value <= 0:
        return 1.0
    step = 10.0 ** (len(str(int(value))) - 1)
    return next(step * part for part in (1, 2, 5, 10) if step * part >= value)
