"""What clients see of a model's scale-down and of its end, beside the same drain without a fleet.

`kvmig up` with a model of real vLLM at three instances. 40 clients stream from it through the
proxy, with a key, and each token is compared. First leg: the model is scaled from three instances
to one; two are drained, and their streams go on at the third. Second leg: while the streams run
there, the model is removed, or in each second run switched off. Every stream must come to its own
end, all of it right; calls that come meanwhile must be answered in full, or told in a sentence with
status 404 or 503 that the model is not there any more. Then no process of it may be left.

The same drain at a `kvmig.serve` of its own, in the same run: the same streams without a proxy, and
its own API is told to drain the two instances that have the fewest blocks in use, as the fleet
does. Of each stream: its longest gap in the drain over its median time between two tokens before,
beside the longest one in as long a window just before the drain.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import aiohttp
import uvloop

from bench import report
from bench.client import Stream, StreamFailed, session
from bench.drain import TIMEOUT_S, Admin, Sample, sample
from bench.models import NAMES, model_flags, model_folder
from bench.replace import counted
from bench.site import SETTLE
from kvmig_tools.fleet import FleetUp
from kvmig_tools.served import Served

NAME = "m"
INSTANCES = 3
STREAMS = 40
FLAGS = (
    "--enforce-eager",
    "--block-size=32",
    "--max-num-seqs=64",
    "--kv-cache-memory-bytes=536870912",
    "--scheduler-interval-ms=50",
    # Nothing moves but by the drains.
    "--migrate-below=-1000000",
)
APART = 4
"""Tokens that each stream is shorter than the one before it: they end one after the other."""
QUIET_S = 10.0
"""Before the drain, which is shorter than that on a quiet machine."""
AFTER_S = 2.0
"""From the end of the drain until the model ends."""
KNOCK_S = 0.1
"""Between two calls that come while it ends."""
KNOCK_TOKENS = 5
STRIDE = 200
"""Tokens at a time for which a stream is waited for."""
DEPLOYMENT = f"--served-model-name={NAME}"
"""In the command lines of its processes."""

Way = Literal["rm", "off"]
Side = Literal["fleet", "plain"]


@dataclass(frozen=True)
class Fate:
    """How one stream ended."""

    side: Side
    run: int
    wanted: int
    came: int
    right: bool
    """As far as it came."""
    error: str
    """Empty: none."""


@dataclass(frozen=True)
class Knock:
    """A call that came while the model ended."""

    run: int
    at_s: float
    """Since the order."""
    took_s: float
    status: int
    """0: no answer."""
    honest: bool
    said: str


@dataclass(frozen=True)
class Run:
    """One run of one side."""

    side: Side
    run: int
    way: str
    """How the model ended; empty for the plain server."""
    load: float
    """Of the machine, at its beginning."""
    spread: list[int]
    """Streams of each instance before the drain."""
    ran: int = 0
    """Streams that had not come to their end when the model was ended."""
    gone_s: float = 0.0
    """From the end of the last stream until no process was left."""


@dataclass
class Seen:
    """All that was seen."""

    drains: dict[Side, list[Sample]]
    ends: list[Sample]
    """Of the second leg."""
    fates: list[Fate]
    knocks: list[Knock]
    runs: list[Run]


class Counting:
    """A stream, and what it must say."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, model: str, number: int, tokens: int
    ) -> None:
        self.start = 100 * number
        self.tokens = tokens
        prompt = list(f"Count: {self.start:04} {self.start + 1:04}".encode())
        self.stream = Stream(http, url, model, prompt, tokens)

    async def fate(self, side: Side, run: int, wanted: int) -> Fate:
        """Once so many tokens have come, or no more will."""
        stream, error = self.stream, ""
        try:
            while len(stream.tokens) < wanted:
                await stream.reach(min(wanted, len(stream.tokens) + STRIDE))
        except (StreamFailed, aiohttp.ClientError, OSError) as failed:
            error = repr(failed)
        right = stream.tokens == counted(self.start, self.tokens)[: len(stream.tokens)]
        return Fate(side, run, wanted, len(stream.tokens), right, error)


