"""A fleet that some tenants attack all the time, beside tenants whose every answer is compared.

`kvmig up` with two proxies and real vLLM: a model of two instances, and one that stays cold. First
the compared clients are alone for a while; then attackers with keys of their own, with revoked keys
and without any send, one after the other and without a pause, what must cost nobody else anything:
hostile bodies, thousands of sequences, guesses at other tenants' prompts, other tenants' request
ids and answers, paths that are not there, orders of an admin, URLs of this host, half a body whose
key is revoked meanwhile, streams that nobody reads. Every compared answer is checked, every call of
a compared tenant is laid beside its row in the ledger, and so is the usage in attackers' answers.

What grew is as in `bench.fleet_soak`. A gap is the time between two tokens of a compared stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, get_args

import httpx
import psutil

from bench import report
from bench.fleet_soak import LONG_RUN, SAMPLE_S, Sample, grown, samples_of
from bench.hostile_bodies import HostileCall, hostile_calls
from bench.ledger import (
    MODEL,
    PATH,
    WRONG,
    Asked,
    Clients,
    Fate,
    Row,
    judge,
    ledger_of,
    new_key,
    spec_of,
)
from bench.soak_samples import FLAT
from kvmig_tools.fleet import FleetUp

PROXIES = 2
COMPARED = 4
"""Clients whose answers are compared, of two users."""
ATTACKERS = 3
CONTEXT = 2048
"""Of `bench.ledger`'s model, in tokens."""
COLD = "cold"
"""The model that no call for work names."""
SECRET_DIGITS = 40
"""Of a tenant's prompt: several blocks of a prefix cache."""
PATIENCE_S = 30.0
"""For the answer to one attack."""
REVOKED_S = 1.0
"""After an order a revoked key may be let in for so long."""
UNREAD_S = 3.0
"""For so long an attacker does not read a stream."""
PAUSE_S = 0.05
ANSWERED = (429, 503)
"""Statuses that say `later`; any other one above 499 is a fault of ours."""

Attack = Callable[["Attackers", random.Random], Awaitable[None]]


class HostileBody(NamedTuple):
    """One hostile call, whose body is in a file: all together they are large."""

    call: HostileCall
    file: Path


def written(folder: Path) -> list[HostileBody]:
    """All hostile bodies, in files."""
    found = []
    for number, one in enumerate(hostile_calls(MODEL, CONTEXT)):
        file = folder / f"body-{number}"
        file.write_bytes(one.body)
        found.append(HostileBody(one._replace(body=b""), file))
    return found


