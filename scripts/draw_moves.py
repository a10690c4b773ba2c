"""Draw docs/moves.svg: two models that change places over a third unit, wave by wave."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kvmig.placement.moves import (
    GIB,
    Leases,
    ModelNeeds,
    MoveUnit,
    PlacedLease,
    PlacementSite,
    PlanRefused,
    PlanWave,
    Slot,
    plan,
)
from scripts.draw_processes import BLUE, GREEN, INK, LINE, PAPER, SOFT, keep, text

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "moves.svg"
SITE = PlacementSite(
    {"unit 0": MoveUnit(10 * GIB), "unit 1": MoveUnit(10 * GIB), "unit 2": MoveUnit(6 * GIB)},
    {"chat": ModelNeeds(8 * GIB, GIB, 12.0), "code": ModelNeeds(4 * GIB, GIB, 8.0)},
)
NOW: Leases = {
    ("chat", "unit 0"): PlacedLease(2 * GIB, GIB),
    ("code", "unit 1"): PlacedLease(2 * GIB, GIB),
}
THEN: Leases = {("code", "unit 0"): PlacedLease(2 * GIB), ("chat", "unit 1"): PlacedLease(2 * GIB)}
WIDTH, HEIGHT, LEFT, TOP, GAP = 112, 96, 20, 52, 10


def drawing() -> str:
    """The whole picture: a column a wave, a row a unit."""
    waves = plan(SITE, NOW, THEN)
    assert not isinstance(waves, PlanRefused)
    at = set(NOW)
    shapes = [_column(0, "before", "", at, [])]
    for number, wave in enumerate(waves, 1):
        shapes.append(_column(number, f"wave {number}", f"{wave.seconds:.0f} s", at, [wave]))
        at |= {(one.model, one.unit) for one in wave.steps if one.kind == "start"}
        at -= {(one.model, one.unit) for one in wave.steps if one.kind == "drain"}
    shapes.append(_column(len(waves) + 1, "after", "", at, []))
    width = LEFT * 2 + (len(waves) + 2) * (WIDTH + GAP) - GAP
    height = TOP + len(SITE.units) * (HEIGHT + GAP) + 10
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif"><rect width="{width}" height="{height}" rx="12" '
        f'fill="{PAPER}"/>{"".join(shapes)}</svg>\n'
    )


def _column(number: int, title: str, under: str, at: set[Slot], waves: Sequence[PlanWave]) -> str:
    x = LEFT + number * (WIDTH + GAP)
    shapes = [text(x + WIDTH / 2, 24, title, size=14, bold=True)]
    shapes.append(text(x + WIDTH / 2, 42, under, size=12, ink=SOFT))
    steps = {(one.model, one.unit): one.kind for wave in waves for one in wave.steps}
    for row, (unit, one) in enumerate(SITE.units.items()):
        y = TOP + row * (HEIGHT + GAP)
        shapes.append(
            f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="8" fill="{BLUE}" '
            f'stroke="{LINE[BLUE]}"/>'
        )
        shapes.append(
            text(x + WIDTH / 2, y + 15, f"{unit}, {one.memory // GIB} GiB", size=11, ink=SOFT)
        )
        slots = sorted(slot for slot in {*at, *steps} if slot[1] == unit)
        for place, slot in enumerate(slots):
            shapes.append(_instance(x, y + 22 + 36 * place, slot, steps.get(slot, "")))
    return "".join(shapes)


def _instance(x: float, y: float, slot: Slot, step: str) -> str:
    """One that comes has a broken line, one that goes is pale."""
    dashes = ' stroke-dasharray="4 3"' if step == "start" else ""
    pale = ' opacity="0.45"' if step == "drain" else ""
    words = {"start": "starts", "drain": "drains"}.get(step, "serves")
    return (
        f'<g{pale}><rect x="{x + 6:g}" y="{y:g}" width="{WIDTH - 12}" height="32" rx="5" '
        f'fill="{GREEN}" stroke="{LINE[GREEN]}"{dashes}/>'
        f"{text(x + WIDTH / 2, y + 20, f'{slot[0]} {words}', size=12, ink=INK)}</g>"
    )


if __name__ == "__main__":
    sys.exit(keep(str(__doc__), {TARGET: drawing}))
