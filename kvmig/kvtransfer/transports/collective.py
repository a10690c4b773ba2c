"""Chunks over a process group of two (`groups`): the way of the paper, for comparison.

The destination hosts the rendezvous store and waits for the source; its token says where.
A receive that fails or is given up leaves the group unusable, so both ends drop it, and the
next migration gets another.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvmig.ground.errors import PeerError, TransportError
from kvmig.kvtransfer.messages import Chunk, Offer
from kvmig.kvtransfer.transports.base import Announce, Channel, Inbox, Shape, Staging, check_slot
from kvmig.kvtransfer.transports.groups import BACKENDS, Backend
from kvmig.kvtransfer.transports.memory import view
from kvmig.kvtransfer.transports.worker import Worker

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

OPEN_TIMEOUT_S = 10.0
"""For the other rank to join."""
RECEIVE_TIMEOUT_S = 10.0


class Meeting(msgspec.Struct, frozen=True):
    """The inbox's token: where the store is, and the group's name in it."""

    host: str
    port: int
    group: str


class Membership:
    """One rank of a group, on a thread of its own; joins at once, in the background."""

    def __init__(self, backend: Backend, meeting: Meeting, host: str, store: Any = None) -> None:
        """store: of the side that hosts it, which is rank 1."""
        self._group: Any = None
        self._worker = Worker(f"{backend.name} {meeting.host}:{meeting.port}")
        self._joined = self._worker.submit(lambda: self._join(backend, meeting, host, store))

    async def run(self, call: Callable[[Any], T]) -> T:
        """`call(group)` on the thread. Raises RuntimeError if the group or the call fails."""
        return await self._worker.run(lambda: call(self._member()))

    def leave(self) -> None:
        """Give the group up, once the call that runs has ended. Idempotent."""
        self._worker.post(self._leave)
        self._worker.close()

    def _join(self, backend: Backend, meeting: Meeting, host: str, store: Any) -> None:
        from torch._C._distributed_c10d import PrefixStore, TCPStore

        rank = 1
        if store is None:
            timeout = timedelta(seconds=OPEN_TIMEOUT_S)
            rank, store = 0, TCPStore(meeting.host, meeting.port, None, False, timeout)
        named = PrefixStore(meeting.group, store)
        self._group = backend.open(named, rank, host, OPEN_TIMEOUT_S)

    def _member(self) -> Any:
        self._joined.result()
        if self._group is None:
            raise RuntimeError("this side has left the group")
        return self._group

    def _leave(self) -> None:
        if self._group is not None:
            group, self._group = self._group, None
            group.abort()


class GroupStaging(Staging):
    """Slots in the backend's kind of memory."""

    def __init__(self, transport: str, slots: int, slot_bytes: int, host: str) -> None:
        """`host`: address that this side's sockets use. Raises TransportError if it can't be."""
        self.transport = transport
        self._backend = BACKENDS[transport]
        self._backend.check()
        self._host = host
        self._memory = self._backend.memory(slots * slot_bytes)
        super().__init__(slots, slot_bytes)

    def buffer(self, slot: int) -> memoryview:
        """The slot; on a GPU no host code may read it, see `memory.view`."""
        self.check(slot)
        address = self._memory.data_ptr() + slot * self.slot_bytes
        return view(address, self.slot_bytes, self._memory, self._backend.device)

    def offer(self) -> Offer:
        """How many buffers the destination needs for it."""
        return Offer(self.transport, Shape(self.slots, self.slot_bytes).token())

    def _connect(self, token: str) -> Channel:
        try:
            meeting = msgspec.json.decode(token, type=Meeting)
        except msgspec.DecodeError as error:
            raise PeerError(f"not a token of {self.transport}: {error}") from error
        tensors = self._memory.split(self.slot_bytes)
        return GroupChannel(self._backend, meeting, list(tensors), self._host)


class GroupChannel(Channel):
    """Sends a slot as a tensor; ChunkDone is the only answer that is waited for."""

    def __init__(
        self, backend: Backend, meeting: Meeting, slots: list[torch.Tensor], host: str
    ) -> None:
        self._slots = slots
        self._members = Membership(backend, meeting, host)
        self._number = 0
        self._sending: dict[int, Any] = {}

    async def push(self, chunk: Chunk, announce: Announce) -> None:
        """Announced first: the first transfer may need both sides to be at it."""
        self._number += 1
        number = self._number
        announce(number=number)
        tensor = self._slots[chunk.slot][: chunk.nbytes]
        try:
            # Replaces the last send from the slot: one that nobody takes any more is dropped.
            self._sending[chunk.slot] = await self._members.run(
                lambda group: group.send([tensor], 1, number)
            )
        except RuntimeError as error:
            self.broken = True
            raise TransportError(f"the process group is broken: {error}") from error

    def close(self) -> None:
        """Leave the group."""
        self._sending.clear()
        self._members.leave()


class GroupInbox(Inbox):
    """As many buffers as the source has, of the backend's kind of memory."""

    stale = False

    def __init__(self, offer: Offer, host: str) -> None:
        """`host`: where the source finds this side. Raises TransportError if it can't be had."""
        from torch._C._distributed_c10d import TCPStore

        self.transport = offer.transport
        self._backend = BACKENDS[offer.transport]
        self._backend.check()
        self._shape = Shape.of(offer)
        timeout = timedelta(seconds=OPEN_TIMEOUT_S)
        try:
            store = TCPStore(host, 0, None, True, timeout, wait_for_workers=False)
            self._memory = self._backend.memory(self._shape.slots * self._shape.slot_bytes)
        except RuntimeError as error:
            raise TransportError(f"no rendezvous at {host}: {error}") from error
        meeting = Meeting(host, store.port, secrets.token_hex(8))
        self.token = msgspec.json.encode(meeting).decode()
        self._last = 0
        self._members = Membership(self._backend, meeting, host, store)

    async def receive(self, chunk: Chunk, payload: bytes | memoryview | None) -> memoryview:
        """The chunk in its slot, once it is received."""
        check_slot(chunk, payload, self._shape.slots, self._shape.slot_bytes)
        if self._backend.ordered and chunk.number != self._last + 1:
            self.stale = True
            raise TransportError(f"push {chunk.number} after {self._last}: one was left out")
        self._last = chunk.number
        start = chunk.slot * self._shape.slot_bytes
        tensor = self._memory[start : start + chunk.nbytes]
        try:
            await self._members.run(lambda group: self._take(group, tensor, chunk.number))
        except BaseException as error:
            self.stale = True
            if isinstance(error, RuntimeError):
                raise TransportError(f"the process group is broken: {error}") from error
            raise
        device = self._backend.device
        return view(tensor.data_ptr(), chunk.nbytes, tensor, device).toreadonly()

    def close(self) -> None:
        """Leave the group; the store goes with it."""
        self.stale = True
        self._members.leave()

    def _take(self, group: Any, tensor: torch.Tensor, number: int) -> None:
        self._backend.wait(group.recv([tensor], 0, number), RECEIVE_TIMEOUT_S)
