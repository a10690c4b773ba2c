"""Which call goes to which server, and when: the one with the fewest, by turns of tenants."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence
from typing import Generic, Protocol, TypeVar

from kvmig.core.fair_queue import FairQueue


class CallableServer(Protocol):
    """What counts of a server here."""

    @property
    def state(self) -> str: ...
    @property
    def running(self) -> int:
        """Calls that it works for."""
        ...

    @property
    def sent(self) -> int:
        """Calls that it ever got."""
        ...

    def begin_call(self) -> None:
        """Count one more call of this server."""
        ...


Server = TypeVar("Server", bound=CallableServer)


class CallTurns(Generic[Server]):
    """The turns of one deployment, within a running event loop."""

    def __init__(self, servers: Callable[[], Sequence[Server]], parallel: int) -> None:
        """parallel: calls that a server works for at once, at most; 0: as many as come."""
        self._servers = servers
        self._most: float = parallel or math.inf
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._woken = 0
        """Calls whose turn has come, and that have not taken their place yet."""
        self._again: list[asyncio.Future[None]] = []
        """Calls that no server has answered yet: they may not have each place that there is."""

    async def take_place(self, tenant: str, tried: Collection[Server] = ()) -> Server | None:
        """A place at a server, once there is one; its `end_call` gives it back.

        tried: servers that could not answer the call. None: no other one serves, or will soon.
        """
        first = True
        while True:
            others = [one for one in self._servers() if one not in tried]
            serving = [one for one in others if one.state == "serving"]
            if not serving and not any(one.state == "starting" for one in others):
                return None
            free = [one for one in serving if one.running < self._most]
            if free and not (first and (self._waiting or self._woken)):
                chosen = min(free, key=lambda one: (one.running, one.sent))
                chosen.begin_call()
                return chosen
            await (self._wait_for_change() if tried else self._wait(tenant))
            first = False

    def grant(self) -> None:
        """Something has changed: wake those whose turn it is."""
        for call in self._again:
            if not call.done():
                call.set_result(None)
        servers = self._servers()
        serving = [one for one in servers if one.state == "serving"]
        places = sum((self._most - one.running for one in serving), 0.0)
        if not serving and not self._is_one_starting():
            places = math.inf  # nobody will answer them
        while self._woken < places and (turn := self._waiting.pop()) is not None:
            if not turn.done():
                turn.set_result(None)
                self._woken += 1

    def _is_one_starting(self) -> bool:
        return any(one.state == "starting" for one in self._servers())

    async def _wait_for_change(self) -> None:
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._again.append(change)
        try:
            await change
        finally:
            self._again.remove(change)

    async def _wait(self, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.enter(0, tenant, turn)
        try:
            await turn
        finally:
            self._waiting.remove_waiting(0, tenant, turn)
            if turn.done() and not turn.cancelled():
                self._woken -= 1
                asyncio.get_running_loop().call_soon(self.grant)  # for the place that it leaves
