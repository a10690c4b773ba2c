"""Does the ledger have what clients got, whatever is killed meanwhile?

`kvmig up` with two proxies and a model of two instances. Clients stream answers, take them as a
whole, or leave early; some ask for beams, or for several prompts at once. Meanwhile the server, a
proxy or the front end is killed (SIGKILL) at random moments, the database is locked for longer than
the server waits for it, the disk is full for the server, or it comes back to a read-only database,
streams move as the model is scaled down and up, and keys are revoked while they are used.
Afterwards the ledger's row of every call is laid beside what its client got.

A client that got all of its answer must find just that in the ledger. One that left, or was cut
off, finds all that it got, and what was on its way. Only a killed front end may have lost what it
had counted in its last second; how long that was is measured.

Keys with a quota are used up: one by 32 streams before the first fault, and others by 8 streams
during the faults. The first must deliver its quota to the token, and none may deliver more, except
for what a killed front end had not counted.

`--model toy` computes nothing, so that more calls fit between two faults.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import random
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import httpx
import psutil

from bench import report
from bench.models import model_folder
from bench.site import ENGINE_FLAGS
from bench.unwritable import full, read_only
from kvmig.accounts.keys import QUOTA_WORDS, RESERVED_WORDS
from kvmig_tools.fleet import FleetUp

MODEL = "m"
PATH = "/v1/completions"
PROXIES = 2
CLIENTS = 12
KEYS = 3
TOKENS = (10, 500)
LONG = 1800
"""Tokens of a stream that shall still run when its key is revoked."""
PAUSE_S = (0.2, 3.0)
"""Between two faults."""
APART_S = 65.0
"""Between the first answer after a kill of the front end and the next kill: a model that fails
again within a minute of its start waits longer."""
LOCK_S = 7.0
"""The server waits 5 s for the database."""
AGAIN_S = 60.0
"""For what was killed to be there again."""
LOST_S = 2.0
"""A killed front end excuses what is missing of so long before."""
LATE_S = 0.5
"""Its last tokens may come to the client so long after its end."""
SETTLE_S = 2.5
"""Front ends write, and the server merges, every second."""
SEEN_S = 2.5
"""For so long a revoked key is tried."""
PROBE_S = 0.01
QUOTA = 10_000
CALM, AMID = (32, 1000), (8, 500)
"""Streams that use a quota up, and the tokens of each."""

Fault = Literal["server", "proxy", "front end", "lock", "full", "read-only", "scale", "revoke"]
FAULTS: tuple[Fault, ...] = (
    "server", "server", "server", "proxy", "proxy", "front end", "lock", "full", "read-only",
    "scale", "revoke",
)  # fmt: skip
WORDS = {
    "server": "kvmig.fleet.server",
    "proxy": "kvmig.proxy",
    "front end": "kvmig.frontend.process_main",
}
"""Of the command line of each."""
BREAKS = ("proxy", "front end")
"""Whose death ends streams."""
Shape = Literal["plain", "beams", "batch"]
BEAMS, BEAM_TOKENS = 3, (5, 40)
PROMPTS, BATCH_TOKENS = 6, (5, 60)
Fate = Literal["whole", "left", "cut", "refused", "unpaid"]
"""left: by its client. refused: before it began. unpaid: for want of quota."""
EXACT = ("whole", "unpaid")
"""Of which nothing can be on its way."""


class Done(NamedTuple):
    """A fault, by the steady clock."""

    fault: Fault
    at: float


@dataclass
class Asked:
    """One call, as its client saw it. Times are of the steady clock."""

    call_id: str
    key: str
    """Its prefix."""
    tokens: int
    """That were asked for."""
    began: float
    ended: float = 0.0
    got: list[tuple[float, int]] = field(default_factory=list)
    """When tokens came, and how many there were then."""
    text: str = ""
    told: tuple[int, int] | None = None
    """Prompt and output tokens, as the answer says."""
    fate: Fate = "cut"
    why: str = ""
    shape: Shape = "plain"

    @property
    def output(self) -> int:
        """Tokens that came; of the bundled model, and of toys, each is a letter."""
        return len(self.text) if self.told is None else self.told[1]

    def take(self, text: str) -> None:
        """More of the answer has come."""
        if text:
            self.text += text
            self.got.append((time.monotonic(), len(self.text)))

    def arrival(self, token: int) -> float:
        """When the token of that number came, from 1 on."""
        return next((at for at, count in self.got if count >= token), self.ended)


class Row(NamedTuple):
    """One row of the ledger."""

    call_id: str
    key: str
    status: str
    prompt: int
    output: int
    moves: int


def counted(start: int, tokens: int) -> str:
    """What the model says after `body_of`'s prompt."""
    return "".join(f" {number:04}" for number in range(start + 2, start + 3 + tokens))[:tokens]


