"""A child's event loop shows that it turns: a byte in a pipe, every second.

For those that nobody asks anything: a front end that hangs would keep its clients for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

BEAT_S = 1.0
SILENT_S = 10.0
"""As long as for an instance (see docs/operations.md)."""
LOOKS = 4
"""Within that time: one that finds nothing proves little, we may have stood still ourselves."""


class Pulse:
    """The launcher's end, to be closed. `descriptor` is for the child to inherit."""

    def __init__(self) -> None:
        self._heard, self.descriptor = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    async def fails(self, silent_s: float) -> None:
        """Return when nothing came for so long."""
        looks = LOOKS
        while looks:
            await asyncio.sleep(silent_s / LOOKS)
            looks = LOOKS if self._beat() else looks - 1

    def _beat(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            return bool(os.read(self._heard, 4096))
        return False

    def close(self) -> None:
        """Both ends; a child that has inherited one keeps it."""
        os.close(self._heard)
        os.close(self.descriptor)


async def beat(descriptor: int) -> None:
    """The child's part, until it is cancelled."""
    while True:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # nobody listens any more
            os.write(descriptor, b".")
        await asyncio.sleep(BEAT_S)
