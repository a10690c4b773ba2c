"""Draws docs/handshake.svg from the two transition tables: `python -m kvmig_tools.draw_handshake`.

Only places are given here; states, arrows and their labels come from the tables, and a
state or arrow without a place is an error.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kvmig.kvtransfer.destination_machine import DestinationMachine
from kvmig.kvtransfer.destination_machine import DestinationState as There
from kvmig.kvtransfer.machine import Table
from kvmig.kvtransfer.source_machine import SourceMachine
from kvmig.kvtransfer.source_machine import SourceState as Here

INK, GREY = "#1f2933", "#52606d"
BLUE, GREEN, AMBER = ("#e6f0fb", "#2f6db5"), ("#e5f5ea", "#2e8b57"), ("#fdf1dc", "#b7791f")
WIDTH, HEIGHT, LINE = 1280, 880, 15


@dataclass(frozen=True)
class Box:
    """Centre and size."""

    x: float
    y: float
    w: float = 150
    h: float = 40
    colour: tuple[str, str] = BLUE

    def edge(self, dx: float, dy: float, aside: tuple[float, float]) -> tuple[float, float]:
        """Where a line in direction (dx, dy), which starts `aside` of the centre, leaves."""
        reach = [
            (half * (1 if d > 0 else -1) - off) / d
            for half, off, d in ((self.w / 2, aside[0], dx), (self.h / 2, aside[1], dy))
            if d
        ]
        return self.x + aside[0] + dx * min(reach), self.y + aside[1] + dy * min(reach)


SOURCE: dict[StrEnum, Box] = {
    Here.EXPORTING: Box(190, 130, 160),
    Here.RESERVING: Box(190, 215, 160),
    Here.CHECKING: Box(190, 300, 160),
    Here.RESERVING_STAGE: Box(460, 300, 170),
    Here.COPYING: Box(460, 390, 170),
    Here.RESERVING_TAIL: Box(190, 390, 160),
    Here.SUSPENDING: Box(190, 480, 160),
    Here.SENDING_TAIL: Box(190, 565, 160),
    Here.COMMITTING: Box(190, 670, 160),
    Here.RESOLVING: Box(415, 670, 130),
    Here.COMMITTED: Box(190, 830, 160, colour=GREEN),
    Here.ABORTED: Box(510, 830, 230, colour=AMBER),
}
DESTINATION: dict[StrEnum, Box] = {
    There.NEW: Box(890, 130),
    There.RESERVING: Box(890, 255),
    There.RECEIVING: Box(890, 400),
    There.SCATTERING: Box(745, 500),
    There.COMMITTING: Box(845, 670),
    There.COMMITTED: Box(845, 830, colour=GREEN),
    There.CANCELLED: Box(1190, 430, 120, 640, colour=AMBER),
}
FRAMED = list(Here)[: list(Here).index(Here.COMMITTING)]
"""States of the source whose ways to ABORTED are drawn as one."""
LABELS: dict[tuple[StrEnum, StrEnum], float] = {
    (Here.COMMITTING, Here.ABORTED): 0.76,
    (Here.RESOLVING, Here.COMMITTED): 0.76,
    (Here.RESOLVING, Here.ABORTED): 0.35,
    (There.RECEIVING, There.COMMITTING): 0.45,
    (There.SCATTERING, There.CANCELLED): 0.86,
}
"""How far along its arrow a label stands, where it isn't the middle."""
DETOURS: dict[tuple[StrEnum, StrEnum], float] = {
    (Here.CHECKING, Here.SUSPENDING): 86,
    (Here.CHECKING, Here.SENDING_TAIL): 40,
}
"""Where an arrow goes down that would cross other states on the straight way."""
LOOPS: dict[StrEnum, str] = {
    Here.CHECKING: "above",
    Here.COMMITTING: "left",
    Here.RESOLVING: "right",
    There.COMMITTED: "left",
    There.CANCELLED: "below",
    There.NEW: "left",
}


def text(x: float, y: float, lines: Iterable[str], anchor: str = "middle", size: int = 12) -> str:
    """Lines of text, the first at y, on white so that an arrow doesn't cross them."""
    return "".join(
        f'<text x="{x:.0f}" y="{y + index * LINE:.0f}" font-size="{size}" text-anchor="{anchor}"'
        f' fill="{GREY}" stroke="#ffffff" stroke-width="4" paint-order="stroke">{line}</text>'
        for index, line in enumerate(lines)
    )


def wrap(words: list[str], width: int = 18) -> list[str]:
    """Words with commas, in lines of at most `width`."""
    lines = [""]
    for word in ", ".join(words).replace("_", " ").split(" "):
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def box(name: str, at: Box) -> str:
    """A state."""
    fill, stroke = at.colour
    return (
        f'<rect x="{at.x - at.w / 2:.0f}" y="{at.y - at.h / 2:.0f}" width="{at.w:.0f}"'
        f' height="{at.h:.0f}" rx="8" fill="{fill}" stroke="{stroke}" stroke-width="1.6"/>'
        f'<text x="{at.x:.0f}" y="{at.y + 5:.0f}" font-size="14" font-weight="600"'
        f' text-anchor="middle" fill="{INK}">{name.upper().replace("_", " ")}</text>'
    )


