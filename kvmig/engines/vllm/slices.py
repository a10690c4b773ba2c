"""Beginning requests takes only a part of each turn of the event loop.

A call may have 256 prompts, and vLLM begins all of them in one turn: with a schema of 120 kB that
is 0.2 s without a token for anyone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SLICE_S = 0.005
"""Length of a turn. One beginning is never interrupted."""


class WorkSlices:
    """`wait` before each beginning, and do it within `measured`."""

    def __init__(self, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._spent_s = 0.0
        self._resets = False

    async def wait(self) -> None:
        """Wait until there is something left of a turn."""
        while self._spent_s >= SLICE_S:  # noqa: ASYNC110 - the next turn is what it waits for
            await asyncio.sleep(0)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """What is done within takes a part of this turn."""
        began = self._clock()
        try:
            yield
        finally:
            self._spent_s += self._clock() - began
            if not self._resets:
                self._resets = True
                asyncio.get_running_loop().call_soon(self._reset)

    def _reset(self) -> None:
        """The next turn has begun."""
        self._spent_s, self._resets = 0.0, False
