"""When no more requests are taken: too many wait for their first token already. Pure.

By priority: a request is refused for those that run before it or with it, never for others.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import NamedTuple

PACE_S = 30.0
"""Requests that began so long ago tell nothing of the present pace."""
SHORTEST_S, LONGEST_S = 1, 60
"""Of what a client is told to wait."""


class Refusal(NamedTuple):
    """waiting: requests ahead of it; retry_after_s: until they have begun, at the present pace."""

    waiting: int
    retry_after_s: int


class Overload:
    """limit: of requests that wait; 0: none."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting: Counter[int] = Counter()
        self._began: deque[float] = deque(maxlen=256)

    def hold(self, priority: int, change: int, now: float) -> None:
        """More or fewer requests of this priority wait."""
        self._waiting[priority] += change
        if change < 0:
            self._began.extend([now] * -change)

    def waiting(self, priority: int) -> int:
        """Requests of this front end that wait and that aren't after this priority."""
        return sum(count for other, count in self._waiting.items() if other <= priority)

    def refusal(self, priority: int, in_queues: int, now: float) -> Refusal | None:
        """Whether one more is too many.

        in_queues: of any front end's, as instances tell, that aren't after this priority.
        """
        ahead = max(self.waiting(priority), in_queues)
        if not self.limit or ahead < self.limit:
            return None
        return Refusal(ahead, self._until_begun_s(ahead, now))

    def _until_begun_s(self, ahead: int, now: float) -> int:
        began = [at for at in self._began if now - at <= PACE_S]
        if len(began) < 2:
            return LONGEST_S
        pace = len(began) / max(now - began[0], 1e-3)
        return max(SHORTEST_S, min(LONGEST_S, math.ceil(ahead / pace)))
