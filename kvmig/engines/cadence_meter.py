"""How long an engine's steps take, and when the next one ends: pure, times are passed in."""

from __future__ import annotations

from kvmig.engines.base import Cadence

WEIGHT = 0.2
"""Of a new step in the average."""
IDLE_STEPS = 3.0
"""An engine that has made no step for so many of its steps' time does nothing."""


class CadenceMeter:
    """Steps of one engine, told one after the other. Times in seconds."""

    def __init__(self) -> None:
        # One tuple, so that other threads never read half of a step.
        self._last: tuple[float, float] | None = None
        """(end of the last step, average period in milliseconds)."""

    def step(self, began: float, ended: float) -> None:
        """A step ended."""
        ms = (ended - began) * 1e3
        if self._last is None:
            self._last = ended, ms
            return
        last_ended, period_ms = self._last
        # What the engine does between two steps counts, unless it had nothing to do.
        pause_ms = (began - last_ended) * 1e3
        ms += pause_ms if pause_ms < period_ms else 0.0
        self._last = ended, period_ms + WEIGHT * (ms - period_ms)

    def cadence(self, now: float) -> Cadence:
        """As seen at `now`; from any thread."""
        if (last := self._last) is None:
            return Cadence(0.0, 0.0)
        ended, period_ms = last
        since_ms = max(0.0, (now - ended) * 1e3)
        return Cadence(since_ms, 0.0 if since_ms > IDLE_STEPS * period_ms else period_ms)
