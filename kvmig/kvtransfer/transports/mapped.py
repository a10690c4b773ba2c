"""Chunks pushed through mapped memory: the source maps the inbox's buffers and copies into them.

Both ends' buffers are of one `MappableMemory`, a GPU's (`cuda_ipc`), so a chunk goes from
device to device, over NVLink where the devices have it. A copy that the source has waited
for is there, so the chunk is announced after it, and the destination waits for nothing.
Memory that is mapped by a file descriptor gets it from a `Donor`.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import os
import secrets
import socket
import struct
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Protocol

import msgspec

from kvmig.ground.errors import KvmigError, PeerError, TransportError
from kvmig.kernels.face import Device
from kvmig.kvtransfer.messages import Chunk, Offer
from kvmig.kvtransfer.transports.base import Announce, Channel, Inbox, Shape, Staging, check_slot
from kvmig.kvtransfer.transports.worker import Worker
from kvmig.kvtransfer.wire import RefusalCounter

SECRET_BYTES = 16
TIMEOUT_S = 2.0
"""For the donor's half of one exchange."""
WORD_TIMEOUT_S = 0.2
"""For a peer's half: much less, for others wait behind it."""
_CREDENTIALS = struct.Struct("3i")


class MemoryHandle(msgspec.Struct, frozen=True):
    """Memory of one process, as another on the same host can map it."""

    size: int
    """Bytes of what is mapped: the whole allocation."""
    offset: int
    """Where in it the memory begins."""
    handle: str = ""
    """A cudaIpcMemHandle in hex, or"""
    ticket: Ticket | None = None
    """where a file descriptor of it can be had."""


@dataclass
class Allocation:
    """Memory of this process, kept alive by `owner`."""

    address: int
    owner: object


@dataclass
class ExportedMemory:
    """The handle for the other process, and the donor of its descriptor, if it has one."""

    exported: MemoryHandle
    donor: Donor | None = None


class MappableMemory(Protocol):
    """A kind of memory. Methods raise KvmigError; all may block."""

    transport: str
    device: Device

    def allocate(self, nbytes: int) -> Allocation:
        """New memory."""
        ...

    def export(self, allocation: Allocation, nbytes: int) -> ExportedMemory:
        """Let another process map it."""
        ...

    def map(self, exported: MemoryHandle) -> int:
        """Where another process's memory now is in this one (that of its offset)."""
        ...

    def unmap(self, exported: MemoryHandle, address: int) -> None:
        """Undo `map`."""
        ...

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """From address to address; done when it returns."""
        ...


class Origin(msgspec.Struct, frozen=True):
    """The offer's token."""

    host: str
    shape: Shape


class Place(msgspec.Struct, frozen=True):
    """The inbox's token."""

    exported: MemoryHandle
    slot_bytes: int


def host_identity() -> str:
    """The same for processes that can map each other's memory.

    They share a kernel and a network namespace, in which the descriptors' sockets are.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/net').readlink()}"


class MappedStaging(Staging):
    """Slots in a kind of memory."""

    def __init__(self, memory: MappableMemory, slots: int, slot_bytes: int) -> None:
        """Raises TransportError if there isn't as much."""
        self.transport = memory.transport
        self._kind = memory
        self._memory = _allocate(memory, slots * slot_bytes)
        super().__init__(slots, slot_bytes)

    def buffer(self, slot: int) -> memoryview:
        """The slot; on a GPU no host code may touch it, see `memory.view`."""
        self.check(slot)
        address = self._memory.address + slot * self.slot_bytes
        return view(address, self.slot_bytes, self._memory.owner, self._kind.device)

    def offer(self) -> Offer:
        """Where this side is, and how many buffers the destination needs for it."""
        origin = Origin(host_identity(), Shape(self.slots, self.slot_bytes))
        return Offer(self.transport, msgspec.json.encode(origin).decode())

    def _connect(self, token: str) -> Channel:
        try:
            place = msgspec.json.decode(token, type=Place)
        except msgspec.DecodeError as error:
            raise PeerError(f"not a token of {self.transport}: {error}") from error
        return MappedChannel(self._kind, self._memory, place, self.slot_bytes)


class MappedChannel(Channel):
    """Copies on a thread of its own, since that waits for the copy's end."""

    def __init__(
        self, kind: MappableMemory, memory: Allocation, place: Place, slot_bytes: int
    ) -> None:
        self._kind = kind
        self._memory = memory
        self._place = place
        self._slot_bytes = slot_bytes
        self._worker = Worker(f"{kind.transport} push")
        self._mapped = self._worker.submit(lambda: kind.map(place.exported))

    async def push(self, chunk: Chunk, announce: Announce) -> None:
        """Copied, then announced."""
        there = chunk.slot * self._place.slot_bytes
        if (
            chunk.nbytes > self._place.slot_bytes
            or there + chunk.nbytes > self._place.exported.size
        ):
            raise PeerError(f"{chunk.nbytes} bytes for buffers of {self._place.slot_bytes}")
        here = self._memory.address + chunk.slot * self._slot_bytes
        try:
            await self._worker.run(
                lambda: self._kind.copy(self._mapped.result() + there, here, chunk.nbytes)
            )
        except (KvmigError, RuntimeError, OSError) as error:
            self.broken = True
            raise TransportError(f"can't copy to the destination's memory: {error}") from error
        announce()

    def close(self) -> None:
        """Unmap, after the copy that runs."""
        kind, exported, mapped = self._kind, self._place.exported, self._mapped
        self._worker.post(lambda: _unmap(kind, exported, mapped))
        self._worker.close()