def line(points: list[tuple[float, float]]) -> str:
    """An arrow."""
    places = " ".join(f"{x:.0f},{y:.0f}" for x, y in points)
    return (
        f'<polyline points="{places}" fill="none" stroke="{INK}" stroke-width="1.5"'
        ' marker-end="url(#tip)"/>'
    )


def loop(at: Box, side: str, labels: list[str]) -> str:
    """An arrow from a state to itself."""
    lines = wrap(labels, 12 if len(labels) < 4 else 18)
    if side == "below":
        x, y = at.x, at.y + at.h / 2
        points = [(x - 30, y), (x - 30, y + 22), (x + 30, y + 22), (x + 30, y)]
        return line(points) + text(x, y + 38, lines)
    if side == "above":
        x, y = at.x + 35, at.y - at.h / 2
        points = [(x, y), (x, y - 16), (x + 30, y - 16), (x + 30, y)]
        return line(points) + text(x + 38, y - 8, lines, "start")
    sign = -1 if side == "left" else 1
    x, y = at.x + sign * at.w / 2, at.y
    points = [(x, y - 10), (x + sign * 20, y - 10), (x + sign * 20, y + 10), (x, y + 10)]
    start = y + 4 - (len(lines) - 1) * LINE / 2
    return line(points) + text(x + sign * 26, start, lines, "end" if sign < 0 else "start")


def arrow(start: Box, end: Box, labels: list[str], along: float, shift: float) -> str:
    """A labelled arrow; `shift` moves it aside, where another one comes back."""
    across = end.h > 3 * end.w  # to a tall box: straight across
    dx, dy = end.x - start.x, 0 if across else end.y - start.y
    length = (dx**2 + dy**2) ** 0.5
    aside = (-dy / length * shift, dx / length * shift)
    x1, y1 = start.edge(dx, dy, aside)
    x2, y2 = (end.x - end.w / 2, start.y) if across else end.edge(-dx, -dy, aside)
    x = x1 + (x2 - x1) * along + aside[0] * 2.2
    y = y1 + (y2 - y1) * along + aside[1] * 2.2
    lines = wrap(labels)
    extra = (len(lines) - 1) * LINE
    top = y - 7 - extra if dy == 0 else y + 4 - extra / 2
    return line([(x1, y1), (x2, y2)]) + text(x, top, lines)


def detour(start: Box, end: Box, labels: list[str], x: float) -> str:
    """A labelled arrow from left edge to left edge, by way of x."""
    left, right = start.x - start.w / 2, end.x - end.w / 2
    points = [(left, start.y), (x, start.y), (x, end.y), (right, end.y)]
    return line(points) + text(x, (start.y + end.y) / 2, wrap(labels))


def machine(table: Table, places: dict[StrEnum, Box], framed: list[Here]) -> str:
    """One table: arrows first, states on top."""
    arrows: dict[tuple[StrEnum, StrEnum], list[str]] = defaultdict(list)
    for state, events in table.items():
        for event, after in events.items():
            if not (state in framed and after is Here.ABORTED):
                arrows[state, after].append(event)
    parts: list[str] = []
    for (state, after), labels in arrows.items():
        if state is after:
            parts.append(loop(places[state], LOOPS[state], labels))
            continue
        if (state, after) in DETOURS:
            x = DETOURS[state, after]
            parts.append(detour(places[state], places[after], labels, x))
            continue
        shift = 14 if (after, state) in arrows else 0
        along = LABELS.get((state, after), 0.5)
        parts.append(arrow(places[state], places[after], labels, along, shift))
    parts += [box(state, places[state]) for state in table]
    return "\n".join(parts)


def frame(table: Table) -> str:
    """The source's states before the commit, and the way out that all of them have."""
    ways = [{event for event, to in table[state].items() if to is Here.ABORTED} for state in FRAMED]
    if any(way != ways[0] for way in ways):
        raise ValueError("the framed states don't have the same ways to be aborted")
    common = [event for event in table[FRAMED[0]] if event in ways[0]]
    return (
        '<rect x="60" y="90" width="550" height="680" rx="12" fill="#f8fafc" stroke="#8a94a3"'
        ' stroke-dasharray="6 4"/>'
        + line([(595, 770), (595, 980)])
        + text(595, 792, [", ".join(common)])
        + text(594, 758, ["the request runs on here, whatever goes wrong"], "end")
    )


def svg() -> str:
    """The whole picture."""
    titles = "".join(
        f'<text x="{x}" y="50" font-size="18" font-weight="600" text-anchor="middle"'
        f' fill="{INK}">{title}</text>'
        for x, title in ((335, "source"), (950, "destination"))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" font-family="Helvetica, Arial, sans-serif" role="img"'
        ' aria-label="The state machines of both ends of a migration">\n'
        '<defs><marker id="tip" markerUnits="userSpaceOnUse" markerWidth="10" markerHeight="8"'
        f' refX="8" refY="4" orient="auto"><path d="M0,0 L9,4 L0,8 z" fill="{INK}"/></marker>'
        f'</defs>\n<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="#ffffff"/>\n{titles}\n'
        f"{frame(SourceMachine.table)}\n"
        f"{machine(SourceMachine.table, SOURCE, FRAMED)}\n"
        f"{machine(DestinationMachine.table, DESTINATION, [])}\n</svg>\n"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the handshake from its tables.")
    parser.add_argument("out", nargs="?", type=Path, default=Path("docs/handshake.svg"))
    parser.parse_args().out.write_text(svg())
