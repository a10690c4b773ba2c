"""Three ways to relay a stream, and what each takes of a processor: the spike before `kvmig.proxy`.

aiohttp: aiohttp's client reads, ASGI messages write. asgi: the upstream's bytes are parsed by
httptools, ASGI messages write. raw: the upstream's head is parsed and rewritten; what follows goes
from the one socket to the other as it came. All three serve by uvicorn on uvloop; upstream is
`bench.proxy.upstream` on a Unix socket, at one pace for all.

`python -m bench.proxy.relays` measures; with a relay's name, a port and a path it is that relay.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import aiohttp
import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from bench import report
from bench.load import process
from bench.load.drive import Driver
from bench.load.rounds import BODY, IN_FLIGHT
from kvmig.process.sockets import free_port

START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream"), (b"transfer-encoding", b"chunked")],
}


async def body_of(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def part(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


# -- aiohttp's client


def by_aiohttp(path: str) -> ASGIApp:
    sessions: list[aiohttp.ClientSession] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if not sessions:
            connector = aiohttp.UnixConnector(path, limit=0)
            sessions.append(aiohttp.ClientSession(connector=connector))
        body = await body_of(receive)
        async with sessions[0].post("http://up/v1/completions", data=body) as answer:
            await send(START)
            async for piece in answer.content.iter_any():
                await send(part(piece))
        await send(part(b"", more=False))

    return app


# -- httptools, then ASGI messages


class Parsed(asyncio.Protocol):
    """The upstream's pieces, in order; None at their end."""

    def __init__(self, request: bytes) -> None:
        self.pieces: deque[bytes | None] = deque()
        self.news = asyncio.Event()
        self._request = request
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)
        self.news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.pieces.append(None)
        self.news.set()


def request_of(body: bytes) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nhost: up\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)
    )


def by_asgi(path: str) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = request_of(await body_of(receive))
        loop = asyncio.get_running_loop()
        _, parsed = await loop.create_unix_connection(lambda: Parsed(request), path)
        await send(START)
        while True:
            while parsed.pieces:
                piece = parsed.pieces.popleft()
                if piece is None:
                    await send(part(b"", more=False))
                    return
                await send(part(piece))
            parsed.news.clear()
            await parsed.news.wait()

    return app


# -- bytes as they came


class Raw(asyncio.Protocol):
    """What follows the upstream's head goes on as it came."""

    def __init__(self, request: bytes, client: asyncio.Transport) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._client = client
        self._head: bytearray | None = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._head is not None:
            self._head += data
            _, end, rest = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._head, data = None, bytes(rest)
        self._pass_on(data)

    def _pass_on(self, data: bytes) -> None:
        at = 0  # whole chunks: what a proxy must know, to say where the stream has stood
        while at < len(data):
            line = data.index(b"\r\n", at)
            at = line + 4 + int(data[at:line], 16)
        self._client.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


class Shown(HttpToolsProtocol):
    """Shows its transport to the application."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["transport"] = self.transport  # type: ignore[typeddict-unknown-key]


def by_bytes(path: str) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        request = request_of(await body_of(receive))
        loop = asyncio.get_running_loop()
        await send(START)
        _, raw = await loop.create_unix_connection(lambda: Raw(request, scope["transport"]), path)
        await raw.ended
        await send(part(b"", more=False))

    return app


RELAYS: dict[str, Callable[[str], ASGIApp]] = {
    "aiohttp": by_aiohttp, "asgi": by_asgi, "raw": by_bytes,
}  # fmt: skip


def serve(name: str, port: int, path: str) -> None:
    logging.disable(logging.CRITICAL)
    uvicorn.run(
        RELAYS[name](path),
        port=port,
        http=Shown,
        loop="uvloop",
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=1,
    )


# -- measured

STREAMS = (1, 100, 1000)
RATES = {1: 500, 100: 5_000, 1000: 10_000}
"""Tokens a second of all streams, well below what each relay can do."""


def sample(name: str, streams: int, seconds: float, folder: Path) -> dict[str, Any]:
    """One relay under so many streams."""
    port = free_port()
    path = str(folder / f"{port}.sock")
    rate = RATES[streams]
    with (folder / "log").open("ab") as log:
        upstream = process.start("bench.proxy.upstream", path, rate, log=log)
        relay = process.start("bench.proxy.relays", name, port, path, log=log)
        try:
            time.sleep(3.0)
            with Driver(port, folder / "client") as client:
                client.ask("open", streams=streams, watched=0, in_flight=IN_FLIGHT, body=BODY)
                client.ask("measure", seconds=1.0)
                before = process.cpu_s([relay.pid])
                told = client.ask("measure", seconds=seconds)
                spent = process.cpu_s([relay.pid]) - before
        finally:
            process.end(relay)
            process.end(upstream)
    return {
        "relay": name,
        "streams": streams,
        "offered": rate,
        "delivered": told["tokens"] / told["seconds"],
        "tokens_per_read": told["tokens"] / max(1, told["reads"]),
        "us_per_token": spent / max(1, told["tokens"]) * 1e6,
    }


def main(argv: list[str]) -> int:
    root = report.parser(__doc__)
    root.add_argument("--seconds", type=float, help="measured of each; instead of 8")
    options = root.parse_args(argv)
    seconds = options.seconds or (3.0 if options.quick else 8.0)
    rounds = 1 if options.quick else 2
    result = report.begin("proxy_relays", {"seconds": seconds, "rates": RATES, "rounds": rounds})
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            for streams in STREAMS:
                for name in RELAYS if number % 2 == 0 else reversed(RELAYS):
                    result.samples.append(sample(name, streams, seconds, Path(folder)))
    for streams in STREAMS:
        for name in RELAYS:
            those = [
                one["us_per_token"]
                for one in result.samples
                if (one["relay"], one["streams"]) == (name, streams)
            ]
            result.summary[f"{name}.us_per_token_{streams}"] = sum(those) / len(those)
    rows = [tuple(one.values()) for one in result.samples]
    columns = ("relay", "streams", "offered", "delivered", "a read", "us a token")
    return report.finish(result, options, [report.table("Relays", columns, rows)])


if __name__ == "__main__":
    if len(sys.argv) > 3 and sys.argv[1] in RELAYS:
        serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    else:
        sys.exit(main(sys.argv[1:]))
