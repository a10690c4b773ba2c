"""W3C's `traceparent`: read from a client's headers, and written for the next process. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

TRACEPARENT, TRACESTATE = b"traceparent", b"tracestate"
DROPPED = (TRACEPARENT, TRACESTATE, b"baggage")
"""Headers of a client that the next process doesn't get from it."""
STATE_BYTES = 512
"""Most bytes of a tracestate that goes on: what W3C asks for."""

_PARENT = re.compile(
    rb"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
    rb"(?P<more>-.*)?",
    re.DOTALL,
)
_MOST_BYTES = 256
_SAMPLED = 1


class TraceParent(NamedTuple):
    """A span that others are made under."""

    trace_id: int
    span_id: int
    sampled: bool

    def header(self) -> bytes:
        """The value of a `traceparent` header."""
        return b"00-%032x-%016x-%02x" % (self.trace_id, self.span_id, self.sampled)


class ClientContext(NamedTuple):
    """What the headers of a call say of the trace that it belongs to."""

    parent: TraceParent | None = None
    state: bytes = b""
    """The tracestate, where it may go on."""


def read_context(headers: Iterable[tuple[bytes, bytes]]) -> ClientContext:
    """The context in a call's headers, whose names are in lower case; what is malformed counts as
    absent, and so does what is there twice."""
    parents: list[bytes] = []
    states: list[bytes] = []
    for name, value in headers:
        if name == TRACEPARENT:
            parents.append(value)
        elif name == TRACESTATE:
            states.append(value)
    parent = read_parent(parents[0]) if len(parents) == 1 else None
    if parent is None:
        return ClientContext()
    state = states[0] if len(states) == 1 else b""
    whole = len(state) <= STATE_BYTES and state.isascii() and state.decode().isprintable()
    return ClientContext(parent, state if whole else b"")


def read_parent(value: bytes) -> TraceParent | None:
    """The parent that a header names; None: it names none that W3C allows."""
    if len(value) > _MOST_BYTES or (found := _PARENT.fullmatch(value)) is None:
        return None
    version = found["version"]
    if version == b"ff" or (version == b"00" and found["more"]):
        return None
    trace_id, span_id = int(found["trace"], 16), int(found["span"], 16)
    if not (trace_id and span_id):
        return None
    return TraceParent(trace_id, span_id, bool(int(found["flags"], 16) & _SAMPLED))
