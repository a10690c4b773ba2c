"""Time as a value that can be given: the real clock here, a virtual one in tests."""

from __future__ import annotations

import time
from typing import Protocol


class TimeSource(Protocol):
    """Gives the time in seconds. One that is called wall gives Unix time, any other never goes
    back."""

    def __call__(self) -> float: ...


monotonic: TimeSource = time.monotonic
"""CLOCK_MONOTONIC: on one host, the same for every process."""
