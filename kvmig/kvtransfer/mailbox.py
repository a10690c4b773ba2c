"""The mailbox of a session: events from outside, kept until the session looks."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

E = TypeVar("E")
A = TypeVar("A")


class CancelMigration(msgspec.Struct, frozen=True):
    """The client left, or the instance stops."""

    reason: str


class PeerLost(msgspec.Struct, frozen=True):
    """The connection to the destination is gone."""


class ActionInterrupted(Exception):
    """An event asks for other actions than the one that is under way."""

    def __init__(self, actions: list[Any]) -> None:
        super().__init__(actions)
        self.actions = actions


class EventMailbox(Generic[E, A]):
    """Events E in order; `hear` gives one to the machine and returns its actions A."""

    def __init__(self, hear: Callable[[E], list[A]]) -> None:
        self._hear = hear
        self._events: deque[E] = deque()
        self.news = asyncio.Event()
        """Set while there is something to read: all that may wait also waits for this."""

    def put(self, event: E) -> None:
        """Keep an event from outside."""
        self._events.append(event)
        self.news.set()

    @property
    def first(self) -> E | None:
        """The event that is read next; None: there is none."""
        return self._events[0] if self._events else None

    def take_event(self) -> E | None:
        """Take out the next event; None: there is none."""
        return self._events.popleft() if self._events else None

    def read(self) -> None:
        """Take what has come. Raises ActionInterrupted at the first event that asks for
        something."""
        if actions := self._next():
            raise ActionInterrupted(actions)

    async def wait(self, timeout_s: float) -> None:
        """Wait for news for at most `timeout_s`, and `read`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.news.wait()
        self.read()

    async def listen(self) -> list[A]:
        """Wait for an event that asks for something."""
        while True:
            await self.news.wait()
            if actions := self._next():
                return actions

    def close(self) -> None:
        """Let go of the session, which is over."""
        self._hear = _deaf

    def _next(self) -> list[A]:
        while self._events:
            if actions := self._hear(self._events.popleft()):
                return actions
        self.news.clear()
        return []


def _deaf(event: object) -> list[Any]:
    return []
