"""The last stage of an answer: every error leaves in its API's form, in an answer or in a stream.

Engines' applications turn one API's stream into another's, and errors get lost on that way. Here
the stream is what the client reads, and the call knows why it failed (`HttpCall.failure`).
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from http import HTTPStatus

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvmig.asgi.call import HttpCall
from kvmig.asgi.error_forms import (
    ApiError,
    EventNumbers,
    error_body,
    error_event,
    is_error_event,
    read_error,
    read_event,
    stream_end,
)
from kvmig.asgi.route_table import Api

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 20
"""Most bytes of an error's body; a larger one is passed on as it is."""
RETRY_AFTER_S = 5
"""Retry-After of a 503 without one."""
UNKNOWN = ApiError(500, "Internal server error")
"""Error of a stream that broke off without a reason."""


class ErrorStage:
    """One call's answer. Give `send` to the application, or let `run` do it."""

    def __init__(self, api: Api, call: HttpCall, send: Send, *, worded: bool) -> None:
        """worded: codes are words, as a fleet's clients know them, not vLLM's numbers."""
        self._api = api
        self._call = call
        self._send = send
        self._worded = worded
        self._start: Message | None = None
        """Start of an answer that is an error: it leaves with its new body."""
        self._body = b""
        self._streams = self._told = self._ended = False
        self._numbers = EventNumbers() if api == "responses" else None

    async def run(self, app: ASGIApp, scope: Scope, receive: Receive) -> None:
        """Serve the call; a stream that its application breaks off ends with an error."""
        try:
            await app(scope, receive, self.send)
        except Exception:
            if not self._streams or self._ended:
                raise  # the server's own handler answers, or the answer is there already
            if self._call.failure is None:
                logger.exception("the stream of call %s broke off", self._call.call_id)
            why = b"" if self._told else self._event(self._call.failure or UNKNOWN)
            data = why + stream_end(self._api)
            await self._send({"type": "http.response.body", "body": data})
            self._ended = True

    def send(self, message: Message) -> Awaitable[None]:
        """ASGI. No coroutine of its own: each costs every token of a stream a step."""
        if message["type"] == "http.response.body":
            if self._start is not None:
                return self._collect(message)
            return self._send(self._checked_event(message) if self._streams else message)
        if message["type"] == "http.response.start":
            return self._begin(message)
        return self._send(message)

    async def _begin(self, message: Message) -> None:
        headers = MutableHeaders(scope=message)
        kind = headers.get("content-type", "")
        if message["status"] == HTTPStatus.SERVICE_UNAVAILABLE:
            headers.setdefault("retry-after", str(RETRY_AFTER_S))  # an engine's own has none
        if message["status"] >= 400 and kind.startswith(("application/json", "text/plain")):
            self._start = message
            return
        self._streams = kind.startswith("text/event-stream")
        await self._send(message)

    async def _collect(self, message: Message) -> None:
        """An error's body, until it is whole."""
        start = self._start
        assert start is not None
        self._body += message.get("body", b"")
        more = message.get("more_body", False)
        if more and len(self._body) <= MOST_BYTES:
            return
        self._start = None
        headers = MutableHeaders(scope=start)
        status = start["status"]
        error = None if more else read_error(status, self._body)
        if error is None and headers["content-type"].startswith("text/plain") and self._body:
            error = ApiError(status, self._body[:MOST_BYTES].decode(errors="replace").strip())
        if error is not None:
            self._body = error_body(self._api, self._said(error))
            headers["content-type"] = "application/json"
            headers["content-length"] = str(len(self._body))
        await self._send(start)
        await self._send({**message, "body": self._body})

    def _checked_event(self, message: Message) -> Message:
        """A part of a stream, or what leaves in its place."""
        body = message.get("body", b"")
        data = bytes(body)
        if is_error_event(self._api, data):
            data = self._event(self._call.failure or read_event(data) or UNKNOWN)
        elif self._numbers is not None:
            self._numbers.feed(data)
        self._ended = not message.get("more_body", False)
        failure = self._call.failure
        if failure is not None and not self._told and self._closes(data):
            data = self._event(failure) + (data or stream_end(self._api))
        return message if data is body else {**message, "body": data}

    def _closes(self, data: bytes) -> bool:
        """Whether the stream ends with it, so that nothing can be said any more."""
        end = stream_end(self._api)
        return self._ended or (end != b"" and data == end)

    def _event(self, error: ApiError) -> bytes:
        self._told = True
        number = 0 if self._numbers is None else self._numbers.next
        return error_event(self._api, self._said(error), number)

    def _said(self, error: ApiError) -> ApiError:
        return error.worded() if self._worded else error
