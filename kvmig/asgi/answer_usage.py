"""What an answer says of its own use: the ledger says the same. Pure.

Engines' applications know better than we what they count where a call is not one prompt with its
answers: several rounds of a model with tools in between, encoders, pairs of texts. Nothing but the
end of an answer is looked at, and no more of it is decoded than the few numbers. Answers of the
Responses API repeat objects of their calls, such as schemas of tools, where a client may have
written a usage: of those only the answer's own field is taken.
"""

from __future__ import annotations

import json
from collections import deque
from typing import Any, NamedTuple

import msgspec
from msgspec import Raw

from kvmig.asgi.route_table import Api

_KEY = b'"usage":'
"""Within a JSON string the quotes would be escaped: where this stands, it is a field's name."""
_MOST = 2_000
"""Bytes of a usage, at most."""
_EVENTS = 4
"""Last events of a stream among which its usage is."""
_DECODER = json.JSONDecoder()


class CallUsage(NamedTuple):
    """Tokens of a call."""

    prompt: int
    output: int


class _Response(msgspec.Struct):
    usage: Raw = Raw()


class _ResponseEvent(msgspec.Struct):
    """A response, or an event that holds it."""

    usage: Raw = Raw()
    response: _Response | None = None


class UsageReader:
    """The usage in one answer: `begin` it, `add_part` its parts, then `read_usage`."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._kind = ""
        self._parts: deque[bytes] = deque(maxlen=_EVENTS)

    def begin(self, content_type: str) -> None:
        """The answer's head."""
        self._kind = content_type.partition(";")[0].strip().lower()

    def add_part(self, part: bytes) -> None:
        """The next part of the body: of a stream an event, else all of it."""
        if part:
            self._parts.append(part)

    def read_usage(self) -> CallUsage | None:
        """What the answer says; None: nothing of its tokens."""
        if self._kind == "application/json" and len(self._parts) == 1:
            return self._read(self._parts[0])
        if self._kind != "text/event-stream":
            return None
        sums = (one for one in reversed(self._parts) if self._is_sum(one))
        return next((found for one in sums if (found := self._read(one)) is not None), None)

    def _is_sum(self, event: bytes) -> bool:
        """Whether an event's usage is the whole answer's; those of `continuous_usage_stats` are of
        one choice."""
        if self._api == "responses":
            return b'"type":"response.' in event
        return b'"choices":[]' in event

    def _read(self, body: bytes) -> CallUsage | None:
        if self._api == "responses":
            return self._usage(_usage_of_response(body))
        at = body.rfind(_KEY)
        if at < 0:
            return None
        text = body[at + len(_KEY) :][:_MOST].decode(errors="replace").lstrip()
        try:
            found, _ = _DECODER.raw_decode(text)
        except ValueError:
            return None
        return self._usage(found)

    def _usage(self, found: Any) -> CallUsage | None:
        if not isinstance(found, dict) or self._api == "messages":
            return None  # of what a cache had it says less
        own = self._api == "responses"
        prompt = found.get("input_tokens" if own else "prompt_tokens")
        output = found.get("output_tokens" if own else "completion_tokens") or 0
        if type(prompt) is int and type(output) is int and prompt >= 0 and output >= 0:
            return CallUsage(prompt, output)
        return None


def _usage_of_response(part: bytes) -> Any:
    """The usage of a response, whole or in an event; None: it names none."""
    try:
        found = msgspec.json.decode(part[max(0, part.find(b"{")) :], type=_ResponseEvent)
        usage = found.usage if found.response is None else found.response.usage
        return msgspec.json.decode(usage) if len(usage) <= _MOST else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
