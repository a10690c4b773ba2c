"""Draw docs/migration.svg: who asks whom what while a request moves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from scripts.draw_processes import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LINE,
    PAPER,
    SOFT,
    arrow,
    keep,
    part,
    text,
)

DOCS = Path(__file__).resolve().parent.parent / "docs"
WIDTH, TOP, ROW = 980, 112, 30
ENGINE_A, SOURCE, DESTINATION, ENGINE_B = LANES = (130, 370, 610, 850)
NAMES = (
    ["engine a", "decodes on"],
    ["source", "its machine drives"],
    ["destination", "its machine answers"],
    ["engine b", "runs its own requests"],
)


@dataclass(frozen=True)
class Say:
    """One arrow; `wide`: KV blocks travel."""

    sender: int
    to: int
    words: str
    wide: bool = False


@dataclass(frozen=True)
class Part:
    """From here to the next one: what the rows are about. Nobody decodes it in a `pause`."""

    words: str
    pause: bool = False


Row = Say | Part

BEGIN: tuple[Row, ...] = (
    Part("room first"),
    Say(SOURCE, ENGINE_A, "export"),
    Say(SOURCE, DESTINATION, "Reserve 0: export, offers"),
    Say(DESTINATION, ENGINE_B, "reserve"),
    Say(DESTINATION, SOURCE, "Reserved: prefix hits, cadence"),
    Part("stages, while it decodes"),
    Say(SOURCE, ENGINE_A, "stage: full blocks"),
    Say(SOURCE, DESTINATION, "Reserve n: tokens"),
    Say(DESTINATION, ENGINE_B, "grow"),
    Say(DESTINATION, SOURCE, "Reserved"),
    Say(SOURCE, ENGINE_A, "gather"),
    Say(SOURCE, DESTINATION, "Chunk: KV blocks, checksums", wide=True),
    Say(DESTINATION, ENGINE_B, "scatter, compare"),
    Say(DESTINATION, SOURCE, "ChunkDone"),
)
END: tuple[Row, ...] = (
    Part("room for the rest"),
    Say(SOURCE, ENGINE_A, "stage: little is left"),
    Say(SOURCE, DESTINATION, "Reserve, last"),
    Say(DESTINATION, ENGINE_B, "grow, prepare"),
    Say(DESTINATION, SOURCE, "Reserved"),
    Say(SOURCE, DESTINATION, "Expect: when"),
    Say(DESTINATION, ENGINE_B, "expect"),
    Part("pause", pause=True),
    Say(SOURCE, ENGINE_A, "suspend, gather"),
    Say(SOURCE, DESTINATION, "Commit: state, last blocks", wide=True),
    Say(DESTINATION, ENGINE_B, "commit: scatter, compare"),
    Say(DESTINATION, SOURCE, "Committed"),
    Say(ENGINE_B, DESTINATION, "first step"),
    Part("free"),
    Say(SOURCE, ENGINE_A, "release"),
    Say(DESTINATION, SOURCE, "FirstToken"),
)
PICTURES = {
    "migration.svg": ("One migration", (*BEGIN, *END)),
}


def said(row: Say, y: float) -> str:
    """An arrow with its words in the middle."""
    middle = (row.sender + row.to) / 2
    points = [(float(row.sender), y), (row.to + (6.0 if row.to < row.sender else -6.0), y)]
    return text(middle, y - 6, row.words, size=12) + arrow(points, wide=row.wide)


def band(row: Part, y: float, height: float) -> str:
    """The background of a part, with its name at the left."""
    fill = "#fdecea" if row.pause else GREY
    words = "".join(
        text(14, y + 20 + 14 * at, line, size=11, bold=row.pause, anchor="start", ink=SOFT)
        for at, line in enumerate(row.words.split(", "))
    )
    return f'<rect x="6" y="{y:g}" width="{WIDTH - 12}" height="{height:g}" fill="{fill}"/>{words}'


def drawing(title: str, rows: tuple[Row, ...]) -> str:
    """One picture."""
    bands: list[str] = []
    arrows: list[str] = []
    y = float(TOP)
    open_part: tuple[Part, float] | None = None
    for row in (*rows, Part("")):
        if isinstance(row, Say):
            arrows.append(said(row, y + ROW - 8))
            y += ROW
            continue
        if open_part is not None:
            bands.append(band(*open_part, y + 4 - open_part[1]))
            y += 10
        open_part = (row, y)
    lanes = [
        f'<line x1="{x}" y1="{TOP - 12}" x2="{x}" y2="{y:g}" stroke="{LINE[GREY]}"/>' for x in LANES
    ]
    heads = [
        part(x - 90, 40, 180, 56, name, LINE[GREEN if x in (ENGINE_A, ENGINE_B) else BLUE])
        for x, name in zip(LANES, NAMES, strict=True)
    ]
    body = [
        f'<rect width="{WIDTH}" height="{y + 10:g}" rx="12" fill="{PAPER}"/>',
        text(WIDTH / 2, 26, title, size=15, bold=True),
        *(*bands, *lanes, *heads, *arrows),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 10:g}" '
        f'width="{WIDTH}" height="{y + 10:g}" font-family="Helvetica, Arial, sans-serif" '
        f'role="img" aria-label="{title}">\n'
        '<defs><marker id="tip" markerUnits="userSpaceOnUse" markerWidth="10" markerHeight="8" '
        f'refX="8" refY="4" orient="auto"><path d="M0,0 L9,4 L0,8 z" fill="{INK}"/></marker>'
        "</defs>\n" + "\n".join(body) + "\n</svg>\n"
    )


def drawings() -> dict[Path, Callable[[], str]]:
    """What draws each picture, by file."""
    return {DOCS / name: partial(drawing, *picture) for name, picture in PICTURES.items()}


if __name__ == "__main__":
    sys.exit(keep(str(__doc__), drawings()))
