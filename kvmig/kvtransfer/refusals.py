"""How many messages of others were refused, by reason."""

from __future__ import annotations

from collections import Counter
from threading import Lock

import msgspec

from kvmig.ground.errors import InvalidTransition, PeerError

REFUSED = (PeerError, InvalidTransition, msgspec.MsgspecError)
"""What comes of messages that can't be taken, or whose contents can't."""


class Refusals:
    """Of one process, over all its sockets; some of them are served by threads of their own."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._lock = Lock()

    def count(self, error: Exception) -> None:
        """One more, see REFUSED."""
        reason = error.reason if isinstance(error, PeerError) else "unusable"
        with self._lock:
            self._counts[reason] += 1

    def strangers(self, connections: int) -> None:
        """So many more that didn't prove that they have the cluster's secret."""
        if connections:
            with self._lock:
                self._counts["unauthenticated"] += connections

    def told(self) -> dict[str, int]:
        """All so far."""
        with self._lock:
            return dict(self._counts)
