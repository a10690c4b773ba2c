"""One run: a cluster, its clients, its migrations, its faults, and what is left of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from random import Random
from typing import Any

from bench import report
from bench.chaos.answers import Answer
from bench.chaos.calls import REFERENCES, reference
from bench.chaos.clients import Client, Ledger, keep_asking
from bench.chaos.leaks import START_TIMEOUT_S, Holdings, compare, when_idle
from bench.chaos.mover import Mover
from bench.chaos.nemesis import Nemesis
from bench.chaos.place import Place
from bench.chaos.plan import Fault
from bench.chaos.unit import Unit
from bench.models import model_flags
from kvmig_tools.served import SMALL, Served

WARM_S = 10.0
"""Load without faults, after which every process has made the connections that it needs."""
SETTLE_S = 6.0
"""After the load: idle connections are closed then."""


@dataclass
class Load:
    """What is asked of the cluster."""

    seed: int
    seconds: float
    instances: int = 3
    front_ends: int = 2
    clients: int = 16
    moves_per_s: float = 3.0
    model: str = "device20ms"
    transport: str = "auto"

    @property
    def flags(self) -> list[str]:
        """kvmig.serve's. Whoever breaks everything on purpose wants nobody to give up; float32:
        what is computed in another order then differs too little for another token."""
        words = [
            *SMALL, *model_flags(self.model), f"--transport={self.transport}",
            f"--instances={self.instances}", f"--front-ends={self.front_ends}",
            "--max-restarts=100000", "--max-crashes=100000", "--shutdown-timeout=5",
            f"--start-timeout={START_TIMEOUT_S:g}",
        ]  # fmt: skip
        return [one.replace("bench.paced.PacedWorker", "bench.chaos.worker.ChaosWorker")
                for one in words]  # fmt: skip


@dataclass
class Findings:
    """Of one run."""

    ledger: Ledger
    mover: Mover
    nemesis: Nemesis
    before: Holdings
    after: Holdings
    left: dict[str, float] = field(default_factory=dict)
    """Once the server has ended."""


async def references(served: Served) -> dict[str, Answer]:
    """The undisturbed answers. Raises RuntimeError if there is none."""
    ledger = Ledger(began=time.monotonic())

    async def one(name: str) -> Answer:
        async with Client(served.url, served.model, ledger) as client:
            outcome, answer = await client.ask(reference(name), None)
        if outcome.error:
            raise RuntimeError(f"no reference for {name}: {outcome.error}")
        return answer

    answers = await asyncio.gather(*map(one, REFERENCES))
    return dict(zip(REFERENCES, answers, strict=True))


async def play(
    served: Served, place: Place, load: Load, faults: list[Fault], unit: Unit | None
) -> Findings:
    """The load, the faults, and the quiet after them."""
    wanted = await references(served)
    await traffic(served, load, wanted, WARM_S, Ledger(began=time.monotonic()))
    await asyncio.sleep(SETTLE_S)
    before = await asyncio.to_thread(when_idle, served, place, load.instances)
    report.say(f"warm, {len(faults)} faults to come")
    ledger = Ledger(began=time.monotonic())
    nemesis = Nemesis(served, place, ledger.began)
    async with unit.watched() if unit else contextlib.nullcontext():
        trouble = asyncio.create_task(nemesis.run(faults, load.seconds))
        try:
            mover = await traffic(served, load, wanted, load.seconds, ledger)
            await trouble
        finally:
            trouble.cancel()
            await nemesis.end()
        await asyncio.sleep(SETTLE_S)
        after = await asyncio.to_thread(when_idle, served, place, load.instances)
    return Findings(ledger, mover, nemesis, before, after)


async def traffic(
    served: Served, load: Load, wanted: dict[str, Answer], seconds: float, ledger: Ledger
) -> Mover:
    """All clients and forced migrations for so long, and until every call has ended."""
    end = time.monotonic() + seconds
    mover = Mover(served, load.seed, load.moves_per_s)

    def over() -> bool:
        return time.monotonic() > end

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        group.create_task(mover.run(over))
        for number in range(load.clients):
            client = await stack.enter_async_context(Client(served.url, served.model, ledger))
            random = Random(f"client {load.seed} {number}")
            group.create_task(keep_asking(client, random, wanted, over))
    return mover


def run(load: Load, faults: list[Fault], place: Place, unit: Unit | None = None) -> Findings:
    """Start a cluster, play, end it. unit: of all instances. Raises StartupError."""
    with (
        unit or contextlib.nullcontext(),
        Served(
            [*load.flags, *(unit.flags if unit else ())],
            model=model_path(),
            environment=place.environment,
            log=place.log,
            enter=place.enter,
        ) as served,
    ):
        findings = asyncio.run(play(served, place, load, faults, unit))
    findings.left = {
        "processes_after_end": len(place.processes()),
        "shared_memory_after_end": len(place.left_in_shm()) if place.private else 0,
    }
    return findings


def model_path() -> str:
    """Of the bundled model, whose answers are known."""
    from kvmig.models import BUNDLED

    return str(BUNDLED)


def summarise(found: Findings) -> dict[str, float]:
    """The figures."""
    outcomes = found.ledger.outcomes
    doomed = found.nemesis.doomed
    failed = [one for one in outcomes if one.error]
    excused = [one for one in failed if one.port in doomed]
    gaps = [one.gap_s for one in outcomes]
    migrations: dict[str, Any] = {
        f"migrations {how}": count for how, count in sorted(found.mover.ended.items())
    }
    return {
        "requests_sent": found.ledger.sent,
        "requests_finished": sum(not one.error and not one.left for one in outcomes),
        "requests_left_by_client": sum(one.left for one in outcomes),
        "refused_and_sent_again": found.ledger.refused,
        "failed_front_end_died": len(excused),
        "failed_otherwise": len(failed) - len(excused),
        "wrong": sum(bool(one.verdict.what) for one in outcomes),
        "tokens_lost": sum(one.verdict.lost for one in outcomes),
        "tokens_repeated": sum(one.verdict.repeated for one in outcomes),
        "tokens": found.ledger.tokens,
        "longest_gap_s": round(max(gaps, default=0.0), 3),
        "p99_gap_s": round(sorted(gaps)[int(len(gaps) * 0.99)], 3) if gaps else 0.0,
        **compare(found.before, found.after),
        **found.left,
        "faults": len(found.nemesis.done),
        **migrations,
    }


ZERO = (
    "failed_otherwise", "wrong", "tokens_lost", "tokens_repeated", "leaked_blocks",
    "leaked_requests", "instances_not_well", "leaked_staging_buffers", "leaked_shared_memory",
    "stray_processes", "leaked_fds", "leaked_memory_mib", "processes_after_end",
    "shared_memory_after_end",
)  # fmt: skip
"""Figures that must be 0."""
