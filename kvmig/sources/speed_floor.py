"""The speed below which a download ends, so that others get its turn. Pure."""

from __future__ import annotations

WINDOW_S = 120.0
LEAST_BYTES_S = 1000
"""A download that brings less than this, on average over the window, ends. A model that comes at
such a pace would take days."""
LISTING_S = 1800.0
"""Longest time for the list of a source's files."""


class SpeedFloor:
    """The floor of one download; it gets what has come so far, a few times in each window."""

    def __init__(self, window_s: float = WINDOW_S, least_bytes_s: float = LEAST_BYTES_S) -> None:
        self._window_s = window_s
        self._least_bytes_s = least_bytes_s
        self._since: float | None = None
        self._before = 0

    def rest(self) -> None:
        """The download waits for something of ours: the window begins at the next look."""
        self._since = None

    def check_speed(self, now: float, moved: int) -> str:
        """Why the download ends; empty: it is fast enough. moved: all bytes that came so far."""
        if self._since is None:
            self._since, self._before = now, moved
            return ""
        waited_s, came = now - self._since, moved - self._before
        if waited_s < self._window_s:
            return ""
        if came < waited_s * self._least_bytes_s:
            return (
                f"it is too slow: {came} bytes came in {waited_s:.0f} s, and the least is"
                f" {self._least_bytes_s:g} bytes/s; what came is kept"
            )
        self._since, self._before = now, moved
        return ""
