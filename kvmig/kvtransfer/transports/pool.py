"""A bounded pool of slot numbers: what all staging buffers have in common."""

from __future__ import annotations

import asyncio

from kvmig.ground.errors import TransportError

CLOSED = -1
"""Stands in the queue of free slots after close, to wake everyone who waits."""


class SlotPool:
    """Slots 0 .. slots - 1, each held by one migration at a time. Used by one event loop."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._held: set[int] = set()
        self._closed = False
        for slot in range(slots):
            self._free.put_nowait(slot)

    @property
    def held(self) -> int:
        """Slots that are acquired now: 0 when no migration is under way."""
        return len(self._held)

    async def acquire(self, timeout_s: float) -> int:
        """Take a slot, waiting for one to be released.

        Raises TransportError after `timeout_s`, or when the pool is closed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                slot = await self._free.get()
        except TimeoutError:
            raise TransportError(
                f"no free staging slot of {self.slots} within {timeout_s:g} s"
            ) from None
        if slot == CLOSED:
            self._free.put_nowait(CLOSED)
            raise TransportError("the staging pool is closed")
        self._held.add(slot)
        return slot

    def release(self, slot: int) -> None:
        """Give an acquired slot back; after `close` it does nothing."""
        if self._closed:
            return
        self.check(slot)
        self._held.remove(slot)
        self._free.put_nowait(slot)

    def check(self, slot: int) -> None:
        """Raises TransportError after `close`, ValueError if `slot` is not acquired."""
        if self._closed:
            raise TransportError("the staging pool is closed")
        if slot not in self._held:
            raise ValueError(f"staging slot {slot} is not acquired")

    def close(self) -> None:
        """Fail everyone who waits. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._held.clear()
        while not self._free.empty():
            self._free.get_nowait()
        self._free.put_nowait(CLOSED)