class Attackers:
    """What hostile tenants do, and what they must not get."""

    def __init__(
        self,
        fleet: FleetUp,
        clients: Clients,
        victim: str,
        keys: Sequence[str],
        bodies: Sequence[HostileBody],
    ) -> None:
        """clients: those that are compared; victim: the key of one. keys: of the attackers."""
        self.statuses: dict[str, Counter[str]] = {}
        self.breaches: list[str] = []
        self.told: dict[str, tuple[int, int]] = {}
        """Prompt and output tokens that an attacker's answer says it used, by call id."""
        self.cached_own = 0
        """Times that a tenant's own prompt was in its prefix cache: the cache works."""
        self.fetched = 0
        """Connections to the URL that attackers name."""
        self.private_port = 0
        """Of that URL."""
        self._fleet = fleet
        self._clients = clients
        self._victim = victim
        self._keys = keys
        self._bodies = bodies
        self._number = 0

    async def run(self, number: int, until: float) -> None:
        """One attacker, until then."""
        chance = random.Random(f"attacker {number}")
        while time.monotonic() < until:
            attack = chance.choice(ATTACKS)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await attack(self, chance)
            except TimeoutError:
                self._note(attack.__name__, "no answer")
            except (httpx.HTTPError, OSError) as error:
                self._note(attack.__name__, type(error).__name__)
            await asyncio.sleep(PAUSE_S)

    async def serve_private(self) -> asyncio.Server:
        """A server on this host that no model may ask."""

        def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.fetched += 1
            writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        self.private_port = int(server.sockets[0].getsockname()[1])
        return server

    def _note(self, kind: str, outcome: int | str) -> None:
        self.statuses.setdefault(kind, Counter())[str(outcome)] += 1

    def _breach(self, kind: str, sentence: str) -> None:
        self.breaches.append(f"{kind}: {sentence[:300]}")

    async def _send(
        self, kind: str, method: str, path: str, body: Any, key: str, call_id: str | None = None
    ) -> httpx.Response:
        """One call; its status is noted, its usage kept, and 5xx but 503 is a breach."""
        self._number += 1
        call_id = call_id or f"attack-{self._number}"
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"x-request-id": call_id, "content-type": "application/json"}
        async with self._fleet.client(key) as http:
            answer = await http.request(method, path, content=content, headers=headers)
        self._note(kind, answer.status_code)
        if answer.status_code >= 500 and answer.status_code not in ANSWERED:
            self._breach(kind, f"{answer.status_code} {answer.text}")
        if answer.is_success and call_id.startswith("attack-"):
            with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
                usage = answer.json()["usage"]
                self.told[call_id] = (
                    usage.get("prompt_tokens", usage.get("input_tokens")),
                    usage.get("completion_tokens", usage.get("output_tokens", 0)),
                )
        return answer

    # -- what they do

    async def hostile_body(self, chance: random.Random) -> None:
        """One of `bench.hostile_bodies`."""
        one = chance.choice(self._bodies)
        body = await asyncio.to_thread(one.file.read_bytes)
        kind = f"body: {one.call.kind}, {one.call.size}"
        await self._send(kind, "POST", one.call.path, body, chance.choice(self._keys))

    async def many_sequences(self, chance: random.Random) -> None:
        """More at once than the key may have."""
        body = {"model": MODEL, "prompt": "Count: 0041", "max_tokens": 50}
        more = chance.choice(({"n": 500}, {"prompt": ["Count: 0041"] * 200}, {"n": 16}))
        await self._send(
            "many sequences", "POST", PATH, {**body, **more}, chance.choice(self._keys)
        )

    async def beam_search(self, chance: random.Random) -> None:
        """Many requests of the engine for one call."""
        body = {"model": MODEL, "prompt": "Count: 0041 0042", "max_tokens": 20, "n": 3}
        body |= {"use_beam_search": True, "temperature": 0}
        await self._send("beam search", "POST", PATH, body, chance.choice(self._keys))

    async def guess_prompt(self, chance: random.Random) -> None:
        """A prompt that another tenant has just sent."""
        secret = " ".join(f"{chance.randrange(10**8):08}" for _ in range(SECRET_DIGITS))
        body = {"model": MODEL, "input": f"The code is {secret}", "max_output_tokens": 2}
        for _ in range(2):
            first = await self._send("own prompt", "POST", "/v1/responses", body, self._victim)
        self.cached_own += first.is_success and _cached(first) > 0
        guess = await self._send(
            "guess prompt", "POST", "/v1/responses", body, chance.choice(self._keys)
        )
        if guess.is_success and _cached(guess):
            self._breach("guess prompt", f"{_cached(guess)} tokens of another tenant's are cached")

    async def other_ids(self, chance: random.Random) -> None:
        """A call under another tenant's request id, an order to end it, a look at its answer."""
        live = [one for one in self._clients.asked if not one.ended] or self._clients.asked
        call_id, key = chance.choice(live).call_id, chance.choice(self._keys)
        body = {"model": MODEL, "prompt": "Count: 0041", "max_tokens": 5}
        await self._send("other's id", "POST", PATH, body, key, call_id)
        order = {"model": MODEL, "request_ids": [f"cmpl-{call_id}-0", call_id]}
        for method, path in (
            ("POST", "/inference/v1/abort_requests"),
            ("GET", f"/v1/responses/resp_{call_id}"),
            ("POST", f"/v1/responses/resp_{call_id}/cancel"),
            ("GET", f"/models/{MODEL}/v1/responses/resp_{call_id}"),
        ):
            answer = await self._send("other's answer", method, path, order, key)
            if answer.is_success:
                self._breach("other's answer", f"{method} {path} {answer.status_code}")

    async def paths_beside(self, chance: random.Random) -> None:
        """Paths that are not for clients, at a model that is cold, too."""
        key = chance.choice(self._keys)
        for path in (
            f"/models/{COLD}/v1/nothing", "/v1/load_lora_adapter", "/v1/../metrics", "/metrics",
            f"/models/{COLD}/v1/completions/render", "/reset_prefix_cache", "/kvmig/v1/instances",
            "/kvmig/v2/keys", f"/models/{COLD}/v1/models", "/docs", "/pause", "/collective_rpc",
        ):  # fmt: skip
            method = chance.choice(("GET", "POST"))
            answer = await self._send("paths", method, path, {"model": COLD}, key)
            if answer.is_success and not path.endswith("/v1/models"):
                self._breach("paths", f"{method} {path} {answer.status_code}")

    async def private_url(self, chance: random.Random) -> None:
        """A picture at an address of this host."""
        url = f"http://127.0.0.1:{self.private_port}/a.png"
        picture = [{"type": "image_url", "image_url": {"url": url}}]
        body = {"model": MODEL, "messages": [{"role": "user", "content": picture}]}
        key = chance.choice(self._keys)
        await self._send("private URL", "POST", "/v1/chat/completions", body, key)

    async def revoked_meanwhile(self, _: random.Random) -> None:
        """Half of a body, whose key is revoked before the other half comes."""
        kind = "revoked meanwhile"
        key = await asyncio.to_thread(new_key, self._fleet)
        body = json.dumps({"model": MODEL, "prompt": "Count: 0041", "max_tokens": 500}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self._fleet.port)
        try:
            head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body[:10])
            await asyncio.sleep(0.3)
            path = f"keys/{key.split('-')[1]}"
            (await asyncio.to_thread(self._fleet.ask, "DELETE", path)).raise_for_status()
            await asyncio.sleep(REVOKED_S)
            with contextlib.suppress(ConnectionError):
                writer.write(body[10:])
                await writer.drain()
            with contextlib.suppress(ConnectionError):
                status = (await reader.readline()).decode().partition(" ")[2][:3]
                self._note(kind, status or "closed")
                if status == "200":
                    self._breach(kind, "the call of a revoked key was answered")
        finally:
            writer.close()

    async def without_key(self, chance: random.Random) -> None:
        """Connections and calls of a stranger."""
        sockets = [socket.create_connection(("127.0.0.1", self._fleet.port)) for _ in range(20)]
        try:
            for path in (PATH, "/kvmig/v2/keys", "/kvmig/v2/openapi.json", "/v1/models"):
                body = b"{" * chance.choice((10, 100_000))
                answer = await self._send("without a key", "POST", path, body, "kv-x")
                if answer.status_code != 401:
                    self._breach("without a key", f"{path} {answer.status_code}")
        finally:
            for one in sockets:
                one.close()

    async def unread_stream(self, chance: random.Random) -> None:
        """A stream that its client does not read, and leaves."""
        body = {"model": MODEL, "prompt": "Count: 0041", "max_tokens": 1500, "stream": True}
        async with (
            self._fleet.client(chance.choice(self._keys)) as http,
            http.stream("POST", PATH, json=body) as answer,
        ):
            self._note("unread stream", answer.status_code)
            await asyncio.sleep(UNREAD_S)