def body_of(start: int, tokens: int, stream: bool) -> dict[str, Any]:
    """A call that counts on from there."""
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    prompt = f"Count: {start:04} {start + 1:04}"
    return {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}


def shaped(shape: Shape, start: int, tokens: int) -> dict[str, Any]:
    """A call with several answers."""
    body = body_of(start, tokens, stream=False)
    if shape == "beams":
        return {**body, "n": BEAMS, "use_beam_search": True}
    prompts = [body_of(start + number, tokens, stream=False)["prompt"] for number in range(PROMPTS)]
    return {**body, "prompt": prompts}


# -- what clients got, beside the ledger. Pure


def judge(
    asked: Sequence[Asked], rows: Sequence[Row], faults: Sequence[Done]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Figures, and what is worth a look."""
    by_call: dict[str, list[Row]] = {}
    for row in rows:
        by_call.setdefault(row.call_id, []).append(row)
    figures: Counter[str] = Counter()
    lost_s, odd = 0.0, []
    for one in asked:
        found = by_call.pop(one.call_id, [])
        wrong = _wrong(one, found, faults)
        output = sum(row.output for row in found)
        if one.output > output:
            since = _lost(one, output, faults)
            if since is None:
                wrong["missing"] = one.output - output
            else:
                lost_s = max(lost_s, since)
                figures["tokens lost with a front end"] += one.output - output
        if one.fate not in EXACT:
            figures["tokens counted that were on their way"] += max(0, output - one.output)
        for what in wrong:
            figures[what] += wrong[what]
        if wrong:
            odd.append({"call": one.call_id, "fate": one.fate, "why": one.why, **wrong})
    figures["rows of no client"] = sum(map(len, by_call.values()))
    return {**figures, "longest that a front end lost, s": lost_s}, odd


WRONG = (
    "missing", "beyond the answer", "beyond what was asked", "rows twice", "other key's",
    "other prompt", "never ended", "failed without a reason", "rows of no client",
)  # fmt: skip
"""Figures that must be 0."""


def _wrong(one: Asked, found: Sequence[Row], faults: Sequence[Done]) -> dict[str, int]:
    output = sum(row.output for row in found)
    wrong = {
        "rows twice": len(found) - 1,
        "other key's": sum(row.key != one.key for row in found),
        "never ended": sum(row.status == "running" for row in found),
        "beyond what was asked": output - one.tokens,
        "failed without a reason": int(one.fate in ("cut", "refused") and not _hit(one, faults)),
    }
    if one.fate in EXACT:
        wrong["beyond the answer"] = output - one.output
    if one.told is not None:
        wrong["other prompt"] = sum(row.prompt != one.told[0] for row in found)
    return {what: count for what, count in wrong.items() if count > 0}


def delivered(calls: Sequence[Asked], prompt: int) -> int:
    """Tokens of a quota that its clients got for it. prompt: tokens of each prompt."""
    return sum(one.output + prompt for one in calls if one.output)


def lost_of(
    calls: Sequence[Asked], rows: Sequence[Row], faults: Sequence[Done], prompt: int
) -> int:
    """Tokens that clients got, and killed front ends had not counted: no quota pays for them.

    prompt: tokens of each prompt.
    """
    counted: Counter[str] = Counter()
    for row in rows:
        counted[row.call_id] += row.output
    return sum(
        one.output - counted[one.call_id] + (0 if counted[one.call_id] else prompt)
        for one in calls
        if one.output > counted[one.call_id]
        and _lost(one, counted[one.call_id], faults) is not None
    )


def _hit(one: Asked, faults: Iterable[Done]) -> bool:
    """Whether something was killed that carries streams, while the call was there."""
    return any(
        fault in BREAKS and one.began - LATE_S <= at <= one.ended + LATE_S for fault, at in faults
    )


def _lost(one: Asked, counted: int, faults: Iterable[Done]) -> float | None:
    """Seconds from the first token that isn't counted to the front end's end; None without one."""
    first = one.arrival(counted + 1)
    ends = [at for fault, at in faults if fault == "front end" and first - LATE_S <= at]
    return max(0.0, min(ends) - first) if ends and min(ends) - first <= LOST_S else None


# -- clients


class Clients:
    """All calls of a run."""

    def __init__(
        self, fleet: FleetUp, keys: Sequence[str], seed: int, *, shapes: bool = True
    ) -> None:
        """shapes: whether the model takes beams and several prompts."""
        self.asked: list[Asked] = []
        self._shapes = shapes
        self.wrong: list[str] = []
        self._fleet = fleet
        self._keys = keys
        self._seed = seed
        self._ids = itertools.count(1)

    async def run(self, number: int, until: float) -> None:
        """One client, until then."""
        chance = random.Random(f"{self._seed} {number}")
        while time.monotonic() < until:
            tokens, key = chance.randint(*TOKENS), chance.choice(self._keys)
            manner = chance.random()
            if self._shapes and (shape := _shape(chance.random())) != "plain":
                await self.ask_for_several(key, shape, chance)
                continue
            leaves = chance.randint(1, tokens) if manner < 0.15 else None
            await self.call(key, tokens, chance.randrange(8000), leaves, manner < 0.85)

    async def call(
        self, key: str, tokens: int, start: int, leaves: int | None = None, stream: bool = True
    ) -> Asked:
        """One call. leaves: after so many tokens."""
        prefix, body = key.split("-")[1], body_of(start, tokens, stream)
        one = Asked(f"ledger-{next(self._ids)}", prefix, tokens, time.monotonic())
        self.asked.append(one)
        try:
            await self._follow(one, key, body, leaves)
        except httpx.HTTPError as error:
            one.fate, one.why = "cut", repr(error)
        finally:
            one.ended = time.monotonic()
        if not counted(start, tokens).startswith(one.text):
            self.wrong.append(f"{one.call_id}: {one.text[:200]}")
        return one

    async def ask_for_several(self, key: str, shape: Shape, chance: random.Random) -> Asked:
        """A call with several answers, whole."""
        tokens = chance.randint(*(BEAM_TOKENS if shape == "beams" else BATCH_TOKENS))
        answers, start = BEAMS if shape == "beams" else PROMPTS, chance.randrange(8000)
        name = f"ledger-{next(self._ids)}"
        one = Asked(name, key.split("-")[1], answers * tokens, time.monotonic(), shape=shape)
        self.asked.append(one)
        try:
            await self._follow(one, key, shaped(shape, start, tokens), None)
        except httpx.HTTPError as error:
            one.fate, one.why = "cut", repr(error)
        finally:
            one.ended = time.monotonic()
        wanted = "".join(counted(start + number, tokens) for number in range(answers))
        if shape == "batch" and one.fate == "whole" and one.text != wanted:
            self.wrong.append(f"{one.call_id}: {one.text[:200]}")
        return one

    async def _follow(self, one: Asked, key: str, body: dict[str, Any], leaves: int | None) -> None:
        async with self._fleet.client(key) as http:  # another proxy each time
            headers = {"x-request-id": one.call_id}
            async with http.stream("POST", PATH, json=body, headers=headers) as answer:
                if answer.is_error:
                    one.why = (await answer.aread()).decode()[:300]
                    one.fate = "unpaid" if "quota" in one.why else "refused"
                    return
                if not body.get("stream"):
                    _whole(one, json.loads(await answer.aread()))
                    return
                async for line in answer.aiter_lines():
                    if line == "data: [DONE]" and not one.why:
                        one.fate = "whole"
                    elif line.startswith("data: {"):
                        _chunk(one, json.loads(line[6:]))
                    if leaves is not None and len(one.text) >= leaves and one.fate != "whole":
                        one.fate = "left"
                        return


def _shape(chance: float) -> Shape:
    return "beams" if chance < 0.1 else "batch" if chance < 0.2 else "plain"


def _whole(one: Asked, answer: dict[str, Any]) -> None:
    one.take("".join(choice["text"] for choice in answer["choices"]))
    one.told = _usage(answer)
    one.fate = "whole"


def _chunk(one: Asked, chunk: dict[str, Any]) -> None:
    for choice in chunk.get("choices", []):
        one.take(choice["text"])
    if chunk.get("usage"):
        one.told = _usage(chunk)
    if "error" in chunk:
        one.why = str(chunk["error"].get("message"))[:300]
        one.fate = "unpaid" if "quota" in one.why else "cut"


def _usage(answer: dict[str, Any]) -> tuple[int, int]:
    return answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]


async def use_up(fleet: FleetUp, clients: Clients, streams: int, tokens: int) -> list[Asked]:
    """All calls of a new key whose quota is used up by so many at once."""
    key = await asyncio.to_thread(new_key, fleet, quota=QUOTA, period="total")
    calls: list[Asked] = []

    async def client(start: int) -> None:
        while True:
            calls.append(one := await clients.call(key, tokens, start))
            if QUOTA_WORDS in one.why and RESERVED_WORDS not in one.why:
                return
            await asyncio.sleep(
                0.0 if one.fate == "whole" else 0.1
            )  # nobody may grant anything now

    await asyncio.gather(*(client(start) for start in range(streams)))
    return calls


# -- faults


class Nemesis:
    """Does one fault after the other."""

    def __init__(self, fleet: FleetUp, clients: Clients, seed: int) -> None:
        self.done: list[Done] = []
        self.back_s: list[float] = []
        """Of killed servers."""
        self.revoked_s: list[float] = []
        """From an order to the last call that was still let in."""
        self.ended_s: list[float] = []
        """From an order to the end of a stream that ran."""
        self._fleet = fleet
        self._clients = clients
        self._chance = random.Random(f"{seed} faults")
        self._instances = 2

    async def run(self, until: float) -> None:
        """Until then. The server's first death is not one of several in a row, which make it wait
        longer before it comes back."""
        await self._do("server")
        while time.monotonic() < until:
            await asyncio.sleep(self._chance.uniform(*PAUSE_S))
            fault = self._chance.choice(FAULTS)
            if fault == "front end" and self._served_since() > time.monotonic() - APART_S:
                continue
            await self._do(fault)

    async def _do(self, fault: Fault) -> None:
        match fault:
            case "server" | "proxy" | "front end":
                await self._kill(fault)
            case "lock":
                await self._lock()
            case "full":
                await self._fill()
            case "read-only":
                await self._make_read_only()
            case "scale":
                await self._scale()
            case "revoke":
                await self.revoke()

    def _served_since(self) -> float:
        """When the first call was answered that began after the front end's last kill."""
        killed = max((one.at for one in self.done if one.fault == "front end"), default=-math.inf)
        firsts = (one.got[0][0] for one in self._clients.asked if one.began > killed and one.got)
        return min(firsts, default=math.inf)

    def _note(self, fault: Fault) -> None:
        self.done.append(Done(fault, time.monotonic()))

    async def _kill(self, fault: Fault) -> None:
        pids = self._fleet.processes(WORDS[fault])
        if not pids:
            return
        killed = psutil.Process(self._chance.choice(pids))
        self._note(fault)
        killed.kill()
        await asyncio.to_thread(killed.wait, AGAIN_S)
        if fault == "server":
            await asyncio.to_thread(self._listens)
            self.back_s.append(time.monotonic() - self.done[-1].at)

    def _listens(self) -> None:
        deadline = time.monotonic() + AGAIN_S
        while not self._fleet.listens():
            if time.monotonic() > deadline:
                raise TimeoutError("the server is not there again")
            time.sleep(0.01)

    async def _lock(self) -> None:
        """The database is another program's for a while."""
        with contextlib.closing(_database(self._fleet)) as file:
            file.execute("BEGIN EXCLUSIVE")
            self._note("lock")
            await asyncio.sleep(LOCK_S)
            file.rollback()

    async def _fill(self) -> None:
        """The server can write nothing for a while."""
        async with full(self._fleet.processes(WORDS["server"])):
            self._note("full")
            await asyncio.sleep(LOCK_S)

    async def _make_read_only(self) -> None:
        """The server that is killed can't use its database when it is back, and tries again."""
        async with read_only(self._fleet.folder / "kvmig.sqlite") as done:
            pids = self._fleet.processes(WORDS["server"])
            if not (done and pids):
                return
            self._note("read-only")
            psutil.Process(pids[0]).kill()
            await asyncio.sleep(LOCK_S)
        await asyncio.to_thread(self._listens)

    async def _scale(self) -> None:
        """What runs on an instance that leaves goes on at the other. Nobody waits for that."""
        self._instances = 3 - self._instances
        wanted = {"min": self._instances, "max": self._instances}
        self._note("scale")
        path = f"models/{MODEL}/scale"
        (await asyncio.to_thread(self._fleet.ask, "POST", path, wanted)).raise_for_status()

    async def revoke(self) -> None:
        """A key that is in use, at all proxies."""
        key = await asyncio.to_thread(new_key, self._fleet)
        # On a loop of its own: on this one it would wait for what all other clients take.
        call = self._clients.call(key, LONG, 17)
        stream = asyncio.create_task(asyncio.to_thread(asyncio.run, call))
        while not any(one.text for one in self._clients.asked if one.key in key):
            if stream.done():
                return  # nothing to see: it was refused, as all are while a front end starts
            await asyncio.sleep(0.01)
        let_in: list[float] = []
        probes = [asyncio.create_task(self._probe(key, let_in)) for _ in range(PROXIES)]
        await asyncio.sleep(0.2)
        ordered = time.monotonic()
        answer = await asyncio.to_thread(self._fleet.ask, "DELETE", f"keys/{key.split('-')[1]}")
        answer.raise_for_status()
        await asyncio.sleep(SEEN_S)
        for probe in probes:
            probe.cancel()
        await asyncio.wait(probes)
        self._note("revoke")
        one = await stream
        if one.fate == "cut":
            one.fate = "left"  # as it had to be
        self.revoked_s.append(max([*let_in, ordered]) - ordered)
        self.ended_s.append(max(one.ended, ordered) - ordered)

    async def _probe(self, key: str, let_in: list[float]) -> None:
        """Ask again and again, on connections of their own; note when it was still let in."""
        while True:
            asked = time.monotonic()
            with contextlib.suppress(httpx.HTTPError):
                async with self._fleet.client(key) as http:
                    if (await http.get("/v1/models")).is_success:
                        let_in.append(asked)
            await asyncio.sleep(PROBE_S)


def new_key(fleet: FleetUp, **limits: Any) -> str:
    """Of the admin. The server may just be killed, or its database locked."""
    body, deadline = {"user": "admin", "scopes": ["infer"], **limits}, time.monotonic() + AGAIN_S
    while True:
        try:
            answer = fleet.ask("POST", "keys", body)
            answer.raise_for_status()
            return str(answer.json()["key"])
        except httpx.HTTPError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)


