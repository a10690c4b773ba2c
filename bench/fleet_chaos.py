"""A fleet of several models under faults: is every answer right, and every failed call told so?

`kvmig up` with two proxies and three models of real vLLM: one goes to zero, one is parked, one
always has an instance, and there is less memory than all three take. Clients stream answers, take
them as a whole, or leave early; orders go to the server all the time. At random moments, drawn by
the seed, the server, a proxy, a model's front end or an instance is killed (SIGKILL), the server is
stopped for a while (SIGSTOP), and the database is locked, full, read-only or gone, the last two
with a server that dies meanwhile.

A call is right (all tokens), told (a status, or an error event, and only right tokens before), left
(by its client), or broken: its connection ended before its answer did, which may be only where a
proxy was killed meanwhile. Anything else is wrong: a token that is not the right one, an answer
that ends well and is not whole, a connection that ends for no reason; or stuck: open after its
deadline. An order that was answered has been done wholly, one that was refused has changed nothing.
Afterwards every model answers, nothing waits, and no process is left of what has ended.

`--nodes 3` is another run, of toys on several Ray nodes: see `bench.fleet_node_chaos`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import secrets
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import httpx

from bench import report
from bench.cold import PATH
from bench.models import model_folder
from bench.site import ENGINE_FLAGS
from bench.unwritable import full, read_only
from kvmig_tools.fleet import FleetUp

MODELS: dict[str, dict[str, Any]] = {
    "zero": {"instances": {"zero_after_s": 4.0, "start_timeout_s": 60.0}},
    "parked": {"instances": {"zero_after_s": 3.0, "start_timeout_s": 60.0}, "warm": "parked"},
    "always": {"instances": {"min": 1, "max": 2, "target": 4, "start_timeout_s": 60.0}},
}
PROXIES = 2
CLIENTS = 3
"""Of each model."""
TOKENS = (10, 600)
PAUSE_S = (0.5, 4.0)
"""Between two faults; a client's between two calls are as long at most."""
LASTS_S = 3.0
"""A fault that doesn't kill."""
DEADLINE_S = 150.0
"""For a call: it may wait for a start, and its model may have failed."""
AFTER_S = 120.0
"""For all to be well again; a model that has failed often waits so long."""
QUICK_S = 60.0
"""All kinds of faults come once in 40 to 50 s."""
CLAIM = (1 << 30) + (1 << 29) + (64 << 20)
"""Bytes of an instance, as its specification says: an estimate changes with what is measured."""

Fate = Literal["right", "told", "left", "broken", "wrong", "stuck"]


def counted(start: int, tokens: int) -> str:
    """What the bundled model says: a token a character."""
    return "".join(f" {number:04}" for number in range(start + 2, start + 3 + tokens))[:tokens]


# -- clients


@dataclass
class Call:
    """One, and how it ended."""

    model: str
    began: float
    start: int
    tokens: int
    text: str = ""
    fate: Fate = "stuck"
    why: str = ""
    ended: float = 0.0
    call_id: str = ""
    """The x-request-id that it was sent with."""

    def row(self, since: float) -> dict[str, Any]:
        """For the report."""
        return {
            "call": self.model, "at_s": round(self.began - since, 2), "fate": self.fate,
            "s": round(self.ended - self.began, 2), "tokens": len(self.text), "why": self.why,
        }  # fmt: skip


async def follow(call: Call, http: httpx.AsyncClient, stream: bool, leaves: int) -> None:
    """Until its end, or after `leaves` tokens."""
    body = {
        "model": call.model, "prompt": f"Count: {call.start:04} {call.start + 1:04}",
        "max_tokens": call.tokens, "temperature": 0, "ignore_eos": True, "stream": stream,
    }  # fmt: skip
    named = {"x-request-id": call.call_id}
    async with http.stream("POST", PATH, json=body, headers=named) as answer:
        if answer.is_error or not stream:
            content = json.loads(await answer.aread())
            if answer.is_error:
                call.fate, call.why = "told", f"{answer.status_code}: {content['error']['message']}"
            else:
                call.text = content["choices"][0]["text"]
                call.fate = "right" if len(call.text) == call.tokens else "wrong"
            return
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                call.text += "".join(one["text"] for one in chunk.get("choices", []))
                if "error" in chunk:
                    call.fate, call.why = "told", chunk["error"]["message"]
                if len(call.text) >= leaves:
                    call.fate = "left"
                    return
            elif line == "data: [DONE]" and call.fate != "told":
                call.fate = "right" if len(call.text) == call.tokens else "wrong"
    if call.fate == "stuck":
        call.fate, call.why = "wrong", "the stream ended well, without its end"


