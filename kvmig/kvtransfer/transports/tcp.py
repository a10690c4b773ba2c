"""TCP: a chunk's bytes travel on a lane of their own, or as a frame of their message.

The destination listens on a port for its source, which gets the port and a key on the control
socket (CURVE); see `lane`. Where the source can't connect to that port, and between engines of one
process, the bytes come with the message.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import secrets
from concurrent.futures import Future

import msgspec

from kvmig.core.errors import PeerError, TransportError
from kvmig.kvtransfer.messages import PAYLOAD_SLOT, Chunk, TransportOffer
from kvmig.kvtransfer.transports.base import (
    AnnounceChunk,
    BufferShape,
    TransportChannel,
    TransportInbox,
)
from kvmig.kvtransfer.transports.host_memory import HostChannel, HostStaging, unmap
from kvmig.kvtransfer.transports.lane import LaneReceiver, LaneSender, LaneTicket
from kvmig.kvtransfer.transports.worker import CallWorker
from kvmig.rpc.codec import RefusalCounter

NAME = "tcp"
PATIENCE_S = 0.05
"""How long a chunk waits for a lane that isn't connected yet; then its message takes its bytes."""

log = logging.getLogger(__name__)


class LaneOffer(BufferShape, frozen=True):
    """The offer's token. source: differs for each source, so that each has an inbox of its own."""

    source: str = ""


class TcpStaging(HostStaging):
    """Slots in private memory, which costs nothing until it is used."""

    transport = NAME
    fuses = True

    def __init__(self, slots: int, slot_bytes: int, lanes: bool = False) -> None:
        """lanes: whether to offer to send on lanes."""
        super().__init__(mmap.mmap(-1, slots * slot_bytes), slots, slot_bytes)
        shape = LaneOffer(slots, slot_bytes, secrets.token_hex(8))
        self._offer = TransportOffer(NAME, shape.token() if lanes else "")

    def offer(self) -> TransportOffer:
        """How many buffers a lane needs there; nothing without lanes, for a peer that received the
        offer has the socket."""
        return self._offer

    def _connect(self, token: str) -> TransportChannel:
        if not token:
            return TcpChannel(self)
        try:
            return LaneChannel(self, msgspec.json.decode(token, type=LaneTicket))
        except msgspec.DecodeError as error:
            raise PeerError(f"not a token of {NAME}: {error}") from error


class TcpChannel(HostChannel):
    """Sends the slot's first bytes; the socket may read them until the chunk is done."""

    async def push(self, chunk: Chunk, announce: AnnounceChunk) -> None:
        """Send the bytes with the message."""
        announce((self._staging.buffer(chunk.slot)[: chunk.nbytes],))


class LaneChannel(TcpChannel):
    """Sends on a lane, which a thread connects; with the messages until then, or if it can't."""

    def __init__(self, staging: TcpStaging, ticket: LaneTicket) -> None:
        super().__init__(staging)
        self._number = 0
        self._lane: LaneSender | None = None
        self._closed = False
        self._worker = CallWorker(f"{NAME} {ticket.host}:{ticket.port}")
        self._connecting = self._worker.submit(lambda: self._open(ticket))
        self._sending: Future[None] | None = None

    @property
    def stale(self) -> bool:
        """Whether the destination has closed its end, or died."""
        return self._lane is not None and self._lane.ended

    async def buffer(self, slot: int) -> memoryview:
        """The slot itself, once the lane is connected or has taken too long."""
        if not self._connecting.done():
            await asyncio.wait([asyncio.wrap_future(self._connecting)], timeout=PATIENCE_S)
        return await super().buffer(slot)

    async def push(self, chunk: Chunk, announce: AnnounceChunk) -> None:
        """Announce the chunk and have its bytes sent, once those of the one before have left."""
        lane = self._lane
        if lane is None:
            await super().push(chunk, announce)
            return
        if self.broken or self._closed:
            raise TransportError("the lane to the destination has ended")
        before, self._number = self._sending, self._number + 1
        number, data = self._number, self._staging.buffer(chunk.slot)[: chunk.nbytes]
        announce(number=number)
        self._sending = self._worker.submit(lambda: self._send(lane, number, chunk.slot, data))
        if before is not None:
            await asyncio.shield(asyncio.wrap_future(before))

    def close(self) -> None:
        """End the lane."""
        self._closed = True
        if self._lane is not None:
            self._lane.end()
            self._worker.post(self._lane.close)
        self._worker.close()

    def _open(self, ticket: LaneTicket) -> None:
        try:
            lane = LaneSender(ticket)
        except TransportError as error:
            log.warning("KV blocks go with their messages, which is slower: %s", error)
            return
        self._lane = lane
        if self._closed:
            lane.close()

    def _send(self, lane: LaneSender, number: int, slot: int, data: memoryview) -> None:
        try:
            lane.send(number, slot, data)
        except TransportError:
            self.broken = True
            lane.close()  # the destination ends the migrations that wait for what doesn't come
            raise


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


class LaneInbox(TcpInbox):
    """Buffers like the source's, which its lane fills; takes bytes from messages as well."""

    def __init__(self, offer: TransportOffer, host: str, refusals: RefusalCounter) -> None:
        """host: address to listen on. Raises TransportError."""
        self._shape = shape = LaneOffer.from_offer(offer)
        self._memory = mmap.mmap(-1, shape.slots * shape.slot_bytes)
        self._lane = LaneReceiver(host, self._memory, shape.slots, shape.slot_bytes, refusals)
        self.token = msgspec.json.encode(self._lane.ticket).decode()

    @property
    def memory(self) -> memoryview:
        """See `TransportInbox`."""
        return memoryview(self._memory)

    @property
    def stale(self) -> bool:  # type: ignore[override]
        """Whether the lane has ended: the source gave it up or died, or it never came."""
        return self._lane.arrivals.ended

    async def receive(self, chunk: Chunk, payload: bytes | memoryview | None) -> memoryview:
        """The chunk in its slot, once it has come; or the payload."""
        if payload is not None:
            return await super().receive(chunk, payload)
        shape = self._shape
        shape.check_chunk(chunk, payload)
        await asyncio.wrap_future(self._lane.arrivals.wait(chunk.slot, chunk.number))
        start = chunk.slot * shape.slot_bytes + chunk.offset
        return memoryview(self._memory)[start : start + chunk.nbytes].toreadonly()

    def close(self) -> None:
        """End the lane; the memory goes with its last view."""
        self._lane.close()
        unmap(self._memory)


def open_inbox(offer: TransportOffer, host: str | None, refusals: RefusalCounter) -> TransportInbox:
    """An inbox for the offer: with a lane where both ends want one. Raises TransportError."""
    if not offer.token or host is None:
        return TcpInbox()
    return LaneInbox(offer, host, refusals)
