"""Holds new requests back while instances have enough in their queues, which are first come, first
served: what waits here goes on by turns of tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from kvmig.core.errors import NoInstance
from kvmig.core.fair_queue import FairQueue

QUEUED = 4
"""Requests in an instance's queue, on average, with which no further one goes to any."""
FRESH = 16
"""Requests per instance that have been sent and have no token yet: reports are late."""


class QueueLengths(NamedTuple):
    """The queues of all instances, as they report them."""

    instances: int
    waiting: int


class DispatchTurns:
    """The turns of one front end, within a running event loop."""

    def __init__(self, queues: Callable[[], QueueLengths], is_fresh: Callable[[str], bool]) -> None:
        """is_fresh: whether a request that was sent has no token yet, and has not ended."""
        self._queues = queues
        self._is_fresh = is_fresh
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._fresh: set[str] = set()
        self._granted = 0
        """Requests whose turn has come, and that are not sent yet."""
        self._closed = ""

    def __len__(self) -> int:
        return len(self._waiting)

    async def wait(self, request_id: str, priority: int, tenant: str) -> None:
        """Wait for the request's turn to be sent. Raises NoInstance when all are given up."""
        if self._closed:
            raise NoInstance(self._closed)
        if self._waiting or not self._has_room():
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.enter(priority, tenant, turn)
            try:
                await turn
            finally:
                self._waiting.remove_waiting(priority, tenant, turn)
                if turn.done() and not turn.cancelled() and turn.exception() is None:
                    self._granted -= 1
        self._fresh.add(request_id)

    def grant_turns(self) -> None:
        """Something has changed: let those go whose turn it is."""
        while self._waiting and self._has_room():
            turn = self._waiting.pop()
            assert turn is not None
            if not turn.done():
                turn.set_result(None)
                self._granted += 1

    def give_up(self, reason: str) -> None:
        """Let no request wait, now or later."""
        self._closed = reason
        while (turn := self._waiting.pop()) is not None:
            if not turn.done():
                turn.set_exception(NoInstance(reason))

    def _has_room(self) -> bool:
        """Whether one more may be sent, besides those that are about to be."""
        queues = self._queues()
        if not queues.instances:
            return True  # where nobody can run it, it fails at once
        most = FRESH * queues.instances
        if len(self._fresh) + self._granted >= most:
            self._fresh = {one for one in self._fresh if self._is_fresh(one)}
        room = queues.waiting < QUEUED * queues.instances
        return room and len(self._fresh) + self._granted < most
