"""Draw docs/trace.svg: the spans of one real call that moves, and its migration by itself.

python -m bench.tracing --capture bench/results/trace/moved_call.json
python -m scripts.draw_trace
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.draw_processes import AMBER, BLUE, GREEN, GREY, LINE, PAPER, SOFT, text

ROOT = Path(__file__).resolve().parent.parent
SPANS = ROOT / "bench" / "results" / "trace" / "moved_call.json"
TARGET = ROOT / "docs" / "trace.svg"
WIDTH, LEFT, RIGHT, ROW, HEAD = 980, 300, 20, 26, 58
COLOURS = {"queue": GREY, "migrate": AMBER, "stage": AMBER, "pause": AMBER, "llm_request": BLUE}
"""Fills of spans, by their names; all others are green."""

Span = dict[str, Any]


def in_order(spans: Sequence[Span], parent: str, depth: int = 0) -> list[tuple[int, Span]]:
    """The spans under one, each before those under it, with their depth."""
    rows: list[tuple[int, Span]] = []
    for one in sorted(spans, key=lambda span: (span["began"], -span["ended"])):
        if one["parent_id"] == parent:
            rows += [(depth, one), *in_order(spans, one["span_id"], depth + 1)]
    return rows


def duration(seconds: float) -> str:
    """A span's length, for people."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def panel(rows: Sequence[tuple[int, Span]], title: str, top: float) -> str:
    """Rows of spans, to the scale of the first one."""
    _, first = rows[0]
    began, whole = first["began"], first["ended"] - first["began"]
    least = rows[0][0]
    drawn = [text(20, top, title, size=15, bold=True, anchor="start")]
    for at, (depth, span) in enumerate(rows):
        y = top + 16 + at * ROW
        start = LEFT + (WIDTH - LEFT - RIGHT - 90) * (span["began"] - began) / whole
        length = (WIDTH - LEFT - RIGHT - 90) * (span["ended"] - span["began"]) / whole
        fill = COLOURS.get(span["name"], GREEN)
        drawn.append(
            text(24 + 16 * (depth - least), y + 17, span["name"], size=13, anchor="start")
            + f'<rect x="{start:.1f}" y="{y + 4:g}" width="{max(2.0, length):.1f}" height="17"'
            f' rx="3" fill="{fill}" stroke="{LINE[fill]}"/>'
            + text(
                start + max(2.0, length) + 6, y + 17, duration(span["ended"] - span["began"]),
                size=12, anchor="start", ink=SOFT,
            )
        )  # fmt: skip
    return "".join(drawn)


def drawing(spans: Sequence[Span]) -> str:
    """The picture."""
    ids = {one["span_id"] for one in spans}
    (call,) = [one for one in spans if one["parent_id"] not in ids]
    rows = in_order(spans, call["parent_id"])
    at = next(index for index, (_, one) in enumerate(rows) if one["name"] == "migrate")
    depth, _ = rows[at]
    under = rows[at + 1 :]
    end = next((n for n, (deep, _) in enumerate(under) if deep <= depth), len(under))
    migration = [rows[at], *under[:end]]
    upper = [one for one in rows if one not in migration[1:]]
    below = HEAD + 16 + len(upper) * ROW + 34
    height = below + 16 + len(migration) * ROW + 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}"'
        f' font-family="system-ui, sans-serif"><rect width="{WIDTH}" height="{height:g}"'
        f' fill="{PAPER}"/>'
        + text(20, 28, f"trace {call['trace_id']}", size=12, anchor="start", ink=SOFT)
        + panel(upper, "one call", HEAD)
        + panel(migration, "its migration", below)
        + "</svg>\n"
    )


def main() -> int:
    TARGET.write_text(drawing(json.loads(SPANS.read_text())))
    print(TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
