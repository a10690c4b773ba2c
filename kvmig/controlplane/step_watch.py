"""Whether an engine's present step takes too long. Pure."""

from __future__ import annotations

from typing import Literal

MOST_S = 0.5
"""Of the time between two looks: more means that this process itself stood still (stopped, or
on a machine that did), and the engine's thread with it."""


class StepWatch:
    """A step is hung after `hung_after_s`, and lost after twice that."""

    def __init__(self, hung_after_s: float, now: float) -> None:
        self._hung_after_s = hung_after_s
        self._looked = now
        self._step_s = 0.0
        self._running_s = 0.0

    def look(self, now: float, step_s: float) -> Literal["", "hung", "lost"]:
        """To be called often. step_s: since the present step began; 0 between two."""
        passed = min(now - self._looked, MOST_S)
        # Shorter than at the last look: another step.
        self._running_s = 0.0 if step_s <= self._step_s else self._running_s + passed
        self._looked, self._step_s = now, step_s
        if self._running_s > 2 * self._hung_after_s:
            return "lost"
        return "hung" if self._running_s > self._hung_after_s else ""
