"""Waits for what nobody announces."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvmig_tools.patience import SERVER_PATIENCE_S

PATIENCE_S = 120.0
"""Far more than anything takes that happens in a test's own process, on a machine as busy as it may
be."""


async def until(
    holds: Callable[[], object], within_s: float = PATIENCE_S, pause_s: float = 0.001
) -> None:
    """For `within_s` of real time at most, however much the event loop's clock skips.

    pause_s: between two looks.
    """
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError
        await asyncio.sleep(pause_s)


async def until_yes(holds: Callable[[], object], within_s: float = SERVER_PATIENCE_S) -> None:
    """Wait until a question that blocks, to a server mostly, is answered with yes."""
    deadline = time.monotonic() + within_s
    while not await asyncio.to_thread(holds):
        if time.monotonic() > deadline:
            raise TimeoutError
        await asyncio.sleep(0.05)


def wait_until(holds: Callable[[], object], within_s: float = PATIENCE_S) -> None:
    """The same as `until` for a test that blocks."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)
