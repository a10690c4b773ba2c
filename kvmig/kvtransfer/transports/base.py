"""The transport port: `StagingPool` at the source, `TransportInbox` at the destination,
`TransportChannel` between.

The source gathers a chunk into a slot's buffer, and a channel brings it to one destination:

- the destination sees the slot's memory (shared memory), or
- the bytes travel with the chunk's message (TCP): `Chunk.slot` is then PAYLOAD_SLOT, or
- they are pushed into the slot of the same number in the inbox (NIXL), or
- the buffer is that slot of the inbox (CUDA IPC), so that gathered is there.
  `TransportInbox.token` says where that is; `Chunk.number` distinguishes pushes.

The slot stays the chunk's until `ChunkDone`, or until the migration is given up: a
destination that still reads a reused slot finds that the checksums differ.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import Protocol, Self

import msgspec

from kvmig.core.errors import PeerError, TransportError
from kvmig.kvtransfer.messages import Chunk, TransportOffer
from kvmig.rpc.codec import Frames

CLOSED = -1
"""Stands in the queue of free slots after close, to wake everyone who waits."""
KEPT = 32
"""Channels, and inboxes, that are kept: those used last."""
MOST = 1 << 36
"""Most bytes of an inbox: a peer that asks for more is mistaken."""


class AnnounceChunk(Protocol):
    """Send the chunk's message, at once. Raises TransportError if the peer is gone."""

    def __call__(self, payload: Frames = (), number: int = 0) -> None: ...


class TransportChannel(ABC):
    """The way from a staging pool to one inbox; serves all migrations between the two."""

    broken = False
    """Whether it can't be used any more: the next migration gets another."""

    @property
    def stale(self) -> bool:
        """Whether the inbox is gone, and what this holds of it is held for nothing."""
        return False

    @abstractmethod
    async def buffer(self, slot: int) -> memoryview:
        """The buffer of a slot [slot_bytes], writable, for blocks that go to this inbox.
        Don't keep it after the slot's release.

        Raises ValueError if the slot is not acquired, TransportError if the inbox can't be reached.
        """

    @abstractmethod
    async def push(self, chunk: Chunk, announce: AnnounceChunk) -> None:
        """Bring the chunk, gathered into slot `chunk.slot`, to the inbox; announces it once.

        Raises TransportError if that fails.
        """

    def close(self) -> None:
        """Free what it holds. Idempotent."""
        return


class StagingPool(ABC):
    """A bounded pool of buffers that serves all migrations out of an instance.

    One event loop uses it; a buffer's memory may be written by other threads.
    """

    transport: str
    fuses = False
    """Whether one slot may bring chunks of several migrations."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        """slots: buffers, each held by one chunk or batch; slot_bytes: bytes of one."""
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._free: asyncio.Queue[int] = asyncio.Queue()
        self._held: set[int] = set()
        self._closed = False
        self._channels: OrderedDict[str, TransportChannel] = OrderedDict()
        for slot in range(slots):
            self._free.put_nowait(slot)

    @property
    def memory(self) -> memoryview | None:
        """The host's memory that the slots are in. Don't keep it."""
        return None

    @abstractmethod
    def offer(self) -> TransportOffer:
        """What the destination needs to try this transport."""

    # -- slots

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

    # -- channels

    def channel(self, token: str) -> TransportChannel:
        """The way to the inbox whose token this is, made at the first call.

        Raises TransportError if it can't be had.
        """
        if self._closed:
            raise TransportError("the staging pool is closed")
        known = self._channels.pop(token, None)
        if known is not None and known.broken:
            known.close()
            known = None
        if known is None:
            self.let_go()
        self._channels[token] = known or self._connect(token)
        while len(self._channels) > KEPT:
            self._channels.popitem(last=False)[1].close()
        return self._channels[token]

    def let_go(self) -> None:
        """Close the channels to inboxes that are gone."""
        for token in [token for token, one in self._channels.items() if one.stale]:
            self._channels.pop(token).close()

    @abstractmethod
    def _connect(self, token: str) -> TransportChannel:
        """A new channel."""

    def close(self) -> None:
        """Close the channels and fail everyone who waits. Idempotent."""
        while self._channels:
            self._channels.popitem()[1].close()
        if self._closed:
            return
        self._closed = True
        self._held.clear()
        while not self._free.empty():
            self._free.get_nowait()
        self._free.put_nowait(CLOSED)


class TransportInbox(ABC):
    """The receiver of one source's chunks; serves all migrations from that source."""

    transport: str
    token = ""
    """What the source needs to push into it."""

    @property
    def memory(self) -> memoryview | None:
        """The host's memory that chunks arrive in, if it is always the same. Don't keep it."""
        return None

    @abstractmethod
    async def receive(self, chunk: Chunk, payload: bytes | memoryview | None) -> memoryview:
        """The chunk's bytes [chunk.nbytes], read-only, valid until its ChunkDone is sent.

        Raises PeerError when slot, size or payload can't be what the source offered,
        TransportError when the bytes don't come.
        """

    @property
    @abstractmethod
    def stale(self) -> bool:
        """Whether the source has closed its end, so that no new migration can use this one."""

    @abstractmethod
    def close(self) -> None:
        """Free what it holds (with the last view of it). Idempotent."""


class BufferShape(msgspec.Struct, frozen=True):
    """The source's buffers, of which the destination needs as many: an offer's token."""

    slots: int
    slot_bytes: int

    @classmethod
    def from_offer(cls, offer: TransportOffer) -> Self:
        """The shape that a token names. Raises TransportError for a token that names none."""
        try:
            return msgspec.json.decode(offer.token, type=cls).checked()
        except msgspec.DecodeError as error:
            raise TransportError(f"not a token of {offer.transport}: {error}") from error

    def checked(self) -> Self:
        """The same shape. Raises TransportError for sizes that can't be."""
        if self.slots < 1 or self.slot_bytes < 1 or self.slots * self.slot_bytes > MOST:
            raise TransportError(
                f"the source offers {self.slots} buffers of {self.slot_bytes} bytes"
            )
        return self

    def token(self) -> str:
        """The offer's token, as JSON."""
        return msgspec.json.encode(self).decode()

    def check_chunk(self, chunk: Chunk, payload: bytes | memoryview | None) -> None:
        """Raises PeerError unless the chunk, which came without bytes, is in one of the slots."""
        if payload is not None or not 0 <= chunk.slot < self.slots:
            raise PeerError(f"chunk in slot {chunk.slot} of {self.slots}")
        if not 0 <= chunk.nbytes <= self.slot_bytes - max(0, chunk.offset) or chunk.offset < 0:
            raise PeerError(
                f"{chunk.nbytes} bytes from {chunk.offset} on in a slot of {self.slot_bytes}"
            )