async def make_call(
    fleet: FleetUp, model: str, chance: random.Random, most: int = TOKENS[1]
) -> Call:
    """One, from a new connection: another proxy each time. most: tokens."""
    tokens = chance.randint(TOKENS[0], most)
    call = Call(model, time.monotonic(), chance.randrange(8000), tokens)
    call.call_id = f"chaos-{secrets.token_hex(8)}"
    leaves = chance.randint(1, tokens) if chance.random() < 0.1 else tokens + 1
    stream = leaves <= tokens or chance.random() < 0.8
    try:
        async with asyncio.timeout(DEADLINE_S), fleet.client() as http:
            http.timeout = httpx.Timeout(DEADLINE_S)
            await follow(call, http, stream, leaves)
    except (TimeoutError, httpx.TimeoutException):
        call.fate = "stuck"
    except httpx.HTTPError as error:
        call.fate, call.why = "broken", repr(error)
    except (ValueError, LookupError) as error:
        call.fate, call.why = "wrong", f"no answer of OpenAI's: {error!r}"
    call.ended = time.monotonic()
    if not counted(call.start, call.tokens).startswith(call.text):
        call.fate, call.why = "wrong", f"after {call.start}: {call.text[:200]!r}"
    return call


# -- orders


class Orders:
    """Changes of the catalogue of users, one after the other, and what was answered to each."""

    def __init__(self, fleet: FleetUp) -> None:
        self.told: dict[str, int] = {}
        """Status by user; 0: the server ended before it answered."""
        self._fleet = fleet

    async def run(self, until: float) -> None:
        """Until then."""
        for number in itertools.count():
            if time.monotonic() > until:
                return
            name = f"user-{number}"
            try:
                answer = await asyncio.to_thread(self._fleet.ask, "POST", "users", {"name": name})
                self.told[name] = answer.status_code
            except httpx.HTTPError:
                self.told[name] = 0
            await asyncio.sleep(0.3)

    def half_done(self) -> list[str]:
        """Those that are otherwise than was told."""
        there = {one["name"] for one in self._fleet.get("users")["data"]}
        return [
            f"{name}: {status}, {'there' if name in there else 'not there'}"
            for name, status in self.told.items()
            if status and (status == 201) != (name in there)
        ]


# -- faults


