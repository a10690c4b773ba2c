"""The mailbox of a source session: events from outside, kept until the session looks."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

import msgspec

from kvmig.kvtransfer.source_machine import Action
from kvmig.rpc.messages import Message


class Cancel(msgspec.Struct, frozen=True):
    """The client left, or the instance stops."""

    reason: str


class PeerLost(msgspec.Struct, frozen=True):
    """The connection to the destination is gone."""


Event = Message | Cancel | PeerLost


class Interrupted(Exception):
    """An event asks for other actions than the one that is under way."""

    def __init__(self, actions: list[Action]) -> None:
        super().__init__(actions)
        self.actions = actions


class Mailbox:
    """Events in order; `hear` gives one to the machine and returns its actions."""

    def __init__(self, hear: Callable[[Event], list[Action]]) -> None:
        self._hear = hear
        self._events: deque[Event] = deque()
        self.news = asyncio.Event()
        """Set while there is something to read: whatever may wait also waits for this."""

    def put(self, event: Event) -> None:
        """Keep an event from outside."""
        self._events.append(event)
        self.news.set()

    def read(self) -> None:
        """Hear what has come. Raises Interrupted at the first event that asks for something."""
        if actions := self._next():
            raise Interrupted(actions)

    async def wait(self, timeout_s: float) -> None:
        """Wait for news for at most `timeout_s`, and `read`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.news.wait()
        self.read()

    async def listen(self) -> list[Action]:
        """Wait for an event that asks for something."""
        while True:
            await self.news.wait()
            if actions := self._next():
                return actions

    def _next(self) -> list[Action]:
        while self._events:
            if actions := self._hear(self._events.popleft()):
                return actions
        self.news.clear()
        return []
