"""Server-sent events of a stream that comes in parts of any size. Pure."""

from __future__ import annotations

import re

_END = re.compile(rb"\n\r\n|\n\n|\r\r")
_DATA = re.compile(rb"(?:^|[\r\n])data: ?([^\r\n]*)")
MOST_BYTES = 16 << 20
"""Most bytes of one event."""


class EventTooLarge(Exception):
    """An event has no end within MOST_BYTES."""


class EventSplitter:
    """Cuts what comes into whole events, byte for byte."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, part: bytes) -> list[bytes]:
        """The events that end in what has come. Raises EventTooLarge."""
        begin = max(0, len(self._rest) - 3)
        self._rest += part
        events, at = [], 0
        for end in _END.finditer(self._rest, begin):
            events.append(bytes(self._rest[at : end.end()]))
            at = end.end()
        del self._rest[:at]
        if len(self._rest) > MOST_BYTES:
            raise EventTooLarge(f"an event is longer than {MOST_BYTES} bytes")
        return events

    def rest(self) -> bytes:
        """What has come of an event without an end."""
        return bytes(self._rest)


def data_of(event: bytes) -> bytes:
    """The event's data; empty: it has none, as a comment."""
    return b"\n".join(_DATA.findall(event))