class Nemesis:
    """Does one fault after the other, and undoes it."""

    def __init__(self, fleet: FleetUp, database: Path, seed: int) -> None:
        self.done: list[dict[str, Any]] = []
        self.proxies_killed: list[float] = []
        self._fleet = fleet
        self._database = database
        self._chance = random.Random(f"{seed} faults")
        self._began = time.monotonic()
        self._faults: dict[str, Callable[[], Awaitable[str]]] = {
            "server killed": lambda: self._kill("kvmig.fleet.server"),
            "proxy killed": self._kill_proxy,
            "front end killed": lambda: self._kill("--served-model-name="),
            "instance killed": lambda: self._kill("kvmig.launcher.llumlet_main"),
            "server stopped": self._stop_server,
            "database locked": self._lock,
            "database full": self._fill,
            "database read-only": self._make_read_only,
            "database gone": self._take_away,
        }

    async def run(self, until: float) -> None:
        """Until then: each kind as often as the others, in any order."""
        while True:
            for fault in self._chance.sample([*self._faults], len(self._faults)):
                await asyncio.sleep(self._chance.uniform(*PAUSE_S))
                if time.monotonic() > until:
                    return
                at = round(time.monotonic() - self._began, 2)
                self.done.append({"fault": fault, "at_s": at, "note": await self._faults[fault]()})

    async def _kill(self, words: str, how: signal.Signals = signal.SIGKILL) -> str:
        pids = await asyncio.to_thread(self._fleet.processes, words)
        if not pids:
            return "there was none"
        pid = self._chance.choice(pids)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, how)
        return str(pid)

    async def _kill_proxy(self) -> str:
        self.proxies_killed.append(time.monotonic())
        return await self._kill("kvmig.proxy")

    async def _stop_server(self) -> str:
        pid = await self._kill("kvmig.fleet.server", signal.SIGSTOP)
        await asyncio.sleep(LASTS_S)
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(int(pid), signal.SIGCONT)
        return pid

    async def _lock(self) -> str:
        with contextlib.closing(sqlite3.connect(self._database, isolation_level=None)) as file:
            file.execute("PRAGMA busy_timeout = 10000")
            file.execute("BEGIN EXCLUSIVE")
            await asyncio.sleep(LASTS_S + 5)  # longer than the server waits
            file.rollback()
        return ""

    async def _fill(self) -> str:
        """The server can write nothing more."""
        async with full(await asyncio.to_thread(self._fleet.processes, "kvmig.fleet.server")):
            await asyncio.sleep(LASTS_S)
        return ""

    async def _make_read_only(self) -> str:
        """Also for who may do everything; the server that dies finds it so when it is back."""
        async with read_only(self._database) as done:
            if not done:
                return "not allowed here"
            pid = await self._kill("kvmig.fleet.server")
            await asyncio.sleep(LASTS_S)
        return pid

    async def _take_away(self) -> str:
        folder, away = self._database.parent, self._database.parent.with_name("away")
        folder.rename(away)
        try:
            pid = await self._kill("kvmig.fleet.server")
            await asyncio.sleep(LASTS_S)
        finally:
            away.rename(folder)
        return pid


# -- the run


async def load(
    fleet: FleetUp, nemesis: Nemesis, orders: Orders, until: float, seed: int
) -> list[Call]:
    """Clients, orders and faults, for so long; all calls, once each has ended."""
    calls: list[Call] = []

    async def client(model: str, number: int) -> None:
        chance = random.Random(f"{seed} {model} {number}")
        while time.monotonic() < until:
            calls.append(await make_call(fleet, model, chance))
            await asyncio.sleep(chance.uniform(0.0, PAUSE_S[1]))

    async with asyncio.TaskGroup() as group:
        group.create_task(nemesis.run(until))
        group.create_task(orders.run(until))
        for model, number in itertools.product(MODELS, range(CLIENTS)):
            group.create_task(client(model, number))
    return calls


async def answers_again(fleet: FleetUp, model: str) -> float:
    """Seconds until it does; raises TimeoutError."""
    began, chance = time.monotonic(), random.Random(model)
    async with asyncio.timeout(AFTER_S):
        while (await make_call(fleet, model, chance)).fate not in ("right", "left"):  # noqa: ASYNC110
            await asyncio.sleep(0.5)
    return time.monotonic() - began


def left_over(fleet: FleetUp) -> list[str]:
    """What should not be there once no client is; it gets some time to go."""
    deadline = time.monotonic() + AFTER_S
    while True:
        found = []
        rows = fleet.get("models")["data"]
        found += [f"{one['name']}: {one['held']} wait" for one in rows if one["held"]]
        found += [f"{one['name']}: {one['running']} run" for one in rows if one["running"]]
        wanted = sum(one["state"] not in ("zero", "waiting", "failed") for one in rows)
        there = len(fleet.processes("--served-model-name="))
        found += [f"{there} deployments, {wanted} models that have one"] * (there != wanted)
        if fleet.get("status")["proxies"] != PROXIES:
            found.append("a proxy is missing")
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.5)


class FaultLog(Protocol):
    """What the end of a run needs of its faults."""

    done: list[dict[str, Any]]
    proxies_killed: list[float]


