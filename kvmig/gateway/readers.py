"""Clients that don't read: how many tokens of theirs wait, and which are too many. Pure.

A connection says when its client has stopped reading (nothing more can be written to it) and
when it goes on. Until then, tokens pile up in the front end.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvmig.gateway.caller import Caller
from kvmig.gateway.requests import Entry


class Readers:
    """max_unread: tokens of one request; 0: any number."""

    def __init__(self, max_unread: int) -> None:
        self.max_unread = max_unread
        self._stuck: dict[Caller, dict[str, int]] = {}

    def paused(self, caller: Caller) -> None:
        """Its client has stopped reading."""
        self._stuck.setdefault(caller, {})

    def resumed(self, caller: Caller) -> None:
        """Its client reads again, or is gone."""
        self._stuck.pop(caller, None)

    def overdue(self, entries: Mapping[str, Entry]) -> list[Entry]:
        """Requests with too many tokens since the first such look at which they were stuck."""
        found: list[Entry] = []
        if not self.max_unread:
            return found
        for caller, marks in self._stuck.items():
            for request_id in caller.request_ids:
                entry = entries[request_id]
                mark = marks.setdefault(request_id, entry.splicer.next)
                if entry.splicer.next - mark > self.max_unread:
                    found.append(entry)
        return found
