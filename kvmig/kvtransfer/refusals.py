"""How many messages of others were refused, by reason."""

from __future__ import annotations

from collections import Counter

import msgspec

from kvmig.ground.errors import InvalidTransition, PeerError

REFUSED = (PeerError, InvalidTransition, msgspec.MsgspecError)
"""What comes of messages that can't be taken, or whose contents can't."""


class Refusals:
    """Of one process, over all its sockets."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, error: Exception) -> None:
        """One more, see REFUSED."""
        self._counts[error.reason if isinstance(error, PeerError) else "unusable"] += 1

    def strangers(self, connections: int) -> None:
        """So many more that didn't prove that they have the cluster's secret."""
        if connections:
            self._counts["unauthenticated"] += connections

    def told(self) -> dict[str, int]:
        """All so far."""
        return dict(self._counts)
