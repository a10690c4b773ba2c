"""Beginning requests takes only a part of each turn of the event loop.

A call may have 256 prompts, and vLLM begins all of them in one turn: with a schema of 120 kB that
is 0.2 s without a token for anyone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

SLICE_S = 0.005
"""Time of a turn, from the first beginning in it on, within which others begin. One beginning is
never interrupted."""


class WorkSlices:
    """`wait` before each beginning. All that runs on the loop from the first one on counts."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._since: float | None = None
        """When the first one of this turn began; None: there was none."""

    async def wait(self) -> None:
        """Wait until there is something left of a turn."""
        while self._is_spent():  # noqa: ASYNC110 - the next turn is what it waits for
            await asyncio.sleep(0)

    def _is_spent(self) -> bool:
        if self._since is None:
            self._since = self._clock()
            asyncio.get_running_loop().call_soon(self._reset)
            return False
        return self._clock() - self._since >= SLICE_S

    def _reset(self) -> None:
        """The next turn has begun."""
        self._since = None
