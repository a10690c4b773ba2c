"""A virtual clock and what happens when: ties in the order in which they were asked for."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

Action = Callable[[], None]


class Timer:
    """Something that will happen, unless it is cancelled."""

    __slots__ = ("action",)

    def __init__(self, action: Action | None) -> None:
        self.action = action

    def cancel(self) -> None:
        """It won't happen. Too late is no error."""
        self.action = None


class EventQueue:
    """Time in seconds; it only goes on while `run` does."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = count()

    def __call__(self) -> float:
        """The time now: this is a `TimeSource`."""
        return self.now

    def at(self, time: float, action: Action) -> Timer:
        """Do it at `time`; a time that is past means now, after all that is due already."""
        timer = Timer(action)
        heappush(self._heap, (max(time, self.now), next(self._order), timer))
        return timer

    def after(self, seconds: float, action: Action) -> Timer:
        """Do it `seconds` from now."""
        return self.at(self.now + seconds, action)

    def run(self, until: float = float("inf")) -> None:
        """Until nothing is left to happen, or the next thing is later than `until`."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            time, _, timer = heappop(heap)
            if timer.action is not None:
                self.now = time
                timer.action()
