"""A `vllm serve` of two data parallel ranks with kvmig's plugin, whose streams move all the time.

    python -m bench.plugin_soak [--minutes M] [--model NAME] [--out FILE.json] [--check]

The load is bench.chaos's: streams, whole answers, slow clients and ones that leave; each answer is
compared with the one that it must be. Migrations between the ranks are asked for at a steady rate,
beside those of the scheduler. wrong: answers that differ; lost: calls that ended early or with an
error, and tokens that are missing; stuck: calls of which nothing came any more. Then what the idle
server still holds.

With --out the file has what clients saw so far, twice a minute, also of a run that is interrupted.

Other models than the bundled one have no answers that are known beforehand: their calls are those
whose answers an undisturbed run gave.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from bench import report
from bench.chaos.answers import Answer
from bench.chaos.calls import KINDS, REFERENCES
from bench.chaos.clients import Client, Ledger, keep_asking
from bench.chaos.leaks import Holdings, compare, when_idle
from bench.chaos.mover import Mover
from bench.chaos.place import Place
from bench.chaos.run import SETTLE_S, WARM_S, references
from bench.models import PACED, model_flags, model_folder
from bench.overhead import plain_environment
from kvmig.plugin import SWITCH
from kvmig_tools.plugin_entry import entry_point
from kvmig_tools.served import SMALL, Served

ROOT = Path(__file__).resolve().parent.parent
COMMAND = ("-m", "vllm.entrypoints.openai.api_server")
FLAGS = (*SMALL, "--data-parallel-size=2", "--api-server-count=2", "--shutdown-timeout=5")
RANKS = 2
CLIENTS = 12
MOVES_PER_S = 8.0
KEEP_S = 30.0
STUCK = ("did not end", "nothing came")
"""What bench.chaos says of calls that stand still."""
LEAKS = (
    "leaked_blocks", "leaked_requests", "instances_not_well", "leaked_staging_buffers",
    "leaked_shared_memory", "stray_processes", "leaked_fds",
)  # fmt: skip
ZERO = ("wrong", "lost", "stuck", "tokens_lost", "tokens_repeated", *LEAKS)


@dataclass
class SoakLoad:
    """What clients and migrations did."""

    ledger: Ledger
    mover: Mover


@dataclass
class Soaked:
    """Everything that was measured."""

    load: SoakLoad
    before: Holdings
    after: Holdings


Keep = Callable[[SoakLoad], None]


def kinds_of(model: str) -> tuple[str, ...]:
    """The calls whose answers are known."""
    return KINDS if model == "count" or PACED.fullmatch(model) else tuple(REFERENCES)


async def soak(
    served: Served, place: Place, seconds: float, kinds: tuple[str, ...], keep: Keep
) -> Soaked:
    """The load, and the quiet before and after it. keep: takes what there is so far."""
    wanted = await references(served)
    await traffic(served, wanted, WARM_S, kinds)
    await asyncio.sleep(SETTLE_S)
    before = await asyncio.to_thread(when_idle, served, place, RANKS)
    report.say("under load")
    load = await traffic(served, wanted, seconds, kinds, keep)
    await asyncio.sleep(SETTLE_S)
    return Soaked(load, before, await asyncio.to_thread(when_idle, served, place, RANKS))


async def traffic(
    served: Served,
    wanted: dict[str, Answer],
    seconds: float,
    kinds: tuple[str, ...],
    keep: Keep | None = None,
) -> SoakLoad:
    """All clients and migrations for so long, and until every call has ended."""
    load = SoakLoad(Ledger(began=time.monotonic()), Mover(served, 1, MOVES_PER_S))
    over = after(seconds)
    async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
        group.create_task(load.mover.run(over))
        for number in range(CLIENTS):
            client = Client(served.url, served.model, load.ledger)
            await stack.enter_async_context(client)
            random = Random(f"plugin {number}")
            group.create_task(keep_asking(client, random, wanted, over, kinds=kinds))
        while keep is not None and not over():
            await asyncio.sleep(KEEP_S)
            keep(load)
    return load


def after(seconds: float) -> Callable[[], bool]:
    """Whether so much time has passed since now."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def summarise_load(load: SoakLoad) -> dict[str, float]:
    """The figures of what clients saw."""
    outcomes = load.ledger.outcomes
    stuck = [one for one in outcomes if one.error in STUCK]
    moves = load.mover.ended
    return {
        "requests_sent": load.ledger.sent,
        "tokens": load.ledger.tokens,
        "wrong": sum(bool(one.verdict.what) for one in outcomes),
        "lost": sum(bool(one.error) for one in outcomes) - len(stuck),
        "stuck": len(stuck),
        "tokens_lost": sum(one.verdict.lost for one in outcomes),
        "tokens_repeated": sum(one.verdict.repeated for one in outcomes),
        "longest_gap_s": round(max((one.gap_s for one in outcomes), default=0.0), 3),
        "refused_and_sent_again": load.ledger.refused,
        "migrations_committed": moves["committed"],
        "migrations_aborted": moves.total() - moves["committed"],
    }


def samples_of(load: SoakLoad) -> list[dict[str, Any]]:
    """One for each call that has ended."""
    return [
        {"call": one.call.kind, "at_s": round(one.at, 1), "manner": one.call.manner,
         "error": one.error, "wrong": one.verdict.what, "gap_s": round(one.gap_s, 3)}
        for one in load.ledger.outcomes
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--minutes", type=float, help="of load: 20, or 0.5 with --quick")
    root.add_argument("--model", default="count", help="count, llama-1b-kv or another of --model")
    root.add_argument("--log", type=Path, help="keep what the server printed there")
    options = root.parse_args(argv)
    minutes = options.minutes or (0.5 if options.quick else 20)
    kinds, flags = kinds_of(options.model), [*FLAGS, *model_flags(options.model)]
    settings = {"minutes": minutes, "model": options.model, "clients": CLIENTS,
                "moves_per_s": MOVES_PER_S, "kinds": kinds, "flags": flags}  # fmt: skip
    result = report.begin("plugin_soak", settings)

    def keep(load: SoakLoad) -> None:
        result.samples, result.summary = samples_of(load), summarise_load(load)
        report.keep(result, options)

    model = model_folder(options.model)
    with Place() as place:
        path = {"PYTHONPATH": f"{entry_point(place.folder)}:{ROOT}", SWITCH: "1"}
        try:
            with Served(
                flags,
                model=model,
                command=COMMAND,
                environment={**plain_environment(), **place.environment, **path},
                log=place.log,
                enter=place.enter,
            ) as served:
                seen = asyncio.run(soak(served, place, minutes * 60, kinds, keep))
        finally:
            if options.log is not None:
                options.log.write_text(place.log.read_text(errors="replace"))
    result.samples = samples_of(seen.load)
    result.summary = {**summarise_load(seen.load), **compare(seen.before, seen.after)}
    result.targets = {name: {"max": 0.0} for name in ZERO}
    result.targets["migrations_committed"] = {"min": 1.0}
    rows = sorted(seen.load.mover.ended.items())
    return report.finish(result, options, [report.table("Migrations", ("", "times"), rows)])


if __name__ == "__main__":
    sys.exit(main())