class Scene:
    """The streams of one run, and the instances that they are on."""

    def __init__(self, admin: Admin, streams: Sequence[Counting], run: int) -> None:
        self.admin = admin
        self.streams = streams
        self._run = run

    async def drained(self, order: Callable[[], Awaitable[None]]) -> tuple[list[int], list[Sample]]:
        """How many streams each instance had, and what each stream saw until one was left.

        order: to all but one.
        """
        await asyncio.sleep(QUIET_S)
        spread = sorted(int(row["running"]) for row in await self.admin.rows())
        begin = time.monotonic()
        await order()
        while len(await self.admin.rows()) > 1:
            if time.monotonic() > begin + TIMEOUT_S:
                raise StreamFailed(f"the drain doesn't end: {await self.admin.rows()}")
            await asyncio.sleep(0.02)
        end = time.monotonic()
        await asyncio.sleep(0.5)  # so that the tokens of a gap at the end have come
        return spread, self.samples(begin, end)

    def samples(self, begin: float, end: float) -> list[Sample]:
        """Of all streams, in [begin, end] (s)."""
        return [sample(self._run, one.stream, begin, end) for one in self.streams]

    async def drain_all_but_one(self) -> None:
        """As a fleet does: those with the fewest blocks in use go."""
        rows = sorted(await self.admin.rows(), key=lambda row: int(row["blocks_used"]))
        for row in rows[: INSTANCES - 1]:
            await self.admin.remove(row["id"])


async def open_scene(
    stack: AsyncExitStack, http: aiohttp.ClientSession, url: str, model: str,
    admin: Admin, run: int, tokens: int,
) -> Scene:  # fmt: skip
    """All streams have settled."""
    streams = [Counting(http, url, model, one, tokens - APART * one) for one in range(STREAMS)]
    for one in streams:
        await stack.enter_async_context(one.stream)
    for one in streams:
        await one.stream.reach(SETTLE)
    return Scene(admin, streams, run)


# -- the two sides


async def plain(served: Served, run: int, tokens: int, seen: Seen) -> None:
    """The drain at a server without a fleet."""
    load = os.getloadavg()[0]
    async with session() as http, AsyncExitStack() as stack:
        admin = Admin(served.url, http)
        scene = await open_scene(stack, http, served.url, served.model, admin, run, tokens)
        spread, samples = await scene.drained(scene.drain_all_but_one)
        seen.drains["plain"] += samples
        seen.runs.append(Run("plain", run, "", load, spread))
        so_far = [min(one.tokens, len(one.stream.tokens) + SETTLE) for one in scene.streams]
        for one, wanted in zip(scene.streams, so_far, strict=True):
            seen.fates.append(await one.fate("plain", run, wanted))


async def of_fleet(fleet: FleetUp, run: int, way: Way, tokens: int, seen: Seen) -> None:
    """Both legs. The model is there at its beginning, and is not at its end."""
    load = os.getloadavg()[0]
    (path,) = (fleet.folder / "run").glob("d-*.sock")
    async with (
        session(fleet.key) as http,
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as own,
        AsyncExitStack() as stack,
    ):
        admin = Admin("http://deployment", own)
        scene = await open_scene(stack, http, fleet.url, NAME, admin, run, tokens)
        spread, samples = await scene.drained(lambda: scale_to_one(fleet))
        seen.drains["fleet"] += samples
        await asyncio.sleep(AFTER_S)
        ran = sum(len(one.stream.tokens) < one.tokens for one in scene.streams)
        ordered = time.monotonic()
        await end_model(fleet, way)
        knocking = asyncio.create_task(knock_on(http, fleet.url, run, ordered, seen.knocks))
        fates = await asyncio.gather(*(one.fate("fleet", run, one.tokens) for one in scene.streams))
        ended = time.monotonic()
        seen.fates += fates
        seen.ends += scene.samples(ordered, ended)
        await until_gone(fleet)
        seen.runs.append(Run("fleet", run, way, load, spread, ran, time.monotonic() - ended))
        await asyncio.sleep(1.0)
        knocking.cancel()
        await asyncio.wait([knocking])
    if way == "off":
        await end_model(fleet, "rm")


