"""What the step gate costs: `--unit-shares` with `--policy free`, where nobody waits for others.

Two engines that ask before each step and two that don't, of one model and on steps as long as a
device's, get the same bursts in turns: first one of each with the other gated one not there (the
gate has nobody else to ask for), then two of each at once. A ratio is of two bursts in a row.

And what an engine costs that has requests and can run none, because all its memory but a block is
lent: beside the gate, and at it. Its agent is one of this process, which can lease so little.
"""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil

from bench import report
from bench.client import session
from bench.models import model_flags
from bench.replace import counted
from bench.units.site import MIB, PATIENCE_S, Site, cores
from kvmig.process.sockets import take_path
from kvmig.sharing.agent import UnitAgent
from kvmig.sharing.lease_ledger import LeaseLedger

ARENA = 128 * MIB
CALLS = 4
"""At once, on each engine."""
TOKENS = 300
SHARES = "--unit-shares=100,40"
WATCHED_S = 5.0
"""For how long an engine's processor time is counted."""


async def burst(http: aiohttp.ClientSession, urls: Sequence[str]) -> float:
    """Tokens a second of `CALLS` calls on each of the engines, from the first to the last."""
    began = time.monotonic()
    calls = [call(http, url, "m", number, TOKENS) for url in urls for number in range(CALLS)]
    await asyncio.gather(*calls)
    return len(urls) * CALLS * TOKENS / (time.monotonic() - began)


async def pairs(gated: Sequence[str], plain: Sequence[str], repeats: int) -> list[dict[str, float]]:
    """Bursts in turns, after one of each that isn't counted. Tokens a second."""
    rows: list[dict[str, float]] = []
    async with session() as http:
        for number in range(-1, repeats):
            order = (gated, plain) if number % 2 else (plain, gated)
            first, second = [await burst(http, one) for one in order]
            rates = (first, second) if number % 2 else (second, first)
            if number >= 0:
                rows.append(dict(zip(("gated", "plain"), rates, strict=True)))
    return rows


def ratio(rows: Sequence[dict[str, float]]) -> float:
    """Median of gated over plain."""
    return median(one["gated"] / one["plain"] for one in rows)


def throughput(repeats: int, model: str) -> tuple[dict[str, float], list[Any]]:
    """Figures and samples of bursts."""
    own = (
        "--instances=1", f"--max-num-seqs={2 * CALLS}", "--max-model-len=2048",
        "--served-model-name=m", *model_flags(model),
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        site = Site(stack, Path(folder))
        agent = site.agent("unit", ARENA, policy="free")
        joined = (f"--unit={agent.path}", *own)
        site.serve_all({"plain0": joined, "plain1": joined, "gated0": (*joined, SHARES)})
        figures: dict[str, float] = {}
        for engines, what in enumerate(("unit of one", "unit of two"), 1):
            if engines == 2:
                site.serve_all({"gated1": (*joined, SHARES)})
            gated, plain = (
                [site.served[f"{kind}{number}"].url for number in range(engines)]
                for kind in ("gated", "plain")
            )
            found = asyncio.run(pairs(gated, plain, repeats))
            rows += [{"what": f"{what}, tokens/s", **one} for one in found]
            figures[f"throughput with the step gate / without, {what}"] = ratio(found)
            figures[f"tokens/s without the step gate, {what}"] = median(
                one["plain"] for one in found
            )
    return figures, rows


async def call(http: aiohttp.ClientSession, url: str, model: str, number: int, tokens: int) -> None:
    """One, whose every token is compared. Raises RuntimeError."""
    start = 100 + 50 * number
    body = {
        "model": model, "prompt": list(f"Count: {start:04} {start + 1:04}".encode()),
        "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    async with http.post(f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        got = (await answer.json())["choices"][0]["token_ids"]
    if got != counted(start, tokens):
        raise RuntimeError(f"{url} doesn't count on from {start}")


async def starved(site: Site, path: Path) -> dict[str, float]:
    """What engines take of a core while their requests wait for memory."""
    ledger = LeaseLedger(ARENA, "fixed")
    own = (f"--unit={path}", "--instances=1", "--max-model-len=2048")
    with take_path(str(path), socket.SOCK_SEQPACKET) as sock:
        agent = UnitAgent(sock, ledger)
        running = asyncio.create_task(agent.run())
        try:
            names = {"plain": own, "gated": (*own, SHARES), "other": (*own, SHARES)}
            await asyncio.to_thread(site.serve_all, names)
            return {
                "core of an engine that waits for memory": await starving(
                    site, agent, ledger, "plain"
                ),
                "core of one that does, at the gate": await starving(site, agent, ledger, "gated"),
            }
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def starving(site: Site, agent: UnitAgent, ledger: LeaseLedger, model: str) -> float:
    """Of a core, while it has a block and a request that wants more; which is right in the end."""
    (process,) = [one.process for one in agent.unit.shares if one.model == model]
    (member,) = [one for one in ledger.members.values() if one.claim.model == model]
    quota, member.quota = member.quota, member.claim.granule
    async with session() as http, asyncio.timeout(PATIENCE_S):
        while member.lease > member.claim.granule:  # noqa: ASYNC110 - its agent is told nothing
            await asyncio.sleep(0.05)
        waits = asyncio.create_task(call(http, site.served[model].url, model, 1, 100))
        await asyncio.sleep(1.0)
        took = await asyncio.to_thread(cores, psutil.Process(process), WATCHED_S)
        if waits.done():
            raise RuntimeError(f"{model} had the memory")
        member.quota = quota
        await waits
    return took


def gate(repeats: int, model: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """U4: figures and samples."""
    figures, rows = throughput(repeats, model)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        figures |= asyncio.run(starved(Site(stack, Path(folder)), Path(folder) / "unit"))
    return figures, rows


TARGETS: dict[str, report.Target] = {
    "throughput with the step gate / without, unit of one": {"min": 0.99},
    "throughput with the step gate / without, unit of two": {"min": 0.97},
    "core of an engine that waits for memory": {"max": 0.02},
    "core of one that does, at the gate": {"max": 0.02},
}
