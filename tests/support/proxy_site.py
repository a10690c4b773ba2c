"""A proxy's door on a port of its own, deployments that do as they are told, and clients."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from kvmig.accounts.keys import AccountLimits, KeyGrant, KeyTerms, new_key
from kvmig.asgi.certificate import load_certificate
from kvmig.asgi.tls import TlsServer
from kvmig.asgi.uvicorn_task import HttpTask, uvicorn_server
from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.config import HttpConfig
from kvmig.process.sockets import take_path
from kvmig.proxy.app import ProxyApp
from kvmig.proxy.call import DoorConnection
from kvmig.proxy.cross_origin import CrossOrigin
from kvmig.proxy.directory import ModelDirectory
from kvmig.proxy.messages import FleetSnapshot, KeyUpdates, ModelRoute, RouteChanges
from kvmig.tracing.calls import CallTracer
from tests.support.certificates import Authority

PEPPER = b"p" * 32
GRACE_S = 2.0
EVENT = b'data: {"choices":[{"text":"~"}]}\n\n'


def key(user: AccountLimits | None = None, **terms: Any) -> tuple[str, KeyGrant]:
    """A new key of the user ann, and its grant. user: her limits."""
    made = new_key(PEPPER)
    told = msgspec.structs.asdict(KeyTerms(**terms))
    grant = KeyGrant(
        **told, key_id=made.prefix, origin=made.prefix, user_id="u1", user="ann",
        user_limits=user or AccountLimits(), prefix=made.prefix, hash=made.hash,
    )  # fmt: skip
    return made.shown, grant


# -- a deployment


@dataclass
class Got:
    """One request, as a deployment has got it."""

    line: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter

    @property
    def fields(self) -> Any:
        return json.loads(self.body)

    def head(self, *lines: str, status: str = "200 OK") -> None:
        text = "\r\n".join((f"HTTP/1.1 {status}", "x-request-id: its-own", *lines))
        self.writer.write(f"{text}\r\n\r\n".encode())

    def events(self) -> None:
        self.head("content-type: text/event-stream", "transfer-encoding: chunked")

    def chunk(self, data: bytes = EVENT) -> None:
        self.writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    def last(self) -> None:
        self.writer.write(b"0\r\n\r\n")

    def json(self, answer: Any, status: str = "200 OK") -> None:
        body = json.dumps(answer).encode()
        self.head("content-type: application/json", f"content-length: {len(body)}", status=status)
        self.writer.write(body)


Answer = Callable[[Got], Awaitable[None]]


async def says_ok(got: Got) -> None:
    got.json({"ok": True})


def says_ok_after(seconds: float) -> Answer:
    async def answer(got: Got) -> None:
        await asyncio.sleep(seconds)
        await says_ok(got)

    return answer


async def streams(got: Got) -> None:
    """A stream that goes on until its client leaves."""
    got.events()
    while True:
        got.chunk()
        await asyncio.sleep(0.02)


@dataclass
class Deployment:
    """Answers each request by `answer`, then closes."""

    path: str
    answer: Answer = says_ok
    got: list[Got] = field(default_factory=list)
    left: int = 0
    """Clients that left before their answer was complete."""
    _server: asyncio.Server | None = None

    async def open(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, sock=take_path(self.path))

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for one in self.got:
            one.writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        line, *rest = head.strip().split("\r\n")
        headers = dict(one.split(": ", 1) for one in rest)
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        got = Got(line, headers, body, writer)
        self.got.append(got)
        gone = asyncio.create_task(reader.read(1))
        answer = asyncio.create_task(self._answered(got))
        await asyncio.wait((gone, answer), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            self.left += 1
        gone.cancel()
        answer.cancel()
        await asyncio.gather(gone, answer, return_exceptions=True)
        writer.close()

    async def _answered(self, got: Got) -> None:
        await self.answer(got)
        await got.writer.drain()


# -- the proxy


@dataclass
class Site:
    """A door that serves."""

    door: ProxyApp
    port: int
    folder: Path
    key: str
    wanted: list[str]
    trust: ssl.SSLContext | None = None
    """What clients accept the door's certificate by; None: it speaks plain HTTP."""

    def tell(self, *routes: ModelRoute, removed: tuple[str, ...] = ()) -> None:
        version = self.door.directory.version + 1
        self.door.apply(RouteChanges(version=version, changed=routes, removed=removed))

    def add_key(self, user: AccountLimits | None = None, **terms: Any) -> tuple[str, KeyGrant]:
        """A new key, as of `key`, which the door knows from now on."""
        given, grant = key(user, **terms)
        version = self.door.directory.version + 1
        self.door.apply(KeyUpdates(version=version, changed=(grant,)))
        return given, grant

    def ready(self, name: str = "count", **more: Any) -> None:
        """The model is there, at `deployment`."""
        self.tell(ModelRoute(name=name, state="ready", socket=f"{self.folder}/{name}", **more))

    @asynccontextmanager
    async def deployment(
        self, answer: Answer = says_ok, name: str = "count", **more: Any
    ) -> AsyncIterator[Deployment]:
        """One that serves the model, whose route says so."""
        one = Deployment(f"{self.folder}/{name}", answer)
        await one.open()
        self.ready(name, **more)
        try:
            yield one
        finally:
            await one.close()

    @asynccontextmanager
    async def client(self, given: str | None = None) -> AsyncIterator[httpx.AsyncClient]:
        bearer = {"authorization": f"Bearer {self.key if given is None else given}"}
        base = f"{'https' if self.trust else 'http'}://127.0.0.1:{self.port}"
        async with httpx.AsyncClient(
            base_url=base, headers=bearer, timeout=30, verify=self.trust or True
        ) as client:
            yield client

    async def ask(
        self, body: Any = None, path: str = "/v1/chat/completions", *, given: str | None = None,
        **more: Any,
    ) -> Any:  # fmt: skip
        """One call, and its whole answer. body: as JSON, bytes as they are; given: another key."""
        content = body if isinstance(body, bytes) else json.dumps(body or {"model": "count"})
        headers = {"content-type": "application/json", **more.pop("headers", {})}
        async with self.client(given) as client:
            return await client.post(path, content=content, headers=headers, **more)

    async def connect(self, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which this was sent."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=self.trust)
        writer.write(sent)
        return reader, writer

    def call(self, fields: Any, *headers: str, path: str = "/v1/chat/completions") -> bytes:
        """One call's bytes."""
        body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
        lines = [
            f"POST {path} HTTP/1.1", "host: door", f"authorization: Bearer {self.key}",
            "content-type: application/json", f"content-length: {len(body)}", *headers,
        ]  # fmt: skip
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@asynccontextmanager
async def site(
    folder: Path,
    *grants: KeyGrant,
    clock: TimeSource = monotonic,
    wall: TimeSource = time.time,
    pages: tuple[str, ...] = (),
    authority: Authority | None = None,
    traces: CallTracer | None = None,
    **limits: Any,
) -> AsyncIterator[Site]:
    """A door with one key that may use everything, and `grants`; it knows no models.

    pages: origins of web pages that may call. authority: signs the door's certificate; None: it
    speaks plain HTTP. traces: makes spans; None: there are none.
    """
    shown, grant = key(scopes=("infer", "read", "admin"))
    wanted: list[str] = []
    api = str(folder / "api")
    door = ProxyApp(
        ModelDirectory(), HttpConfig(**limits), api, wanted.append, clock=clock, wall=wall,
        cross_origin=CrossOrigin(pages), traces=traces,
    )  # fmt: skip
    door.apply(FleetSnapshot(version=1, pepper=PEPPER, keys=(grant, *grants)))
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    connection = DoorConnection.limited(5.0, door.count_refused)
    server, trust = uvicorn_server(door, connection, access_log=False), None
    if authority is not None:
        context, trust = load_certificate(authority.write(folder)).context, authority.trusting()
        server = TlsServer(server.config, connection, lambda: context)
    task = HttpTask(sock, lambda: server)
    try:
        await task.run(server.serve([sock]))
        yield Site(door, port, folder, shown, wanted, trust)
    finally:
        door.close()
        await task.stop(GRACE_S)
