"""When a process that died is started again. Pure."""

from __future__ import annotations

import math

PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Before the first start again in a row, the second, ...; the last one repeats."""
STABLE_S = 60.0
"""Who has served for so long starts a new row with its next death."""


class Restarts:
    """The deaths of one process. most: starts again in a row; None: without end.

    Example, most = 2: dead after 1 s of serving: again in 0.5 s; after 3 s: again in 1 s;
    after 2 s: given up. Had it served for a minute, it would be again in 0.5 s.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = math.inf if most is None else most
        self.deaths = 0
        """In a row."""

    def died(self, served_s: float) -> float | None:
        """Seconds until it shall start again; None: give it up. served_s: since it was ready."""
        if served_s >= STABLE_S:
            self.deaths = 0
        self.deaths += 1
        if self.deaths > self._most:
            return None
        return PAUSES_S[min(self.deaths, len(PAUSES_S)) - 1]
