"""Calls that offer another protocol are answered as calls of HTTP/1.1, with their bodies."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from kvmig.asgi.connection import HttpConnection
from kvmig.asgi.request_parser import RequestParser
from kvmig.asgi.uvicorn_task import HttpTask, uvicorn_server

OFFERS = ("h2c", "websocket", "foo/2")
HIDDEN = b"GET /hidden HTTP/1.1\r\nhost: x\r\n\r\n"
"""A body that would be a call if it were read as one."""


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the path and the body."""
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    said = json.dumps([scope["method"], scope["path"], body.decode()]).encode()
    own = [(b"content-length", b"%d" % len(said))]
    await send({"type": "http.response.start", "status": 200, "headers": own})
    await send({"type": "http.response.body", "body": said})


@asynccontextmanager
async def served() -> AsyncIterator[int]:
    """The port of a server that echoes."""
    sock = socket.create_server(("127.0.0.1", 0))
    port: int = sock.getsockname()[1]
    server = uvicorn_server(echo, HttpConnection.limited(30.0, lambda _: None), access_log=False)
    task = HttpTask(sock, lambda: server)
    await task.run(server.serve([sock]))
    try:
        yield port
    finally:
        await task.stop(2.0)


async def answers(port: int, *parts: bytes) -> list[Any]:
    """What calls got, of which the last one ends the connection. parts: sent one by one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with closing(writer):
        for one in parts:
            writer.write(one)
            await writer.drain()
            await asyncio.sleep(0.02)
        async with asyncio.timeout(30):
            said = await reader.read()
    assert b" 400 " not in said, said
    return [json.loads(one.split(b"]")[0] + b"]") for one in said.split(b"\r\n\r\n")[1:]]


def call(body: bytes, offer: str = "", *, chunked: bool = False, last: bool = False) -> bytes:
    lines = ["POST /own HTTP/1.1", "host: x"]
    if offer:
        lines += [f"upgrade: {offer}", "http2-settings: AAMAAABkAAQAAP__"]
        lines.append("connection: Upgrade, HTTP2-Settings" + (", close" if last else ""))
    elif last:
        lines.append("connection: close")
    lines.append("transfer-encoding: chunked" if chunked else f"content-length: {len(body)}")
    if chunked:
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("offer", OFFERS)
async def test_a_call_that_offers_another_protocol_keeps_its_body(
    offer: str, chunked: bool
) -> None:
    sent = call(HIDDEN, offer, chunked=chunked, last=True)
    head, _, body = sent.partition(b"\r\n\r\n")
    own = ["POST", "/own", HIDDEN.decode()]
    async with served() as port:
        assert await answers(port, sent) == [own], "in one piece"
        assert await answers(port, head + b"\r\n\r\n", body) == [own], "its body apart"
        assert await answers(port, *(sent[at : at + 50] for at in range(0, len(sent), 50))) == [own]


async def test_calls_behind_one_that_offers_another_protocol_are_answered_in_their_order() -> None:
    calls = [call(b"one", "h2c"), call(b"two"), call(b"three", "foo", chunked=True)]
    every = [*calls, call(b"", "h2c"), call(HIDDEN, last=True)]
    own = [["POST", "/own", one] for one in ("one", "two", "three", "", HIDDEN.decode())]
    async with served() as port:
        assert await answers(port, b"".join(every)) == own
        assert await answers(port, *every) == own


class Heard:
    """Takes a parser's calls."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.bodies: list[bytes] = []
        self.ended = 0

    def on_message_begin(self) -> None:
        self.headers = []
        self.bodies.append(b"")

    def on_url(self, url: bytes) -> None:
        assert url in b"/own"

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        assert self.headers

    def on_body(self, body: bytes) -> None:
        self.bodies[-1] += body

    def on_message_complete(self) -> None:
        self.ended += 1
        assert self.ended == len(self.bodies)


@given(
    st.lists(st.tuples(st.binary(max_size=40), st.sampled_from(("", *OFFERS)), st.booleans())),
    st.integers(1, 64),
)
def test_bodies_are_the_same_with_and_without_offers_however_they_come(
    calls: list[tuple[bytes, str, bool]], size: int
) -> None:
    heard = Heard()
    parser = RequestParser(heard)
    calls = [(body or b"x", offer, chunked) for body, offer, chunked in calls]
    sent = b"".join(call(body, offer, chunked=chunked) for body, offer, chunked in calls)
    for at in range(0, len(sent), size):
        parser.feed_data(sent[at : at + size])
    assert heard.bodies == [body for body, _, _ in calls]
    assert heard.ended == len(calls)


def test_many_offers_at_once_are_read_one_after_the_other() -> None:
    heard = Heard()
    RequestParser(heard).feed_data(call(b"x", "h2c") * 3000)
    assert heard.bodies == [b"x"] * 3000
