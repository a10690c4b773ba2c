"""What a pause is made of: many moves of single streams between two real vLLM instances, idle and
beside further streams, each gap in decode steps.

A stream moves to the other instance and back, some times; then the next stream does. Of each move:

longest / quiet: the longest time between any two of its tokens from the moment that the move was
asked for until some tokens after the switch, and the longest in an equally long window of the same
stream right after it. switch: how long the client had waited when the destination's first token
came. In steps: over the stream's usual time between two tokens.

The parts of the pause are the report's: drain (the suspension is asked for, until no step holds the
request: it still gets tokens), the copy of the tail, way (Commit's and its answer's), engine (the
destination's part of the commit: it scatters, builds and registers the request), first (until the
first step with it has ended), of which wait is what is more than a step. back is what remains of
the client's wait: the first token's way to it, less that of the token before. A gap counts as the
switch's where it ended with the destination's first token or the one after it; others of a move
come from the copies or from the machine, which also shows in windows without a move.

--runner v2: vLLM's model runner V2 on a CPU (`bench.v2_on_cpu`).

--beside FOLDER: another working tree of kvmig. Both are up, and their streams take turns, so that
the machine is the same for both. The first moves of a server find everything cold: they are
reported by themselves (`cold`), not among the others.

On a GPU: `bench/gpu.sh --only pause pause-v1`, or `--model FOLDER --flags '--no-enforce-eager
--kv-cache-memory-bytes=8G'` and what the model needs; $VLLM_USE_V2_MODEL_RUNNER chooses the model
runner there.
"""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import uvloop
from rich.table import Table

from bench import report
from bench.arrivals import intervals_ms
from bench.client import Stream, StreamFailed, prompt_of, session
from bench.downtime import AFTER, percentile
from bench.models import NAMES, model_flags, model_folder
from bench.moves import Window, watched_move
from bench.site import SERVED_FLAGS, SETTLE, Site, all_up
from kvmig_tools.nursery import Nursery
from kvmig_tools.served import Served

PROMPT = 512
MOVES = 8
"""Of one stream."""
RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
COLD = 4
"""First moves of a server."""
TOKENS = 6000
"""Of a stream at most; it leaves after its last move."""
STEPS = 3.0
"""No gap should be longer."""
HERE = "here"
"""The working tree that this is in."""
PARTS = ("drain", "tail", "way", "engine", "first", "wait", "back")


@dataclass(frozen=True)
class PauseSample:
    """One move. Times in milliseconds."""

    tree: str
    load: int
    move: int
    """Since the server's start, under any load."""
    step_ms: float
    """The stream's usual time between two tokens."""
    longest_ms: float
    quiet_ms: float
    switch_ms: float
    drain: float
    tail: float
    way: float
    engine: float
    first: float
    wait: float
    back: float
    total_ms: float
    late: int = 0
    """See `Window`."""

    @property
    def at_switch(self) -> bool:
        """Whether its longest gap is the switch's."""
        return self.late in (0, 1)


def sample_of(
    tree: str, load: int, move: int, step_ms: float, window: Window, migration: dict[str, Any]
) -> PauseSample:
    """From what the client saw, and the server's report."""
    pause = migration["downtime_ms"]
    first, engine = pause["first_token"] or 0.0, migration["commit_engine_ms"]
    way = pause["commit"] - engine
    # The answer's way back is no part of the wait for the first token.
    known = pause["tail_copy"] + way / 2 + engine + first
    return PauseSample(
        tree, load, move, step_ms, window.longest_ms, window.quiet_ms, window.switch_ms,
        drain=pause["drain"], tail=pause["tail_copy"], way=way, engine=engine, first=first,
        wait=first - step_ms, back=window.switch_ms - known, total_ms=migration["total_ms"],
        late=window.late,
    )  # fmt: skip


