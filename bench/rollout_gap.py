"""The longest wait that any client sees while a model's weights roll out, and while one of its
instances is drained.

A fleet (`kvmig up`) serves a model with two instances, and streams run on both. First one instance
is drained, and another one takes its place. Then the model gets other weights: another deployment
starts next to the old one and takes over new requests, and the streams of the old one gather on one
instance. Both are measured with streams of their own in one run, one after the other, as often as
there are runs. Of each stream: the longest time between two tokens in the window before, and in the
window of the drain or of the roll-out. Short calls come all the time during a roll-out; of these
the time to the first token is measured.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

import aiohttp
import httpx
import uvloop

from bench import report
from bench.arrivals import intervals_ms, longest_ms
from bench.client import Stream, StreamFailed, session
from bench.models import model_folder
from kvmig_tools.fleet import FleetUp

STREAMS = 40
TOKENS = 4000
SETTLE = 20
"""Tokens of each stream before anything is measured."""
BEFORE_S = 5.0
CALL_S = 0.25
"""Pause between two short calls."""
CALL_TOKENS = 4
TIMEOUT_S = 180.0
NAME = "a"
ADMIN = "/kvmig/v1/instances"
FLAGS = {
    "toy": ["--step-ms=20", "--max-num-seqs=64", "--num-blocks=8000"],
    "vllm": [
        "--enforce-eager",
        "--block-size=32",
        "--max-num-seqs=64",
        "--kv-cache-memory-bytes=536870912",
    ],
}
LONG_RUN = ("rollout_over_drain",)
"""The longest gap of one drain and one roll-out is chance."""
Kind = Literal["drain", "rollout"]


@dataclass(frozen=True)
class StreamSample:
    """One stream in one run. Times in milliseconds."""

    run: int
    kind: Kind
    window_ms: float
    inter_token_ms: float
    longest_before_ms: float
    longest_ms: float
    starting_ms: float = 0.0
    """Of a roll-out's window, until the new deployment gets requests."""
    longest_starting_ms: float = 0.0
    longest_gathering_ms: float = 0.0
    """In the rest of it, while the streams of the old one gather."""


@dataclass(frozen=True)
class CallSample:
    """One short call during a roll-out."""

    run: int
    kind: Literal["call"]
    ttft_ms: float


Sample = StreamSample | CallSample


class TextStream(Stream):
    """A stream whose tokens are characters, as those of toys and of the bundled model."""

    def __init__(self, http: aiohttp.ClientSession, url: str, prompt: str, tokens: int) -> None:
        super().__init__(http, url, NAME, [], tokens)
        self._body["prompt"] = prompt
        del self._body["return_token_ids"]

    def _take(self, event: bytes) -> None:
        if not event.startswith(b"data: {"):
            return
        found = json.loads(event[6:])
        if "error" in found:
            raise StreamFailed(str(found["error"]))
        for choice in found["choices"]:
            self.tokens += map(ord, choice["text"])


def count_from(number: int) -> str:
    """A prompt that toys and the bundled model count on from."""
    return f"Count: {number:04} {number + 1:04}"


class Deployment:
    """The instances of the deployment that serves, on its own socket."""

    def __init__(self, fleet: FleetUp) -> None:
        rows = [(path, found) for path in fleet.sockets() if (found := self._rows(path))]
        if len(rows) != 1:
            raise StreamFailed(f"{len(rows)} deployments answer, expected one")
        self._client = self._client_of(rows[0][0])

    @staticmethod
    def _client_of(path: Path) -> httpx.Client:
        # Without certificates, which take tens of milliseconds of a core to load.
        transport = httpx.HTTPTransport(uds=str(path), verify=False)
        return httpx.Client(transport=transport, base_url="http://x", timeout=20)

    def _rows(self, path: Path) -> list[dict[str, Any]]:
        try:
            with self._client_of(path) as client:
                rows: list[dict[str, Any]] = client.get(ADMIN).json()["data"]
        except httpx.HTTPError:  # a deployment that has ended leaves its socket
            return []
        return rows

    def close(self) -> None:
        """Let its connection go."""
        self._client.close()

    async def rows(self) -> list[dict[str, Any]]:
        """The rows of its instances."""
        answer = await asyncio.to_thread(self._client.get, ADMIN)
        rows: list[dict[str, Any]] = answer.json()["data"]
        return rows

    async def drain(self, instance: str) -> None:
        """Let an instance drain."""
        await self._order("POST", f"{ADMIN}/{instance}/drain")

    async def end(self, instance: str) -> None:
        """Let an instance end."""
        await self._order("DELETE", f"{ADMIN}/{instance}")

    async def _order(self, method: str, what: str) -> None:
        answer = await asyncio.to_thread(self._client.request, method, what)
        if answer.is_error:
            raise StreamFailed(answer.text)

    async def until(self, instance: str, **fields: Any) -> None:
        """Wait until its row shows it so."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                row = next((one for one in await self.rows() if one["id"] == instance), {})
                if all(row.get(name) == value for name, value in fields.items()):
                    return
                await asyncio.sleep(0.02)

    async def until_serving(self, count: int) -> None:
        """Wait until it has this number of instances, which all serve."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                if [one["state"] for one in await self.rows()] == ["serving"] * count:
                    return
                await asyncio.sleep(0.05)


