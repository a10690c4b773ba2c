"""Traffic for hours with constant migration, and instances that come and go: does anything grow?

    python -m bench.soak [--minutes M] [--wave S] [--out FILE.json] [--plot FILE.png] [--check]

Two to three instances of the bundled model behind two front ends, with autoscaling. The load of
bench.chaos comes in waves, so that an instance is added and drained again with each; between them
one is added and deleted by the admin API. Migrations are forced at a steady rate. Every answer is
compared with the one that it must be. Every few seconds: proportional and resident memory, open
files and threads of each process, used blocks, bytes of kvmig's in /dev/shm.

After a warm-up (a quarter of the time) a line is fitted through each series of a process
that lived most of the rest; of a part in which none did, of the one that lived longest. Flat is
what grew, by that line and over all the time, no more than `FLAT` allows (bench/soak_samples.py).

Blocks of the KV cache become resident when they are used for the first time, so minutes are too
short to say anything of an instance's memory.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import aiohttp
import httpx

from bench import report
from bench.chaos.answers import Answer
from bench.chaos.clients import Client, Ledger, keep_asking
from bench.chaos.leaks import Holdings, compare, when_idle
from bench.chaos.mover import Mover
from bench.chaos.place import Place
from bench.chaos.run import SETTLE_S, WARM_S, Load, references, traffic
from bench.models import model_flags
from bench.soak_plot import draw_soak
from bench.soak_samples import FLAT, Sample, Whole, cluster_of, samples_of, steepest
from kvmig.models import BUNDLED
from kvmig_tools.served import SMALL, Served

LOW, HIGH = 4, 28
"""Clients at low and high tide."""
MOVES_PER_S = 4.0
ORDER_TIMEOUT_S = 30.0
MODEL = "device20ms"
FLAGS = (
    *SMALL, "--instances=2", "--min-instances=2", "--max-instances=4",
    "--autoscale=45,150", "--scale-stabilization=3", "--scale-cooldown=10", "--front-ends=2",
    "--shutdown-timeout=5",
)  # fmt: skip


@dataclass
class Watched:
    """Everything that was measured."""

    ledger: Ledger
    mover: Mover
    processes: list[Sample]
    cluster: list[Whole]
    before: Holdings
    after: Holdings
    scaled: Counter[str]


async def watch(
    served: Served, place: Place, every_s: float, seconds: float, wave_s: float
) -> Watched:
    """The load, with a sample now and then; wave_s: from a high tide of clients to the next."""
    wanted = await references(served)
    warming = Load(0, WARM_S, clients=HIGH)
    await traffic(served, warming, wanted, WARM_S, Ledger(began=time.monotonic()))
    await asyncio.sleep(SETTLE_S)
    before = await asyncio.to_thread(when_idle, served, place, 2)
    report.say("under load")
    ledger = Ledger(began=time.monotonic())
    mover, processes, cluster = Mover(served, 1, MOVES_PER_S), [], []
    scaled: Counter[str] = Counter()

    def over() -> bool:
        return time.monotonic() > ledger.began + seconds

    async def sample() -> None:
        while not over():
            at_s = round(time.monotonic() - ledger.began, 1)
            processes.extend(await asyncio.to_thread(samples_of, place, at_s))
            try:
                cluster.append(await asyncio.to_thread(cluster_of, served, place, at_s))
            except httpx.HTTPError as error:
                scaled[f"not sampled: {type(error).__name__}"] += 1
            await asyncio.sleep(every_s)

    async with asyncio.TaskGroup() as group:
        group.create_task(sample())
        group.create_task(mover.run(over))
        group.create_task(_add_and_delete(served, wave_s, over, scaled))
        for number in range(HIGH):
            group.create_task(_in_waves(served, ledger, number, wave_s, wanted, over))
    await asyncio.sleep(SETTLE_S)
    after = await asyncio.to_thread(when_idle, served, place, 2)
    return Watched(ledger, mover, processes, cluster, before, after, scaled)


async def _in_waves(
    served: Served,
    ledger: Ledger,
    number: int,
    wave_s: float,
    wanted: dict[str, Answer],
    over: Callable[[], bool],
) -> None:
    """A client that is away at low tide, unless it is one of the first."""

    async def rest() -> None:
        while number >= LOW and (time.monotonic() - ledger.began) % wave_s > wave_s / 2:
            if over():
                return
            await asyncio.sleep(0.5)

    async with Client(served.url, served.model, ledger) as client:
        await keep_asking(client, Random(f"soak {number}"), wanted, over, rest)


async def _add_and_delete(
    served: Served, wave_s: float, over: Callable[[], bool], scaled: Counter[str]
) -> None:
    """One instance more by hand once in two waves, and the last that serves away again."""
    url = f"{served.url}/kvmig/v1/instances"
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=ORDER_TIMEOUT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        while not over():
            async with http.post(url, json={"count": 1}) as answer:
                scaled[f"POST {answer.status}"] += 1
            if await _patient(wave_s, over):
                return
            async with http.get(url) as answer:
                rows = (await answer.json())["data"]
            serving = [row["id"] for row in rows if row["state"] == "serving"]
            if len(serving) > 2:
                async with http.delete(f"{url}/{serving[-1]}") as answer:
                    scaled[f"DELETE {answer.status}"] += 1
            if await _patient(wave_s, over):
                return


async def _patient(seconds: float, over: Callable[[], bool]) -> bool:
    """Wait so long; True at once when it is over."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if over():
            return True
        await asyncio.sleep(0.5)
    return False


