"""Clients of the mixed load: each asks one call after the other, and checks every answer."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import aiohttp

from bench.chaos.answers import RIGHT, Answer, Verdict, judge
from bench.chaos.calls import KINDS, Call, counted, draw

PATIENCE_S = 240.0
"""No answer, and no end of one, for so long: it is stuck."""
BUSY_S = 1.0
"""Before a refused call is sent again."""
SLOW_S = 0.2
SLOW_BYTES = 2048
"""What a slow client reads, and how long it waits then."""
REFUSALS = (429, 503)


class ServerSaid(Exception):
    """An error instead of an answer, or at the end of a stream."""


class Refused(ServerSaid):
    """Try again."""


@dataclass
class Outcome:
    """What became of one call. at, gap_s: seconds; port: the client's own."""

    call: Call
    at: float
    port: int = 0
    error: str = ""
    broken: bool = False
    """Whether the connection ended before the answer."""
    verdict: Verdict = RIGHT
    gap_s: float = 0.0
    left: bool = False


@dataclass
class Ledger:
    """Everything that clients saw."""

    began: float = 0.0
    sent: int = 0
    refused: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    tokens: int = 0


class Client:
    """One client, with a connection for each call. Use it as a context."""

    def __init__(self, url: str, model: str, ledger: Ledger) -> None:
        self._url = url
        self._model = model
        self._ledger = ledger
        self._sock: socket.socket | None = None
        self._port = 0
        self._slow = False
        self._last = 0.0
        self._gap_s = 0.0

    async def __aenter__(self) -> Client:
        trace = aiohttp.TraceConfig()
        trace.on_connection_create_end.append(self._connected)
        connector = aiohttp.TCPConnector(force_close=True, socket_factory=self._socket)
        timeout = aiohttp.ClientTimeout(total=None, sock_read=PATIENCE_S)
        self._http = aiohttp.ClientSession(
            connector=connector, timeout=timeout, trace_configs=[trace]
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._http.close()

    def _socket(self, address: Any) -> socket.socket:
        family, kind, protocol, _, _ = address
        self._sock = socket.socket(family, kind, protocol)
        if self._slow:  # else the kernel would read for it
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SLOW_BYTES)
        return self._sock

    async def _connected(self, *_: object) -> None:
        assert self._sock is not None
        self._port = self._sock.getsockname()[1]

    async def ask(self, call: Call, wanted: Answer | None) -> tuple[Outcome, Answer]:
        """One call and its outcome, which goes to the ledger, too. wanted: None: not known."""
        self._ledger.sent += 1
        self._slow = call.manner == "slow"
        while True:
            answer = Answer()
            self._port, self._gap_s, self._last = 0, 0.0, time.monotonic()
            outcome = Outcome(call, time.monotonic() - self._ledger.began)
            try:
                async with asyncio.timeout(PATIENCE_S * 2):
                    outcome.left = await self._perform(call, answer)
            except Refused:
                self._ledger.refused += 1
                await asyncio.sleep(BUSY_S)
                continue
            except ServerSaid as error:
                outcome.error = str(error)
            except aiohttp.ServerTimeoutError:
                outcome.error = "nothing came"
            except (aiohttp.ClientError, ConnectionError) as error:
                outcome.error, outcome.broken = f"{type(error).__name__}", True
            except TimeoutError:
                outcome.error = "did not end"
            break
        outcome.port, outcome.gap_s = self._port, self._gap_s
        if wanted is not None:
            whole = not outcome.error and not outcome.left
            outcome.verdict = judge(answer, wanted, whole)
        self._ledger.outcomes.append(outcome)
        self._ledger.kinds[call.kind] += 1
        self._ledger.tokens += answer.tokens or 0
        return outcome, answer

    async def _perform(self, call: Call, answer: Answer) -> bool:
        """Whether the client left before the end. Raises ServerSaid and aiohttp's errors."""
        body = {"model": self._model, **call.body}
        if call.streams:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with self._http.post(f"{self._url}{call.path}", json=body) as response:
            if response.status in REFUSALS:
                raise Refused(await response.text())
            if response.status != 200:
                raise ServerSaid(f"{response.status}: {(await response.text())[:200]}")
            if not call.streams:
                answer.take(json.loads(await response.text()))
                return False
            return await self._read(call, answer, response)

    async def _read(self, call: Call, answer: Answer, response: aiohttp.ClientResponse) -> bool:
        rest, came = b"", 0
        async for data in response.content.iter_any():
            *lines, rest = (rest + data).split(b"\n\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    came += self._take(line[6:], answer)
            if call.manner == "leave" and came >= call.leave_at:
                return True
            if call.manner == "slow":
                await asyncio.sleep(SLOW_S)
                self._last = time.monotonic()  # it was this client that stood still
        if answer.tokens is None:
            raise aiohttp.ClientPayloadError("ended without usage")
        return False

    def _take(self, text: bytes, answer: Answer) -> int:
        chunk = json.loads(text)
        if "error" in chunk:
            raise ServerSaid(str(chunk["error"])[:300])
        grown = answer.take(chunk)
        if grown:
            now = time.monotonic()
            self._gap_s, self._last = max(self._gap_s, now - self._last), now
        return int(grown)


async def keep_asking(
    client: Client,
    random: Random,
    references: dict[str, Answer],
    until: Callable[[], bool],
    rest: Callable[[], Awaitable[None]] | None = None,
    kinds: Sequence[str] = KINDS,
) -> None:
    """One call after the other until it is time. rest: between two."""
    while not until():
        call = draw(random, kinds)
        wanted = references[call.reference] if call.reference else counted(call)
        await client.ask(call, wanted)
        if rest is not None:
            await rest()