async def until_model(fleet: FleetUp, **fields: Any) -> None:
    """Wait until the server shows the model so."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            found = await asyncio.to_thread(fleet.get, f"models/{NAME}")
            if all(found[name] == value for name, value in fields.items()):
                return
            await asyncio.sleep(0.05)


async def measure(
    fleet: FleetUp, engine: str, folders: list[str], runs: int, count: int
) -> list[Sample]:
    """All samples. folders: two with the same weights, between which the model rolls out."""
    samples: list[Sample] = []
    async with session(fleet.key) as http:
        for run in range(runs):
            samples += await one_drain(fleet, http, run, count)
            samples += await one_rollout(fleet, http, run, count, engine, folders[(run + 1) % 2])
            report.say(f"run {run + 1} of {runs}")
    return samples


async def begun(
    fleet: FleetUp, http: aiohttp.ClientSession, stack: AsyncExitStack, count: int
) -> list[Stream]:
    """Streams that all run, and have for a while."""
    streams: list[Stream] = []
    for number in range(count):
        own = TextStream(http, fleet.url, count_from(100 * number), TOKENS)
        streams.append(await stack.enter_async_context(own))
    for stream in streams:
        await stream.reach(SETTLE)
    await asyncio.sleep(BEFORE_S)
    return streams


async def one_drain(
    fleet: FleetUp, http: aiohttp.ClientSession, run: int, count: int
) -> list[Sample]:
    """Drain one of two instances under streams; the fleet starts another one in its place."""
    at = Deployment(fleet)
    instance = (await at.rows())[0]["id"]
    async with AsyncExitStack() as stack:
        stack.callback(at.close)
        streams = await begun(fleet, http, stack, count)
        begin = time.monotonic()
        await at.drain(instance)
        await at.until(instance, running=0, waiting=0, migrations_out=0)
        end = time.monotonic()
        for stream in streams:
            await stream.reach(len(stream.tokens) + SETTLE)
        await at.end(instance)
        await at.until_serving(2)
    return [sample(run, "drain", one, begin, end) for one in streams]


async def one_rollout(
    fleet: FleetUp, http: aiohttp.ClientSession, run: int, count: int, engine: str, folder: str
) -> list[Sample]:
    """Let other weights take over under streams, which end where they began."""
    ttfts: list[float] = []

    async def call() -> None:
        number = 0
        while True:
            number += 1
            prompt = count_from(number % 9000)
            async with TextStream(http, fleet.url, prompt, CALL_TOKENS) as stream:
                await stream.reach(CALL_TOKENS)
                ttfts.append((stream.arrivals[0].at - stream.sent_at) * 1e3)
            await asyncio.sleep(CALL_S)

    async with AsyncExitStack() as stack:
        streams = await begun(fleet, http, stack, count)
        calls = asyncio.create_task(call())
        begin = time.monotonic()
        await asyncio.to_thread(change, fleet, engine, folder)
        shifted = 0.0
        async with asyncio.timeout(TIMEOUT_S):  # the streams are on one old instance then
            while True:
                share, left = await asyncio.to_thread(how_far, fleet)
                shifted = shifted or (time.monotonic() if share else 0.0)
                if share == 100 and left == 1:
                    break
                if calls.done():
                    calls.result()  # raises what went wrong
                await asyncio.sleep(0.05)
        end = time.monotonic()
        for stream in streams:
            await stream.reach(len(stream.tokens) + SETTLE)
        calls.cancel()
        await asyncio.wait([calls])
    await until_model(fleet, rollout=None, serving=2)
    found: list[Sample] = [
        replace(
            sample(run, "rollout", one, begin, end),
            starting_ms=round((shifted - begin) * 1e3, 1),
            longest_starting_ms=round(longest_ms(one.arrivals, begin, shifted), 3),
            longest_gathering_ms=round(longest_ms(one.arrivals, shifted, end), 3),
        )
        for one in streams
    ]
    return found + [CallSample(run, "call", round(one, 3)) for one in ttfts]


def change(fleet: FleetUp, engine: str, folder: str) -> None:
    """Give the model other weights."""
    body = {"fleet": {"models": [spec(engine, folder)]}}
    answer = fleet.ask("POST", "apply", body)
    if answer.is_error:
        raise StreamFailed(answer.text)


def how_far(fleet: FleetUp) -> tuple[int, int]:
    """How many of 100 new requests go to the new deployment, and the number of instances of the old
    one that serve."""
    rollout = fleet.get(f"models/{NAME}")["rollout"]
    if rollout is None:
        raise StreamFailed("the streams have ended before their instances were one")
    return int(rollout["share"]), int(rollout["old"]["serving"])


def spec(engine: str, folder: str) -> dict[str, Any]:
    """The model of two instances."""
    counts = {"min": 2, "max": 2, "target": 1000}
    return {"name": NAME, "source": f"path:{folder}", "engine": engine, "flags": FLAGS[engine],
            "instances": counts, "share_prefixes": True}  # fmt: skip


def sample(run: int, kind: Kind, stream: Stream, begin: float, end: float) -> StreamSample:
    """What one stream saw in [begin, end] (s)."""
    before = [one for one in stream.arrivals if begin - BEFORE_S < one.at < begin]
    return StreamSample(
        run=run,
        kind=kind,
        window_ms=round((end - begin) * 1e3, 1),
        inter_token_ms=round(median(intervals_ms(before)), 3),
        longest_before_ms=round(longest_ms(stream.arrivals, begin - BEFORE_S, begin), 3),
        longest_ms=round(longest_ms(stream.arrivals, begin, end), 3),
    )


def summarise(samples: list[Sample]) -> dict[str, float]:
    """The figures."""
    found: dict[str, float] = {}
    kinds: tuple[Kind, ...] = ("drain", "rollout")
    for kind in kinds:
        of = [one for one in samples if isinstance(one, StreamSample) and one.kind == kind]
        found |= {
            f"{kind}_inter_token_ms": median(one.inter_token_ms for one in of),
            f"{kind}_longest_before_ms": max(one.longest_before_ms for one in of),
            f"{kind}_longest_ms": median(one.longest_ms for one in of),
            f"{kind}_longest_of_all_ms": max(one.longest_ms for one in of),
            f"{kind}_ms": median({one.run: one.window_ms for one in of}.values()),
        }
    phases = [one for one in samples if isinstance(one, StreamSample) and one.kind == "rollout"]
    found |= {
        "rollout_starting_ms": median({one.run: one.starting_ms for one in phases}.values()),
        "rollout_longest_starting_of_all_ms": max(one.longest_starting_ms for one in phases),
        "rollout_longest_gathering_of_all_ms": max(one.longest_gathering_ms for one in phases),
    }
    ttfts = [one.ttft_ms for one in samples if isinstance(one, CallSample)]
    found |= {"calls": len(ttfts), "ttft_ms": median(ttfts), "ttft_of_all_ms": max(ttfts)}
    found["rollout_over_drain"] = (
        found["rollout_longest_of_all_ms"] / found["drain_longest_of_all_ms"]
    )
    return found


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, LONG_RUN)
    root.add_argument("--engine", choices=sorted(FLAGS), default="toy")
    root.add_argument("--runs", type=int, help="drains and roll-outs: 5, or 1 with --quick")
    root.add_argument("--streams", type=int, default=STREAMS)
    options = root.parse_args(argv)
    runs = options.runs or (1 if options.quick else 5)
    settings = {
        "engine": options.engine, "runs": runs, "streams": options.streams,
        "flags": FLAGS[options.engine],
    }  # fmt: skip
    result = report.begin("rollout_gap", settings)
    with tempfile.TemporaryDirectory() as scratch:
        folders = [str(Path(scratch) / name) for name in ("old", "new")]
        for one in folders:
            if options.engine == "vllm":
                shutil.copytree(model_folder("count"), one)
            else:
                Path(one).mkdir()
        with FleetUp(Path(scratch), "--threads=1") as fleet:
            fleet.add(spec(options.engine, folders[0]))
            uvloop.run(until_model(fleet, state="serving", serving=2))
            samples = uvloop.run(measure(fleet, options.engine, folders, runs, options.streams))
    result.samples = [asdict(one) for one in samples]
    result.summary = summarise(samples)
    result.targets = {"rollout_over_drain": {"max": 1.0}}
    kinds: tuple[Kind, ...] = ("drain", "rollout")
    names = ("inter_token_ms", "longest_before_ms", "longest_ms", "longest_of_all_ms", "ms")
    rows = [(kind, *(result.summary[f"{kind}_{name}"] for name in names)) for kind in kinds]
    columns = ("", "inter-token", "longest before", "longest, median", "of all", "window")
    return report.finish(result, options, [report.table("Milliseconds", columns, rows)])


if __name__ == "__main__":
    sys.exit(main())