async def scale_to_one(fleet: FleetUp) -> None:
    """An order to the fleet's API, as `kvmig model scale` gives it."""
    body = {"min": 1, "max": 1}
    answer = await asyncio.to_thread(fleet.ask, "POST", f"models/{NAME}/scale", body)
    answer.raise_for_status()


async def end_model(fleet: FleetUp, way: Way) -> None:
    """The same, as `kvmig model rm` or `kvmig model off`."""
    words: tuple[Any, ...] = (
        ("DELETE", f"models/{NAME}")
        if way == "rm"
        else ("POST", f"models/{NAME}/switch", {"on": False})
    )
    (await asyncio.to_thread(fleet.ask, *words)).raise_for_status()


async def until_gone(fleet: FleetUp) -> None:
    """No process of the model is left. Raises StreamFailed after TIMEOUT_S."""
    deadline = time.monotonic() + TIMEOUT_S
    while left := await asyncio.to_thread(fleet.processes, DEPLOYMENT):
        if time.monotonic() > deadline:
            raise StreamFailed(f"processes {left} of the model don't end")
        await asyncio.sleep(0.05)


async def knock_on(
    http: aiohttp.ClientSession, url: str, run: int, ordered: float, knocks: list[Knock]
) -> None:
    """Call again and again, until cancelled."""
    while True:
        knocks.append(await knock(http, url, run, ordered))
        await asyncio.sleep(KNOCK_S)


