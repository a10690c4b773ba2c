"""The transport port: staging buffers at the source, a view of them at the destination.

The source gathers a chunk into a slot and sends a `Chunk`. Either the destination
sees the slot's memory (`payload` is None and `Chunk.slot` is the slot), or the
bytes travel with the message (`payload` is the frame and `Chunk.slot` is
PAYLOAD_SLOT). Either way the slot stays the chunk's until `ChunkDone`, or until
the migration is given up: a destination that still reads a reused slot finds
that the checksums differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
from abc import ABC, abstractmethod

from kvmig.ground.errors import TransportError
from kvmig.kvtransfer.messages import Chunk, Offer

CLOSED = -1
"""Stands in the queue of free slots after close, to wake everyone who waits."""


class Staging(ABC):
    """A bounded pool of buffers that serves all migrations out of an instance.

    One event loop uses it; `buffer`'s memory may be written by other threads.
    slots: buffers; slot_bytes: bytes of one; offset: where slot 0 starts in `memory`.
    """

    transport: str

    def __init__(self, memory: mmap.mmap, slots: int, slot_bytes: int, offset: int = 0) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._memory = memory
        self._offset = offset
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

    def buffer(self, slot: int) -> memoryview:
        """The slot's memory [slot_bytes], writable. Don't keep it after `release`."""
        self._check(slot)
        start = self._offset + slot * self.slot_bytes
        return memoryview(self._memory)[start : start + self.slot_bytes]

    def release(self, slot: int) -> None:
        """Give an acquired slot back; after `close` it does nothing."""
        if self._closed:
            return
        self._check(slot)
        self._held.remove(slot)
        self._free.put_nowait(slot)

    def close(self) -> None:
        """Free the memory (with the last view of it) and fail everyone who waits. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._held.clear()
        while not self._free.empty():
            self._free.get_nowait()
        self._free.put_nowait(CLOSED)
        unmap(self._memory)

    @abstractmethod
    def offer(self) -> Offer:
        """What the destination needs to try this transport."""

    @abstractmethod
    def payload(self, slot: int, nbytes: int) -> memoryview | None:
        """The first `nbytes` of the slot as a message frame; None when they don't travel so."""

    def _check(self, slot: int) -> None:
        if self._closed:
            raise TransportError("the staging pool is closed")
        if slot not in self._held:
            raise ValueError(f"staging slot {slot} is not acquired")


class Inbox(ABC):
    """The destination's view of one source's staging buffers; serves all migrations from it."""

    transport: str

    @abstractmethod
    def view(self, chunk: Chunk, payload: bytes | memoryview | None) -> memoryview:
        """The chunk's bytes [chunk.nbytes], read-only, valid until its ChunkDone is sent.

        Raises PeerError when slot, size or payload can't be what the source offered.
        """

    @property
    @abstractmethod
    def stale(self) -> bool:
        """Whether the source has closed its end, so that no new migration can use this one."""

    @abstractmethod
    def close(self) -> None:
        """Free what was mapped (with the last view of it). Idempotent."""


def unmap(memory: mmap.mmap) -> None:
    """Unmap now; while a copy still reads it, with the last view and the owner's reference."""
    with contextlib.suppress(BufferError):
        memory.close()
