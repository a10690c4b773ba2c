"""A fleet on several Ray nodes under faults: `python -m bench.fleet_chaos --nodes 3`.

Each node is a host of its own in a network namespace, with an address, shared memory and a disk of
its own; one more host has Ray's head and `kvmig up --ray`, with a PostgreSQL database. Models are
toys, which count, so that every token of every answer is known. At random moments, drawn by the
seed, a node is killed and joins again, is frozen for a moment or for longer than Ray waits, or is
cut off the network for a moment or for longer than that; the server or a proxy is killed, the
server is stopped for a while, and PostgreSQL restarts.

What a call may end with is in `bench.fleet_chaos`. Besides, the ledger is exact: each right call is
in it once with its own tokens; any other one is in it once at most, with no fewer tokens than its
client has got, and no more than it asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy

from bench import report
from bench.fleet_chaos import (
    AFTER_S,
    CLIENTS,
    Call,
    ChaosRun,
    Orders,
    answers_again,
    make_call,
    report_run,
)
from tests.support import postgres
from tests.support.fleets import ToyFleet
from tests.support.network import Host, Network, NoNetwork
from tests.support.ray_nodes import QUICK_TO_NOTICE, RayHosts

MODELS: dict[str, dict[str, Any]] = {
    "steady": {"instances": {"min": 2, "max": 2, "start_timeout_s": 60.0}},
    "busy": {"instances": {"min": 1, "max": 2, "target": 4, "start_timeout_s": 60.0}},
    "zero": {"instances": {"zero_after_s": 4.0, "start_timeout_s": 60.0}},
}
CPUS = 2
"""Of a node; an instance takes one."""
PROXIES = 2
TOKENS = 3000
"""Of a call at most: with these, several stream at any moment."""
FLAGS = ["--max-model-len=4096", "--num-blocks=8000"]
PAUSE_S = (1.0, 6.0)
"""Between two faults."""
SHORT_S, LONG_S = 1.5, 9.0
"""A fault that Ray doesn't notice, and one after which it counts the node as lost."""
DATABASE_S = 2.0
JOIN_S = 60.0
LEDGER_S = 60.0
"""For all that calls have used to come to the ledger."""


class ChaosSite:
    """The hosts, their nodes, the database and the fleet."""

    def __init__(
        self,
        network: Network,
        ray: RayHosts,
        database: postgres.Cluster,
        url: str,
        fleet: ToyFleet,
    ) -> None:
        self.network, self.ray, self.database, self.url, self.fleet = (
            network, ray, database, url, fleet,
        )  # fmt: skip
        self.nodes = network.hosts[1:]

    def workers(self) -> Counter[str]:
        """The states of the workers that may have instances, with their number."""
        rows = self.fleet.get("workers")["data"]
        return Counter(one["state"] for one in rows)


@contextmanager
def site(nodes: int) -> Iterator[ChaosSite]:
    """All of it, until the end of the block. Raises NoNetwork."""
    programs = postgres.programs()
    if programs is None:
        raise NoNetwork("PostgreSQL is not installed")
    with ExitStack() as held:
        network = held.enter_context(closing(Network(nodes + 1)))
        folder = Path(held.enter_context(tempfile.TemporaryDirectory()))
        ray = held.enter_context(closing(RayHosts(network, folder, CPUS, QUICK_TO_NOTICE)))
        database = held.enter_context(postgres.cluster(programs))
        url = database.new()
        front = network.hosts[0]
        fleet = ToyFleet(
            folder, f"--ray={ray.address}", "--threads=1", f"--proxies={PROXIES}",
            f"--database={url}", host=front.address, enter=front.enter,
        )  # fmt: skip
        held.enter_context(fleet)
        made = ChaosSite(network, ray, database, url, fleet)
        _until(lambda: made.workers()["ready"] > nodes, JOIN_S, "not all nodes have joined")
        for name, more in MODELS.items():
            fleet.add_toy(name, flags=FLAGS, **more)
        yield made


def _until(holds: Callable[[], bool], seconds: float, otherwise: str) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(otherwise)
        time.sleep(0.1)


