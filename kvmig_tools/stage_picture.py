"""A picture of one copy stage of a migration: a row for each of its chunks, over time.

It shows where a stage's time goes: chunks that wait for a slot, copies that run one after the
other, a destination that falls behind. Pure; the times are the report's (`StageReport.chunks`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from xml.sax.saxutils import escape

from kvmig.kvtransfer.report import ChunkTimes, StageReport

LEFT, WIDTH, TOP, ROW, BAR = 64, 860, 76, 9, 7
COLOURS = {
    "waits at the source": "#c9c9c9",
    "gather": "#1f6fb2",
    "push": "#4fa36b",
    "waits at the destination": "#ece3c8",
    "scatter": "#c98a1b",
}
ON_DEVICE, DEVICE_COLOUR, DEVICE_BAR = "of it on the GPU", "#222222", 3
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 60_000)
MOST_TICKS = 10


def bars(chunk: ChunkTimes) -> list[tuple[str, float, float]]:
    """What happened to the chunk, from when to when: milliseconds since the stage began.

    The destination's scatter ends with its answer, whose way is part of the wait before it.
    """
    if chunk.answered is None:
        ends = [chunk.turn, chunk.gather, chunk.push, chunk.sent]
    else:
        scatters = max(chunk.sent, chunk.answered - chunk.scatter)
        ends = [chunk.turn, chunk.gather, chunk.push, chunk.sent, scatters, chunk.answered]
    return [(name, begin, end) for name, (begin, end) in zip(COLOURS, pairwise(ends), strict=False)]


def device_bars(chunk: ChunkTimes) -> list[tuple[float, float]]:
    """When a GPU worked for the chunk, as far as its events say: at the end of the gather, and of
    the scatter, within either."""
    found = []
    if chunk.gather_device is not None:
        found.append((max(chunk.gather, chunk.push - chunk.gather_device), chunk.push))
    if chunk.scatter_device is not None and chunk.answered is not None:
        began = chunk.answered - min(chunk.scatter, chunk.scatter_device)
        found.append((max(chunk.sent, began), chunk.answered))
    return found


def picture_of(stage: StageReport, title: str) -> str:
    """An SVG. Raises ValueError for a stage whose chunks aren't known."""
    if not stage.chunks:
        raise ValueError("no chunk of the stage is known")
    shown = [bars(chunk) for chunk in stage.chunks]
    until = max(end for chunk in shown for _, _, end in chunk) or 1.0
    height = TOP + ROW * len(shown) + 34
    gb_s = stage.bytes / 1e6 / stage.ms if stage.ms else 0.0
    words = f"{stage.bytes / 1e6:,.1f} MB in {stage.ms:,.1f} ms, {gb_s:.2f} GB/s"
    if len(shown) * max(chunk.bytes for chunk in stage.chunks) < stage.bytes:
        words += f"; its first {len(shown)} chunks"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 24}" height="{height}"'
        ' font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
        f'<text x="{LEFT}" y="38">{escape(words)}</text>',
        *_legend(any(map(device_bars, stage.chunks))),
        *_axis(until, height),
    ]
    for row, chunk in enumerate(shown):
        y = TOP + ROW * row
        lines.append(f'<text x="{LEFT - 6}" y="{y + BAR}" text-anchor="end">{row + 1}</text>')
        lines += [_bar(y, BAR, COLOURS[name], (b / until, e / until)) for name, b, e in chunk]
        low = y + BAR - DEVICE_BAR
        worked = device_bars(stage.chunks[row])
        lines += [_bar(low, DEVICE_BAR, DEVICE_COLOUR, (b / until, e / until)) for b, e in worked]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _bar(y: int, height: int, colour: str, span: tuple[float, float]) -> str:
    """span: parts of the width."""
    x, wide = LEFT + WIDTH * span[0], WIDTH * (span[1] - span[0])
    where = f'x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{height}"'
    return f'<rect {where} fill="{colour}"/>'


def _legend(on_device: bool) -> Iterator[str]:
    x, last = LEFT, {ON_DEVICE: DEVICE_COLOUR} if on_device else {}
    for name, colour in (COLOURS | last).items():
        yield f'<rect x="{x}" y="50" width="10" height="10" fill="{colour}"/>'
        yield f'<text x="{x + 14}" y="59">{name}</text>'
        x += 34 + 6 * len(name)


def _axis(until: float, height: int) -> Iterator[str]:
    every = next((tick for tick in TICKS if until / tick <= MOST_TICKS), TICKS[-1])
    for number in range(int(until / every) + 1):
        x = LEFT + WIDTH * number * every / until
        yield f'<path d="M{x:.1f} {TOP - 4}V{height - 24}" stroke="#e4e4e4"/>'
        yield f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle">{number * every} ms</text>'
