"""How many calls at once decode images, audio and video, by turns of users."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from kvmig.core.fair_queue import FairQueue
from kvmig.frontend.media_budget import MediaBudget

PLACES = 4
"""Calls at once: their media are in memory from the first that is decoded until the prompt goes to
an engine."""
WAIT_S = 30.0
"""Longest time until a call has a place."""


class NoPlace(Exception):
    """No place became free in time."""


class MediaRoom:
    """The places of one front end, within a running event loop."""

    def __init__(self, places: int = PLACES, wait_s: float = WAIT_S) -> None:
        self._free = places
        self._wait_s = wait_s
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    @property
    def free(self) -> int:
        """Free places."""
        return self._free

    async def enter(self, tenant: str) -> None:
        """Take a place, in turn. Raises NoPlace when it takes too long."""
        if self._free and not self._waiting:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.enter(0, tenant, turn)
        try:
            async with asyncio.timeout(self._wait_s):
                await turn
        except BaseException as error:
            self._waiting.remove_waiting(0, tenant, turn)
            if turn.done() and not turn.cancelled():  # it had its turn at the very moment
                self.release_place()
            if isinstance(error, TimeoutError):
                sentence = f"media of other calls are decoded for over {self._wait_s:g} s"
                raise NoPlace(f"{sentence}, try again") from None
            raise

    def release_place(self) -> None:
        """Give a place back."""
        self._free += 1
        while self._free and (turn := self._waiting.pop()) is not None:
            if not turn.done():
                self._free -= 1
                turn.set_result(None)


class CallMedia:
    """The media of one call: fetched all at once, then decoded one after the other in one place."""

    def __init__(self, room: MediaRoom, tenant: str, budget: MediaBudget) -> None:
        self.budget = budget
        self._room = room
        self._tenant = tenant
        self._fetching = 0
        self._all_here = asyncio.Event()
        self._all_here.set()
        self._turn = asyncio.Lock()
        self._placed = False
        self._over = False

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Hold decoding back while one item is fetched: the call takes no slot meanwhile."""
        self._fetching += 1
        self._all_here.clear()
        try:
            yield
        finally:
            self._fetching -= 1
            if not self._fetching:
                self._all_here.set()

    @asynccontextmanager
    async def decoding(self) -> AsyncIterator[None]:
        """Decode one item in a slot. Raises NoPlace."""
        await asyncio.sleep(0)  # until its fellows are on their way
        await self._all_here.wait()
        async with self._turn:
            if not self._placed:
                await self._room.enter(self._tenant)
                self._placed = True
            if self._over:
                self.give_back()
                raise asyncio.CancelledError
            yield

    def give_back(self) -> None:
        """Free the call's decoding slot, once its prompt goes to an engine."""
        if self._placed:
            self._placed = False
            self._room.release_place()

    def close(self) -> None:
        """The call is over."""
        self._over = True
        self.give_back()
