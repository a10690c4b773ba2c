"""Requests that move away because others want their memory back, beside quotas alone.

Model `a` is in unit `here`, `b` in it and in unit `there`. Streams of `b` come to `here` while its
other instance drains, and hold more of it than they were guaranteed; then that one serves again,
and a burst of `a` wants what `a` was guaranteed. Nothing moves for any other reason. Once `b`
migrates, and once, on units of its own, it runs with --no-migration: what it owes becomes free as
its requests end, or are preempted after --reclaim-patience. Both get the same calls, in turns, and
steps take as long as a device's (bench/paced.py).
"""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

import aiohttp
import httpx

from bench import report
from bench.client import Stream, StreamFailed, session
from bench.models import model_flags
from bench.replace import counted
from bench.units.shift import Call, Size, preemptions, prompt_of
from bench.units.site import BLOCK_BYTES, MIB, Site

HERE, THERE = 16 * MIB, 16 * MIB
GUARANTEE = 80 * BLOCK_BYTES
"""Of `a`."""
HELD = Size(100, 220)
STREAMS = 12
"""Of `b`: to their end all of them have room, as long as nobody else wants any."""
BURST = Size(150, 100)
CALLS = 10
"""Of the burst: all of them together want just what was guaranteed."""
BEGUN = 100
"""Tokens of each stream when the burst comes."""
LONGEST = 512
SEED = 22
ARMS = {"relieve": (), "quotas": ("--no-migration",)}
"""Flags of `b`."""


@dataclass(frozen=True)
class Told:
    """What came of one call. Seconds."""

    model: str
    ttft_s: float
    tpot_s: float
    failed: str = ""
    wrong: bool = False


async def ask(
    http: aiohttp.ClientSession, url: str, model: str, call: Call, begun: asyncio.Semaphore
) -> Told:
    """begun: released once it has BEGUN tokens."""
    tokens = call.size.tokens
    stream = Stream(http, url, model, prompt_of(call), tokens)
    failed = ""
    try:
        async with stream:
            await stream.reach(min(BEGUN, tokens))
            begun.release()
            await stream.reach(tokens)
    except (StreamFailed, aiohttp.ClientError, OSError) as error:
        failed = repr(error)
        begun.release()
    if failed:
        return Told(model, 0.0, 0.0, failed)
    first, last = stream.arrivals[0].at, stream.arrivals[-1].at
    wrong = stream.tokens != counted(call.start - 1, tokens)
    return Told(model, first - stream.sent_at, (last - first) / (tokens - 1), "", wrong)


async def scene(site: Site, arm: str, chance: random.Random) -> list[Told]:
    """Streams of `b`, and the burst once all of them run."""

    def calls(model: str, size: Size, count: int) -> list[Call]:
        return [Call(0.0, 0, model, size, 500 + chance.randrange(9000)) for _ in range(count)]

    async with session() as http:
        await asyncio.to_thread(site.order, "POST", f"b-{arm}", "instances/i1/drain")
        begun, ended = asyncio.Semaphore(0), asyncio.Semaphore(0)
        held = [
            asyncio.create_task(ask(http, site.served[f"b-{arm}"].url, one.model, one, begun))
            for one in calls(f"b-{arm}", HELD, STREAMS)
        ]
        for _ in held:
            await begun.acquire()
        await asyncio.to_thread(site.order, "DELETE", f"b-{arm}", "instances/i1/drain")
        burst = [
            asyncio.create_task(ask(http, site.served[f"a-{arm}"].url, one.model, one, ended))
            for one in calls(f"a-{arm}", BURST, CALLS)
        ]
        return await asyncio.gather(*held, *burst)


def moved(site: Site, arm: str) -> int:
    """Requests of `b` that were moved because of what it owed."""
    url = f"{site.served[f'b-{arm}'].url}/kvmig/v1/migrations"
    rows = httpx.get(url, params={"limit": 1000}, timeout=30).json()["data"]
    return sum(one["why"] == "relieve" and one["state"] == "committed" for one in rows)


def relieve(rounds: int, model: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """R4: figures and samples."""
    own = (
        "--max-num-seqs=32", f"--max-model-len={LONGEST}", "--migrate-below=-1000000",
        *model_flags(model),
    )  # fmt: skip
    told: dict[str, list[Told]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        site = Site(stack, Path(folder))
        servers: dict[str, Sequence[str]] = {}
        for arm, flags in ARMS.items():
            here, there = site.agent(f"{arm}-here", HERE), site.agent(f"{arm}-there", THERE)
            unit = f"--unit={here.path}"
            promised = f"--unit-guarantee={GUARANTEE}B"
            servers[f"a-{arm}"] = (unit, promised, "--instances=1", *own)
            servers[f"b-{arm}"] = (unit, f"--unit=i1: {there.path}", "--instances=2", *flags, *own)
        site.serve_all(servers)
        chances = {arm: random.Random(SEED) for arm in ARMS}
        for number in range(rounds):
            for arm in ARMS if number % 2 == 0 else reversed(ARMS):
                told[arm] += asyncio.run(scene(site, arm, chances[arm]))
                waited = max(one.ttft_s for one in told[arm] if one.model == f"a-{arm}")
                report.say(f"{arm}: first tokens of the burst after {waited:.2f} s at most so far")
        counts = {arm: moved(site, arm) for arm in ARMS}
        preempted = preemptions(site)
    rows = [
        {"what": "call", "arm": arm, "number": number, "model": one.model[0],
         "ttft_s": round(one.ttft_s, 4), "tpot_ms": round(one.tpot_s * 1e3, 3),
         "failed": one.failed, "wrong": one.wrong}
        for arm, listed in told.items() for number, one in enumerate(listed)
    ]  # fmt: skip
    return summarise(told, counts) | {"relieve: preemptions of all": preempted}, rows


def summarise(told: dict[str, list[Told]], counts: dict[str, int]) -> dict[str, float]:
    """The figures. counts: moves that relieved, by arm."""
    figures: dict[str, float] = {}
    late: dict[str, float] = {}
    pace: dict[str, float] = {}
    for arm, listed in told.items():
        first = [one.ttft_s for one in listed if one.model[0] == "a" and not one.failed]
        late[arm] = quantiles(first, n=100, method="inclusive")[98]
        pace[arm] = fmean(one.tpot_s for one in listed if one.model[0] == "b" and not one.failed)
        figures |= {
            f"{arm}: P99 of the burst's TTFT, s": late[arm],
            f"{arm}: median of it, s": quantiles(first, n=2, method="inclusive")[0],
            f"{arm}: TPOT of the others, mean, ms": pace[arm] * 1e3,
            f"{arm}: moves that relieved": counts[arm],
        }
    every = [one for listed in told.values() for one in listed]
    return figures | {
        "P99 of the burst's TTFT, quotas alone / relieve": late["quotas"] / late["relieve"],
        "TPOT of the others, relieve / quotas alone": pace["relieve"] / pace["quotas"],
        "relieve: failed": sum(bool(one.failed) for one in every),
        "relieve: wrong": sum(one.wrong for one in every),
    }


TARGETS: dict[str, report.Target] = {
    "P99 of the burst's TTFT, quotas alone / relieve": {"min": 1.5},
    "TPOT of the others, relieve / quotas alone": {"max": 1.05},
    "relieve: failed": {"max": 0},
    "relieve: wrong": {"max": 0},
}
