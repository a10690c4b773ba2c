"""Three models in a box that holds two, wanted on and off: what fails, is wrong, grows.

`kvmig up --memory` with three models of real vLLM. Clients of each come in spells with pauses
between them, longer than what a model may be idle, and now and then all three are wanted at once,
so that one must end for another. Every answer is compared. The memory of all processes is sampled:
what deployments take beside what was estimated of them, and what the processes that stay grow by.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import psutil

from bench import report
from bench.cold import ask, counted
from bench.models import model_folder
from bench.site import ENGINE_FLAGS
from kvmig_tools.fleet import FleetUp

MODELS = ("a", "b", "c")
CLIENTS = 4
"""Of each model in a spell."""
SPELL_S = (10.0, 40.0)
PAUSE_S = (5.0, 60.0)
ZERO_AFTER_S = 20.0
SAMPLE_S = 5.0
MIB = 1 << 20
WARM = 0.2
"""Share of the time before growth counts."""
STAY = (
    "kvmig up",
    "kvmig.fleet.server",
    "kvmig.fleet.fork_server",
    "kvmig.proxy",
    "kvmig.launcher.shared_fork_server",
)
"""Words of the command lines of processes that stay."""


@dataclass
class Seen:
    """What clients saw."""

    right: int = 0
    wrong: int = 0
    failed: list[str] = field(default_factory=list)
    held_s: list[float] = field(default_factory=list)
    """To the first token, of calls that took a second and more."""


async def use(fleet: FleetUp, model: str, until: float, seed: int, seen: Seen) -> None:
    """Clients of one model: spells and pauses."""
    chance = random.Random(f"{seed} {model}")

    async def client(http: httpx.AsyncClient, end: float) -> None:
        while time.monotonic() < min(end, until):
            start, began = chance.randrange(9000), time.monotonic()
            first, text = await ask(http, model, start)
            if text == counted(start):
                seen.right += 1
                if first - began >= 1:
                    seen.held_s.append(first - began)
            elif first == 0.0 or text.startswith("{"):
                seen.failed.append(text[:300])
            else:
                seen.wrong += 1
            await asyncio.sleep(chance.uniform(0.05, 0.5))

    while time.monotonic() < until:
        end = time.monotonic() + chance.uniform(*SPELL_S)
        async with fleet.client() as http:
            http.timeout = httpx.Timeout(600)
            await asyncio.gather(*(client(http, end) for _ in range(CLIENTS)))
        await asyncio.sleep(min(chance.uniform(*PAUSE_S), max(0.0, until - time.monotonic())))


def processes(fleet: FleetUp) -> list[dict[str, Any]]:
    """All, with what each does and takes, in MiB."""
    assert fleet.process is not None
    init, found = psutil.Process(fleet.process.pid), []
    for one in (init, *init.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            line, memory = " ".join(one.cmdline()), one.memory_full_info()
            part = next((words for words in STAY if words in line), "deployments")
            part = "kvmig up" if one == init else part
            found.append(
                {"pid": one.pid, "part": part, "pss": memory.pss / MIB, "rss": memory.rss / MIB}
            )
    return found


async def sample(fleet: FleetUp, until: float, rows: list[dict[str, Any]]) -> None:
    """Look at memory and states again and again."""
    began = time.monotonic()
    while time.monotonic() < until:
        states = {name: await asyncio.to_thread(fleet.get, f"models/{name}") for name in MODELS}
        every = await asyncio.to_thread(processes, fleet)
        row: dict[str, Any] = {"at_s": round(time.monotonic() - began, 1)}
        row |= {name: one["state"] for name, one in states.items()}
        row["claimed_mib"] = fleet.get("status")["claimed_bytes"] / MIB
        for part in (*STAY, "deployments"):
            # Pages that a nursery shares with its forks count less the more of them there are.
            kind = "pss" if part == "deployments" else "rss"
            row[part] = round(sum(one[kind] for one in every if one["part"] == part), 1)
        rows.append(row)
        await asyncio.sleep(SAMPLE_S)


async def load(fleet: FleetUp, seconds: float, seed: int) -> tuple[Seen, list[dict[str, Any]]]:
    """Both, for so long."""
    until, seen = time.monotonic() + seconds, Seen()
    rows: list[dict[str, Any]] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(sample(fleet, until, rows))
        for model in MODELS:
            group.create_task(use(fleet, model, until, seed, seen))
    return seen, rows


def growth(rows: list[dict[str, Any]], part: str) -> float:
    """MiB from the first to the last third of the samples after the warm-up."""
    figures = [float(row[part]) for row in rows[int(len(rows) * WARM) :]]
    third = max(1, len(figures) // 3)
    return median(figures[-third:]) - median(figures[:third])


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--minutes", type=float, default=30.0, help="of load")
    root.add_argument("--seed", type=int, default=0)
    options = root.parse_args(argv)
    seconds = 80.0 if options.quick else 60 * options.minutes
    result = report.begin("room", {"seconds": seconds, "seed": options.seed, "clients": CLIENTS})
    spec = {
        "source": f"path:{model_folder('count').absolute()}",
        "flags": [*ENGINE_FLAGS, "--max-model-len=2048"],
        "instances": {"zero_after_s": ZERO_AFTER_S},
    }
    claim = (1 << 30) + (1 << 29) + (64 << 20)  # as it is estimated, and a little
    with (
        tempfile.TemporaryDirectory() as data,
        FleetUp(Path(data), f"--memory={2 * claim}") as fleet,
    ):
        for name in MODELS:
            fleet.add({"name": name, **spec})
        seen, result.samples = asyncio.run(load(fleet, seconds, options.seed))
        starts = fleet.get("status")["starts"]
        events = [one for name in MODELS for one in fleet.get(f"models/{name}")["events"]]
    made = sum(one["what"].endswith("to make room") for one in events)
    for sentence in seen.failed:
        report.say(f"failed: {sentence}")
    most = max(row["claimed_mib"] for row in result.samples)
    held = sorted(seen.held_s) or [0.0]
    result.summary = {
        "right": seen.right,
        "failed": len(seen.failed),
        "wrong": seen.wrong,
        "starts": starts,
        "ended to make room": made,
        "waited for room": sum("-> waiting" in one["what"] for one in events),
        "first token of a held call, median s": median(held),
        "first token of a held call, longest s": held[-1],
        "claimed at once, MiB": most,
        "taken by deployments at once, MiB": max(row["deployments"] for row in result.samples),
        "allowed, MiB": 2 * claim / MIB,
    }
    result.summary |= {f"growth of {part}, MiB": growth(result.samples, part) for part in STAY}
    result.targets = {
        "failed": {"max": 0},
        "wrong": {"max": 0},
        "ended to make room": {"min": 1},
        "claimed at once, MiB": {"max": 2 * claim / MIB},
        "taken by deployments at once, MiB": {"max": 2 * claim / MIB},
        **{f"growth of {part}, MiB": {"max": 16.0} for part in STAY},
    }
    return report.finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
