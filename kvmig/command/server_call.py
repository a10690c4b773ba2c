"""One attempt of a call at one server: the request as it is sent, the parts of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Self, cast

from kvmig.command.server_pool import ServerInstance
from kvmig.proxy.relay import (
    OWN,
    AnswerHead,
    ChunkedFraming,
    UnchunkedTransport,
    UpstreamCall,
    UpstreamProtocolError,
)

MOST_UNREAD = 1 << 18
"""Bytes of an answer that wait for their client, at most; then the server isn't read."""
NOT_PASSED = OWN | {
    b"accept-encoding", b"authorization", b"content-length", b"cookie", b"expect", b"forwarded",
    b"host", b"transfer-encoding", b"x-api-key", b"x-real-ip",
}  # fmt: skip
OURS = (b"x-kvmig-", b"x-forwarded-", b"x-vllm-priority")
"""Beginnings of headers that no server gets."""


class _Parts(asyncio.WriteTransport):
    """Keeps what comes of an answer until it is taken."""

    def __init__(self, upstream: UpstreamCall) -> None:
        super().__init__()
        self.came = asyncio.Event()
        self._upstream = upstream
        self._data = bytearray()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._data += data
        self.came.set()
        if len(self._data) > MOST_UNREAD:
            self._upstream.pause()

    def take(self) -> bytes:
        """What has come since the last call."""
        data, self._data = bytes(self._data), bytearray()
        self.came.clear()
        self._upstream.resume()
        return data


class ServerCall:
    """`begin` it, read `head`, then `next_part` until it is empty; `close` it in any case."""

    def __init__(self, instance: ServerInstance, upstream: UpstreamCall) -> None:
        self.instance = instance
        self._upstream = upstream
        self._parts = _Parts(upstream)

    @classmethod
    async def begin(cls, instance: ServerInstance) -> Self | None:
        """A connection; None: the server takes none."""
        upstream = await instance.connect(UpstreamCall)
        return None if upstream is None else cls(instance, cast("UpstreamCall", upstream))

    async def send(
        self, method: str, target: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> AnswerHead:
        """The head of the answer. Raises UpstreamProtocolError."""
        lines = [b"%s %s HTTP/1.1" % (method.encode(), target), b"host: server"]
        lines += [
            b"%s: %s" % one
            for one in headers
            if one[0] not in NOT_PASSED and not one[0].startswith(OURS)
        ]
        lines += [b"connection: close", b"content-length: %d" % len(body)]
        head = b"\r\n".join(lines) + b"\r\n\r\n"
        self._upstream.send(method, head, body, lambda: None)
        found = await self._upstream.head
        chunked = isinstance(self._upstream.framing, ChunkedFraming)
        self._upstream.pass_to(UnchunkedTransport(self._parts) if chunked else self._parts)
        self._upstream.ended.add_done_callback(lambda _: self._parts.came.set())
        return found

    async def next_part(self) -> bytes:
        """The next part of the body; empty: it is complete. Raises UpstreamProtocolError for one
        that breaks off."""
        while True:
            await self._parts.came.wait()
            ended = self._upstream.ended.done()
            if part := self._parts.take():
                if ended:
                    self._parts.came.set()
                return part
            if not ended:
                continue
            self._parts.came.set()
            if not self._upstream.framing.ended:
                raise UpstreamProtocolError("its answer broke off")
            return b""

    def close(self) -> None:
        """Leave: a server that still works for the call sees the connection end."""
        self._upstream.abort()
