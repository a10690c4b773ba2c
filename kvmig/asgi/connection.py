"""A client's HTTP connection, with bounds on what a slow client costs."""

from __future__ import annotations

import asyncio
import math
import resource
from collections.abc import Callable
from typing import Any, ClassVar, Self, cast

from httptools import HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvmig.asgi.call import HttpCall
from kvmig.asgi.request_parser import RequestParser
from kvmig.core.config import HEAD_BYTES, HEAD_S, SPARE_FILES, HttpConfig

SCOPE = "kvmig.call"
"""Key of an ASGI scope's `HttpCall`; the connection looks for it there."""

REQUEST_TIMEOUT, HEADERS_TOO_LARGE = 408, 431


def most_clients(each: int) -> float:
    """Connections that this process has files for. each: files that one of them takes."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return math.inf
    return (files - min(SPARE_FILES, files // 4)) // each


class HttpConnection(HttpToolsProtocol):
    """uvicorn's HTTP connection, with bounds on a head's size and time, and on a pause in reading.

    uvicorn waits for a call's headers without end, and keeps all that comes of them; and it waits
    without end for a client that doesn't read its answer. This class has no limits of its own: a
    front end serves with one that has, see `limited`. `on_refusal` gets answers that are sent
    before there is a call.
    """

    each: ClassVar[int] = 1
    """Files that the process has open for one connection."""
    most: ClassVar[float] = math.inf
    """Connections at once; one more is closed: the process needs files for more than clients."""
    head_bytes: ClassVar[int] = HEAD_BYTES
    head_s: ClassVar[float] = HEAD_S
    send_timeout_s: ClassVar[float] = HttpConfig().send_timeout_s
    on_refusal: ClassVar[Callable[[int], None]] = staticmethod(lambda status: None)

    _in_head = True
    _came = 0
    _late: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _paused: HttpCall | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        """Takes what uvicorn gives a connection."""
        super().__init__(*args, **options)
        self.parser = cast("HttpRequestParser", RequestParser(self))

    @classmethod
    def limited(cls, send_timeout_s: float, on_refusal: Callable[[int], None]) -> type[Self]:
        """The connections of one front end: uvicorn makes them, and gives them nothing else."""
        own = {
            "most": most_clients(cls.each),
            "send_timeout_s": send_timeout_s,
            "on_refusal": staticmethod(on_refusal),
        }
        return type(cls.__name__, (cls,), own)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most:
            transport.abort()
        else:
            self._begin_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_head()
        self._end_pause()
        if (call := self._call()) is not None:
            call.lose_client()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client hasn't read for so long that everything in between is full."""
        super().pause_writing()
        self._end_pause()
        self._unread = self.loop.call_later(self.send_timeout_s, self.transport.abort)
        self._paused = self._call()
        if self._paused is not None:
            self._paused.stopped_reading()

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

    def _call(self) -> HttpCall | None:
        """The one that is answered, or was last."""
        return cast("dict[str, HttpCall]", self.scope or {}).get(SCOPE)

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
        if self._paused is not None:
            self._paused.reads_again()
            self._paused = None

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
