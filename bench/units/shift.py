"""A load whose heavy model changes, on quotas that follow it and on static thirds.

Three models of one unit get requests 8:1:1, and who gets the eight changes with each phase. The
same arrivals come to the same engines under `--quotas kvmig` and `--quotas fixed`, in turns: only
the agent is another one. Steps take as long as a device's (bench/paced.py), so that what a model
lacks is KV cache: all together want seven tenths of it, the heavy one 1.7 times its third.

An answer is in time if it took at most so many times what the same request takes alone. R is what a
model's requests hold, over what they would hold if each ran alone; Jain's index of the models' R is
1 where they are slowed down alike, 1/3 where one has everything.
"""

from __future__ import annotations

import asyncio
import random
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import aiohttp
import httpx
import psutil

from bench import report
from bench.client import session
from bench.models import model_flags
from bench.replace import counted
from bench.units.site import BLOCK_BYTES, BLOCK_TOKENS, Agent, Site
from kvmig.sharing.messages import UnitState
from kvmig.sharing.unit_state import fetch_unit

MODELS = ("a", "b", "c")
ARMS = ("kvmig", "fixed")
"""Rules of quotas (`--quotas`)."""
MIX = (8, 1, 1)
"""Of the arrivals; the first of them is the heavy model's."""
FULL = 0.7
"""Of the arena: what all requests would hold on average if each ran alone."""
SLO = 4
"""Times the latency alone."""
LOOSE_SLO = 8
"""The same in most of MuxServe's figures."""
SAMPLE_S = 0.2
ALONE = 2
"""Calls of each size and model that are timed alone."""
LONGEST = 256
"""Tokens of a request at most."""
SEED = 22


class Size(NamedTuple):
    """Tokens of a request."""

    prompt: int
    tokens: int

    def held(self) -> float:
        """Bytes of KV cache on average over its time."""
        return BLOCK_BYTES * ((self.prompt + self.tokens / 2) / BLOCK_TOKENS + 0.5)


SIZES = (Size(60, 20), Size(60, 40), Size(60, 60))


class Call(NamedTuple):
    """One request. at: seconds from the beginning of the load."""

    at: float
    phase: int
    model: str
    size: Size
    start: int
    """The number that its prompt ends with."""


@dataclass(frozen=True)
class Answer:
    """What came of one."""

    call: Call
    sent_s: float
    """When it was sent, on the load's clock: `call.at`, or a little later."""
    took_s: float
    failed: str = ""
    wrong: bool = False


def calls_of(
    seed: int, phases: int, phase_s: float, rate: float, models: Sequence[str] = MODELS
) -> list[Call]:
    """Poisson arrivals, `rate` a second of all models, whose mix turns with each phase."""
    chance, calls, at = random.Random(seed), list[Call](), 0.0
    while (at := at + chance.expovariate(rate)) < phases * phase_s:
        phase = int(at / phase_s)
        heavy = phase % len(models)
        (model,) = chance.choices([*models[heavy:], *models[:heavy]], MIX)
        size = chance.choice(SIZES)
        calls.append(Call(at, phase, model, size, 500 + chance.randrange(9000)))
    return calls


def rate_for(arena: int, alone_s: Mapping[Size, float]) -> float:
    """Requests a second that hold `FULL` of the arena (Little's law)."""
    return FULL * arena / fmean(alone_s[size] * size.held() for size in SIZES)


def in_time(answers: Iterable[Answer], alone_s: Mapping[Size, float], scale: float) -> int:
    """Right answers that took at most `scale` times what they take alone."""
    return sum(
        not one.failed and not one.wrong and one.took_s <= scale * alone_s[one.call.size]
        for one in answers
    )


def wanted(
    calls: Iterable[Call], alone_s: Mapping[Size, float], begin: float, end: float
) -> dict[str, float]:
    """Bytes that each model's requests would hold in the window, on average, if each ran alone."""
    held: defaultdict[str, float] = defaultdict(float)
    for one in calls:
        inside = min(end, one.at + alone_s[one.size]) - max(begin, one.at)
        held[one.model] += max(0.0, inside) * one.size.held()
    return {model: size / (end - begin) for model, size in held.items()}