# -- faults


class NodeNemesis:
    """Does one fault after the other, and undoes it."""

    def __init__(self, where: ChaosSite, seed: int) -> None:
        self.done: list[dict[str, Any]] = []
        self.proxies_killed: list[float] = []
        self._site = where
        self._chance = random.Random(f"{seed} faults of nodes")
        self._began = time.monotonic()
        self._faults: dict[str, Callable[[], Awaitable[str]]] = {
            "node killed": self._kill_node,
            "node frozen": lambda: self._freeze_node(SHORT_S),
            "node frozen for long": lambda: self._freeze_node(LONG_S),
            "node cut off": lambda: self._cut_node_off(SHORT_S),
            "node cut off for long": lambda: self._cut_node_off(LONG_S),
            "server killed": lambda: self._signal("kvmig.fleet.server", signal.SIGKILL),
            "server stopped": self._stop_server,
            "proxy killed": self._kill_proxy,
            "PostgreSQL restarted": self._restart_database,
        }

    async def run(self, until: float) -> None:
        """Until then: each kind as often as the others, in any order."""
        while True:
            for fault in self._chance.sample([*self._faults], len(self._faults)):
                await asyncio.sleep(self._chance.uniform(*PAUSE_S))
                if time.monotonic() > until:
                    return
                at = round(time.monotonic() - self._began, 2)
                note = await self._faults[fault]()
                self.done.append({"fault": fault, "at_s": at, "note": note})

    def _node(self) -> Host:
        return self._chance.choice(self._site.nodes)

    async def _kill_node(self) -> str:
        node = self._node()
        await asyncio.to_thread(self._site.ray.kill, node)
        await asyncio.sleep(self._chance.choice((SHORT_S, LONG_S)))
        await asyncio.to_thread(self._site.ray.join, node)
        return node.address

    async def _freeze_node(self, seconds: float) -> str:
        node = self._node()
        stopped = await asyncio.to_thread(self._site.ray.processes, node)
        for one in stopped:
            _send(one, signal.SIGSTOP)
        await asyncio.sleep(seconds)
        for one in stopped:
            _send(one, signal.SIGCONT)
        await self._join_again(node, seconds)
        return node.address

    async def _cut_node_off(self, seconds: float) -> str:
        node = self._node()
        await asyncio.to_thread(self._site.network.isolate, node)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self._site.network.heal)
        await self._join_again(node, seconds)
        return node.address

    async def _join_again(self, node: Host, seconds: float) -> None:
        """A node that Ray counts as lost ends once it is back; another one joins then."""
        if seconds < LONG_S:
            return
        await asyncio.to_thread(self._site.ray.wait_end, node)
        await asyncio.to_thread(self._site.ray.join, node)

    async def _signal(self, words: str, how: signal.Signals) -> str:
        pids = await asyncio.to_thread(self._site.fleet.processes, words)
        if not pids:
            return "there was none"
        pid = self._chance.choice(pids)
        _send(psutil.Process(pid), how)
        return str(pid)

    async def _stop_server(self) -> str:
        pid = await self._signal("kvmig.fleet.server", signal.SIGSTOP)
        await asyncio.sleep(SHORT_S)
        if pid.isdigit() and psutil.pid_exists(int(pid)):
            _send(psutil.Process(int(pid)), signal.SIGCONT)
        return pid

    async def _kill_proxy(self) -> str:
        self.proxies_killed.append(time.monotonic())
        return await self._signal("kvmig.proxy", signal.SIGKILL)

    async def _restart_database(self) -> str:
        await asyncio.to_thread(self._site.database.stop)
        await asyncio.sleep(DATABASE_S)
        await asyncio.to_thread(self._site.database.start)
        return ""


