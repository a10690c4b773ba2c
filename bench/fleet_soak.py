"""A fleet for an hour under a light, steady load: is every answer right, does any process grow?

`kvmig up` with two proxies. Ten clients at a time stream answers, take them as a whole, or leave
early, on keys with every kind of limit, from a model of two toy instances (they compute nothing).
Every few minutes another model starts from zero and goes back, one instance of the first is drained
and comes again, and a key is made, used and revoked. Every answer is compared, and at the end every
call with its row in the ledger. Resident memory, open files and threads of each process are looked
at now and then.

What grew is the difference between the medians of the last and the first sixth of the time (ten
minutes of an hour), of each process that was there in both.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args

import psutil

from bench import cold, report
from bench.ledger import MODEL, WRONG, Clients, Fate, judge, ledger_of, new_key
from bench.soak_samples import FLAT
from kvmig_tools.fleet import FleetUp

PROXIES = 2
CLIENTS = 10
STEP_MS = 100
RARE = "rare"
"""The model that comes and goes."""
KEYS: tuple[dict[str, Any], ...] = (
    {},
    {"rpm": 6_000, "parallel": 100},
    {"tpm": 1_000_000},
    {"quota": 1_000_000_000, "period": "day"},
)
EVERY_S = 180.0
"""Between two rounds of what happens now and then."""
SAMPLE_S = 30.0
LONG_RUN = ("* growth",)
"""In a minute processes grow because they have just begun."""
ENDS = 6
"""The first and the last of so many parts of the time are compared."""
MIB = 1 << 20
PARTS = {
    "kvmig.fleet.server": "server",
    "kvmig.fleet.fork_server": "fork server",
    "kvmig.proxy": "proxy",
    "kvmig.launcher.shared_fork_server": "fork server of an engine",
    "kvmig.launcher.llumlet_main": "instance",
    "kvmig.launcher.scheduler": "scheduler",
    "kvmig.frontend.process_main": "front end",
    "kvmig.serve": "launcher",
}
"""By words of the command line; the first that is there."""


@dataclass(frozen=True)
class Sample:
    """One process at one time. at_s: since the load began; memory in MiB."""

    at_s: float
    pid: int
    part: str
    rss_mib: float
    fds: int
    threads: int


def samples_of(fleet: FleetUp, at_s: float) -> list[Sample]:
    """All processes, now; those that end meanwhile are left out."""
    assert fleet.process is not None
    init, found = psutil.Process(fleet.process.pid), []
    for one in (init, *init.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            line = " ".join(one.cmdline())
            part = next((part for words, part in PARTS.items() if words in line), "other")
            memory = round(one.memory_info().rss / MIB, 2)
            part = "init" if one == init else part
            found.append(Sample(at_s, one.pid, part, memory, one.num_fds(), one.num_threads()))
    return found


# -- what grew. Pure


def grown(samples: Sequence[Sample], seconds: float) -> dict[str, float]:
    """Of each part the medians of both ends in the process that grew most, and its growth; of open
    files those of all its processes together, for a connection comes to any of them."""
    of_part: dict[str, dict[int, list[Sample]]] = {}
    for one in samples:
        of_part.setdefault(one.part, {}).setdefault(one.pid, []).append(one)
    found: dict[str, float] = {}
    for part, processes in sorted(of_part.items()):
        ends = [(_early(rows, seconds), _late(rows, seconds)) for rows in processes.values()]
        lasting = [(first, last) for first, last in ends if first and last]
        for figure in FLAT if lasting else ():
            pairs = [(_median(first, figure), _median(last, figure)) for first, last in lasting]
            if figure == "fds":
                first, last = (sum(values) for values in zip(*pairs, strict=True))
            else:
                first, last = max(pairs, key=lambda pair: pair[1] - pair[0])
            for word, value in (("first", first), ("last", last), ("growth", last - first)):
                found[f"{part} {figure} {word}"] = round(value, 2)
    return found


def _early(rows: Sequence[Sample], seconds: float) -> list[Sample]:
    return [one for one in rows if one.at_s <= seconds / ENDS]


def _late(rows: Sequence[Sample], seconds: float) -> list[Sample]:
    return [one for one in rows if one.at_s >= seconds - seconds / ENDS]


def _median(rows: Sequence[Sample], figure: str) -> float:
    return float(median(getattr(one, figure) for one in rows))


# -- the load


class Events:
    """What happens now and then."""

    def __init__(self, fleet: FleetUp, clients: Clients) -> None:
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._fleet = fleet
        self._clients = clients

    async def run(self, until: float) -> None:
        """Until then."""
        for turn in range(sys.maxsize):
            await asyncio.gather(self._rare(turn), self._scale(), self._key(turn))
            await asyncio.sleep(max(0.0, min(EVERY_S, until - time.monotonic())))
            if time.monotonic() >= until:
                return

    async def _rare(self, turn: int) -> None:
        async with self._fleet.client() as http:
            _, text = await cold.ask(http, RARE, turn)
        if text != cold.counted(turn):
            self.wrong.append(f"{RARE}: {text[:300]}")
        self.done["answers of a model from zero"] += 1

    async def _scale(self) -> None:
        for instances in (1, 2):
            wanted = {"min": instances, "max": instances}
            path = f"models/{MODEL}/scale"
            answer = await asyncio.to_thread(self._fleet.ask, "POST", path, wanted)
            answer.raise_for_status()
            await asyncio.to_thread(
                self._fleet.until, f"models/{MODEL}", state="serving", serving=instances
            )
        self.done["drains"] += 1

    async def _key(self, turn: int) -> None:
        # A proxy that has just begun takes it that a minute's worth was used: 0.1 s of this rate.
        key = await asyncio.to_thread(new_key, self._fleet, rpm=600, quota=1_000)
        await self._clients.call(key, 20, turn)
        path = f"keys/{key.split('-')[1]}"
        (await asyncio.to_thread(self._fleet.ask, "DELETE", path)).raise_for_status()
        async with self._fleet.client(key) as http:
            await asyncio.sleep(1.0)
            if (await http.get("/v1/models")).status_code != 401:
                self.wrong.append("a revoked key was let in after a second")
        self.done["keys revoked"] += 1


async def load(
    fleet: FleetUp, clients: Clients, events: Events, seconds: float
) -> tuple[list[Sample], list[float]]:
    """All of it, for so long; what was sampled, and the machine's load."""
    began, samples, loads = time.monotonic(), list[Sample](), list[float]()

    async def sample() -> None:
        while (at_s := time.monotonic() - began) < seconds:
            samples.extend(await asyncio.to_thread(samples_of, fleet, round(at_s, 1)))
            loads.append(psutil.getloadavg()[0])
            await asyncio.sleep(min(SAMPLE_S, seconds / 20))

    async with asyncio.TaskGroup() as group:
        group.create_task(sample())
        group.create_task(events.run(began + seconds))
        for number in range(CLIENTS):
            group.create_task(clients.run(number, began + seconds))
    return samples, loads


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, LONG_RUN)
    root.add_argument("--minutes", type=float, help="of load: 60, or 1 with --quick")
    root.add_argument("--seed", type=int, default=0)
    options = root.parse_args(argv)
    seconds = 60 * (options.minutes or (1 if options.quick else 60))
    settings = {"seconds": seconds, "seed": options.seed, "clients": CLIENTS, "keys": KEYS}
    result = report.begin("fleet_soak", {**settings, "proxies": PROXIES, "step_ms": STEP_MS})
    toy = {"source": "path:/toy", "engine": "toy", "flags": [f"--step-ms={STEP_MS}"]}
    both = {"min": 2, "max": 2, "target": 1}
    with (
        tempfile.TemporaryDirectory() as data,
        FleetUp(Path(data), f"--proxies={PROXIES}") as fleet,
    ):
        fleet.add({"name": MODEL, **toy, "instances": both})
        fleet.add({"name": RARE, **toy, "instances": {"zero_after_s": EVERY_S / 4}})
        fleet.until(f"models/{MODEL}", state="serving", serving=2)
        keys = [new_key(fleet, **limits) for limits in KEYS]
        clients = Clients(fleet, keys, options.seed, shapes=False)  # a toy answers one prompt
        events = Events(fleet, clients)
        began = sum(psutil.Process().cpu_times()[:2])
        samples, loads = asyncio.run(load(fleet, clients, events, seconds))
        own_s = sum(psutil.Process().cpu_times()[:2]) - began
        rows = [row for row in ledger_of(fleet) if row.call_id.startswith("ledger-")]
    figures, odd = judge(clients.asked, rows, ())
    wrong = [*clients.wrong, *events.wrong]
    result.samples = [asdict(one) for one in samples]
    result.samples += [*odd, *({"wrong": sentence} for sentence in wrong)]
    fates = Counter(one.fate for one in clients.asked)
    result.summary = {
        "calls": len(clients.asked),
        **{f"calls {fate}": fates[fate] for fate in get_args(Fate)},
        **events.done,
        "tokens that clients got": sum(one.output for one in clients.asked),
        "moves in the ledger": sum(row.moves for row in rows),
        **dict.fromkeys(WRONG, 0),
        "wrong answers": len(wrong),
        **figures,
        "the machine's load, median": median(loads),
        "of a core, by the clients": own_s / seconds,
        **grown(samples, seconds),
    }
    nothing = (*WRONG, "wrong answers", "calls cut", "calls refused", "calls unpaid")
    result.targets = {name: {"max": 0} for name in nothing}
    for name in [one for one in result.summary if one.endswith(" growth")]:
        result.targets[name] = {"max": FLAT[name.split()[-2]]}
    return report.finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
