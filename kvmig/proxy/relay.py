"""One answer of a deployment, on its way to a client: a new head, the body as it is.

A connection to a deployment serves one call. What comes of the body is written to the client's
connection as it came; the relay only knows where chunks end, and where the body does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, cast

from kvmig.asgi.error_forms import read_error
from kvmig.proxy.refusals import ProxyRefusal

HEAD_BYTES = 1 << 16
"""Most bytes of the head of a deployment's answer."""
OWN = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization",
        b"proxy-connection", b"te", b"trailer", b"upgrade", b"x-kvmig-not-taken", b"x-request-id",
    }
)  # fmt: skip
"""Headers of one connection only, what is said to the proxy, and the one that the proxy sets."""
CROSS_ORIGIN = b"access-control-"
"""Begins headers for browsers, which are the proxy's to set."""
LAST_CHUNK = b"0\r\n\r\n"
ERROR_BYTES = 1 << 20
"""Most bytes of a deployment's error that is sent at the end of a stream."""


class UpstreamProtocolError(Exception):
    """The deployment's answer can't be understood, or ended before its head did."""


@dataclass
class AnswerHead:
    """The head of an answer. Names of headers in lower case."""

    line: bytes
    status: int
    headers: list[tuple[bytes, bytes]]

    def get(self, name: bytes) -> bytes:
        """A header; empty without it."""
        return next((value for one, value in self.headers if one == name), b"")

    @property
    def events(self) -> bool:
        """Whether a stream of events follows."""
        return self.get(b"content-type").startswith(b"text/event-stream")

    def rewritten(self, own: list[tuple[bytes, bytes]], *, chunks: bool = True) -> bytes:
        """The head for the client. own: the proxy's headers. chunks: whether it knows them."""
        lines = [self.line]
        dropped = OWN if chunks else OWN | {b"transfer-encoding"}
        lines += [
            b"%s: %s" % one
            for one in self.headers
            if one[0] not in dropped and not one[0].startswith(CROSS_ORIGIN)
        ]
        lines += [b"%s: %s" % one for one in own]
        return b"\r\n".join(lines) + b"\r\n\r\n"


def parse_head(text: bytes) -> AnswerHead:
    """Raises UpstreamProtocolError."""
    line, *rest = text.split(b"\r\n")
    words = line.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise UpstreamProtocolError(f"its answer begins with {line[:60]!r}")
    headers = []
    for one in rest:
        name, _, value = one.partition(b":")
        headers.append((name.strip().lower(), value.strip()))
    return AnswerHead(b"HTTP/1.1 " + line.split(b" ", 1)[1], int(words[1]), headers)


# -- where a body ends. Each takes what comes, and says whether all of it is the body's.


class BodyFraming(Protocol):
    """`whole`: between two chunks. `ended`: the body is complete."""

    whole: bool
    ended: bool

    def feed(self, data: bytes) -> None:
        """What has come. Raises UpstreamProtocolError."""
        ...


def _is_chunk(data: bytes) -> bool:
    """Whether it is exactly one, and not the last."""
    end = data.find(b"\n")
    try:
        return end > 0 and 0 < int(data[:end], 16) == len(data) - end - 3
    except ValueError:
        return False  # it is half a line, or has an extension


@dataclass(slots=True)
class ChunkedFraming:
    """A body by `transfer-encoding: chunked`."""

    whole: bool = True
    ended: bool = False
    _left: int = 0
    _line: bytes = b""
    _trailing: bool = False

    def feed(self, data: bytes) -> None:
        if self.whole and _is_chunk(data):
            return  # as it nearly always is: what is written at once is read at once
        at, size = self._left, len(data)
        while at < size:
            end = data.find(b"\n", at)
            if end < 0:
                self._line += data[at:]
                at = size
                break
            line = data[at:end]
            if self._line:
                line, self._line = self._line + line, b""
            at = end + 1 + self._take(line)
        self._left = at - size
        self.whole = not (self._left or self._line or self._trailing)

    def _take(self, line: bytes) -> int:
        """Bytes until the next line, which belong to the chunk that this one begins."""
        if self._trailing:
            self.ended = self.ended or not line.strip()
            return 0
        try:
            length = int(line.split(b";", 1)[0], 16)
        except ValueError:
            length = -1
        if length < 0:
            raise UpstreamProtocolError(f"a chunk begins with {line[:60]!r}")
        if length:
            return length + 2
        self._trailing = True
        return 0


@dataclass
class LengthFraming:
    """A body by `content-length`."""

    left: int
    whole: bool = False
    ended: bool = field(init=False)

    def __post_init__(self) -> None:
        self.ended = self.left == 0

    def feed(self, data: bytes) -> None:
        self.left -= len(data)
        if self.left < 0:
            raise UpstreamProtocolError("its answer is longer than it says")
        self.ended = self.left == 0


@dataclass
class CloseFraming:
    """A body by the connection's end."""

    whole: bool = False
    ended: bool = True

    def feed(self, data: bytes) -> None:
        """Take the data: all of it belongs to the body."""


def framing_of(head: AnswerHead, method: str) -> BodyFraming:
    """Raises UpstreamProtocolError."""
    if method == "HEAD" or head.status in (204, 304):
        return LengthFraming(0)
    if b"chunked" in head.get(b"transfer-encoding").lower():
        return ChunkedFraming()
    length = head.get(b"content-length")
    if not length:
        return CloseFraming()
    if not length.isdigit():
        raise UpstreamProtocolError(f"its content-length is {length[:60]!r}")
    return LengthFraming(int(length))


