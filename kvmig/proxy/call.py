"""One HTTP call as its client sees it: the connection, the proxy's own answers, a deployment's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from math import ceil
from typing import Any, cast

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvmig.asgi import request_body as gateway
from kvmig.asgi.body_budget import BodyBudget, BodyShare
from kvmig.asgi.call import CALL_ID, HttpCall, accepted
from kvmig.asgi.connection import HttpConnection
from kvmig.asgi.error_forms import EventNumbers, api_of
from kvmig.asgi.error_stage import ErrorStage
from kvmig.asgi.plain_paths import plain_path
from kvmig.asgi.route_table import Api
from kvmig.proxy.calls import error_body, error_event, heartbeat, unnamed
from kvmig.proxy.door_trace import DoorTrace
from kvmig.proxy.refusals import ProxyRefusal
from kvmig.proxy.relay import (
    LAST_CHUNK,
    AnswerHead,
    ChunkedFraming,
    NullTransport,
    UnchunkedTransport,
    UpstreamCall,
)

CLIENT_ADDRESS = b"x-kvmig-client-address"
"""Header by which a host that stands by names the client of a call that it relays."""
SHOWN = "kvmig.connection"
"""Key of an ASGI scope's connection and its cycle."""
EVENTS = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"cache-control: no-cache\r\n"
)
CHUNKED = b"transfer-encoding: chunked\r\n"
NOTHING = (b"", b"")
KEPT_BYTES = 1 << 16
"""Most bytes of a body that is kept until the answer begins, so that it may be sent again..."""
MOST_KEPT = 1 << 26
"""... and of all that are kept at once."""
CUT_S = 0.2
"""Time to read the body of a call that may not go on."""
DIED = ProxyRefusal(
    HTTPStatus.INTERNAL_SERVER_ERROR,
    "the model's deployment ended while it answered",
    "deployment_ended",
)


def on_lost_nothing() -> None:
    """Do nothing when the connection is lost."""


class ClientGone(Exception):
    """The client has left."""


