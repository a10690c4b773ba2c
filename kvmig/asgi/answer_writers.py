"""Which instance writes which part of a streamed answer, for clients that ask for it. Pure.

Comments of the stream name it, which clients of server-sent events ignore:
`: kvmig {"instance":"2","token":57}` stands for: instance 2 writes from output token 57 on.
"""

from __future__ import annotations

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Send

HEADER = "x-kvmig-writers"
"""Header of a call that asks for it."""
EVENTS = "text/event-stream"


class AnswerWriters:
    """The writers of one answer."""

    def __init__(self) -> None:
        self._writer = ""
        self._changes: list[tuple[str, int]] = []
        self._streams = False
        """Whether the answer is a stream: no other one has comments."""

    def add_token(self, instance: str, token: int) -> None:
        """An output token, by its number, and the instance that wrote it."""
        if instance != self._writer:
            self._writer = instance
            self._changes.append((instance, token))

    def take_comments(self) -> bytes:
        """What is new since the last call, as events; they go before the next event."""
        if not self._changes:
            return b""
        changes, self._changes = self._changes, []
        rows = ({"instance": instance, "token": token} for instance, token in changes)
        return b"".join(b": kvmig " + msgspec.json.encode(one) + b"\n\n" for one in rows)

    def wrap_send(self, send: Send) -> Send:
        """The same ASGI channel, whose stream has the comments."""

        async def send_shown(message: Message) -> None:
            if message["type"] == "http.response.start":
                kind = Headers(raw=message.get("headers", [])).get("content-type", "")
                self._streams = kind.startswith(EVENTS)
            elif self._streams and message.get("body") and (comments := self.take_comments()):
                message = {**message, "body": comments + message["body"]}
            await send(message)

        return send_shown


def show_writers(headers: Headers, send: Send) -> tuple[AnswerWriters | None, Send]:
    """The writers of a call's answer, None where it does not ask for them, and its ASGI channel."""
    if HEADER not in headers:
        return None, send
    writers = AnswerWriters()
    return writers, writers.wrap_send(send)
