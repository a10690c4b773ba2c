"""Epochs of requests: numbers of the attempts to move them, none used twice. Pure."""

from __future__ import annotations

from collections import OrderedDict

LEAP = 1 << 20
"""Epochs that a fence shuts out: the attempt's, and those under which the request may have been
moved on from where it went. More moves than this in one run are not expected."""
REMEMBERED = 65536
"""Requests whose last tried epoch is remembered."""


class Epochs:
    """Of one instance."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = OrderedDict()

    def after(self, request_id: str, epoch: int) -> int:
        """For the next attempt to move a request that runs under `epoch`."""
        last = self._last[request_id] = max(epoch, self._last.pop(request_id, 0)) + 1
        while len(self._last) > REMEMBERED:
            self._last.popitem(last=False)
        return last

    def fenced(self, request_id: str, epoch: int) -> None:
        """The attempt was shut out, and all that may have followed it."""
        self._last[request_id] = max(epoch + LEAP - 1, self._last.pop(request_id, 0))