def summarise(seen: Watched, output: str, seconds: float) -> dict[str, float]:
    """The figures."""
    outcomes = seen.ledger.outcomes
    return {
        "requests_sent": seen.ledger.sent,
        "tokens": seen.ledger.tokens,
        "failed": sum(bool(one.error) for one in outcomes),
        "wrong": sum(bool(one.verdict.what) for one in outcomes),
        "tokens_lost": sum(one.verdict.lost for one in outcomes),
        "tokens_repeated": sum(one.verdict.repeated for one in outcomes),
        "longest_gap_s": round(max(one.gap_s for one in outcomes), 3),
        "migrations_committed": seen.mover.ended["committed"],
        "migrations_aborted": seen.mover.ended.total() - seen.mover.ended["committed"],
        "instances_added": output.count("starts\n") - 2,
        "instances_taken_out": output.count("is taken out\n"),
        "added_by_autoscaling": output.count("autoscaling: 1 more"),
        "drained_by_autoscaling": output.count("goes\n"),
        "instances_most": max(one.instances for one in seen.cluster),
        "shm_mib_most": max(one.shm_mib for one in seen.cluster),
        **compare(seen.before, seen.after),
        **steepest(seen.processes, seconds),
    }


def targets(summary: dict[str, float]) -> dict[str, report.Target]:
    """What must be 0, and what must be flat."""
    zero = ("failed", "wrong", "tokens_lost", "tokens_repeated", "leaked_blocks",
            "leaked_requests", "leaked_staging_buffers", "leaked_shared_memory",
            "stray_processes", "leaked_fds")  # fmt: skip
    flat = {name: {"max": FLAT[name.split()[1]]} for name in summary if name.endswith(" growth")}
    return {**{name: {"max": 0.0} for name in zero}, **flat}


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--minutes", type=float, help="of load: 10, or 0.5 with --quick")
    root.add_argument("--wave", type=float, default=90.0, help="seconds between two high tides")
    root.add_argument("--sample", type=float, default=10.0, help="seconds between two samples")
    root.add_argument("--log", type=Path, help="keep what the server printed there")
    options = root.parse_args(argv)
    minutes = options.minutes or (0.5 if options.quick else 10)
    flags = [*FLAGS, *model_flags(MODEL)]
    settings = {"minutes": minutes, "sample_s": options.sample, "wave_s": options.wave,
                "clients": HIGH, "moves_per_s": MOVES_PER_S, "flags": flags}  # fmt: skip
    result = report.begin("soak", settings)
    with Place() as place:
        with Served(
            flags, model=BUNDLED, environment=place.environment, log=place.log, enter=place.enter
        ) as served:
            seen = asyncio.run(watch(served, place, options.sample, minutes * 60, options.wave))
        output = place.log.read_text(errors="replace")
        if options.log is not None:
            options.log.write_text(output)
    result.samples = [asdict(one) for one in seen.processes]
    result.samples += [asdict(one) for one in seen.cluster]
    result.samples += [
        {"call": one.call.kind, "at_s": round(one.at, 1), "error": one.error,
         "wrong": one.verdict.what, "body": one.call.body}
        for one in seen.ledger.outcomes if one.error or one.verdict.what
    ]  # fmt: skip
    result.summary = summarise(seen, output, minutes * 60)
    result.targets = targets(result.summary)
    rows = sorted((seen.mover.ended + seen.scaled).items())
    return report.finish(result, options, [report.table("Events", ("", "times"), rows)], draw_soak)


if __name__ == "__main__":
    sys.exit(main())