class MappedInbox(Inbox):
    """Buffers like the source's, in the same kind of memory."""

    stale = False

    def __init__(self, memory: MappableMemory, offer: Offer) -> None:
        """Raises TransportError for a source on another host, or without enough memory."""
        self.transport = memory.transport
        self._device = memory.device
        try:
            origin = msgspec.json.decode(offer.token, type=Origin)
        except msgspec.DecodeError as error:
            raise TransportError(f"not a token of {offer.transport}: {error}") from error
        if origin.host != host_identity():
            raise TransportError("the source is on another host")
        self._shape = origin.shape.checked()
        nbytes = self._shape.slots * self._shape.slot_bytes
        self._memory = _allocate(memory, nbytes)
        try:
            self._export = memory.export(self._memory, nbytes)
        except KvmigError as error:
            raise TransportError(f"can't share memory of {self.transport}: {error}") from error
        place = Place(self._export.exported, self._shape.slot_bytes)
        self.token = msgspec.json.encode(place).decode()

    async def receive(self, chunk: Chunk, payload: bytes | memoryview | None) -> memoryview:
        """The chunk in its slot; it is there."""
        check_slot(chunk, payload, self._shape.slots, self._shape.slot_bytes)
        address = self._memory.address + chunk.slot * self._shape.slot_bytes
        return view(address, chunk.nbytes, self._memory.owner, self._device).toreadonly()

    def close(self) -> None:
        """Give no more descriptors; the memory goes with its last view."""
        if self._export.donor is not None:
            self._export.donor.close()


def _allocate(memory: MappableMemory, nbytes: int) -> Allocation:
    try:
        return memory.allocate(nbytes)
    except (KvmigError, RuntimeError, OSError) as error:
        raise TransportError(f"no {nbytes} bytes of {memory.transport} memory: {error}") from error


def _unmap(kind: MappableMemory, exported: MemoryHandle, mapped: Future[int]) -> None:
    if mapped.exception() is None:
        kind.unmap(exported, mapped.result())


def view(address: int, nbytes: int, owner: object, device: Device = "cpu") -> memoryview:
    """`nbytes` at `address`, writable; keeps `owner`, whose memory it is, alive.

    Of a GPU's memory only the address means something: kernels take it, host code that
    reads or writes the view crashes. It and its parts say so to `kernels.arrays.memory_of`.
    """
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    buffer.owner = owner  # type: ignore[attr-defined]
    if device == "cuda":
        buffer.__cuda_array_interface__ = {  # type: ignore[attr-defined]
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
    return memoryview(buffer).cast("B")


# -- file descriptors from one process to another on the same host (SCM_RIGHTS)


class Ticket(msgspec.Struct, frozen=True):
    """Where a descriptor can be had, and by what word."""

    socket: str
    secret: str


class Donor:
    """Gives copies of one descriptor to this user's processes that have the ticket.

    The socket is abstract: it leaves no file, and only this network namespace sees it. Who
    connects without both is a stranger, and counted.
    """

    def __init__(self, descriptor: int, refusals: RefusalCounter) -> None:
        """Keeps a copy of `descriptor` of its own until `close`."""
        self._descriptor = os.dup(descriptor)
        self._refusals = refusals
        self._secret = secrets.token_bytes(SECRET_BYTES)
        name = f"kvmig-{secrets.token_hex(8)}"
        self.ticket = Ticket(name, self._secret.hex())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{name}")
        self._socket.listen()
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give no more. Idempotent."""
        with contextlib.suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join(TIMEOUT_S)
        self._socket.close()

    def _serve(self) -> None:
        try:
            while True:
                try:
                    peer, _ = self._socket.accept()
                except OSError:
                    return
                with peer, contextlib.suppress(OSError):  # a peer that left gets nothing
                    self._give(peer)
        finally:
            os.close(self._descriptor)

    def _give(self, peer: socket.socket) -> None:
        peer.settimeout(WORD_TIMEOUT_S)
        if self._knows(peer):
            socket.send_fds(peer, [b"!"], [self._descriptor])
        else:
            self._refusals.count_strangers(1)

    def _knows(self, peer: socket.socket) -> bool:
        if not _ours(peer):
            return False
        try:
            word = peer.recv(SECRET_BYTES, socket.MSG_WAITALL)
        except OSError:  # it says nothing, or left
            return False
        return secrets.compare_digest(word, self._secret)


def take(ticket: Ticket, refusals: RefusalCounter) -> int:
    """A copy of the donor's descriptor; the caller closes it. Blocks for TIMEOUT_S at most.

    Raises TransportError if the donor is gone, gives none, or is another user's: anybody may
    listen under the name of a donor that is gone, and would hear the word and lend its own
    memory for our blocks. That is counted.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as donor:
        donor.settimeout(TIMEOUT_S)
        try:
            donor.connect(f"\0{ticket.socket}")
            if not _ours(donor):
                refusals.count_strangers(1)
                raise TransportError(f"no descriptor from {ticket.socket}: another user's socket")
            donor.sendall(bytes.fromhex(ticket.secret))
            size = socket.CMSG_SPACE(array.array("i").itemsize)
            _, control, _, _ = donor.recvmsg(1, size, socket.MSG_CMSG_CLOEXEC)
        except (OSError, ValueError) as error:
            raise TransportError(f"no descriptor from {ticket.socket}: {error}") from error
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            (descriptor,) = array.array("i", data[:4])
            return descriptor
    raise TransportError(f"no descriptor from {ticket.socket}: it refused")


def _ours(peer: socket.socket) -> bool:
    """Whether a process of this user is at the other end: who connected, or who listens."""
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(raw)
    return bool(user == os.geteuid())