# -- the connection


class UpstreamCall(asyncio.Protocol):
    """One call's connection to a deployment. `head`, then `pass_to`, then `ended`."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.head: asyncio.Future[AnswerHead] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done at the end of the body, or of the connection."""
        self.closed: asyncio.Future[None] = loop.create_future()
        self.framing: BodyFraming = CloseFraming()
        self.passed = 0
        """Bytes."""
        self.watch: Callable[[bytes], None] | None = None
        """Sees what of the body goes by."""
        self.before_last: Callable[[], None] | None = None
        """Called before the client gets the last of a body, and may send its next call."""
        self._method = "GET"
        self._transport: asyncio.Transport | None = None
        self._before = bytearray()
        self._client: asyncio.WriteTransport | None = None
        self._on_written: Callable[[], None] | None = None
        self._broken: UpstreamProtocolError | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def send(self, method: str, request: bytes, body: bytes, written: Callable[[], None]) -> None:
        """Send the request; once. written: is called when nothing of it is kept here any more."""
        assert self._transport is not None
        self._method = method
        self._on_written = written
        self._transport.set_write_buffer_limits(0)
        self._transport.writelines([request, body])
        if not self._transport.get_write_buffer_size():
            self.resume_writing()

    def resume_writing(self) -> None:
        """Report that the request is written."""
        if self._on_written is not None:
            self._on_written()
            self._on_written = None

    def data_received(self, data: bytes) -> None:
        if self._client is None:
            self._before += data
            if not self.head.done():
                self._look_for_head()
            return
        try:
            self.framing.feed(data)
        except UpstreamProtocolError as error:
            self._fail(error)
            return
        self.passed += len(data)
        if self.watch is not None:
            self.watch(data)
        ended = self.framing.ended and not isinstance(self.framing, CloseFraming)
        if ended and self.before_last is not None:
            self.before_last()
        self._client.write(data)
        if ended:
            self._end()

    def _look_for_head(self) -> None:
        text, end, rest = self._before.partition(b"\r\n\r\n")
        try:
            if not end:
                if len(text) > HEAD_BYTES:
                    raise UpstreamProtocolError(
                        f"its answer has a head of more than {HEAD_BYTES} bytes"
                    )
                return
            head = parse_head(bytes(text))
            self._before = rest
            if head.status < 200:  # more is to come
                self._look_for_head()
                return
            self.framing = framing_of(head, self._method)
        except UpstreamProtocolError as error:
            self._fail(error)
            return
        self.pause()  # until it is known whom the body is for
        self.head.set_result(head)

    def pass_to(self, client: asyncio.WriteTransport) -> None:
        """Pass the answer to the client from now on."""
        self._client = client
        before, self._before = bytes(self._before), bytearray()
        if before:
            self.data_received(before)
        if self.framing.ended and not isinstance(self.framing, CloseFraming):
            self._end()
        self.resume()

    def _end(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def _fail(self, error: UpstreamProtocolError) -> None:
        self._broken = error
        self.framing.whole = False
        self.abort()

    def pause(self) -> None:
        """The client doesn't read."""
        if self._transport is not None and self._transport.is_reading():
            self._transport.pause_reading()

    def resume(self) -> None:
        """The client reads again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def lose_client(self) -> None:
        """Read on without a client: the deployment goes on with what it does for the call."""
        if self._client is not None:
            self._client = NullTransport()
            self.resume()

    def abort(self) -> None:
        """Leave, at once: the deployment aborts what it does for the call."""
        self._client = None
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if not self.head.done():
            self.head.set_exception(self._broken or UpstreamProtocolError("its connection ended"))
            self.head.exception()  # whoever waits hears; nobody may
        self._end()
        if not self.closed.done():
            self.closed.set_result(None)


class UnchunkedTransport(asyncio.WriteTransport):
    """Passes on what is in chunks, for a client of HTTP/1.0, which knows none."""

    def __init__(self, client: asyncio.WriteTransport) -> None:
        super().__init__()
        self._client = client
        self._unread = bytearray()
        self._left = 0
        """Bytes that are left of the chunk."""
        self._over = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._unread += data
        while self._unread and not self._over:
            if not self._left and not self._begin_chunk():
                return
            part = bytes(self._unread[: self._left])
            del self._unread[: len(part)]
            self._left -= len(part)
            if part:
                self._client.write(part)

    def _begin_chunk(self) -> bool:
        """Whether one more line was there: a chunk's first one, or the end of one's last."""
        end = self._unread.find(b"\n")
        if end < 0:
            return False
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        if line.strip():
            self._left = int(line.split(b";", 1)[0], 16)  # the framing has read it before
            self._over = not self._left
        return True


class NullTransport(asyncio.WriteTransport):
    """Takes an answer whose client has left."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Drop the bytes."""


class ErrorSink(asyncio.WriteTransport):
    """Takes a deployment's error that no client reads as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.content = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if len(self.content) < ERROR_BYTES:
            self.content += data


async def error_of(head: AnswerHead, upstream: UpstreamCall) -> ProxyRefusal:
    """A deployment's answer that is no stream, for a client that has been promised one."""
    sink = ErrorSink()
    upstream.pass_to(sink)
    await upstream.ended
    error = read_error(head.status, bytes(sink.content))
    if error is None:
        message = f"the deployment answered with status {head.status}"
        return ProxyRefusal(head.status, message, "deployment_refused")
    return ProxyRefusal(head.status, error.message, error.code or "deployment_refused")
