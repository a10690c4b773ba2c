"""One HTTP connection: uvicorn's, but that a head is bounded in size and in time, as is waiting
for a client to read.

uvicorn waits for a call's headers for ever, and keeps whatever comes of them; and for ever for a
client that doesn't read its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ClassVar, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvmig.gateway.caller import SCOPE, Caller
from kvmig.gateway.readers import Readers
from kvmig.ground.http import HEAD_BYTES, HEAD_S, HttpConfig

REQUEST_TIMEOUT, HEADERS_TOO_LARGE = 408, 431


class Connection(HttpToolsProtocol):
    """One without limits of its own; a front end serves with a class that has them, see `limited`.

    `on_refusal` hears of what is answered before there is a call, `readers` of clients that
    don't read.
    """

    head_bytes: ClassVar[int] = HEAD_BYTES
    head_s: ClassVar[float] = HEAD_S
    read_timeout_s: ClassVar[float] = HttpConfig().read_timeout_s
    readers: ClassVar[Readers] = Readers(0)
    on_refusal: ClassVar[Callable[[int], None]] = staticmethod(lambda status: None)

    _in_head = True
    _came = 0
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _reader: Caller | None = None

    @classmethod
    def limited(
        cls, read_timeout_s: float, readers: Readers, on_refusal: Callable[[int], None]
    ) -> type[Connection]:
        """The connections of one front end: uvicorn makes them, and gives them nothing else."""
        own = {
            "read_timeout_s": read_timeout_s,
            "readers": readers,
            "on_refusal": staticmethod(on_refusal),
        }
        return type(cls.__name__, (cls,), own)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_pause()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client hasn't read for so long that everything in between is full."""
        super().pause_writing()
        self._end_pause()
        self._unread = self.loop.call_later(self.read_timeout_s, self.transport.abort)
        self._reader = cast("dict[str, Caller]", self.scope or {}).get(SCOPE)
        if self._reader is not None:
            type(self).readers.paused(self._reader)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_pause()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            # A read is small: what it has beyond the last call's body counts too much at most once.
            self._came += len(data)
            if self._came > self.head_bytes:
                self._refuse(HEADERS_TOO_LARGE, f"Headers of more than {self.head_bytes} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begin_head()

    def on_headers_complete(self) -> None:
        self._end_head()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        type(self).on_refusal(400)
        super().send_400_response(msg)

    def _begin_head(self) -> None:
        self._in_head, self._came = True, 0
        if self._late is None:
            self._late = self.loop.call_later(self.head_s, self._too_late)

    def _end_head(self) -> None:
        self._in_head = False
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end_pause(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        if self._reader is not None:
            type(self).readers.resumed(self._reader)
            self._reader = None

    def _too_late(self) -> None:
        self._late = None
        self._refuse(REQUEST_TIMEOUT, f"No headers within {self.head_s:g} s.")

    def _refuse(self, status: int, sentence: str) -> None:
        if self.transport.is_closing():
            return
        type(self).on_refusal(status)
        # Between two answers only: else it would end up inside of one. (None before the first.)
        if self.cycle is None or self.cycle.response_complete:  # type: ignore[redundant-expr]
            body = sentence.encode()
            head = STATUS_LINE[status] + (
                b"content-type: text/plain\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
                % len(body)
            )
            self.transport.write(head + body)
        self.transport.close()
