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

    def stranger(self) -> None:
        """A connection without the cluster's secret."""
        self._counts["unauthenticated"] += 1

    def told(self) -> dict[str, int]:
        """All so far."""
        return dict(self._counts)