def jain(values: Sequence[float]) -> float:
    """Jain's index of fairness: 1 if all are equal, 1/n if one has everything."""
    squares = sum(one * one for one in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def normalised(
    rows: Sequence[Mapping[str, Any]],
    calls: Sequence[Call],
    alone_s: Mapping[Size, float],
    phase_s: float,
) -> list[dict[str, float]]:
    """R of each model in each phase. rows: samples of {"at_s", "used": bytes by model}.

    A phase counts from when requests of the one before it would have ended.
    """
    found: list[dict[str, float]] = []
    for phase in range(1 + max(one.phase for one in calls)):
        begin, end = phase * phase_s + max(alone_s.values()), (phase + 1) * phase_s
        inside = [row["used"] for row in rows if begin <= row["at_s"] < end]
        want = wanted(calls, alone_s, begin, end)
        found.append(
            {model: fmean(row[model] for row in inside) / size for model, size in want.items()}
        )
    return found


def prompt_of(call: Call) -> list[int]:
    """Numbers up to the one that it ends with: a token a character, the first one a blank."""
    numbers = range(call.start - call.size.prompt // 5 + 1, call.start + 1)
    return list("".join(f" {one:04}" for one in numbers).encode())


# -- the real thing


@dataclass
class Run:
    """All arrivals under one rule."""

    arm: str
    answers: list[Answer]
    samples: list[dict[str, Any]]
    preemptions: int
    cores: float
    """That all processes of the bench took."""


class Load:
    """Clients of the three models."""

    def __init__(self, site: Site, http: aiohttp.ClientSession) -> None:
        self._urls = {model: served.url for model, served in site.served.items()}
        self._http = http

    async def ask(self, call: Call, began: float) -> Answer:
        """Send it when it is time; every token of the answer is compared."""
        await asyncio.sleep(began + call.at - time.monotonic())
        body = {
            "model": call.model, "prompt": prompt_of(call), "max_tokens": call.size.tokens,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        sent, failed, tokens = time.monotonic(), "", list[int]()
        try:
            url = f"{self._urls[call.model]}/v1/completions"
            async with self._http.post(url, json=body) as answer:
                if answer.status == 200:
                    tokens = (await answer.json())["choices"][0]["token_ids"]
                else:
                    failed = (await answer.text())[:200]
        except (aiohttp.ClientError, OSError) as error:
            failed = repr(error)
        took = time.monotonic() - sent
        right = tokens == counted(call.start - 1, call.size.tokens)
        return Answer(call, sent - began, took, failed, not failed and not right)

    async def alone_s(self) -> dict[Size, float]:
        """Seconds that a request of each size takes alone on its engine."""
        took: defaultdict[Size, list[float]] = defaultdict(list)

        async def one_by_one(model: str) -> None:
            for number in range(ALONE):
                for size in SIZES:
                    call = Call(0.0, 0, model, size, 300 + number)
                    answer = await self.ask(call, time.monotonic())
                    if answer.failed or answer.wrong:
                        raise RuntimeError(f"alone already: {answer}")
                    took[size].append(answer.took_s)

        await asyncio.gather(*map(one_by_one, MODELS))
        return {size: median(each) for size, each in took.items()}

    async def run(self, calls: Sequence[Call]) -> list[Answer]:
        """All of them, to their ends."""
        began = time.monotonic()
        return await asyncio.gather(*(self.ask(one, began) for one in calls))


async def sample(agent: Agent, rows: list[dict[str, Any]]) -> None:
    """What each model has of the unit, until cancelled. Bytes; vLLM's null block is nobody's."""
    began = time.monotonic()
    while True:
        unit = await fetch_unit(agent.path)
        rows.append(
            {
                "at_s": round(time.monotonic() - began, 2),
                "used": {one.model: one.used - BLOCK_BYTES for one in unit.shares},
                "lease": {one.model: one.lease for one in unit.shares},
            }
        )
        await asyncio.sleep(SAMPLE_S)


PREEMPTIONS = re.compile(r"^kvmig_preemptions_total\{.*\} (\S+)$", re.MULTILINE)


def preemptions(site: Site) -> int:
    """Of all models since their start."""
    texts = [httpx.get(f"{one.url}/metrics", timeout=30).text for one in site.served.values()]
    counts = [float(count) for text in texts for count in PREEMPTIONS.findall(text)]
    if len(counts) < len(texts):
        raise RuntimeError("/metrics doesn't say how often requests were preempted")
    return int(sum(counts))


def processor_s() -> float:
    """Of this process and all that it has started, those that it has outlived not."""
    here = psutil.Process()
    every = [one.cpu_times() for one in (here, *here.children(recursive=True))]
    return float(sum(one.user + one.system for one in every))


def settled(unit: UnitState) -> bool:
    """Whether all models are there, and have as much as they shall have."""
    here = [one for one in unit.shares if one.connected]
    leased = sum(one.lease for one in here)
    return (
        len(here) == len(MODELS)
        and leased >= unit.arena - len(here) * BLOCK_BYTES
        and all(one.lease == one.quota for one in here)
    )


async def measure(
    site: Site, agent: Agent, arena: int, phases: int, phase_s: float, rounds: int
) -> tuple[dict[Size, float], list[Call], list[Run]]:
    """agent: the first; each run has one of its own."""
    runs: list[Run] = []
    async with session() as http:
        load = Load(site, http)
        alone_s = await load.alone_s()
        calls = calls_of(SEED, phases, phase_s, rate_for(arena, alone_s))
        for number in range(rounds):
            for arm in ARMS if number % 2 == 0 else reversed(ARMS):
                agent.close()
                agent = await asyncio.to_thread(site.agent, "unit", arena, arm)
                await asyncio.to_thread(agent.until, settled)
                before, rows = preemptions(site), list[dict[str, Any]]()
                began, spent = time.monotonic(), processor_s()
                sampling = asyncio.create_task(sample(agent, rows))
                answers = await load.run(calls)
                sampling.cancel()
                cores = (processor_s() - spent) / (time.monotonic() - began)
                await asyncio.sleep(0.5)  # until the last report of what was preempted
                runs.append(Run(arm, answers, rows, preemptions(site) - before, cores))
                report.say(f"{arm}: {in_time(answers, alone_s, SLO)} of {len(answers)} in time")
    return alone_s, calls, runs


def shift(
    arena: int, phases: int, phase_s: float, rounds: int, model: str
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """U2: figures and samples."""
    own = (
        "--instances=1", "--max-num-seqs=256", f"--max-model-len={LONGEST}", *model_flags(model)
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        site = Site(stack, Path(folder))
        agent = site.agent("unit", arena)
        site.serve_all(dict.fromkeys(MODELS, (f"--unit={agent.path}", *own)))
        alone_s, calls, runs = asyncio.run(measure(site, agent, arena, phases, phase_s, rounds))
    rows = [
        {"what": "alone", "prompt": size.prompt, "tokens": size.tokens, "s": took}
        for size, took in alone_s.items()
    ]  # fmt: skip
    for number, run in enumerate(runs):
        for phase, one in enumerate(normalised(run.samples, calls, alone_s, phase_s)):
            rows.append({"what": "R", "run": number, "arm": run.arm, "phase": phase, **one})
        rows += [{"what": "unit", "run": number, "arm": run.arm, **one} for one in run.samples]
        rows += [
            {"what": "answer", "run": number, "arm": run.arm, **row(one)} for one in run.answers
        ]
    return summarise(alone_s, calls, runs, phase_s), rows


def row(answer: Answer) -> dict[str, Any]:
    """Of one answer, as the file has it."""
    call = answer.call
    return {
        "model": call.model, "phase": call.phase, "at_s": round(call.at, 3), "tokens":
        call.size.tokens, "late_ms": round((answer.sent_s - call.at) * 1e3, 1),
        "took_s": round(answer.took_s, 3), "failed": answer.failed, "wrong": answer.wrong,
    }  # fmt: skip


def summarise(
    alone_s: Mapping[Size, float], calls: Sequence[Call], runs: Sequence[Run], phase_s: float
) -> dict[str, float]:
    """The figures; the ratios are left out where thirds have nothing to compare with."""
    every = {arm: [one for one in runs if one.arm == arm] for arm in ARMS}
    kept = {
        scale: {
            arm: sum(in_time(one.answers, alone_s, scale) for one in every[arm]) for arm in ARMS
        }
        for scale in (SLO, LOOSE_SLO)
    }
    preempted = {arm: sum(one.preemptions for one in every[arm]) for arm in ARMS}
    index = {
        arm: min(
            jain([*one.values()])
            for run in every[arm]
            for one in normalised(run.samples, calls, alone_s, phase_s)
        )
        for arm in ARMS
    }
    answers = [one for run in runs for one in run.answers]
    figures: dict[str, float] = {
        "requests of a run": len(calls),
        "runs of each": len(every["kvmig"]),
        "latency alone, mean of sizes, s": fmean(alone_s.values()),
    }
    for scale, counts in kept.items():
        for arm, count in counts.items():
            share = count / (len(calls) * len(every[arm]))
            figures[f"{words(arm)}: in {scale} times the latency alone, of all"] = share
    for arm in ARMS:
        figures |= {
            f"{words(arm)}: preemptions": preempted[arm],
            f"{words(arm)}: Jain's index of R, least of phases": index[arm],
            f"{words(arm)}: cores that it all took, most": max(one.cores for one in every[arm]),
        }
    for scale, counts in kept.items():
        if counts["fixed"]:
            figures[f"in {scale} times the latency alone, quotas / thirds"] = (
                counts["kvmig"] / counts["fixed"]
            )
    if preempted["fixed"]:
        figures["preemptions, quotas / thirds"] = preempted["kvmig"] / preempted["fixed"]
    return figures | {
        "clients late, longest ms": max(one.sent_s - one.call.at for one in answers) * 1e3,
        "shift: failed": sum(bool(one.failed) for one in answers),
        "shift: wrong": sum(one.wrong for one in answers),
    }


def words(arm: str) -> str:
    """The rule in the figures' names."""
    return {"kvmig": "quotas", "fixed": "thirds"}[arm]


TARGETS: dict[str, report.Target] = {
    f"in {SLO} times the latency alone, quotas / thirds": {"min": 1.5},
    "preemptions, quotas / thirds": {"max": 0.5},
    "quotas: Jain's index of R, least of phases": {"min": 0.95},
    "shift: failed": {"max": 0},
    "shift: wrong": {"max": 0},
}
