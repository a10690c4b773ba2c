"""What becomes of the rest of a request: the way that leaves the shortest pause.

Copied, the last blocks are gathered and scattered while nobody decodes the request. Computed
again, its first step at the destination has all their tokens to compute; where the destination
follows, one token more than its own.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from kvmig.ground.config import Rest, Way

WEIGHT = 0.25
EXTRA_TOKENS = 1
"""That the first step of a destination that followed computes beside the one it samples after."""
MOST_TOKENS = 64
"""Are computed again: of steps of more tokens nothing is known (`engines.cadence_meter`)."""


class PauseCost(msgspec.Struct, frozen=True):
    """What each way is expected to add to the pause, milliseconds; None: not known.

    It says nothing of whether the way was open: engines may be unable to follow or to compute.
    """

    way: Way
    copy_ms: float | None = None
    follow_ms: float | None = None
    recompute_ms: float | None = None


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


def choose(
    copy_ms: float | None,
    token_ms: float | None,
    tokens: int,
    open_ways: Collection[Way],
    wish: Rest = "auto",
) -> PauseCost:
    """The shortest of the ways that are open, or the one that is wished for, if it is.
    To copy is always open.

    token_ms: what one token more adds to a step of the destination; tokens: whose KV isn't
    there. Where the cost of a copy isn't known the rest is copied, as engines that can do
    nothing else have it anyway. Of equal ones the one comes first that keeps more of what the
    source has computed.

    Example: a copy costs 3 ms, a token 0.1 ms, 20 tokens are left: 3 ms to copy them, 2 ms to
    compute them again, 0.1 ms after following.
    """
    follow_ms = recompute_ms = None
    if token_ms is not None:
        follow_ms = EXTRA_TOKENS * token_ms
        recompute_ms = tokens * token_ms if tokens <= MOST_TOKENS else None
    by_way: dict[Way, float | None] = {
        "copy": copy_ms, "follow": follow_ms, "recompute": recompute_ms,
    }  # fmt: skip
    way: Way = "copy"
    if wish != "auto":
        way = wish if wish in open_ways else "copy"
    elif copy_ms is not None:
        known = {one: ms for one, ms in by_way.items() if ms is not None and one in open_ways}
        way = min(known, key=known.__getitem__)
    return PauseCost(way, copy_ms, follow_ms, recompute_ms)


def _copy(nbytes: int, bytes_per_ms: float | None) -> float:
    return nbytes / bytes_per_ms if bytes_per_ms else 0.0
