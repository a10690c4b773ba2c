"""A placement is changed while clients stream: what they see of it, and what a plan is worth.

Three models (`kvmig.serve` with real vLLM each) share two units of a host; 60 clients stream from
them, one answer after the other, each token checked. `python -m kvmig.placement.executor` takes the
site from placement A to B and back: each unit has room for two instances, so models move in turns.

Of each client in each leg: its longest wait between two tokens, over its median wait in an equally
long window without a change just before. Then the same with faults, at each wave of the plan: the
executor is killed and another one started; an instance is killed that requests leave, or to which
they go, or that starts. Every answer must be right and whole, and the end the placement that was
wanted. kvmig runs no request a third time that may have crashed two instances, so a fault waits
until all answers have ended that the last one may have met.

On a host without GPUs a unit is a name, and its memory what the placement's file says. With
--agents each unit has an agent (`kvmig.sharing`) that leases KV cache. Then the placements have
quotas, too, which change on the way, and what is killed at each wave is the agent of the unit
that the wave is about; another one is started soon after.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import psutil
import uvloop

from bench import report
from bench.agents import Agents, agents_of
from bench.arrivals import Arrival, intervals_ms, longest_ms
from bench.client import Stream, StreamFailed, session
from bench.models import NAMES, model_flags, model_folder
from bench.site import all_up
from kvmig_tools.served import Served

KV = 128 << 20
HELD = 700 << 20
UNIT = 2 * (KV + HELD)
FLOOR = KV // 16
"""KV cache of a request of 4,096 tokens."""
ARENA = 48 << 20
"""Of an agent."""
BLOCK = 64 << 10
"""That an engine has before its first lease."""
MODELS = ("a", "b", "c")
UNITS = ("left", "right")
PLACEMENTS = {
    "A": {"left": ("a", "b"), "right": ("b", "c")},
    "B": {"left": ("a", "c"), "right": ("a", "b")},
}
QUOTAS = {"A": (32 << 20, 16 << 20), "B": (16 << 20, 32 << 20)}
"""Of the first and the second model of each unit, where units have agents."""
FLAGS = (
    "--enforce-eager",
    "--block-size=32",
    "--max-num-seqs=32",
    "--max-instances=4",
    "--scheduler-interval-ms=50",
    # Nothing moves but by the drains.
    "--migrate-below=-1000000",
    "--shutdown-timeout=2",
)
ALONE = (f"--kv-cache-memory-bytes={KV}",)
SHARED = ("--max-model-len=3072",)
"""The size of KV caches without and with agents. With agents, a unit's arena has room for the
longest requests of three models at once: of two that stay, and of one that comes."""
TOKENS = (100, 400)
"""Least and most of an answer."""
QUICK_TOKENS = (50, 150)
FAULTS = [
    *(("source", wave) for wave in (1, 2, 3, 4)),
    *(("start", wave) for wave in (2, 4)),
    *(("destination", wave) for wave in (1, 2, 3, 4)),
    *(("executor", wave) for wave in (1, 2, 3, 4)),
]
"""Who is killed at which wave: drains and starts take turns."""
AGENT_FAULTS = [("agent", wave) for wave in range(1, 10)]
"""Of quotas, too; there and back the waves are of the same kinds."""
QUICK_AGENT_FAULTS = [("agent", 1), ("agent", 5)]
"""Quotas, and a start."""
FAULT_AFTER_S = 0.4
"""From the beginning of a wave."""
TRIAL_S = 4.0
"""So long an instance serves on trial: it gets some requests, of which deployments tell how long
they took to leave."""
QUIET_S = 8.0
"""Without a change, before a leg."""
LEG_S = 400.0
TRIES = 5
LONG_RUN = ("took_over_planned_*",)
"""A plan's time is for answers of usual length; those of a quick run end earlier."""
"""Executors, one after the other, until a placement is reached."""
WAVE = re.compile(r"wave (\d+), ([\d.]+) s: (.*)")
PLAN = re.compile(r"(\d+) waves?, ([\d.]+) s: ")


def quotas(name: str) -> dict[tuple[str, str], int]:
    """Of a placement with agents, by model and unit."""
    return {
        (model, unit): quota
        for unit, models in PLACEMENTS[name].items()
        for model, quota in zip(models, QUOTAS[name], strict=True)
    }