@dataclass
class ChaosRun:
    """A run that has ended."""

    began: float
    faults: FaultLog
    orders: Orders
    calls: list[Call]
    again: float
    """Longest wait for an answer afterwards, in seconds."""
    half: list[str]
    left: list[str]
    unlike: list[str] | None = None
    """What the ledger has otherwise than the clients of calls; None: nothing was compared."""


def is_excused(call: Call, proxies_killed: Iterable[float]) -> bool:
    """Whether a proxy was killed while it ran."""
    return any(call.began <= at <= call.ended for at in proxies_killed)


def report_run(
    result: report.Result, options: argparse.Namespace, run: ChaosRun, least: float
) -> int:
    """Exit status. least: faults that must have been done."""
    for one in run.calls:
        if one.fate == "broken" and not is_excused(one, run.faults.proxies_killed):
            one.fate = "wrong"
    done = run.faults.done
    result.samples = [*done, *(one.row(run.began) for one in run.calls if one.fate != "right")]
    bad = (f"{one}" for one in run.calls if one.fate in ("wrong", "stuck"))
    for sentence in (*run.half, *run.left, *(run.unlike or ()), *bad):
        report.say(sentence)
    fates = Counter(one.fate for one in run.calls)
    statuses = Counter(run.orders.told.values())
    otherwise = "calls that the ledger has otherwise"
    result.summary = {
        "faults": len(done),
        **{f"calls {fate}": fates[fate] for fate in ("right", "told", "left", "broken")},
        "calls wrong": fates["wrong"],
        "calls stuck": fates["stuck"],
        **({} if run.unlike is None else {otherwise: len(run.unlike)}),
        "orders done": statuses[201],
        "orders refused": statuses[503],
        "orders without an answer": statuses[0],
        "orders half done": len(run.half),
        "longest wait for an answer afterwards, s": run.again,
        "left over": len(run.left),
    }
    result.targets = {
        "faults": {"min": least},
        "calls right": {"min": 1},
        **{f"calls {fate}": {"max": 0} for fate in ("wrong", "stuck")},
        **({} if run.unlike is None else {otherwise: {"max": 0}}),
        "orders done": {"min": 1},
        "orders half done": {"max": 0},
        "left over": {"max": 0},
    }
    rows = sorted(Counter(one["fault"] for one in done).items())
    return report.finish(result, options, [report.table("faults", ("fault", "times"), rows)])


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--minutes", type=float, default=10.0, help="of load")
    root.add_argument("--seed", type=int, default=0)
    root.add_argument("--nodes", type=int, default=0, metavar="N", help="Ray nodes; 0: one host")
    options = root.parse_args(argv)
    seconds = QUICK_S if options.quick else 60 * options.minutes
    if options.nodes:
        from bench.fleet_node_chaos import run_nodes  # which begins with this module

        return run_nodes(options, seconds)
    result = report.begin("fleet_chaos", {"seconds": seconds, "seed": options.seed})
    with tempfile.TemporaryDirectory() as data:
        database = Path(data, "database", "kvmig.sqlite")
        database.parent.mkdir()
        flags = [f"--memory={int(2.7 * CLAIM)}", f"--proxies={PROXIES}"]
        with FleetUp(Path(data), f"--database=sqlite:///{database}", *flags) as fleet:
            folder = f"path:{model_folder('count').absolute()}"
            engine = [*ENGINE_FLAGS, "--max-model-len=2048"]
            for name, more in MODELS.items():
                spec = {"name": name, "source": folder, "flags": engine, "memory": CLAIM}
                fleet.add({**spec, **more})
            began = time.monotonic()
            nemesis, orders = Nemesis(fleet, database, options.seed), Orders(fleet)
            calls = asyncio.run(load(fleet, nemesis, orders, began + seconds, options.seed))
            again = max(asyncio.run(answers_again(fleet, model)) for model in MODELS)
            half, left = orders.half_done(), left_over(fleet)
    run = ChaosRun(began, nemesis, orders, calls, again, half, left)
    return report_run(result, options, run, 9 if options.quick else 100 * seconds / 600)


if __name__ == "__main__":
    sys.exit(main())