def _database(fleet: FleetUp) -> sqlite3.Connection:
    return sqlite3.connect(fleet.folder / "kvmig.sqlite", timeout=AGAIN_S, isolation_level=None)


def ledger_of(fleet: FleetUp) -> list[Row]:
    """All rows, once nothing more comes."""
    wanted = (
        "SELECT call_id, prefix, status, prompt, output, moves FROM usage"
        " LEFT JOIN api_keys ON api_keys.id = key_id"
    )
    before: list[Row] = []
    deadline = time.monotonic() + AGAIN_S
    while True:
        with contextlib.closing(_database(fleet)) as file:
            rows = [Row(*row) for row in file.execute(wanted)]
        if rows and rows == before:
            return rows
        if time.monotonic() > deadline:
            raise TimeoutError("the ledger doesn't come to rest")
        before = rows
        time.sleep(SETTLE_S)


# -- the run


async def load(
    fleet: FleetUp, clients: Clients, nemesis: Nemesis, seconds: float
) -> tuple[list[Asked], list[list[Asked]]]:
    """All of it; the calls of the quota that is used up in quiet, and of each of the others."""
    calm, amid = await use_up(fleet, clients, *CALM), []
    until = time.monotonic() + seconds

    async def spend() -> None:
        while time.monotonic() < until:
            amid.append(await use_up(fleet, clients, *AMID))

    async with asyncio.TaskGroup() as group:
        group.create_task(nemesis.run(until))
        group.create_task(spend())
        for number in range(CLIENTS):
            group.create_task(clients.run(number, until))
    return calm, amid


