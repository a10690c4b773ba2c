"""What a client sees when its stream is moved: live, live unspread, blocking, or recomputed.

Three servers of two real vLLM instances each are up at the same time: as kvmig.serve is by
default (live stages, the pause spread over the tokens before it), with --pause-spread 0, and with
--max-stages 0 --pause-spread 0. Each run takes all samples of one cell, in turn:

recompute: the client leaves its stream and sends prompt and tokens so far again; the
  other instance computes all of it (a salt of its own keeps prefix caches out). Gap: from
  leaving to the first new token.
live: that stream is migrated back. unspread, blocking: the same on the other servers.

The headline of a move is `longest_ms` / `quiet_ms`: the longest time between any two tokens from
the moment that the move was asked for until some tokens after the switch, and the longest in an
equally long window of the same stream a little later. Both are the client's own; the server's
report only says which token was the switch, and is kept.

Details: `gap_ms`, how long the client had waited when the first token of the destination came
(nearly always since the last token of the source), beside the median time between two tokens of
that stream before the move; and the pause, by the report: from the end of the request's last
step at the source to that of its first one at the destination.
Background: streams on each instance, all the time, of 64 tokens of prompt.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import uvloop
from rich.table import Table

from bench import report
from bench.arrivals import intervals_ms
from bench.client import Stream, StreamFailed, prompt_of, session
from bench.models import NAMES, model_flags, model_folder
from bench.moves import watched_move
from bench.plots import draw_downtime
from bench.site import SERVED_FLAGS, SETTLE, Site, all_up
from kvmig_tools.served import Served

PROMPTS = (128, 1024, 3500)
BACKGROUNDS = (0, 4)
MEASURED = 40
"""Tokens over which the time between two is taken."""
AFTER = 8
"""Tokens that must come after a migration."""
PARTS = ("drain", "tail_copy", "commit", "first_token")
PAUSE = PARTS[1:]
"""While nobody decodes the request; in the drain its last step runs."""
MODES = ("live", "unspread", "blocking", "recompute")
MOVES = MODES[:-1]
FLAGS = ((), ("--pause-spread=0",), ("--max-stages=0", "--pause-spread=0"))
"""Of kvmig.serve, for each kind of move."""
ATTEMPTS = 3
"""Of one sample."""
LONG_RUN = ("live_worst_gap_over_quiet_*", "live_3500_over_128_*", "live_over_inter_token_3500_*")
"""Bounds of 10 to 30 % on gaps of single moves, for which two of a cell are too few."""


@dataclass(frozen=True)
class Sample:
    """One gap. Times in milliseconds."""

    mode: str
    prompt: int
    background: int
    run: int
    inter_token_ms: float
    gap_ms: float
    longest_ms: float
    quiet_ms: float
    intervals_ms: list[float]
    migration: dict[str, Any] | None = None
    """The server's own report."""

    @property
    def ratio(self) -> float:
        """Gap over the time between two tokens."""
        return self.gap_ms / self.inter_token_ms

    @property
    def worst(self) -> float:
        """The longest gap around the move over the longest of an equally long window without."""
        return self.longest_ms / self.quiet_ms


async def measured(stream: Stream) -> list[float]:
    """The last times between tokens of a stream that has settled."""
    await stream.reach(len(stream.tokens) + SETTLE)
    begin = len(stream.arrivals)
    await stream.reach(len(stream.tokens) + MEASURED)
    return intervals_ms(stream.arrivals[begin - 1 :])


async def moved(site: Site, stream: Stream, cell: dict[str, Any]) -> Sample:
    """Migrate the stream; the gap at that."""
    intervals = await measured(stream)
    window, migration = await watched_move(site, stream, AFTER)
    return Sample(
        **cell,
        inter_token_ms=median(intervals),
        gap_ms=window.switch_ms,
        longest_ms=window.longest_ms,
        quiet_ms=window.quiet_ms,
        intervals_ms=_rounded(intervals),
        migration=migration,
    )


