"""CUDA IPC: the source's kernel gathers blocks straight into the inbox, GPU memory that it maps.

A chunk crosses NVLink, or PCIe between two GPUs, once; a copy that the source has waited for is
there, so the chunk is announced after it, and the destination waits for nothing. The source has no
buffers of its own. The inbox is memory of kvmig's own (`kernels.ipc`) on the GPU that the
destination's KV cache is on, never the cache itself: a copy that ends late, since a migration was
given up or its source is stuck or killed, writes where no blocks are, and what was read is
checked against the source's sums. A destination takes the offer when it has fetched a few bytes of
the source's memory: GPUs of one host needn't reach each other (no peer access, MIG).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import weakref
from pathlib import Path

import msgspec

from kvmig.core.errors import KvmigError, PeerError, TransportError
from kvmig.kernels import ipc
from kvmig.kernels.driver import CudaDriver
from kvmig.kernels.side_stream import SideStream
from kvmig.kvtransfer.messages import Chunk, TransportOffer
from kvmig.kvtransfer.transports.base import (
    AnnounceChunk,
    BufferShape,
    StagingPool,
    TransportChannel,
    TransportInbox,
)
from kvmig.kvtransfer.transports.descriptors import DescriptorDonor, DescriptorTicket, gone, take
from kvmig.kvtransfer.transports.worker import CallWorker
from kvmig.rpc.codec import RefusalCounter

NAME = "cuda-ipc"
NONCE_BYTES = 16
TEST_TIMEOUT_S = 30.0

log = logging.getLogger(__name__)


class ExportedMemory(msgspec.Struct, frozen=True):
    """Memory of one process, for others on the host: where a descriptor of it can be had."""

    ticket: DescriptorTicket
    size: int


class IpcOrigin(msgspec.Struct, frozen=True):
    """The offer's token. `exported` begins with `nonce`, in hex, for a test transfer."""

    host: str
    shape: BufferShape
    exported: ExportedMemory
    nonce: str


class IpcPlace(msgspec.Struct, frozen=True):
    """The inbox's token."""

    exported: ExportedMemory
    slot_bytes: int


def host_identity() -> str:
    """The same for processes that can map each other's memory.

    They share a kernel and a network namespace, in which the descriptors' sockets are.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/net').readlink()}"


class IpcMemory:
    """Memory of this process on one GPU, which others may map; it goes with its last view."""

    def __init__(self, gpu: int | None, nbytes: int, refusals: RefusalCounter) -> None:
        """refusals: counts strangers at its socket. Raises TransportError if there isn't as much,
        or no GPU."""
        if gpu is None:
            raise TransportError("CUDA IPC needs a KV cache in an NVIDIA GPU's memory")
        try:
            self.driver = CudaDriver(gpu)
            self.mapping, descriptor = ipc.create(self.driver, nbytes)
        except KvmigError as error:
            raise TransportError(f"no {nbytes} bytes of GPU memory to share: {error}") from error
        weakref.finalize(self, ipc.close, self.driver, self.mapping)
        try:
            self._donor = DescriptorDonor(descriptor, refusals)
        finally:
            os.close(descriptor)
        self.exported = ExportedMemory(self._donor.ticket, self.mapping.size)
        _ours[self._donor.ticket.socket] = self

    def view(self, start: int, nbytes: int) -> memoryview:
        """A part of it, see `ipc.view`."""
        return ipc.view(self.mapping.address + start, nbytes, self)

    def close(self) -> None:
        """End sharing: no process may map the memory any more. Idempotent."""
        self._donor.close()


_ours: weakref.WeakValueDictionary[str, IpcMemory] = weakref.WeakValueDictionary()
"""Memory of this process by its sockets' names: it can't be mapped again here, and needn't."""


class PeerMemory:
    """Another's memory as `driver`'s device reaches it at `address`; it goes with its last view."""

    def __init__(
        self, driver: CudaDriver, exported: ExportedMemory, refusals: RefusalCounter
    ) -> None:
        """Raises KvmigError, and OSError."""
        self._ours = _ours.get(exported.ticket.socket)
        if self._ours is not None:
            mapping = self._ours.mapping
            ipc.let(driver, mapping)
        else:
            mapping = _mapped(driver, exported, refusals)
            weakref.finalize(self, ipc.close, driver, mapping)
        self.address = mapping.address


def _mapped(
    driver: CudaDriver, exported: ExportedMemory, refusals: RefusalCounter
) -> ipc.DeviceMapping:
    descriptor = take(exported.ticket, refusals)
    try:
        return ipc.open_descriptor(driver, descriptor, exported.size)
    finally:
        os.close(descriptor)


class CudaIpcStaging(StagingPool):
    """Slots of the inboxes; here there is only what a destination tests the way with."""

    transport = NAME

    def __init__(
        self, gpu: int | None, slots: int, slot_bytes: int, refusals: RefusalCounter
    ) -> None:
        """refusals: counts strangers at sockets. Raises TransportError without a GPU's memory."""
        self._memory = IpcMemory(gpu, NONCE_BYTES, refusals)
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            self._memory.driver.write(self._memory.mapping.address, self._nonce)
        except KvmigError as error:
            self._memory.close()
            raise TransportError(f"GPU {gpu} takes no bytes: {error}") from error
        self._refusals = refusals
        super().__init__(slots, slot_bytes)

    def offer(self) -> TransportOffer:
        """The offer: this side's location, and how many buffers the destination needs for it."""
        shape = BufferShape(self.slots, self.slot_bytes)
        origin = IpcOrigin(host_identity(), shape, self._memory.exported, self._nonce.hex())
        return TransportOffer(NAME, msgspec.json.encode(origin).decode())

    def _connect(self, token: str) -> TransportChannel:
        try:
            place = msgspec.json.decode(token, type=IpcPlace)
        except msgspec.DecodeError as error:
            raise PeerError(f"not a token of {NAME}: {error}") from error
        size = place.exported.size
        if place.slot_bytes < self.slot_bytes or size < self.slots * place.slot_bytes:
            raise PeerError(
                f"{size} bytes in slots of {place.slot_bytes} are too small for "
                f"{self.slots} slots of {self.slot_bytes}"
            )
        return CudaIpcChannel(self, self._memory.driver, place, self._refusals)

    def close(self) -> None:
        """End the offer: no peer may test it any more."""
        if not self._closed:
            super().close()
            self._memory.close()
            del self._memory


