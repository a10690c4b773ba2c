"""When a process gives back the memory that it has freed. Pure.

The C library keeps what was freed for the next one who wants some: after one large body a process
stays as large as it was with it. To give it back takes milliseconds, so it is done where it pays.
"""

from __future__ import annotations

GROWN = 8 << 20
"""Bytes by which a process is larger than it was, before anything is done."""
LITTLE = 2 << 20
"""Bytes given back at once that were not worth it."""
PAUSE_S = (5.0, 300.0)
"""Pauses before the next trim: the first, which doubles after each trim without gain, and the
longest."""


class MemoryTrimming:
    """When to trim one process's heap. Sizes: bytes of resident memory; times: a steady clock's."""

    def __init__(self, resident: int) -> None:
        """resident: as it is before it works."""
        self._least = resident
        self._last = resident
        """Resident bytes after the last trim."""
        self._pause_s = PAUSE_S[0]
        self._again_at = 0.0

    def is_due(self, resident: int, now: float) -> bool:
        """Whether to give back now what is free.

        What grows again is looked at once. It may have been in use still, and free a little later:
        so it is looked at again, ever more rarely.
        """
        self._least = min(self._least, resident)
        self._last = min(self._last, resident)
        if resident - self._last >= GROWN:
            return True
        return resident - self._least >= GROWN and now >= self._again_at

    def record_trimmed(self, before: int, after: int, now: float) -> None:
        """What was free was given back."""
        first_s, most_s = PAUSE_S
        worth = before - after >= LITTLE
        self._pause_s = first_s if worth else min(2 * self._pause_s, most_s)
        self._again_at = now + self._pause_s
        self._last = after