async def live_and_recompute(site: Site, cell: dict[str, Any]) -> list[Sample]:
    """One sample of each, on the server with live stages."""
    name = tuple(cell.values())
    async with AsyncExitStack() as stack:
        await site.background(stack, cell["background"], name)
        first = site.stream(prompt_of(cell["prompt"], name), "first")
        async with first:
            intervals = await measured(first)
            other = await site.other_than(first)
        left = time.monotonic()
        again = site.stream([*first.prompt, *first.tokens], "again")
        await stack.enter_async_context(again)
        await again.reach(1)
        if await site.instance_of(again) != other:
            raise StreamFailed("recomputed where it was")
        gap = (again.arrivals[0].at - left) * 1e3
        recompute = Sample(
            mode="recompute",
            **cell,
            inter_token_ms=median(intervals),
            gap_ms=gap,
            longest_ms=gap,
            quiet_ms=max(intervals),
            intervals_ms=_rounded(intervals),
        )
        return [recompute, await moved(site, again, {"mode": "live", **cell})]


async def one_move(site: Site, mode: str, cell: dict[str, Any]) -> list[Sample]:
    """One sample, on a server that moves so."""
    name = tuple(cell.values())
    async with AsyncExitStack() as stack:
        await site.background(stack, cell["background"], name)
        stream = site.stream(prompt_of(cell["prompt"], name), mode)
        await stack.enter_async_context(stream)
        return [await moved(site, stream, {"mode": mode, **cell})]


async def attempted(make: Callable[[], Awaitable[list[Sample]]]) -> list[Sample]:
    """Samples of one cell. A run that the machine's stalls have spoilt is said and made again."""
    for _ in range(ATTEMPTS - 1):
        try:
            return await make()
        except StreamFailed as error:
            report.say(f"again: {error}")
    return await make()


async def measure(servers: dict[str, Served], prompts: tuple[int, ...], runs: int) -> list[Sample]:
    """All samples; the first run of all is thrown away, it finds caches cold."""
    samples: list[Sample] = []
    cells = [
        {"prompt": prompt, "background": background, "run": run}
        for run in range(runs)
        for background in BACKGROUNDS
        for prompt in prompts
    ]
    async with session() as http:
        sites = {mode: Site(served, http) for mode, served in servers.items()}

        async def of_a_cell(cell: dict[str, Any]) -> list[Sample]:
            found = await attempted(partial(live_and_recompute, sites["live"], cell))
            for mode in MOVES[1:]:
                found += await attempted(partial(one_move, sites[mode], mode, cell))
            return found

        await of_a_cell({"prompt": prompts[0], "background": 0, "run": -1})
        with report.progress() as bar:
            for cell in bar.track(cells, description="cells"):
                samples += await of_a_cell(cell)
    return samples


def pause_ms(sample: Sample) -> float:
    """From the last step at the source to the first token at the destination, by the report."""
    assert sample.migration is not None
    parts: dict[str, float | None] = sample.migration["downtime_ms"]
    return sum(parts[part] or 0.0 for part in PAUSE)


def summarise(samples: list[Sample]) -> tuple[dict[str, float], dict[str, report.Target]]:
    """The figures, and what they should be. Medians throughout, a set for each background."""
    prompts = sorted({sample.prompt for sample in samples})
    short, long = prompts[0], prompts[-1]
    summary: dict[str, float] = {}
    targets: dict[str, report.Target] = {}
    for background in sorted({sample.background for sample in samples}):
        here = [sample for sample in samples if sample.background == background]

        def gap(mode: str, prompt: int, here: list[Sample] = here) -> float:
            return median(s.gap_ms for s in here if (s.mode, s.prompt) == (mode, prompt))

        def inter_token(prompt: int, here: list[Sample] = here) -> float:
            return median(s.inter_token_ms for s in here if (s.mode, s.prompt) == ("live", prompt))

        def ratio_at(prompt: int, here: list[Sample] = here) -> float:
            return median(s.ratio for s in here if (s.mode, s.prompt) == ("live", prompt))

        live = [sample for sample in here if sample.mode == "live"]
        of = f"background_{background}"
        ratio, growth = f"live_over_inter_token_{of}", f"live_{long}_over_{short}_{of}"
        recomputed = f"recompute_over_live_{long}_{of}"
        flat = f"live_over_inter_token_{long}_over_{short}_{of}"
        summary |= {
            ratio: median(sample.ratio for sample in live),
            growth: gap("live", long) / gap("live", short),
            # A step itself takes longer behind a longer prompt: so much of the growth is its.
            f"inter_token_{long}_over_{short}_{of}": inter_token(long) / inter_token(short),
            flat: ratio_at(long) / ratio_at(short),
            recomputed: gap("recompute", long) / gap("live", long),
            f"blocking_over_live_{long}_{of}": gap("blocking", long) / gap("live", long),
            f"inter_token_ms_{of}": median(sample.inter_token_ms for sample in live),
            f"live_ms_{long}_{of}": gap("live", long),
            f"live_pause_over_inter_token_{of}": median(
                pause_ms(sample) / sample.inter_token_ms for sample in live
            ),
        }
        for mode in MOVES:
            worst = [sample.worst for sample in here if sample.mode == mode]
            summary |= {
                f"{mode}_worst_gap_over_quiet_{of}": median(worst),
                f"{mode}_worst_gap_over_quiet_p90_{of}": percentile(worst, 90),
            }
        targets |= {
            f"live_worst_gap_over_quiet_{of}": {"max": 1.1},
            f"live_worst_gap_over_quiet_p90_{of}": {"max": 1.3},
            growth: {"max": 1.2},
            flat: {"max": 1.1},
            recomputed: {"min": 20.0},
        }
    return summary, targets


