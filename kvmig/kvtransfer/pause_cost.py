"""Which way leaves the shorter pause: copy the rest of the request in it, or compute it there.

Copied, the last blocks are gathered and scattered while nobody decodes the request. Computed
(the destination follows), its first step has a token more than its own to compute.
"""

from __future__ import annotations

from typing import Literal

import msgspec

WEIGHT = 0.25
EXTRA_TOKENS = 1
"""That the first step of a destination that followed computes beside the one it samples after."""

Way = Literal["copy", "follow"]


class PauseCost(msgspec.Struct, frozen=True):
    """What either way is expected to add to the pause, milliseconds; None: not known."""

    way: Way
    copy_ms: float | None = None
    follow_ms: float | None = None


class CopyTimes:
    """What the copies of tails took, beside their bytes: threads and messages."""

    def __init__(self) -> None:
        self._overhead_ms: float | None = None

    def observe(self, ms: float, nbytes: int, bytes_per_ms: float | None) -> None:
        """A tail of `nbytes` took `ms` from the suspension to its commit."""
        overhead = max(0.0, ms - _copy(nbytes, bytes_per_ms))
        known = self._overhead_ms
        self._overhead_ms = overhead if known is None else known + WEIGHT * (overhead - known)

    def expected(self, nbytes: int, bytes_per_ms: float | None) -> float | None:
        """Of a tail of `nbytes`, at both ends; None until anything was copied at all."""
        if bytes_per_ms is None:
            return None
        return (self._overhead_ms or 0.0) + 2 * _copy(nbytes, bytes_per_ms)


def cheaper(copy_ms: float | None, token_ms: float | None) -> PauseCost:
    """The shorter of both. token_ms: what one token more adds to a step of the destination.

    Where one isn't known the request is copied, as engines that can't follow have it anyway.
    """
    follow_ms = None if token_ms is None else EXTRA_TOKENS * token_ms
    follows = copy_ms is not None and follow_ms is not None and follow_ms < copy_ms
    return PauseCost("follow" if follows else "copy", copy_ms, follow_ms)


def _copy(nbytes: int, bytes_per_ms: float | None) -> float:
    return nbytes / bytes_per_ms if bytes_per_ms else 0.0
