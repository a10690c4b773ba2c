"""TCP: a chunk's bytes are a frame of its message, on the migration's own (CURVE) socket."""

from __future__ import annotations

import mmap

from kvmig.core.errors import PeerError
from kvmig.kvtransfer.messages import PAYLOAD_SLOT, Chunk, Offer
from kvmig.kvtransfer.transports.base import (
    AnnounceChunk,
    HostChannel,
    HostStaging,
    TransportChannel,
    TransportInbox,
)

NAME = "tcp"


class TcpStaging(HostStaging):
    """Slots in private memory, which costs nothing until it is used."""

    transport = NAME
    fuses = True

    def __init__(self, slots: int, slot_bytes: int) -> None:
        super().__init__(mmap.mmap(-1, slots * slot_bytes), slots, slot_bytes)

    def offer(self) -> Offer:
        """An empty offer: a peer that received it has the socket."""
        return Offer(NAME)

    def _connect(self, token: str) -> TransportChannel:
        return TcpChannel(self)


class TcpChannel(HostChannel):
    """Sends the slot's first bytes; the socket may read them until the chunk is done."""

    async def push(self, chunk: Chunk, announce: AnnounceChunk) -> None:
        """Send the bytes with the message."""
        announce((self._staging.buffer(chunk.slot)[: chunk.nbytes],))


class TcpInbox(TransportInbox):
    """Takes the bytes from the message."""

    transport = NAME
    stale = False

    async def receive(self, chunk: Chunk, payload: bytes | memoryview | None) -> memoryview:
        """The payload."""
        if payload is None or chunk.slot != PAYLOAD_SLOT:
            raise PeerError("chunk without its bytes")
        data = memoryview(payload).toreadonly()
        if data.nbytes != chunk.nbytes:
            raise PeerError(f"chunk of {chunk.nbytes} bytes came with {data.nbytes}")
        return data

    def close(self) -> None:
        """Free nothing: the channel holds nothing."""