def worst(cell: list[Sample], mode: str) -> str:
    """Median and p90 of one mode's samples."""
    found = [sample.worst for sample in cell if sample.mode == mode]
    return f"{median(found):.2f}, {percentile(found, 90):.2f}"


def tables(samples: list[Sample]) -> list[Table]:
    """Gaps, and where the pause of the live ones goes."""
    keys = sorted({(sample.background, sample.prompt) for sample in samples})
    gaps: list[tuple[object, ...]] = []
    pauses: list[tuple[object, ...]] = []
    for background, prompt in keys:
        cell = [s for s in samples if (s.background, s.prompt) == (background, prompt)]
        live = [s for s in cell if s.mode == "live"]
        of = {mode: [s.gap_ms for s in cell if s.mode == mode] for mode in MODES}
        inter_token = median(s.inter_token_ms for s in live)
        name = f"{background} / {prompt}"
        gaps.append(
            (
                name,
                inter_token,
                *(f"{median(of[m]):.1f} ({min(of[m]):.1f}-{max(of[m]):.1f})" for m in MODES),
                median(s.ratio for s in live),
                *(worst(cell, mode) for mode in MOVES),
            )
        )
        for mode in MOVES:
            chosen = [s.migration for s in cell if s.mode == mode and s.migration is not None]
            pauses.append(
                (
                    f"{name} {mode}",
                    *(median(m["downtime_ms"][part] or 0.0 for m in chosen) for part in PARTS),
                    median(m["tail_blocks"] for m in chosen),
                    median(len(m["stages"]) for m in chosen),
                    median(m["total_ms"] for m in chosen),
                )
            )
    return [
        report.table(
            "Gap at the switch, ms: median (least-most); worst gap / without a move: median, p90",
            (
                "background / prompt",
                "inter-token",
                *MODES,
                "live / inter-token",
                *(f"worst, {mode}" for mode in MOVES),
            ),
            gaps,
        ),
        report.table(
            "Where the pause goes, by the servers' reports, ms (medians)",
            (
                "background / prompt",
                *(part.replace("_", " ") for part in PARTS),
                "tail blocks",
                "stages",
                "whole migration",
            ),
            pauses,
        ),
    ]


def percentile(values: list[float], percent: int) -> float:
    """By linear interpolation."""
    return float(numpy.percentile(values, percent))


def _rounded(values: list[float]) -> list[float]:
    return [round(value, 3) for value in values]


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, LONG_RUN)
    root.add_argument("--model", default="step10ms", help=f"{', '.join(NAMES)} or a folder")
    root.add_argument("--runs", type=int, help="of each cell: 8, or 2 with --quick")
    options = root.parse_args(argv)
    prompts = (PROMPTS[0], PROMPTS[-1]) if options.quick else PROMPTS
    runs = options.runs or (2 if options.quick else 8)
    flags = [*SERVED_FLAGS, *model_flags(options.model)]
    settings = {"model": options.model, "prompts": prompts, "runs": runs, "flags": flags}
    result = report.begin("downtime", settings)
    model = model_folder(options.model)
    with tempfile.TemporaryDirectory() as logs:
        servers = {
            mode: Served([*flags, *more], model=model, log=Path(logs) / mode)
            for mode, more in zip(MOVES, FLAGS, strict=True)
        }
        report.say("starting three servers")
        with all_up([*servers.values()]):
            samples = uvloop.run(measure(servers, prompts, runs))
    result.samples = [asdict(sample) for sample in samples]
    result.summary, result.targets = summarise(samples)
    return report.finish(result, options, tables(samples), draw_downtime)


if __name__ == "__main__":
    sys.exit(main())