class DoorConnection(HttpConnection):
    """A client's connection. It shows itself to the proxy's app, which writes to it."""

    each = 2
    """The other one is a deployment's."""
    of_peer = False
    """Whether another host of the fleet has made it, for calls of that host's clients."""
    too_many = False
    """Whether it is of the last tenth that there can be: answers to its calls show that."""
    upstream: UpstreamCall | None = None
    """The upstream whose answer goes to the client now."""
    on_lost: Callable[[], None] = staticmethod(on_lost_nothing)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.too_many = len(self.connections) > 0.9 * self.most

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        cast("dict[str, Any]", self.scope)[SHOWN] = (self, self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.on_lost()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.upstream is not None:
            self.upstream.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.upstream is not None:
            self.upstream.resume()


class SharedConnection(DoorConnection):
    """A client's connection where hosts that stand by connect, too."""

    each = 4
    """Half of the files are for their connections."""


class PeerConnection(SharedConnection):
    """A connection that a host which stands by has made, by the fleet's secret."""

    of_peer = True


class ProxiedCall:
    """One HTTP call."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection, cycle = scope[SHOWN]
        self.connection: DoorConnection = connection
        self.cycle: RequestResponseCycle = cycle
        self.scope = scope
        self.receive = receive
        self.send = send
        self.method: str = scope["method"]
        self.path = plain_path(scope["path"])
        self.headers = Headers(raw=scope["headers"])
        self.call_id = accepted(self.headers.get(CALL_ID))
        self.api: Api = api_of(unnamed(self.path))
        self.asking = NOTHING
        """Head and body, as they go on."""
        self.errand: tuple[bytes, list[tuple[bytes, bytes]], bytes] | None = None
        """Path, headers and body for a deployment, until it answers, if they are kept."""
        self.kept: BodyShare | None = None
        """What its errand takes of the room for those that a deployment has been sent."""
        self.body: BodyShare | None = None
        """What its body takes of the room for bodies, until all of it is written."""
        self.granted = False
        """Whether the server grants its tokens."""
        self.session_key = ""
        """Prefix of the key of the page's session that it is of; empty: it has a key of its own."""
        self.numbers = EventNumbers()
        self.beats = 0
        """Signs of life that were sent; from the first on the answer is a stream."""
        self.cut: ProxyRefusal | None = None
        """Why it may not go on."""
        self.over = False
        self.background = False
        """Whether its deployment goes on with it after the answer, as long as its connection to the
        proxy is there."""
        self.hang_up: Callable[[], None] | None = None
        """Leaves the deployment that it asks; None: it asks none."""
        self.patience_s = 0.0
        """Time for an answer that is on its way when the call may not go on."""
        self.limits: list[tuple[bytes, bytes]] = []
        """Headers with limits."""
        self.cross_origin: list[tuple[bytes, bytes]] = []
        """Headers of all its answers, for the browser of a page that calls."""
        self.trace: DoorTrace | None = None
        """The call's spans; None: there are none."""
        self.chunks = scope["http_version"] != "1.0"
        """Whether its client knows chunks."""

    @property
    def address(self) -> str:
        """The client's, as the socket says, or the host of the fleet that relays the call; uvicorn
        would believe a header of any client."""
        if self.connection.of_peer:
            return self.headers.get(CLIENT_ADDRESS.decode(), "")
        client = self.connection.client
        return client[0] if client else ""

    @property
    def gone(self) -> bool:
        """Whether the client has left."""
        return self.connection.transport.is_closing()

    @property
    def key(self) -> str:
        """The key, as OpenAI's clients send it, or Anthropic's."""
        kind, _, given = self.headers.get("authorization", "").partition(" ")
        return (given if kind.lower() == "bearer" else self.headers.get("x-api-key", "")).strip()

    def set_request(self, path: bytes, headers: list[tuple[bytes, bytes]], content: bytes) -> None:
        """What a deployment, or the server, will be asked. path: with the query."""
        lines = [b"%s %s HTTP/1.1" % (self.method.encode(), path)]
        lines += [b"%s: %s" % one for one in headers]
        lines.append(b"x-request-id: %s\r\nconnection: close" % self.call_id.encode())
        if content or self.method not in ("GET", "HEAD", "DELETE", "OPTIONS"):
            lines.append(b"content-length: %d" % len(content))
        self.asking = (b"\r\n".join(lines) + b"\r\n\r\n", content)

    def keep_errand(self, room: BodyBudget, account: str) -> None:
        """Keep the errand until a deployment answers, if it is small and there is room."""
        if self.errand is not None and self.kept is None:
            self.kept, size = room.enter(account), len(self.errand[2])
            if size > KEPT_BYTES or self.kept.count_bytes(size):
                self.errand = None

    def drop_errand(self) -> None:
        """Free the errand: it is sent no more. A second call does nothing."""
        self.errand = None
        if self.kept is not None:
            self.kept.give_back()

    def give_body_back(self) -> None:
        """Free the body's share of the budget."""
        if self.body is not None:
            self.body.give_back()

    def check(self) -> None:
        """Raises ClientGone if the client has left, ProxyRefusal for a call that may not go on."""
        if self.gone:
            raise ClientGone
        if self.cut is not None:
            raise self.cut

    def cut_off(self, why: ProxyRefusal) -> None:
        """End the call, in any wait."""
        if self.patience_s:
            loop = asyncio.get_running_loop()
            loop.call_later(self.patience_s, self._cut_off, why)
        else:
            self._cut_off(why)

    def _cut_off(self, why: ProxyRefusal) -> None:
        if self.over or self.cut is not None:
            return
        self.cut = why
        (self.hang_up or self.connection.on_lost)()
        self.cycle.message_event.set()  # the rest of its body

    async def receive_part(self) -> Message:
        """The next part of the body. Raises ProxyRefusal for a call that may not go on."""
        message = await self.receive()
        if self.cut is not None:
            raise self.cut
        return message

    # -- answers of the proxy's own

    async def answer(
        self,
        status: int,
        body: bytes,
        kind: str = "application/json",
        headers: dict[str, str] | None = None,
    ) -> None:
        """Send a whole answer."""
        response = Response(body, status, {**(headers or {}), CALL_ID: self.call_id}, kind)
        self.allow_page(response)
        await response(self.scope, self.receive, self.send)

    def allow_page(self, response: Response) -> None:
        """Let the page that calls read it."""
        for name, value in self.cross_origin:
            response.headers[name.decode()] = value.decode()

    async def refuse(self, why: ProxyRefusal, unread: int = 0) -> None:
        """An error, in the form that fits what the client has got so far.

        unread: how much of the call's body is taken, and dropped; the connection is closed then.
        """
        if self.beats:
            self._write_chunk(error_event(self.api, why.status, str(why), why.code))
            self._write_last()
            self.finish()
            return
        own = [*self.limits, *why.headers]
        headers = {name.decode(): value.decode() for name, value in own}
        if why.again_s is not None:
            headers["Retry-After"] = str(max(1, ceil(why.again_s)))
        if why.status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        if unread:
            headers["connection"] = "close"
            within_s = gateway.DISCARD_S if self.cut is None else CUT_S
            await gateway.discard(self.receive, unread, within_s)
        body = error_body(self.api, why.status, str(why), why.code)
        await self.answer(why.status, body, headers=headers)

    def send_keepalive(self, sentence: str) -> None:
        """Show a waiting client that the call lives."""
        if not self.beats:
            own = b"x-request-id: %s\r\n" % self.call_id.encode()
            if not self.cycle.keep_alive:
                own += b"connection: close\r\n"
            if self.chunks:
                own += CHUNKED
            own += b"".join(b"%s: %s\r\n" % one for one in self.cross_origin)
            self.connection.transport.write(EVENTS + own + b"\r\n")
            self.cycle.response_started = True
        self._write_chunk(heartbeat(self.api, sentence))
        self.beats += 1

    def _write_chunk(self, data: bytes) -> None:
        chunk = b"%x\r\n%s\r\n" % (len(data), data) if self.chunks else data
        self.connection.transport.write(chunk)

    def _write_last(self) -> None:
        if self.chunks:
            self.connection.transport.write(LAST_CHUNK)

    # -- answers of a deployment

    def begin(self, head: AnswerHead, own: list[tuple[bytes, bytes]]) -> None:
        """Write its head, with headers of our own."""
        own = [*own, *self.limits, *self.cross_origin]
        own.append((CALL_ID.encode(), self.call_id.encode()))
        if not self.cycle.keep_alive:
            own.append((b"connection", b"close"))
        self.connection.transport.write(head.rewritten(own, chunks=self.chunks))
        self.cycle.response_started = True

    async def pass_on(self, upstream: UpstreamCall) -> None:
        """Pass the body on as it comes."""
        connection = self.connection
        connection.upstream = upstream
        if self.api == "responses":
            upstream.watch = self.numbers.feed
        try:
            plain = not self.chunks and isinstance(upstream.framing, ChunkedFraming)
            client: asyncio.WriteTransport = NullTransport() if self.gone else connection.transport
            upstream.pass_to(UnchunkedTransport(client) if plain else client)
            if connection.flow.write_paused:
                upstream.pause()
            await upstream.ended
        finally:
            connection.upstream = None

    def end(self, upstream: UpstreamCall, events: bool) -> None:
        """Whether its answer is complete or not."""
        if self.gone or upstream.framing.ended:
            self.finish()
        elif events and upstream.framing.whole:
            why = self.cut or DIED
            number = self.numbers.next
            self._write_chunk(error_event(self.api, why.status, str(why), why.code, number))
            self._write_last()
            self.finish()
        else:
            self.cycle.keep_alive = False  # the client must see that something is missing
            self.finish()

    def finish(self) -> None:
        """The answer is written."""
        cycle = self.cycle
        cycle.response_started = cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.connection.transport.close()
        cycle.on_response()


async def serve_call(
    call: ProxiedCall,
    serve: Callable[[ProxiedCall], Awaitable[None]],
    note_status: Callable[[int], None] | None = None,
) -> None:
    """Serve a call to its end: a refusal is its answer, and what it holds is given back.

    note_status: gets the status of a refusal.
    """
    expects = "expect" in call.headers
    try:
        await serve(call)
    except ProxyRefusal as why:
        if note_status is not None:
            note_status(why.status)
        if not call.gone:
            comes = call.cycle.more_body and not expects
            await call.refuse(why, gateway.UNREAD_BYTES if comes else 0)
    except gateway.HttpRejection as no_body:
        if note_status is not None:
            note_status(no_body.answer.status_code)
        if no_body.unread and not expects:
            await gateway.discard(call.receive, no_body.unread)
        stage = ErrorStage(call.api, HttpCall(call.call_id), call.send, worded=True)
        call.allow_page(no_body.answer)
        await no_body.answer(call.scope, call.receive, stage.send)
    except ClientGone:
        call.finish()
    finally:
        call.over = True
        call.give_body_back()