async def knock(http: aiohttp.ClientSession, url: str, run: int, ordered: float) -> Knock:
    """One call. Honest: the right answer, or status and sentence that say what is the matter."""
    body = {
        "model": NAME, "prompt": "Count: 0041 0042", "max_tokens": KNOCK_TOKENS,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    began, status = time.monotonic(), 0
    try:
        async with http.post(f"{url}/v1/completions", json=body) as answer:
            status = answer.status
            told = await answer.json()
        if status == 200:
            said = str(told["choices"][0]["text"])
            honest = said.encode() == bytes(counted(41, KNOCK_TOKENS))
        else:
            said = str(told["error"]["message"])
            honest = status in (404, 503) and bool(said)
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        said, honest = repr(error), False
    took_s = time.monotonic() - began
    return Knock(run, round(began - ordered, 3), round(took_s, 3), status, honest, said)


# -- figures


def summarise(seen: Seen) -> dict[str, float]:
    """The figures. Gaps are in usual steps of their stream."""
    gaps = {side: [one.ratio for one in samples] for side, samples in seen.drains.items()}
    before = {
        side: median(one.longest_before_ms / one.inter_token_ms for one in samples)
        for side, samples in seen.drains.items()
    }
    ends = [one.ratio for one in seen.ends]
    answered = [one.took_s for one in seen.knocks]
    fates = seen.fates
    return {
        "streams": len(fates),
        "wrong": sum(not one.right for one in fates),
        "lost tokens": sum(max(0, one.wanted - one.came) for one in fates),
        "dropped": sum(bool(one.error) for one in fates),
        "usual step, ms": median(one.inter_token_ms for one in seen.drains["fleet"]),
        **{
            f"scale-down, longest gap in steps, {side}, {name}": of(gaps[side])
            for side in gaps
            for name, of in (("median", median), ("worst", max))
        },
        **{
            f"as long before it, longest gap in steps, {side}, median": steps
            for side, steps in before.items()
        },
        "scale-down, median gap over a drain's": median(gaps["fleet"]) / median(gaps["plain"]),
        "scale-down, worst gap over a drain's": max(gaps["fleet"]) / max(gaps["plain"]),
        **{
            f"scale-down, s, {side}": median(one.drain_ms for one in samples) / 1e3
            for side, samples in seen.drains.items()
        },
        "end, streams that ran, least": min(one.ran for one in seen.runs if one.way),
        "end, longest gap in steps, median": median(ends),
        "end, longest gap in steps, worst": max(ends),
        "end, last stream to no process, longest, s": max(one.gone_s for one in seen.runs),
        "calls while it ended": len(seen.knocks),
        "of these not told honestly": sum(not one.honest for one in seen.knocks),
        "of these the longest answer, s": max(answered),
    }


TARGETS: dict[str, report.Target] = {
    "wrong": {"max": 0},
    "lost tokens": {"max": 0},
    "dropped": {"max": 0},
    "scale-down, median gap over a drain's": {"max": 1.2},
    "end, streams that ran, least": {"min": STREAMS},
    "calls while it ended": {"min": 1},
    "of these not told honestly": {"max": 0},
}


def spec_of(model: str) -> dict[str, Any]:
    """The model as the catalogue gets it."""
    return {
        "name": NAME,
        "source": f"path:{model_folder(model).absolute()}",
        "flags": [*FLAGS, *model_flags(model)],
        "instances": {"min": INSTANCES, "max": INSTANCES, "target": STREAMS},
    }


def one_run(fleet: FleetUp, model: str, side: Side, run: int, tokens: int, seen: Seen) -> None:
    """Start it, stream from it, end it."""
    if side == "fleet":
        fleet.add(spec_of(model))
        fleet.until(f"models/{NAME}", state="serving", serving=INSTANCES)
        way: Way = "off" if run % 2 else "rm"
        uvloop.run(of_fleet(fleet, run, way, tokens, seen))
        return
    flags = [*FLAGS, *model_flags(model), f"--instances={INSTANCES}", "--shutdown-timeout=2"]
    with Served(flags, model=model_folder(model), log=fleet.folder.parent / "plain") as served:
        uvloop.run(plain(served, run, tokens, seen))


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--model", default="device30ms", help=f"one that counts: {', '.join(NAMES)}")
    root.add_argument("--runs", type=int, help="of each side: 4, or 1 with --quick")
    root.add_argument("--tokens", type=int, help="of a stream: 2000, or 1000 with --quick")
    options = root.parse_args(argv)
    runs = options.runs or (1 if options.quick else 4)
    tokens = options.tokens or (1000 if options.quick else 2000)
    settings = {
        "model": options.model, "runs": runs, "streams": STREAMS, "tokens": tokens, "flags": FLAGS,
    }  # fmt: skip
    result = report.begin("scale_down", settings)
    seen = Seen({"fleet": [], "plain": []}, [], [], [], [])
    with tempfile.TemporaryDirectory() as data, FleetUp(Path(data)) as fleet:
        for run in range(runs):
            sides: tuple[Side, Side] = ("fleet", "plain") if run % 2 == 0 else ("plain", "fleet")
            for side in sides:
                report.say(f"run {run + 1} of {runs}: {side}")
                one_run(fleet, options.model, side, run, tokens, seen)
    for one in seen.fates:
        if one.error or not one.right:
            report.say(f"{one}")
    result.samples = [asdict(one) for one in seen.runs]
    result.samples += [
        {"side": side, "leg": "scale-down", **asdict(one)}
        for side, samples in seen.drains.items()
        for one in samples
    ]
    result.samples += [{"side": "fleet", "leg": "end", **asdict(one)} for one in seen.ends]
    result.samples += [*map(asdict, seen.fates), *map(asdict, seen.knocks)]
    result.summary = summarise(seen)
    result.targets = TARGETS
    said = Counter((one.run, one.status, one.said) for one in seen.knocks)
    rows = [
        (f"run {run + 1}: {status or 'no answer'}, {words[:100]}", count)
        for (run, status, words), count in sorted(said.items())
    ]
    columns = ("calls while the model ended", "times")
    return report.finish(result, options, [report.table("The end", columns, rows)])


if __name__ == "__main__":
    sys.exit(main())
