"""Time as a value that can be given: the real clock here, a virtual one in tests."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from an arbitrary start, never going back."""

    def __call__(self) -> float: ...


monotonic: Clock = time.monotonic
"""CLOCK_MONOTONIC: on one host, the same for every process."""