ATTACKS: tuple[Attack, ...] = (
    Attackers.hostile_body, Attackers.hostile_body, Attackers.hostile_body,
    Attackers.many_sequences, Attackers.beam_search, Attackers.guess_prompt, Attackers.other_ids,
    Attackers.paths_beside, Attackers.private_url, Attackers.revoked_meanwhile,
    Attackers.without_key, Attackers.unread_stream,
)  # fmt: skip


def _cached(answer: httpx.Response) -> int:
    """Tokens of the prompt that a cache had, as the answer of a response says."""
    return int(answer.json()["usage"]["input_tokens_details"]["cached_tokens"])


# -- what compared clients saw. Pure


def longest_gap(calls: Sequence[Asked], since: float, until: float) -> float:
    """Seconds between two tokens of one stream within that time, at most."""
    gaps = [
        later - earlier
        for one in calls
        for (earlier, _), (later, _) in zip(one.got, one.got[1:], strict=False)
        if since <= earlier and later <= until
    ]
    return max(gaps, default=0.0)


def untrue(told: dict[str, tuple[int, int]], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Answers of attackers whose usage is not what the ledger has."""
    found: dict[str, list[tuple[int, int]]] = {}
    for row in rows:
        found.setdefault(row.call_id, []).append((row.prompt, row.output))
    return [
        {"call": call_id, "told": usage, "ledger": found.get(call_id)}
        for call_id, usage in told.items()
        if found.get(call_id) != [usage]
    ]


# -- the run


async def load(
    fleet: FleetUp, clients: Clients, attackers: Attackers, quiet_s: float, seconds: float
) -> tuple[list[Sample], tuple[float, float, float]]:
    """All of it; what was sampled, and when it began, when attacks began, and when it ended."""
    began = time.monotonic()
    attacked, until = began + quiet_s, began + quiet_s + seconds
    samples: list[Sample] = []

    async def sample() -> None:
        while time.monotonic() < until:
            at_s = round(time.monotonic() - attacked, 1)
            if at_s >= 0:
                samples.extend(await asyncio.to_thread(samples_of, fleet, at_s))
            await asyncio.sleep(min(SAMPLE_S, seconds / 20))

    async def attack(number: int) -> None:
        await asyncio.sleep(quiet_s)
        await attackers.run(number, until)

    async with await attackers.serve_private(), asyncio.TaskGroup() as group:
        group.create_task(sample())
        for number in range(COMPARED):
            group.create_task(clients.run(number, until))
        for number in range(ATTACKERS):
            group.create_task(attack(number))
    return samples, (began, attacked, until)


def new_user(fleet: FleetUp, name: str, **limits: Any) -> str:
    """A key of a new user."""
    fleet.ask("POST", "users", {"name": name}).raise_for_status()
    body = {"user": name, "scopes": ["infer"], **limits}
    answer = fleet.ask("POST", "keys", body)
    answer.raise_for_status()
    return str(answer.json()["key"])


def main(argv: list[str] | None = None) -> int:
    root = report.parser(__doc__, LONG_RUN)
    root.add_argument("--minutes", type=float, help="of attacks: 30, or 1 with --quick")
    root.add_argument("--seed", type=int, default=0)
    options = root.parse_args(argv)
    seconds = 60 * (options.minutes or (1 if options.quick else 30))
    quiet_s = min(120.0, seconds / 3)
    settings = {"seconds": seconds, "quiet_s": quiet_s, "seed": options.seed}
    settings |= {"compared": COMPARED, "attackers": ATTACKERS, "proxies": PROXIES}
    result = report.begin("fleet_attack", settings)
    with (
        tempfile.TemporaryDirectory() as data,
        FleetUp(Path(data), f"--proxies={PROXIES}") as fleet,
    ):
        spec = spec_of("count")
        fleet.add(spec)
        fleet.add({**spec, "name": COLD, "instances": {"min": 0}})
        fleet.until(f"models/{MODEL}", state="serving", serving=2)
        compared = [new_user(fleet, f"tenant-{number}") for number in range(2)]
        hostile = [
            new_user(fleet, "attacker-0", parallel=8),
            new_user(fleet, "attacker-1", rpm=600, quota=100_000_000),
        ]
        clients = Clients(fleet, compared, options.seed)
        attackers = Attackers(fleet, clients, compared[0], hostile, written(Path(data)))
        samples, times = asyncio.run(load(fleet, clients, attackers, quiet_s, seconds))
        every = ledger_of(fleet)
        cold = fleet.get(f"models/{COLD}")["state"]
    began, attacked, until = times
    prefixes = {key.split("-")[1] for key in compared}
    rows = [row for row in every if row.key in prefixes and row.call_id.startswith("ledger-")]
    figures, odd = judge(clients.asked, rows, ())
    lies = untrue(attackers.told, every)
    result.samples = [asdict(one) for one in samples]
    result.samples += [*odd, *lies, *({"wrong": sentence} for sentence in clients.wrong)]
    result.samples += [{"breach": sentence} for sentence in attackers.breaches]
    result.samples += [
        {"attack": kind, **outcomes} for kind, outcomes in sorted(attackers.statuses.items())
    ]
    fates = Counter(one.fate for one in clients.asked)
    result.summary = {
        "compared calls": len(clients.asked),
        **{f"compared calls {fate}": fates[fate] for fate in get_args(Fate)},
        "tokens that compared clients got": sum(one.output for one in clients.asked),
        "attacks": sum(sum(one.values()) for one in attackers.statuses.values()),
        "attacks without an answer": sum(one["no answer"] for one in attackers.statuses.values()),
        "breaches": len(attackers.breaches) + attackers.fetched + (cold != "zero"),
        "own prompts that were cached": attackers.cached_own,
        "attackers' answers with usage": len(attackers.told),
        "of these not as in the ledger": len(lies),
        **dict.fromkeys(WRONG, 0),
        "wrong answers": len(clients.wrong),
        **figures,
        "longest gap of a compared stream, quiet, s": longest_gap(clients.asked, began, attacked),
        "longest gap of a compared stream, attacked, s": longest_gap(
            clients.asked, attacked, until
        ),
        "the machine's load": psutil.getloadavg()[1],
        **grown(samples, seconds),
    }
    nothing = (
        *WRONG, "wrong answers", "compared calls cut", "compared calls refused", "breaches",
        "compared calls unpaid", "of these not as in the ledger",
    )  # fmt: skip
    result.targets = {name: {"max": 0} for name in nothing}
    result.targets["own prompts that were cached"] = {"min": 1}
    for name in [one for one in result.summary if one.endswith(" growth")]:
        result.targets[name] = {"max": FLAT[name.split()[-2]]}
    return report.finish(result, options)


if __name__ == "__main__":
    sys.exit(main())