class Tree:
    """The server of one working tree, and how many moves it has made."""

    def __init__(self, name: str, served: Served, http: aiohttp.ClientSession) -> None:
        self.name = name
        self.moves = 0
        self._site = Site(served, http)

    async def one_stream(self, load: int, number: int, count: int) -> list[PauseSample]:
        """`count` moves of one stream beside `load` others on each instance."""
        async with AsyncExitStack() as stack:
            await self._site.background(stack, load, (self.name, load, number))
            prompt = prompt_of(PROMPT, "pause", number)
            stream = self._site.stream(prompt, f"{self.name}{number}", TOKENS)
            await stack.enter_async_context(stream)
            return [await self._move(load, stream) for _ in range(count)]

    async def wrong(self, number: int, count: int) -> int:
        """Tokens of a stream that moves which differ from those of one that stays."""
        prompt = prompt_of(PROMPT, "pause", number)
        async with self._site.stream(prompt, "moves", TOKENS) as moved:
            await moved.reach(SETTLE)
            for _ in range(count):
                await watched_move(self._site, moved, AFTER)
        async with self._site.stream(prompt, "stays", len(moved.tokens)) as stays:
            await stays.reach(len(moved.tokens))
        return sum(a != b for a, b in zip(moved.tokens, stays.tokens, strict=True))

    async def _move(self, load: int, stream: Stream) -> PauseSample:
        await stream.reach(len(stream.tokens) + SETTLE)
        begin = len(stream.arrivals)
        window, migration = await watched_move(self._site, stream, AFTER)
        quiet = stream.arrivals[begin + (len(stream.arrivals) - begin) * 2 // 3 :]
        step_ms = median(intervals_ms(quiet))
        self.moves += 1
        return sample_of(self.name, load, self.moves, step_ms, window, migration)


async def measure(servers: dict[str, Served], loads: Sequence[int], moves: int) -> dict[str, Any]:
    """Samples of all moves, and the tokens that were wrong, by tree."""
    samples: list[PauseSample] = []
    wrong: dict[str, int] = {}
    async with session() as http:
        trees = [Tree(name, served, http) for name, served in servers.items()]
        rounds = [(load, number) for load in loads for number in range(-(-moves // MOVES))]
        for tree in trees:
            samples += await tree.one_stream(0, -1, COLD)
        with report.progress() as bar:
            for load, number in bar.track(rounds, description="streams"):
                for tree in trees:
                    try:
                        samples += await tree.one_stream(load, number, MOVES)
                    except StreamFailed as error:
                        report.say(f"{tree.name}: {error}")
        for tree in trees:
            wrong[tree.name] = await tree.wrong(0, MOVES)
    return {"samples": samples, "wrong": wrong}


def summarise(
    samples: Sequence[PauseSample], wrong: dict[str, int]
) -> tuple[dict[str, float], dict[str, report.Target]]:
    """The figures of each tree and load; targets of this tree's."""
    summary: dict[str, float] = {}
    targets: dict[str, report.Target] = {}
    for tree in dict.fromkeys(one.tree for one in samples):
        prefix = "" if tree == HERE else f"{tree}_"
        cold = [one for one in samples if one.tree == tree and one.move <= COLD]
        summary[f"{prefix}wrong_tokens"] = float(wrong[tree])
        summary[f"{prefix}cold_longest_steps"] = max(one.longest_ms / one.step_ms for one in cold)
        for load in sorted({one.load for one in samples}):
            here = [one for one in warm(samples) if (one.tree, one.load) == (tree, load)]
            summary |= {f"{prefix}{name}_{load}": value for name, value in figures(here).items()}
    for load in sorted({one.load for one in samples}):
        targets |= {
            f"longest_over_quiet_{load}": {"max": 1.2},
            f"longest_over_quiet_p90_{load}": {"max": 1.5},
            f"longest_steps_most_{load}": {"max": STEPS},
        }
    return summary, targets | {"wrong_tokens": {"max": 0.0}}


def warm(samples: Sequence[PauseSample]) -> list[PauseSample]:
    """Those after a server's first moves."""
    return [one for one in samples if one.move > COLD]


def figures(here: Sequence[PauseSample]) -> dict[str, float]:
    """Of one tree and load."""
    ratios = [one.longest_ms / one.quiet_ms for one in here]
    steps = [one.longest_ms / one.step_ms for one in here]
    found = {
        "moves": float(len(here)),
        "step_ms": median(one.step_ms for one in here),
        "longest_over_quiet": median(ratios),
        "longest_over_quiet_p90": percentile(ratios, 90),
        "longest_steps": median(steps),
        "longest_steps_p90": percentile(steps, 90),
        "longest_steps_most": max(steps),
        "quiet_steps_most": max(one.quiet_ms / one.step_ms for one in here),
        "switch_steps": median(one.switch_ms / one.step_ms for one in here),
        "over_three_steps": float(sum(one > STEPS for one in steps)),
        "over_three_at_switch": float(
            sum(one.at_switch and one.longest_ms > STEPS * one.step_ms for one in here)
        ),
        "quiet_over_three_steps": float(sum(one.quiet_ms > STEPS * one.step_ms for one in here)),
    }
    return found | {f"{part}_ms": median(getattr(one, part) for one in here) for part in PARTS}


def tables(samples: Sequence[PauseSample]) -> list[Table]:
    """Gaps and parts, a row for each tree and load."""
    gaps: list[tuple[object, ...]] = []
    parts: list[tuple[object, ...]] = []
    for load, tree in sorted({(one.load, one.tree) for one in warm(samples)}):
        found = figures([one for one in warm(samples) if (one.tree, one.load) == (tree, load)])
        name = f"{tree}, {load} more"
        gaps.append((name, *(found[key] for key in list(found)[: -len(PARTS)])))
        parts.append((name, *(found[f"{part}_ms"] for part in PARTS)))
    columns = ("tree, load", *(key.replace("_", " ") for key in list(found)[: -len(PARTS)]))
    return [
        report.table("Longest gap around a move, beside one without, and in steps", columns, gaps),
        report.table("Parts of a pause, ms (medians)", ("tree, load", *PARTS), parts),
    ]


def server(
    tree: Path | None, flags: Sequence[str], model: Path, log: Path, nursery: Nursery | None = None
) -> Served:
    """Of a working tree; None: this one. nursery: where it is forked."""
    if tree is None:
        return Served(flags, model=model, log=log, nursery=nursery)
    # Python puts the folder that it is in before PYTHONPATH, unless it is safe.
    environment = {"PYTHONPATH": str(tree.resolve()), "PYTHONSAFEPATH": "1"}
    return Served(flags, model=model, log=log, environment=environment)


@contextmanager
def runner(name: str | None) -> Iterator[Nursery | None]:
    """Where servers of that model runner are forked; None: nowhere."""
    if name != "v2":
        yield None
        return
    environment = {**os.environ, "TRITON_INTERPRET": "1", RUNNER: "1"}
    with Nursery("vllm", environment, module="bench.v2_on_cpu") as nursery:
        yield nursery


def options_of(argv: list[str] | None) -> Namespace:
    """The flags; raises SystemExit for those that can't be."""
    root = report.parser(__doc__, long_run=("longest_*",))
    add = root.add_argument
    add("--model", default="device6ms-async", help=f"{', '.join(NAMES)} or a folder")
    add("--moves", type=int, help="under each load: 100, or 8 with --quick")
    add("--loads", default="0,8", help="further streams on each instance")
    add("--flags", default="", metavar="'...'", help="further flags of the servers, for a GPU")
    add("--beside", type=Path, metavar="FOLDER", help="another working tree, measured in turn")
    add("--runner", choices=("v1", "v2"), help="vLLM's model runner, on a CPU (v1)")
    options = root.parse_args(argv)
    if options.beside is not None and options.runner == "v2":
        root.error("--runner is v2, must not be given with --beside")
    if options.beside is not None and not (options.beside / "kvmig").is_dir():
        root.error(f"--beside is {options.beside}, must be a working tree of kvmig")
    return options


def main(argv: list[str] | None = None) -> int:
    options = options_of(argv)
    loads = [int(one) for one in options.loads.split(",")]
    moves = options.moves or (MOVES if options.quick else 100)
    flags = [*SERVED_FLAGS, *model_flags(options.model), *options.flags.split()]
    settings = {
        "model": options.model, "prompt": PROMPT, "moves": moves, "loads": loads, "flags": flags,
        "beside": options.beside is not None, "runner": options.runner or "",
    }  # fmt: skip
    result = report.begin("pause", settings)
    model = model_folder(options.model)
    trees = {HERE: None} | ({"before": options.beside} if options.beside else {})
    with tempfile.TemporaryDirectory() as logs, runner(options.runner) as nursery:
        servers = {
            name: server(tree, flags, model, Path(logs, name), nursery)
            for name, tree in trees.items()
        }
        report.say(f"starting {len(servers)} servers")
        with all_up([*servers.values()]):
            found = uvloop.run(measure(servers, loads, moves))
    result.samples = [asdict(one) for one in found["samples"]]
    result.summary, result.targets = summarise(found["samples"], found["wrong"])
    return report.finish(result, options, tables(found["samples"]))


if __name__ == "__main__":
    sys.exit(main())
