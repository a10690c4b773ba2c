"""What reaches a source session from outside, kept until the session looks."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

import msgspec

from kvmig.kvtransfer.messages import Message
from kvmig.kvtransfer.source_actions import Action


class Cancel(msgspec.Struct, frozen=True):
    """The client left, or the instance stops."""

    reason: str


class PeerLost(msgspec.Struct, frozen=True):
    """The connection to the destination is gone."""


Event = Message | Cancel | PeerLost


class Mailbox:
    """Events in order; `feed` gives one to the machine and returns its actions."""

    def __init__(self, feed: Callable[[Event], list[Action]]) -> None:
        self._feed = feed
        self._events: deque[Event] = deque()
        self.news = asyncio.Event()
        """Set while there is something to read: what may wait, waits for this, too."""

    def put(self, event: Event) -> None:
        """From outside."""
        self._events.append(event)
        self.news.set()

    def read(self) -> list[Action]:
        """Feed what has come, up to the first event that asks for something."""
        while self._events:
            if actions := self._feed(self._events.popleft()):
                return actions
        self.news.clear()
        return []

    async def wait(self, timeout_s: float) -> list[Action]:
        """Wait for news at most so long; what they ask for, [] if nothing."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.news.wait()
        return self.read()

    async def listen(self) -> list[Action]:
        """Wait for an event that asks for something."""
        while True:
            await self.news.wait()
            if actions := self.read():
                return actions