def _send(process: psutil.Process, how: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        os.kill(process.pid, how)


# -- the run


async def load(
    where: ChaosSite, nemesis: NodeNemesis, orders: Orders, until: float, seed: int
) -> list[Call]:
    """Clients, orders and faults, for so long; all calls, once each has ended."""
    calls: list[Call] = []

    async def client(model: str, number: int) -> None:
        chance = random.Random(f"{seed} {model} {number}")
        while time.monotonic() < until:
            calls.append(await make_call(where.fleet, model, chance, TOKENS))
            await asyncio.sleep(chance.uniform(0.0, 2.0))

    async with asyncio.TaskGroup() as group:
        group.create_task(nemesis.run(until))
        group.create_task(orders.run(until))
        for model, number in itertools.product(MODELS, range(CLIENTS)):
            group.create_task(client(model, number))
    return calls


def left_over(where: ChaosSite) -> list[str]:
    """What should not be there once no client is; it gets some time to go."""
    deadline = time.monotonic() + AFTER_S
    while True:
        rows = where.fleet.get("models")["data"]
        found = [f"{one['name']}: {one['held']} wait" for one in rows if one["held"]]
        found += [f"{one['name']}: {one['running']} run" for one in rows if one["running"]]
        ready = where.workers()["ready"]
        found += [f"{ready} workers are ready"] * (ready <= len(where.nodes))
        serving = {one["name"]: one["serving"] for one in rows}
        for name, more in MODELS.items():
            least, most = more["instances"].get("min", 0), more["instances"].get("max", 1)
            if not least <= serving[name] <= most:
                found.append(f"{name}: {serving[name]} instances, must be {least} to {most}")
        if where.fleet.get("status")["proxies"] != PROXIES:
            found.append("a proxy is missing")
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


def rows_of(url: str) -> list[tuple[str, int, str]]:
    """Call, output tokens and status of each row of the ledger."""
    engine = sqlalchemy.create_engine(url)
    try:
        with engine.connect() as connection:
            rows = connection.execute(
                sqlalchemy.text("SELECT call_id, output, status FROM usage")
            ).all()
    finally:
        engine.dispose()
    return [(str(one[0]), int(one[1]), str(one[2])) for one in rows]


def wrong_in_ledger(calls: Sequence[Call], rows: Sequence[tuple[str, int, str]]) -> list[str]:
    """What the ledger has otherwise than the calls' clients. Pure."""
    found: list[str] = []
    of_call: dict[str, list[tuple[int, str]]] = {}
    for call_id, output, status in rows:
        of_call.setdefault(call_id, []).append((output, status))
    for call in calls:
        there = of_call.get(call.call_id, [])
        if call.fate == "right":
            if there != [(call.tokens, "finished")]:
                found.append(f"{call.call_id}: {call.tokens} tokens, the ledger has {there}")
        elif sum(output for output, _ in there) > call.tokens:
            found.append(f"{call.call_id}: at most {call.tokens} tokens, the ledger has {there}")
        elif sum(output for output, _ in there) < len(call.text):
            found.append(f"{call.call_id}: got {len(call.text)} tokens, the ledger has {there}")
    return found


def settled_ledger(where: ChaosSite, calls: Sequence[Call]) -> list[str]:
    """What is wrong in the ledger once all has had time to come there."""
    deadline = time.monotonic() + LEDGER_S
    while (found := wrong_in_ledger(calls, rows_of(where.url))) and time.monotonic() < deadline:
        time.sleep(1.0)
    return found


def run_nodes(options: argparse.Namespace, seconds: float) -> int:
    """Exit status."""
    settings = {"nodes": options.nodes, "seconds": seconds, "seed": options.seed}
    result = report.begin("fleet_chaos_nodes", settings)
    try:
        with site(options.nodes) as where:
            began = time.monotonic()
            nemesis, orders = NodeNemesis(where, options.seed), Orders(where.fleet)
            calls = asyncio.run(load(where, nemesis, orders, began + seconds, options.seed))
            again = max(asyncio.run(answers_again(where.fleet, model)) for model in MODELS)
            half, left = orders.half_done(), left_over(where)
            unlike = settled_ledger(where, calls)
    except NoNetwork as error:
        report.say(f"not run: {error}")
        return 0
    run = ChaosRun(began, nemesis, orders, calls, again, half, left, unlike)
    return report_run(result, options, run, 3 if options.quick else 40 * seconds / 600)
