"""Waits for what nobody announces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 60.0
"""Far more than anything takes that happens, on a machine as busy as it may be."""


async def until(holds: Callable[[], object]) -> None:
    """For PATIENCE_S of real time at most, however much the event loop's clock skips."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError
        await asyncio.sleep(0.001)
