"""Times of many engines on one front end's clock: pure, times are passed in.

vLLM's statistics subtract an engine's monotonic times from each other. A request that moves
has times of several engines, and those of two machines have nothing to do with each other.
"""

from __future__ import annotations

ANOTHER_CLOCK_S = 10.0
"""What comes so much later than anything before it was told by another clock: the instance has
been started again elsewhere."""


class EngineClocks:
    """Engines by index. What came fastest tells how an engine's clock differs from ours."""

    def __init__(self) -> None:
        self._ahead: dict[int, float] = {}
        self._last: dict[int, float] = {}

    def step(self, index: int, told: float, now: float) -> float:
        """A step ended at `told` on the engine's clock, and came at `now`: when it ended on ours.

        Never before the step before it.
        """
        ahead = now - told
        known = self._ahead.get(index)
        if known is None or not known <= ahead <= known + ANOTHER_CLOCK_S:
            self._ahead[index] = ahead
        ended = max(self.here(index, told), self._last.get(index, now - ANOTHER_CLOCK_S))
        self._last[index] = ended
        return ended

    def here(self, index: int, told: float) -> float:
        """A time on the engine's clock, on ours."""
        return told + self._ahead.get(index, 0.0)
