"""When a drain's sessions may leave: one at a time, and never in the way of a request's move."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from kvmig.core.errors import MigrationRefused

QUIET_S = 0.05
"""Time without a request's move before a session goes: one request often follows another."""


class SessionTurns:
    """The turns of one llumlet. A session on its way gives way to a request that is to move."""

    def __init__(self, give_up: Callable[[str], None], quiet_s: float = QUIET_S) -> None:
        """give_up: ends the move of a session, by the id of the move."""
        self._give_up = give_up
        self._quiet_s = quiet_s
        self._requests = 0
        """Requests that move, or wait for their turn."""
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._turn = asyncio.Lock()
        self._session = ""

    @contextmanager
    def request_moves(self) -> Iterator[None]:
        """Inside the block a request moves."""
        self._requests += 1
        self._quiet.clear()
        if self._session:
            self._give_up(self._session)
        try:
            yield
        finally:
            self._requests -= 1
            if not self._requests:
                self._quiet.set()

    @asynccontextmanager
    async def session_moves(self, move_id: str, patience_s: float) -> AsyncIterator[None]:
        """Wait for a turn; inside the block the session moves. Raises MigrationRefused (busy)."""
        try:
            async with asyncio.timeout(patience_s):
                await self._turn.acquire()
                try:
                    await self._wait_for_quiet()
                except BaseException:
                    self._turn.release()
                    raise
        except TimeoutError:
            raise MigrationRefused("busy", "requests, or other sessions, move first") from None
        self._session = move_id
        try:
            yield
        finally:
            self._session = ""
            self._turn.release()

    def check_turn(self) -> None:
        """Raises MigrationRefused (busy) if a request is to move."""
        if self._requests:
            raise MigrationRefused("busy", "a request moves first")

    async def _wait_for_quiet(self) -> None:
        while True:
            await self._quiet.wait()
            await asyncio.sleep(self._quiet_s)
            if self._quiet.is_set():
                return
