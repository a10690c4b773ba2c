"""How many requests wait for their first token, and whether there is room for more. Pure.

Requests are sequences: a call with several answers or prompts counts as several. By priority: one
is refused for those that run before it or with it, never for others.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import NamedTuple


class OverloadReason(NamedTuple):
    """Why no more may wait.

    waiting, allowed: requests ahead of it, or, if `own`, those of its account.
    retry_after_s: until as many as are ahead have begun, at the present pace.
    """

    waiting: int
    allowed: int
    retry_after_s: int
    own: bool = False


class LoadShedding:
    """Counts requests that wait, and refuses further ones.

    limit: of requests that wait; 0: none. An account may have as many as it leaves room for, so
    that one alone has half of all at most, two have a third each, and others find room.
    """

    PACE_S = 30.0
    """Seconds within which requests began that make the present pace."""
    SHORTEST_S, LONGEST_S = 1, 60
    """Bounds of the time in Retry-After."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._waiting: Counter[tuple[int, str]] = Counter()
        """Waiting requests by priority and account, where there are some."""
        self._began: deque[float] = deque(maxlen=256)

    def hold(self, priority: int, change: int, now: float, account: str = "") -> None:
        """More or fewer requests of this priority and account wait."""
        self._waiting[priority, account] += change
        if not self._waiting[priority, account]:
            del self._waiting[priority, account]
        if change < 0:
            self._began.extend([now] * min(-change, self._began.maxlen or 0))

    def refusal(
        self, priority: int, queued: int, now: float, account: str = "", sequences: int = 1
    ) -> OverloadReason | None:
        """Why `sequences` more requests are too many; None: they aren't.

        queued: of any front end's, as instances report, that aren't after this priority.
        account: whose they are; empty: it is unknown.
        """
        before = [one for one in self._waiting.items() if one[0][0] <= priority]
        ahead = max(sum(count for _, count in before), queued)
        if not self.limit:
            return None
        if ahead + sequences > self.limit:
            return OverloadReason(ahead, self.limit, self._until_begun_s(ahead, now))
        own = sum(count for (_, whose), count in before if whose == account)
        if account and own and own + sequences > self.limit - ahead:
            allowed = max(own, self.limit - ahead)
            return OverloadReason(own, allowed, self._until_begun_s(own, now), own=True)
        return None

    def _until_begun_s(self, ahead: int, now: float) -> int:
        began = [at for at in self._began if now - at <= self.PACE_S]
        if len(began) < 2:
            return self.LONGEST_S
        pace = len(began) / max(now - began[0], 1e-3)
        return max(self.SHORTEST_S, min(self.LONGEST_S, math.ceil(ahead / pace)))