class CudaIpcChannel(TransportChannel):
    """The inbox's slots as the source's GPU reaches them, mapped on a thread: it takes a while."""

    def __init__(
        self, staging: CudaIpcStaging, driver: CudaDriver, place: IpcPlace, refusals: RefusalCounter
    ) -> None:
        self._staging = staging
        self._place = place
        self._peer: PeerMemory | None = None  # not in the future, which lives as long as it likes
        self._closed = False
        worker = CallWorker(f"{NAME} map")
        self._mapped = worker.submit(lambda: self._map(driver, refusals))
        worker.close()

    @property
    def stale(self) -> bool:
        """Whether the destination has closed its inbox, or died: its GPU's memory is held here."""
        return gone(self._place.exported.ticket)

    async def buffer(self, slot: int) -> memoryview:
        """The slot of the inbox; no host code may touch it, see `ipc.view`."""
        self._staging.check(slot)
        try:
            if not self._mapped.done():
                await asyncio.shield(asyncio.wrap_future(self._mapped))
            self._mapped.result()
        except (KvmigError, OSError) as error:
            self.broken = True
            raise TransportError(f"can't map the destination's memory: {error}") from error
        peer = self._peer
        if peer is None:
            raise TransportError("the way to the destination's memory was given up")
        return ipc.view(
            peer.address + slot * self._place.slot_bytes, self._staging.slot_bytes, peer
        )

    async def push(self, chunk: Chunk, announce: AnnounceChunk) -> None:
        """Announce the chunk: the gather has put its bytes there already."""
        if chunk.nbytes > self._staging.slot_bytes:
            raise PeerError(f"{chunk.nbytes} bytes for buffers of {self._staging.slot_bytes}")
        announce()

    def close(self) -> None:
        """The mapping goes with its last view."""
        self._closed, self._peer = True, None

    def _map(self, driver: CudaDriver, refusals: RefusalCounter) -> None:
        peer = PeerMemory(driver, self._place.exported, refusals)
        self._peer = None if self._closed else peer


class CudaIpcInbox(TransportInbox):
    """Buffers like the source's, in a GPU's memory."""

    transport = NAME

    def __init__(self, offer: TransportOffer, gpu: int | None, refusals: RefusalCounter) -> None:
        """Raises TransportError for a source on another host, without enough memory, and where the
        GPUs don't reach each other's memory."""
        try:
            origin = msgspec.json.decode(offer.token, type=IpcOrigin)
        except msgspec.DecodeError as error:
            raise TransportError(f"not a token of {offer.transport}: {error}") from error
        if origin.host != host_identity():
            raise TransportError("the source is on another host")
        self._shape, self._source = origin.shape.checked(), origin.exported.ticket
        nbytes = max(self._shape.slots * self._shape.slot_bytes, NONCE_BYTES)
        memory = IpcMemory(gpu, nbytes, refusals)
        self._memory: IpcMemory | None = memory
        try:
            _test(memory, origin, refusals)
        except (KvmigError, OSError) as error:
            self.close()
            why = str(error)
            # Said here: the next offer may work, and is slower.
            log.warning("GPU %d doesn't reach a source on this host by %s: %s", gpu, NAME, why)
            raise TransportError(f"a test transfer failed: {why}") from error
        place = IpcPlace(memory.exported, self._shape.slot_bytes)
        self.token = msgspec.json.encode(place).decode()

    @property
    def stale(self) -> bool:
        """Whether the source has closed its end, or died."""
        return self._memory is None or gone(self._source)

    async def receive(self, chunk: Chunk, payload: bytes | memoryview | None) -> memoryview:
        """The chunk in its slot; it is there."""
        self._shape.check_chunk(chunk, payload)
        if self._memory is None:
            raise TransportError("the buffers for this source were given up")
        return self._memory.view(chunk.slot * self._shape.slot_bytes, chunk.nbytes).toreadonly()

    def close(self) -> None:
        """Give no more descriptors; the memory goes with its last view."""
        if self._memory is not None:
            self._memory.close()
        self._memory = None


def _test(memory: IpcMemory, origin: IpcOrigin, refusals: RefusalCounter) -> None:
    """Copy the source's nonce into `memory`. Raises KvmigError."""
    if origin.exported.size < NONCE_BYTES:
        raise PeerError(f"{origin.exported.size} bytes are too small for a nonce")
    driver, here = memory.driver, memory.mapping.address
    peer = PeerMemory(driver, origin.exported, refusals)
    stream = SideStream(driver)
    try:
        driver.move(here, peer.address, NONCE_BYTES, stream.handle)
        stream.settle(TEST_TIMEOUT_S)
    except TimeoutError:
        _stuck.append((memory, peer))
        raise
    finally:
        stream.close()
    if driver.read(here, NONCE_BYTES).hex() != origin.nonce:
        raise TransportError("other bytes came")


_stuck: list[tuple[IpcMemory, PeerMemory]] = []
"""The two ends of each copy that didn't end. They stay mapped, because the device may still
copy."""
