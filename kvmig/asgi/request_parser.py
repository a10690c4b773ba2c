"""Calls that offer another protocol (`Upgrade: h2c`) are read as what they are: calls of HTTP/1.1.

A server may ignore such an offer (RFC 9110, 7.8), and clients of Java and Kotlin make it with every
call. httptools takes it for accepted: it reads no body, and leaves what comes next to the other
protocol (httptools #124, uvicorn #2722). The body would be lost, or be read as calls.
"""

from __future__ import annotations

from typing import Protocol

from httptools import HttpParserUpgrade, HttpRequestParser

_FRAMING = (b"connection", b"content-length", b"transfer-encoding")
"""Headers that say where a body ends."""


class ParserEvents(Protocol):
    """What a parser calls, as uvicorn's connection has it."""

    headers: list[tuple[bytes, bytes]]
    """The present call's, names in lower case."""

    def on_message_begin(self) -> None: ...
    def on_url(self, url: bytes) -> None: ...
    def on_header(self, name: bytes, value: bytes) -> None: ...
    def on_headers_complete(self) -> None: ...
    def on_body(self, body: bytes) -> None: ...
    def on_message_complete(self) -> None: ...


class _CallEvents:
    """A connection's methods for one parser."""

    def __init__(self, events: ParserEvents) -> None:
        self.on_message_begin = events.on_message_begin
        self.on_url = events.on_url
        self.on_header = events.on_header
        self.on_headers_complete = events.on_headers_complete
        self.on_body = events.on_body


class _LaterEvents:
    """The same for a parser that begins within a call, whose head the connection knows."""

    def __init__(self, events: ParserEvents) -> None:
        self._events = events
        self.in_call = True
        self.on_body = events.on_body

    def on_message_begin(self) -> None:
        if not self.in_call:
            self._events.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self.in_call:
            self._events.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self.in_call:
            self._events.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self.in_call:
            self._events.on_headers_complete()


class RequestParser:
    """httptools' parser, for a connection that accepts no other protocol."""

    def __init__(self, events: ParserEvents) -> None:
        self._events = events
        self._parser = self._make_parser(_CallEvents(events))

    def feed_data(self, data: bytes) -> None:
        """Read what has come. Raises httptools.HttpParserError."""
        while True:
            try:
                self._parser.feed_data(data)
            except HttpParserUpgrade as offer:
                self._go_on_in_call()
                data = data[offer.args[0] :]
            else:
                return

    def get_http_version(self) -> str:
        """The present call's."""
        version: str = self._parser.get_http_version()
        return version

    def get_method(self) -> bytes:
        """The present call's."""
        method: bytes = self._parser.get_method()
        return method

    def should_keep_alive(self) -> bool:
        """Whether the connection may stay after the present call."""
        keeps: bool = self._parser.should_keep_alive()
        return keeps

    def should_upgrade(self) -> bool:
        """Whether the connection goes on in another protocol: never."""
        return False

    def _make_parser(self, events: _CallEvents | _LaterEvents) -> HttpRequestParser:
        parser: HttpRequestParser

        def end_message() -> None:
            if not parser.should_upgrade():  # else its body is still to come
                self._events.on_message_complete()

        vars(events)["on_message_complete"] = end_message
        parser = HttpRequestParser(events)
        # As uvicorn does: what comes behind a call that ends the connection is no error.
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def _go_on_in_call(self) -> None:
        """Begin again behind the head of the present call, without the offer in it."""
        lines = [b"POST / HTTP/%s" % self.get_http_version().encode()]
        lines += [b"%s: %s" % one for one in self._events.headers if one[0] in _FRAMING]
        later = _LaterEvents(self._events)
        self._parser = self._make_parser(later)
        self._parser.feed_data(b"\r\n".join(lines) + b"\r\n\r\n")
        later.in_call = False