def placement_text(name: str, *, agents: bool = False) -> str:
    """The file; no two units are alike, or nothing would have to move."""
    lines: list[str] = []
    for at, unit in enumerate(UNITS):
        memory = 2 * HELD + ARENA if agents else UNIT
        lines += ["[[units]]", f'name = "{unit}"', f"memory_bytes = {memory + at}"]
        lines += [f"arena_bytes = {ARENA}"] if agents else []
        for model in PLACEMENTS[name][unit]:
            kv = quotas(name)[model, unit] if agents else KV
            lines += [
                "[[units.models]]", f'name = "{model}"', f"held_bytes = {HELD}",
                f"floor_bytes = {FLOOR}", f"kv_bytes = {kv}",
            ]  # fmt: skip
    return "\n".join(lines) + "\n"


def counted(start: int, tokens: int) -> list[int]:
    """What the bundled model answers: a token a character, whose id is its byte."""
    text = "".join(f" {number:04}" for number in range(start + 2, start + 3 + tokens // 5))
    return list(text[:tokens].encode())


# -- clients


@dataclass
class Client:
    """One, that asks for an answer as soon as it has the last."""

    deployment: str
    model: str
    url: str
    chance: random.Random
    lengths: tuple[int, int] = TOKENS
    arrivals: list[list[Arrival]] = field(default_factory=list)
    """Of each answer."""
    answers: int = 0
    wrong: list[str] = field(default_factory=list)
    stopping: bool = False

    async def run(self, http: aiohttp.ClientSession) -> None:
        """Until told to stop; then the present answer is the last."""
        while not self.stopping:
            start, tokens = self.chance.randrange(8000), self.chance.randint(*self.lengths)
            prompt = list(f"Count: {start:04} {start + 1:04}".encode())
            stream = Stream(http, self.url, self.model, prompt, tokens)
            self.arrivals.append(stream.arrivals)
            self.answers += 1
            try:
                async with stream:
                    await stream.reach(tokens)
            except (StreamFailed, aiohttp.ClientError, OSError) as error:
                self.wrong.append(
                    f"{self.deployment}: {error!r}, after {len(stream.tokens)} tokens"
                )
            if stream.tokens != counted(start, tokens)[: len(stream.tokens)]:
                self.wrong.append(f"{self.deployment}: other tokens than counting from {start}")

    def waits_ms(self, begin: float, end: float) -> list[float]:
        """Between two tokens of one answer, inside the window."""
        inside = [[one for one in each if begin < one.at < end] for each in self.arrivals]
        return [wait for each in inside for wait in intervals_ms(each)]

    def longest_ms(self, begin: float, end: float) -> float:
        """The longest wait that touches the window."""
        return max((longest_ms(each, begin, end) for each in self.arrivals), default=0.0)


async def renewed(clients: Sequence[Client]) -> None:
    """Wait until nobody has the answer any more that is under way now."""
    now = [one.answers for one in clients]
    async with asyncio.timeout(LEG_S):
        while any(one.answers == at for one, at in zip(clients, now, strict=True)):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


# -- the site


class Site:
    """The deployments."""

    def __init__(
        self, servers: dict[str, Served], http: aiohttp.ClientSession, agents: Agents | None
    ) -> None:
        self.servers = servers
        self.agents = agents
        self._http = http

    async def rows(self, model: str) -> list[dict[str, Any]]:
        async with self._http.get(f"{self.servers[model].url}/kvmig/v1/instances") as answer:
            rows: list[dict[str, Any]] = (await answer.json())["data"]
            return rows

    async def places(self) -> dict[str, set[str]]:
        """Units of the instances that serve, by model."""
        return {
            model: {row["unit"] for row in await self.rows(model) if row["state"] == "serving"}
            for model in self.servers
        }

    async def reached(self, to: str) -> bool:
        """Whether everybody is where the placement has them, with the quotas that it says."""
        there = {
            (model, row["unit"]): row["shared"] and row["shared"]["guarantee_bytes"]
            for model in self.servers for row in await self.rows(model) if row["state"] == "serving"
        }  # fmt: skip
        wanted = quotas(to)
        return there == wanted if self.agents else there.keys() == wanted.keys()

    async def trial(self, model: str) -> float:
        """Seconds of a start under the present load; the instance leaves again."""
        url = f"{self.servers[model].url}/kvmig/v1/instances"
        began = time.monotonic()
        async with self._http.post(url, json={"unit": "trial"}) as answer:
            (name,) = [one["id"] for one in (await answer.json())["data"]]
        await self._until(model, name, "serving")
        started = time.monotonic()
        await asyncio.sleep(TRIAL_S)
        await self._http.delete(f"{url}/{name}")
        await self._until(model, name, None)
        return started - began

    async def _until(self, model: str, name: str, state: str | None) -> None:
        """None: until it is gone."""
        deadline = time.monotonic() + LEG_S
        while time.monotonic() < deadline:
            row = next((row for row in await self.rows(model) if row["id"] == name), {})
            if row.get("state") == state:
                return
            if not row:
                raise StreamFailed(f"the server gave instance {name} up before it was {state}")
            await asyncio.sleep(0.1)
        raise StreamFailed(f"instance {name} is never {state}")

    async def process(self, model: str, unit: str | None) -> int | None:
        """Of the instance there; unit None: of one that starts and doesn't serve yet."""
        server = self.servers[model].process
        assert server is not None
        port = {
            int(row["endpoint"].rpartition(":")[2]): row["unit"]
            for row in await self.rows(model) if row["endpoint"]
        }  # fmt: skip
        for one in psutil.Process(server.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if not any("kvmig.launcher.llumlet_main" in word for word in one.cmdline()):
                    continue
                listens = {at.laddr.port for at in one.net_connections("tcp")
                           if at.status == psutil.CONN_LISTEN}  # fmt: skip
                known = [port[at] for at in listens if at in port]
                if (unit in known) if unit else not known:
                    return one.pid
        return None


# -- one leg


@dataclass
class Leg:
    """One way from placement to placement. Times in seconds."""

    to: str
    fault: str
    wave: int
    """At which the fault came; 0: at none."""
    planned_s: float = 0.0
    took_s: float = 0.0
    waves: int = 0
    hit: str = ""
    """What the fault met."""
    reached: bool = False
    legal: bool = True
    """Whether every model served at every look."""
    gaps: list[tuple[float, float, float]] = field(default_factory=list)
    """Of each client: median wait, longest wait before and during, milliseconds."""

    def ratios(self) -> list[float]:
        """Longest waits in steps."""
        return [during / usual for usual, _, during in self.gaps]

    def undisturbed(self) -> list[float]:
        """The same in the window before."""
        return [before / usual for usual, before, _ in self.gaps]


class Executor:
    """`python -m kvmig.placement.executor` as a process."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = [sys.executable, "-m", "kvmig.placement.executor", *words]
        self.process: asyncio.subprocess.Process | None = None

    async def lines(self, *more: str) -> AsyncIterator[str]:
        """What it prints, until it ends."""
        self.process = await asyncio.create_subprocess_exec(
            *self.words, *more, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            yield line.decode().rstrip()
        await self.process.wait()


async def run_leg(site: Site, executor: Executor, leg: Leg, clients: Sequence[Client]) -> None:
    """From a quiet window to the placement."""
    quiet = time.monotonic()
    await asyncio.sleep(QUIET_S)
    async for line in executor.lines("--dry-run"):
        if found := PLAN.match(line):
            leg.waves, leg.planned_s = int(found[1]), float(found[2])
    looking = asyncio.create_task(look(site, leg))
    began = time.monotonic()
    try:
        async with asyncio.timeout(LEG_S):
            for _ in range(TRIES):
                if await carried_out(site, executor, leg):
                    break
                await asyncio.sleep(1.0)
    finally:
        ended = time.monotonic()
        looking.cancel()
    leg.took_s = ended - began
    leg.reached = await site.reached(leg.to)
    for one in clients:
        usual = one.waits_ms(quiet, began)
        if usual:
            window = max(quiet, began - leg.took_s)
            leg.gaps.append(
                (median(usual), one.longest_ms(window, began), one.longest_ms(began, ended))
            )


async def carried_out(site: Site, executor: Executor, leg: Leg) -> bool:
    """Run the executor once, with the fault if it hasn't come; whether it came to its end."""
    hitting: asyncio.Task[None] | None = None
    async for line in executor.lines():
        report.say(f"  {line}")
        found = WAVE.match(line)
        if found and leg.wave and int(found[1]) == leg.wave and not leg.hit:
            hitting = asyncio.create_task(hit(site, executor, leg, found[3]))
    if hitting is not None:
        await hitting
    assert executor.process is not None
    return executor.process.returncode == 0


async def hit(site: Site, executor: Executor, leg: Leg, steps: str) -> None:
    """The fault: `steps` is what the wave does, in words."""
    if leg.fault == "agent":  # at once: a wave of quotas is over soon
        assert site.agents is not None
        leg.hit = f"the agent of {unit_of(steps)}"
        await site.agents.kill(unit_of(steps))
        return
    await asyncio.sleep(FAULT_AFTER_S)
    if leg.fault == "executor":
        assert executor.process is not None
        with contextlib.suppress(ProcessLookupError):
            executor.process.kill()
            leg.hit = "the executor"
        return
    model, unit = victim(leg.fault, steps, await site.places())
    pid = await site.process(model, unit)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            psutil.Process(pid).send_signal(signal.SIGKILL)
            leg.hit = f"{model} in {unit or 'its start'}"
    leg.hit = leg.hit or f"{model} in {unit or 'its start'}: too late"


def unit_of(steps: str) -> str:
    """The unit that a wave is about; of several the first."""
    found = re.search(rf" (?:in|from|leave) ({'|'.join(UNITS)})\b", steps)
    assert found is not None
    return found[1]


def victim(fault: str, steps: str, places: dict[str, set[str]]) -> tuple[str, str | None]:
    """Model and unit of the instance that is killed; unit None: of the one that starts.

    In a wave of starts the source is another instance of the model, and the destination one of
    another model in the unit.
    """
    if drain := re.search(r"(\w+) drains from (\w+)", steps):
        model, unit = drain[1], drain[2]
        other = sorted(places[model] - {unit}) or [unit]
        return model, other[0] if fault == "destination" else unit
    start = re.search(r"(\w+) starts in (\w+)", steps)
    assert start is not None
    model, unit = start[1], start[2]
    if fault == "start":
        return model, None
    if fault == "destination":
        return sorted(one for one, at in places.items() if one != model and unit in at)[0], unit
    return model, sorted(places[model])[0]


async def look(site: Site, leg: Leg) -> None:
    """No unit may have more than it has room for; a model without an instance is one's own fault
    only if the fault has killed its only one."""
    while True:
        there = [
            (model, row["unit"]) for model in MODELS for row in await site.rows(model)
            if row["state"] != "failed"
        ]  # fmt: skip
        for unit in UNITS:
            leg.legal &= sum(at == unit for _, at in there) * (KV + HELD) <= UNIT + 1
            if site.agents is not None:
                leg.legal &= await site.agents.leased(unit) <= ARENA + BLOCK
        leg.legal &= {model for model, _ in there} == set(MODELS)
        await asyncio.sleep(0.1)


# -- all of it


async def measure(
    servers: dict[str, Served], folder: Path, clients: int, faults: Sequence[tuple[str, int]],
    trips: int, lengths: tuple[int, int], agents: Agents | None = None,
) -> tuple[list[Leg], list[Client]]:  # fmt: skip
    """trips: there and back without a fault. lengths: of answers."""
    async with session() as http:
        site = Site(servers, http, agents)
        everybody = [
            Client(model, servers[model].model, servers[model].url, random.Random(number), lengths)
            for number, model in zip(range(clients), itertools.cycle(MODELS), strict=False)
        ]
        running = [asyncio.create_task(one.run(http)) for one in everybody]
        await asyncio.sleep(8)
        start_s = await site.trial("a")
        report.say(f"a start takes {start_s:.1f} s")
        legs: list[Leg] = []
        kinds = [("", 0)] * (2 * trips) + list(faults)
        for number, (fault, wave) in enumerate(kinds):
            leg = Leg("AB"[(number + 1) % 2], fault, wave)
            file = folder / f"{leg.to}.toml"
            file.write_text(placement_text(leg.to, agents=agents is not None))
            words = ["--to", str(file)]
            for model, served in servers.items():
                words += ["--deployment", f"{model}={served.url}"]
                words += ["--start", f"{model}={start_s:.2f}"]
            report.say(f"to {leg.to}" + (f", {fault} killed at wave {wave}" if fault else ""))
            if fault:
                await renewed(everybody)
            await run_leg(site, Executor(words), leg, everybody)
            legs.append(leg)
        for one in everybody:
            one.stopping = True
        await asyncio.gather(*running)
        return legs, everybody


def summarise(legs: Sequence[Leg], clients: Sequence[Client]) -> dict[str, float]:
    """The figures."""
    smooth = [leg for leg in legs if not leg.fault]
    ratios = [one for leg in smooth for one in leg.ratios()]
    before = [one for leg in smooth for one in leg.undisturbed()]
    return {
        "answers": sum(one.answers for one in clients),
        "wrong_or_lost": sum(len(one.wrong) for one in clients),
        "not_reached": sum(not leg.reached for leg in legs),
        "illegal": sum(not leg.legal for leg in legs),
        "step_ms": median(usual for leg in smooth for usual, _, _ in leg.gaps),
        "longest_gap_steps_median": median(ratios),
        "longest_gap_steps_worst": max(ratios),
        "undisturbed_steps_median": median(before),
        "undisturbed_steps_worst": max(before),
        "took_over_planned_worst": max(leg.took_s / leg.planned_s for leg in smooth),
        "took_over_planned_least": min(leg.took_s / leg.planned_s for leg in smooth),
        "replaced_s": median(leg.took_s for leg in smooth),
        "fault_legs": float(len(legs) - len(smooth)),
    }


TARGETS: dict[str, report.Target] = {
    "wrong_or_lost": {"max": 0},
    "not_reached": {"max": 0},
    "illegal": {"max": 0},
    "longest_gap_steps_median": {"max": 2.0},
    "longest_gap_steps_worst": {"max": 4.0},
    "took_over_planned_worst": {"max": 1.5},
    "took_over_planned_least": {"min": 1 / 1.5},
}


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, LONG_RUN)
    root.add_argument("--model", default="device100ms", help=f"{', '.join(NAMES)}")
    root.add_argument("--streams", type=int, help="on all models: 60, or 30 with --quick")
    root.add_argument("--trips", type=int, help="there and back: 3, or 1 with --quick")
    root.add_argument("--faults", type=int, help="legs with one: all, or none with --quick")
    root.add_argument(
        "--agents",
        action="store_true",
        help="units have agents, which are killed at each wave; at two with --quick, which takes "
        "3.5 minutes then",
    )
    options = root.parse_args(argv)
    streams = options.streams or (30 if options.quick else 60)
    trips = options.trips or (1 if options.quick else 3)
    faults = AGENT_FAULTS if options.agents else FAULTS
    if options.faults is not None:
        faults = faults[: options.faults]
    elif options.quick:
        faults = QUICK_AGENT_FAULTS if options.agents else []
    flags = [*FLAGS, *(SHARED if options.agents else ALONE)]
    settings = {
        "model": options.model, "streams": streams, "trips": trips, "faults": len(faults),
        "agents": options.agents, "flags": flags,
    }  # fmt: skip
    # Else each server has threads for all cores, which wait for the other servers' turns.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result = report.begin("replace-agents" if options.agents else "replace", settings)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        agents: Agents | None = None
        if options.agents:
            agents = stack.enter_context(agents_of(Path(folder), UNITS, ARENA))
            flags = [*flags, *agents.flags]
        servers: dict[str, Served] = {}
        for name in MODELS:
            there = [unit for unit in UNITS if name in PLACEMENTS["A"][unit]]
            own = [f"--instances={len(there)}"]
            own += [f"--instance-unit=i{at}: {unit}" for at, unit in enumerate(there)]
            servers[name] = Served(
                [*flags, *model_flags(options.model), *own],
                model=model_folder(options.model),
                log=Path(folder) / f"{name}.log",
            )
        report.say("starting three models")
        with all_up(list(servers.values())):
            lengths = QUICK_TOKENS if options.quick else TOKENS
            seen = measure(servers, Path(folder), streams, faults, trips, lengths, agents)
            legs, clients = uvloop.run(seen)
    result.samples = [asdict(leg) for leg in legs]
    result.samples += [{"wrong": words} for one in clients for words in one.wrong]
    result.summary = summarise(legs, clients)
    result.targets = TARGETS
    rows = [
        (
            f"to {leg.to}" + (f", wave {leg.wave}: {leg.hit}" if leg.fault else ""),
            leg.planned_s, leg.took_s, median(leg.ratios()), max(leg.ratios()),
            median(leg.undisturbed()), max(leg.undisturbed()),
            "yes" if leg.reached and leg.legal else "no",
        )
        for leg in legs
    ]  # fmt: skip
    columns = (
        "leg", "planned s", "took s", "longest gap, steps: median", "of all", "before: median",
        "of all", "reached",
    )  # fmt: skip
    return report.finish(result, options, [report.table("Re-placement", columns, rows)])


if __name__ == "__main__":
    sys.exit(main())
