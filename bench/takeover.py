"""How long a fleet of two hosts has no server when the host that serves is lost.

Two hosts of one PostgreSQL, as docs/high-availability.md has them: one serves a model of toys,
which always runs, the other stands by. Then each process of the first one is killed at once, as if
it had no power any more. A client at the other host calls all the time, one call after the other.
Measured from the kill: until a call that began after it has its answer from the fleet's server, and
until a model, which has to start again on the other host, has answered. The lost host comes back
and stands by; the next round kills the other one.

The time is an absolute one: it is made of time-outs, not of computing.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import httpx
import uvloop

from bench import report
from kvmig_tools.fleet import FleetUp
from tests.support import postgres
from tests.support.fleets import ToyFleet

MODEL = "count"
BODY = {"model": MODEL, "prompt": "Count: 0000 0001", "max_tokens": 4}
TIMEOUT_S = 120.0
SETTLE_S = 5.0
"""Before a host is lost: a standby that has just begun waits longer, for it has not seen the other
host's beat yet (`kvmig.fleet.leadership`)."""
PAUSE_S = 0.02
"""Between two calls of the client, at most, while the host refuses them."""


@dataclass(frozen=True)
class LostHost:
    """One round. Times in seconds since the host was killed."""

    round: int
    server_s: float
    model_s: float
    refused: int
    """Calls that were answered with another status than 200, or not at all, until then."""


async def until_answered(
    client: httpx.AsyncClient, method: str, path: str, body: dict[str, object] | None = None
) -> int:
    """Call until one call is answered with 200; the number of those that were not."""
    refused = 0
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                found = await client.request(method, path, json=body)
            except httpx.TransportError:
                found = None
            if found is not None and found.status_code == 200:
                return refused
            refused += 1
            await asyncio.sleep(PAUSE_S)


async def lose_host(number: int, lost: FleetUp, other: FleetUp, key: str) -> LostHost:
    """Kill each process of one host, and wait until the other one serves."""
    assert lost.process is not None
    pids = [lost.process.pid, *lost.processes("")]
    async with other.client(key) as client:
        began = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        refused = await until_answered(client, "GET", "/v1/models")
        server_s = time.monotonic() - began
        refused += await until_answered(client, "POST", "/v1/completions", BODY)
        model_s = time.monotonic() - began
    lost.process.wait(TIMEOUT_S)
    return LostHost(number, round(server_s, 3), round(model_s, 3), refused)


def stand_by(host: FleetUp, leader: FleetUp) -> None:
    """Start a host beside the one that serves."""
    host.log.unlink(missing_ok=True)
    host.begin()
    host.says(f"{leader.folder} leads, this host takes over when it is gone")


def measure(folder: Path, rounds: int, programs: Path) -> list[LostHost]:
    """All rounds, each host lost in turn."""
    samples: list[LostHost] = []
    with ExitStack() as stack:
        database = stack.enter_context(postgres.cluster(programs)).new()
        hosts = []
        for name in ("a", "b"):
            (folder / name).mkdir()
            host = ToyFleet(folder / name, "--standby", f"--database={database}")
            stack.callback(host.end)
            hosts.append(host)
        first, second = hosts
        first.start()
        first.add_toy(MODEL, instances={"min": 1, "max": 1})
        first.until(f"models/{MODEL}", state="serving", serving=1)
        second.folder.mkdir(mode=0o700)
        shutil.copy(first.folder / "pepper", second.folder / "pepper")
        key = first.key
        stand_by(second, first)
        for number in range(rounds):
            lost, other = hosts[number % 2], hosts[1 - number % 2]
            time.sleep(SETTLE_S)
            samples.append(uvloop.run(lose_host(number, lost, other, key)))
            stand_by(lost, other)
            other.until(f"models/{MODEL}", state="serving", serving=1)
            report.say(f"round {number + 1} of {rounds}: {samples[-1]}")
    return samples


def summarise(samples: list[LostHost]) -> dict[str, float]:
    """The figures; the worst of each is what counts."""
    return {
        "rounds": len(samples),
        "server_s": median(one.server_s for one in samples),
        "server_longest_s": max(one.server_s for one in samples),
        "model_s": median(one.model_s for one in samples),
        "model_longest_s": max(one.model_s for one in samples),
        "refused": sum(one.refused for one in samples),
    }


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--rounds", type=int, help="lost hosts: 20, or 3 with --quick")
    options = root.parse_args(argv)
    programs = postgres.programs()
    if programs is None:
        print("bench.takeover needs PostgreSQL's programs (initdb)", file=sys.stderr)
        return 2
    rounds = options.rounds or (3 if options.quick else 20)
    result = report.begin("takeover", {"rounds": rounds})
    with tempfile.TemporaryDirectory() as scratch:
        samples = measure(Path(scratch), rounds, programs)
    result.samples = [asdict(one) for one in samples]
    result.summary = summarise(samples)
    result.targets = {"server_longest_s": {"max": 3.0}}
    rows = [
        (
            "until the server answers",
            result.summary["server_s"],
            result.summary["server_longest_s"],
        ),
        ("until a model answers", result.summary["model_s"], result.summary["model_longest_s"]),
    ]
    columns = ("seconds since the host was lost", "median", "longest")
    return report.finish(result, options, [report.table("A lost host", columns, rows)])


if __name__ == "__main__":
    sys.exit(main())
