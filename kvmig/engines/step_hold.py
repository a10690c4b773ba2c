"""Which step waits for a request that is about to be committed, and how long.

A request that comes just after a step began waits for nearly all of it. So its source says when it
will come, and a step that could begin shortly before waits for it instead: at most `HOLD` of
a step and `MOST_S`, and once for each request, whether it comes or not.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

HOLD = 0.3
"""Of a step: longer no step waits."""
MOST_S = 0.015


def limit_s(step_s: float) -> float:
    """How long a step may wait, where one takes `step_s`. Example: 3 ms, of 10 ms."""
    return min(HOLD * step_s, MOST_S)


class StepHold:
    """Requests that one engine expects. Times in seconds, on one clock."""

    def __init__(self) -> None:
        self._due: dict[str, float | None] = {}
        """None: a step has waited for it."""
        self._lock = threading.Lock()

    def expect(self, request_id: str, at: float) -> None:
        """It comes at about that time. From any thread; only the first word counts."""
        with self._lock:
            self._due.setdefault(request_id, at)

    def over(self, request_id: str) -> None:
        """It is here, or won't come. Unknown ids are ignored."""
        with self._lock:
            self._due.pop(request_id, None)

    def awaited(self, now: float, step_s: float) -> Collection[str]:
        """For which the step that could begin `now` waits; none of them is named again.

        One that is late by more than a step may wait isn't waited for, either.
        """
        if not self._due:
            return ()
        limit = limit_s(step_s)
        with self._lock:
            near = [
                request_id
                for request_id, due in self._due.items()
                if due is not None and abs(due - now) <= limit
            ]
            self._due.update(dict.fromkeys(near))
        return near

    def coming(self, request_ids: Collection[str]) -> bool:
        """Whether any of them isn't here yet, and may still come."""
        return any(request_id in self._due for request_id in request_ids)
