"""How many messages of others were refused, by reason."""

from __future__ import annotations

from collections import Counter

from kvmig.ground.errors import PeerError


class Refusals:
    """Of one process, over all its sockets."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def count(self, error: PeerError) -> None:
        """One more."""
        self._counts[error.reason] += 1

    def stranger(self) -> None:
        """A connection without the cluster's secret."""
        self._counts["unauthenticated"] += 1

    def told(self) -> dict[str, int]:
        """All so far."""
        return dict(self._counts)