def spec_of(model: str) -> dict[str, Any]:
    """Two instances, so that streams can move."""
    both = {"name": MODEL, "instances": {"min": 2, "max": 2, "target": 1}}
    if model == "toy":
        flags = ["--max-num-seqs=64", "--step-ms=4"]
        return {**both, "source": "path:/toy", "engine": "toy", "flags": flags}
    flags = [*ENGINE_FLAGS, "--max-model-len=2048"]
    return {**both, "source": f"path:{model_folder(model).absolute()}", "flags": flags}


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__)
    root.add_argument("--model", choices=("count", "toy"), default="count")
    root.add_argument("--minutes", type=float, help="of load: 10, or 0.8 with --quick")
    root.add_argument("--seed", type=int, default=0)
    options = root.parse_args(argv)
    seconds = 60 * (options.minutes or (0.8 if options.quick else 10))
    settings = {"model": options.model, "seconds": seconds, "seed": options.seed}
    result = report.begin("ledger", {**settings, "clients": CLIENTS, "proxies": PROXIES})
    with (
        tempfile.TemporaryDirectory() as data,
        FleetUp(Path(data), f"--proxies={PROXIES}") as fleet,
    ):
        fleet.add(spec_of(options.model))
        fleet.until(f"models/{MODEL}", state="serving", serving=2)
        keys, shapes = [new_key(fleet) for _ in range(KEYS)], options.model != "toy"
        clients = Clients(fleet, keys, options.seed, shapes=shapes)
        nemesis = Nemesis(fleet, clients, options.seed)
        calm, amid = asyncio.run(load(fleet, clients, nemesis, seconds))
        rows = ledger_of(fleet)
        sums = fleet.get("usage?by=key")["data"]
    figures, odd = judge(clients.asked, rows, nemesis.done)
    result.samples = [*odd, *({"wrong": sentence} for sentence in clients.wrong)]
    result.samples += [{"fault": one.fault, "at": round(one.at, 3)} for one in nemesis.done]
    fates = Counter(one.fate for one in clients.asked)
    whole = Counter(one.shape for one in clients.asked if one.fate == "whole")
    killed = Counter(one.fault for one in nemesis.done)
    result.summary = {
        "calls": len(clients.asked),
        **{f"calls {fate}": fates[fate] for fate in get_args(Fate)},
        **{f"whole calls, {shape}": whole[shape] for shape in get_args(Shape)},
        **{f"faults: {fault}": killed[fault] for fault in dict.fromkeys(FAULTS)},
        "tokens that clients got": sum(one.output for one in clients.asked),
        "tokens in the ledger": sum(row.output for row in rows),
        **dict.fromkeys(WRONG, 0),
        "wrong answers": len(clients.wrong),
        "sums that aren't those of the rows": sum(row["output"] for row in sums)
        - sum(row.output for row in rows),
        **figures,
    }  # fmt: skip
    result.targets = {
        **{what: {"max": 0} for what in (*WRONG, "wrong answers")},
        "sums that aren't those of the rows": {"min": 0, "max": 0},
        "longest that a front end lost, s": {"max": 1.5},
    }
    plain = (one for one in clients.asked if one.shape == "plain")
    prompt = max(one.told[0] for one in plain if one.told is not None)
    in_quiet, amid_faults = (
        delivered(calm, prompt),
        [delivered(one, prompt) - lost_of(one, rows, nemesis.done, prompt) for one in amid],
    )
    result.summary |= {
        "moves in the ledger": sum(row.moves for row in rows),
        f"delivered of {QUOTA}, {CALM[0]} streams": in_quiet,
        f"most delivered of {QUOTA} amid faults": max(amid_faults),
        f"least delivered of {QUOTA} amid faults": min(amid_faults),
        "quotas used up amid faults": len(amid_faults),
    }
    result.targets |= {
        f"delivered of {QUOTA}, {CALM[0]} streams": {"min": QUOTA, "max": QUOTA},
        f"most delivered of {QUOTA} amid faults": {"max": QUOTA},
    }
    if nemesis.back_s:  # each further death in a row is followed by a longer pause
        result.summary["a killed server is back, s"] = nemesis.back_s[0]
        result.targets["a killed server is back, s"] = {"max": 2.0}
    if nemesis.revoked_s:
        for what, samples in (
            ("a revoked key is let in, longest, s", nemesis.revoked_s),
            ("a revoked key's stream ends, longest, s", nemesis.ended_s),
        ):
            result.summary[what] = max(samples)
            result.targets[what] = {"max": 1.0}
    return report.finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
