"""Draw docs/processes.svg, docs/fleet.svg, docs/cluster.svg and docs/units.svg: the processes of a
cluster and of a fleet, and what crosses each socket; a fleet's workers; how models share the KV
cache of a host."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parent.parent / "docs"
WIDTH, HEIGHT = 980, 560
INK, SOFT, PAPER = "#1f2933", "#52606d", "#ffffff"
BLUE, GREEN, AMBER, GREY = "#e6f0fb", "#e5f5ea", "#fdf1dc", "#f2f4f7"
LINE = {BLUE: "#2f6db5", GREEN: "#2e8b57", AMBER: "#b7791f", GREY: "#8a94a3"}


def text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 13,
    bold: bool = False,
    anchor: str = "middle",
    ink: str = INK,
) -> str:
    """One line of text, its baseline at y."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
        f'fill="{ink}"{weight}>{escape(words)}</text>'
    )


def box(x: float, y: float, width: float, height: float, fill: str, title: str) -> str:
    """A process."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="10" '
        f'fill="{fill}" stroke="{LINE[fill]}" stroke-width="1.6"/>'
        + text(x + width / 2, y + 26, title, size=16, bold=True)
    )


def part(x: float, y: float, width: float, height: float, lines: list[str], edge: str) -> str:
    """A part of a process: the first line is its name."""
    first = y + height / 2 + 5 - 9 * (len(lines) - 1)
    words = "".join(
        text(x + width / 2, first + 18 * at, line, bold=at == 0, ink=INK if at == 0 else SOFT)
        for at, line in enumerate(lines)
    )
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
        f'fill="{PAPER}" stroke="{edge}" stroke-width="1"/>{words}'
    )


def arrow(
    points: list[tuple[float, float]],
    *,
    both: bool = False,
    dashed: bool = False,
    wide: bool = False,
) -> str:
    """A connection; its end is where messages go to."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    start = ' marker-start="url(#back)"' if both else ""
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    return (
        f'<polyline points="{path}" fill="none" stroke="{INK}" '
        f'stroke-width="{3 if wide else 1.6}" marker-end="url(#tip)"{start}{dash}/>'
    )


def label(x: float, y: float, lines: list[str], anchor: str = "start") -> str:
    """Words beside an arrow."""
    return "".join(
        text(x, y + 17 * at, line, size=12, anchor=anchor, ink=SOFT)
        for at, line in enumerate(lines)
    )


def llumlet(x: float, number: int) -> str:
    """One instance's process, 330 wide."""
    edge = LINE[GREEN]
    return "".join(
        (
            box(x, 330, 330, 190, GREEN, f"llumlet {number}"),
            part(x + 20, 372, 290, 56, ["event loop", "load reports · handshake · ROUTER"], edge),
            part(x + 20, 444, 140, 60, ["vLLM EngineCore", "its own thread"], edge),
            part(x + 170, 444, 140, 60, ["copy thread", "gather · scatter"], edge),
        )
    )


def drawing() -> str:
    """The whole picture."""
    edge = LINE[BLUE]
    shapes = [
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="12" fill="{PAPER}"/>',
        # front end
        part(20, 60, 130, 56, ["clients", "OpenAI API"], LINE[GREY]),
        arrow([(150, 88), (218, 88)], both=True),
        text(184, 76, "HTTP", size=12, ink=SOFT),
        box(222, 24, 420, 152, BLUE, "front end, launcher (kvmig.serve)"),
        part(
            240,
            66,
            184,
            92,
            ["vLLM's OpenAI app", "detokenizer, stop strings,", "admin API, metrics"],
            edge,
        ),
        part(440, 66, 184, 92, ["Router", "dispatch, splice, fence,", "answers Resolve"], edge),
        # scheduler
        box(760, 24, 200, 152, AMBER, "scheduler"),
        part(
            778,
            66,
            164,
            92,
            ["rebalancing", "each round: pairs of", "low and high freeness"],
            LINE[AMBER],
        ),
        arrow([(642, 88), (756, 88)]),
        text(699, 76, "Members", size=12, ink=SOFT),
        # instances
        llumlet(60, 0),
        llumlet(590, 1),
        # front end to llumlets
        arrow([(320, 176), (250, 326)], both=True),
        arrow([(520, 176), (650, 326)], both=True),
        label(
            252,
            208,
            [
                "down: Submit, Abort, Call,",
                "Migrate, Fence, Shutdown",
                "up: Outputs, LoadReport,",
                "Migrated, Resolve",
            ],
            "end",
        ),
        # scheduler to llumlets
        arrow([(860, 176), (820, 326)], both=True, dashed=True),
        arrow([(780, 176), (390, 340)], both=True, dashed=True),
        label(850, 236, ["down: Pair", "up: LoadReport"]),
        # peers
        arrow([(390, 400), (590, 400)], both=True),
        label(
            490,
            372,
            [
                "Reserve, Chunk, Commit",
            ],
            "middle",
        ),
        label(490, 390, ["and their answers"], "middle"),
        arrow([(390, 474), (590, 474)], wide=True),
        label(490, 464, ["KV blocks"], "middle"),
        label(490, 496, ["shared memory, or TCP", "between hosts"], "middle"),
        text(
            20,
            547,
            "Thin lines: ZeroMQ over TCP under CURVE; each llumlet and the scheduler "
            "bind one ROUTER, all others connect. Dashed: all is served without it.",
            size=12,
            anchor="start",
            ink=SOFT,
        ),
    ]
    return picture(shapes, WIDTH, HEIGHT, "The processes of a kvmig cluster and their connections")


def fleet() -> str:
    """The picture of a fleet's processes."""
    width, height = 980, 430
    shapes = [
        f'<rect width="{width}" height="{height}" rx="12" fill="{PAPER}"/>',
        part(20, 60, 120, 56, ["clients", "OpenAI API, keys"], LINE[GREY]),
        part(20, 210, 120, 56, ["kvmig ...", "command line"], LINE[GREY]),
        f'<rect x="190" y="16" width="770" height="366" rx="12" fill="none" stroke="{SOFT}" '
        'stroke-dasharray="4 4"/>',
        text(
            206,
            374,
            "supervisor (kvmig up): the parent of all; nothing outlives it",
            size=12,
            anchor="start",
            ink=SOFT,
        ),
        box(220, 32, 220, 128, BLUE, "proxy"),
        part(
            236,
            70,
            188,
            76,
            ["entry point", "keys, models, relay;", "holds calls during a start"],
            LINE[BLUE],
        ),
        box(220, 208, 220, 128, AMBER, "server"),
        part(
            236,
            246,
            188,
            76,
            ["decides", "catalogue, keys, from zero,", "how many instances"],
            LINE[AMBER],
        ),
        part(500, 250, 120, 56, ["database", "or PostgreSQL's"], LINE[GREY]),
        arrow([(440, 278), (498, 278)], both=True),
        arrow([(140, 88), (218, 88)], both=True),
        arrow([(140, 238), (218, 258)], both=True),
        arrow([(330, 162), (330, 206)], both=True),
        label(340, 180, ["routes, keys", "demand"]),
    ]
    for row, name in enumerate(("qwen", "count")):
        y = 32 + 96 * row
        shapes += [
            box(640, y, 300, 84, GREEN, f"kvmig.serve: {name}"),
            text(790, y + 50, "a deployment: front end, llumlets, scheduler", size=12, ink=SOFT),
            text(790, y + 68, "streams move between its instances", size=12, ink=SOFT),
            arrow([(440, 96), (638, y + 42)], wide=True),
        ]
    shapes += [
        label(500, 48, ["bytes, on a", "Unix socket"]),
        box(640, 250, 300, 84, GREY, "fork server"),
        text(790, 300, "has vLLM loaded: deployments and", size=12, ink=SOFT),
        text(790, 318, "instances are forks of it", size=12, ink=SOFT),
        arrow([(790, 250), (790, 214)], dashed=True),
        text(20, 412, "Without the server, streams, warm models and known keys keep working. A "
             "deployment's own processes: see Architecture.", size=12, anchor="start", ink=SOFT),
    ]  # fmt: skip
    return picture(shapes, width, height, "The processes of a kvmig fleet")


def cluster() -> str:
    """The head and two workers of a fleet: what runs where."""
    width, height = 980, 400
    shapes = [
        f'<rect width="{width}" height="{height}" rx="12" fill="{PAPER}"/>',
        part(20, 150, 110, 56, ["clients", "OpenAI API"], LINE[GREY]),
        box(180, 20, 330, 320, BLUE, "head: kvmig up --ray auto"),
        part(200, 62, 290, 60, ["proxies", "entry point, keys"], LINE[BLUE]),
        part(200, 134, 290, 60, ["server", "decides which worker; cordons, drains"], LINE[AMBER]),
        part(200, 206, 290, 60, ["kvmig.serve, one a model", "front end, launcher"], LINE[GREEN]),
        part(200, 278, 290, 46, ["Ray head"], LINE[GREY]),
        arrow([(130, 178), (198, 92)], both=True),
    ]
    for row, name in enumerate(("worker left", "worker right")):
        y = 20 + 170 * row
        shapes += [
            box(660, y, 300, 150, GREY, name),
            part(676, y + 40, 128, 44, ["agent", "measures"], LINE[AMBER]),
            part(816, y + 40, 128, 44, ["Ray node"], LINE[GREY]),
            part(676, y + 94, 268, 44, ["instances", "llumlets of several models"], LINE[GREEN]),
            arrow([(490, 236), (674, y + 116)], both=True, wide=True),
            arrow([(674, y + 62), (492, 164)], dashed=True),
        ]
    shapes += [
        arrow([(960, 130), (972, 130), (972, 292), (962, 292)], both=True, wide=True),
        label(952, 184, ["streams move"], "end"),
        label(586, 300, ["tokens, orders", "(CURVE)"], "middle"),
        label(586, 60, ["memory, GPUs", "(Ray)"], "middle"),
        text(20, 372, "A worker is a node of the Ray cluster. The front ends of all models are on "
             "the head; a lost worker's requests run again on others.", size=12, anchor="start",
             ink=SOFT),
    ]  # fmt: skip
    return picture(shapes, width, height, "A kvmig fleet over several machines")


def units() -> str:
    """Two models and the agent of their unit: what each has of the arena, the memory budget."""
    width, height = 980, 430
    shapes = [
        box(20, 20, 300, 176, GREEN, "kvmig.serve: llama"),
        box(660, 20, 300, 176, GREEN, "kvmig.serve: qwen"),
        box(370, 20, 240, 110, AMBER, "unit agent"),
        text(490, 70, "quotas, leases;", size=12, ink=SOFT),
        text(490, 88, "holds no memory", size=12, ink=SOFT),
    ]
    for x, used, cached, gone in ((40, 120, 40, 100), (680, 60, 20, 180)):
        shapes.append(text(x, 92, "vLLM's block pool", anchor="start", size=12, ink=SOFT))
        at = x
        for size, fill, words in (
            (used, BLUE, "requests"), (cached, PAPER, "cache"), (gone, GREY, "balloon"),
        ):  # fmt: skip
            shapes.append(
                f'<rect x="{at}" y="104" width="{size}" height="44" fill="{fill}" '
                f'stroke="{LINE[BLUE]}" stroke-width="1"/>'
            )
            shapes.append(text(at + size / 2, 131, words, size=11))
            at += size
        shapes.append(text(x, 176, "as large as the arena, in addresses", anchor="start", size=12,
                           ink=SOFT))  # fmt: skip
    shapes += [
        arrow([(370, 60), (322, 60)]),
        arrow([(610, 60), (658, 60)]),
        label(346, 36, ["Lease"]),
        label(634, 36, ["Lease"]),
        label(346, 84, ["Held"]),
        label(634, 84, ["Held"]),
        text(20, 250, "the arena: memory budget of the unit", size=14, bold=True, anchor="start"),
    ]
    at = 20
    for size, fill, words in (
        (430, BLUE, "leased to llama"), (350, GREEN, "leased to qwen"), (160, PAPER, "free"),
    ):  # fmt: skip
        shapes.append(
            f'<rect x="{at}" y="264" width="{size}" height="50" fill="{fill}" '
            f'stroke="{INK}" stroke-width="1"/>'
        )
        shapes.append(text(at + size / 2, 294, words))
        at += size
    shapes += [
        text(20, 346, "Blocks of the balloon have no pages. A lease shrinks once its pages are "
             "given back, and only then another one grows:", size=12, anchor="start", ink=SOFT),
        text(20, 366, "leases never add up to more than the arena.", size=12, anchor="start",
             ink=SOFT),
        text(20, 396, "Reclaimed: free blocks, then cold prefixes, then blocks of requests that "
             "migrate or end, last those of preempted ones.", size=12, anchor="start", ink=SOFT),
    ]  # fmt: skip
    return picture(shapes, width, height, "How models of a unit share the KV cache of a host")


TARGETS = {
    DOCS / "processes.svg": drawing,
    DOCS / "fleet.svg": fleet,
    DOCS / "cluster.svg": cluster,
    DOCS / "units.svg": units,
}


def picture(shapes: list[str], width: int, height: int, words: str) -> str:
    """SVG of the shapes; words: for those who can't see it."""
    tip = "M0,0 L9,4 L0,8 z"
    back = "M9,0 L0,4 L9,8 z"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="Helvetica, Arial, sans-serif" '
        f'role="img" aria-label="{words}">\n'
        "<defs>"
        f'<marker id="tip" markerUnits="userSpaceOnUse" markerWidth="10" markerHeight="8" refX="8" '
        f'refY="4" orient="auto"><path d="{tip}" fill="{INK}"/></marker>'
        f'<marker id="back" markerUnits="userSpaceOnUse" markerWidth="10" markerHeight="8" '
        f'refX="1" refY="4" orient="auto"><path d="{back}" fill="{INK}"/></marker>'
        "</defs>\n" + "\n".join(shapes) + "\n</svg>\n"
    )


def keep(words: str, pictures: Mapping[Path, Callable[[], str]]) -> int:
    """Write each picture to its file; with --check, return 1 if one isn't current. words: what
    --help says."""
    parser = argparse.ArgumentParser(description=words)
    parser.add_argument("--check", action="store_true", help="only say whether all are current")
    if parser.parse_args().check:
        return int(any(path.read_text() != draw() for path, draw in pictures.items()))
    for path, draw in pictures.items():
        path.write_text(draw())
    return 0


if __name__ == "__main__":
    sys.exit(keep(str(__doc__), TARGETS))
