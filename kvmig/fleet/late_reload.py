"""What the database has is read again where it has given no answer.

An order may be stored though its server got no answer, or could not read back what it has
changed: the same order, given again, finds it done. Nothing else reads the catalogue and the keys
before the next order, and a key that was revoked would let calls in until then.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from kvmig.core.background import BackgroundTasks
from kvmig.fleet.tables import StoreError

LATE_S = 1.0
"""Pause before each try."""

log = logging.getLogger(__name__)


class LateReload:
    """`begin` it whenever the database has failed, `close` it before `tasks`."""

    def __init__(self, tasks: BackgroundTasks, *reads: Callable[[], Awaitable[None]]) -> None:
        """tasks: where it runs. reads: what is read, in this order; each may raise StoreError."""
        self._tasks = tasks
        self._reads = reads
        self._running: asyncio.Task[None] | None = None
        self._closed = False

    def close(self) -> None:
        """Begin no more: another server may lead."""
        self._closed = True

    def begin(self) -> None:
        """Read all once the database answers; without effect while that is under way."""
        if not self._closed and (self._running is None or self._running.done()):
            self._running = self._tasks.start(self._run(), "late reload")

    async def settle(self, timeout_s: float) -> None:
        """Wait until all is read, timeout_s at most."""
        if self._running is not None:
            await asyncio.wait({self._running}, timeout=timeout_s)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LATE_S)
            try:
                for read in self._reads:
                    await read()
            except StoreError as error:
                log.info("what the database has is read later: %s", error)
            else:
                return
