"""NCCL: a chunk goes from a GPU's memory to another GPU's as one send and one receive.

`auto` never takes it. A communicator is two ranks, a source's and a destination's, and is made for
them alone: it shares nothing with those that an engine's workers use, except the GPU. Operations of
two communicators that wait for each other across GPUs can stop both for good, so each has a
deadline, and one that passes aborts the communicator: the migration ends, its request goes on, and
the next one makes another. Sends and receives are matched by their order alone, so a chunk that the
destination never asks for ends the communicator, too. NCCL neither encrypts nor authenticates.
"""

from __future__ import annotations

import asyncio
import base64
import weakref
from collections.abc import Callable

import msgspec

from kvmig.core.errors import KvmigError, PeerError, TransportError
from kvmig.kernels import ipc, nccl
from kvmig.kernels.arrays import memory_of
from kvmig.kernels.driver import CudaDriver
from kvmig.kvtransfer.messages import Chunk, TransportOffer
from kvmig.kvtransfer.transports.base import (
    AnnounceChunk,
    BufferShape,
    StagingPool,
    TransportChannel,
    TransportInbox,
)
from kvmig.kvtransfer.transports.worker import CallWorker

NAME = "nccl"
OPEN_S = 20.0
"""Timeout of the other rank's coming."""
TRANSFER_S = 5.0
"""Timeout of one chunk's send or receive."""

_Transfer = Callable[[nccl.NcclPair], None]


class NcclOffer(BufferShape, frozen=True):
    """The offer's token. gpu: which one the source is on; NCCL takes no GPU twice."""

    gpu: str = ""


class NcclPlace(msgspec.Struct, frozen=True):
    """The inbox's token: the communicator that both ends join, and the size of its slots."""

    unique_id: str
    slot_bytes: int


class NcclMemory:
    """Memory of a GPU that goes with its last view."""

    def __init__(self, gpu: int | None, nbytes: int) -> None:
        """Raises TransportError without NCCL, without a GPU, or if there isn't as much."""
        if gpu is None:
            raise TransportError("NCCL needs a KV cache in an NVIDIA GPU's memory")
        try:
            nccl.library()
            self.driver = CudaDriver(gpu)
            self.gpu = self.driver.uuid()
            self.address = self.driver.allocate(nbytes)
        except KvmigError as error:
            raise TransportError(f"no communicator of NCCL's: {error}") from error
        weakref.finalize(self, self.driver.free, self.address)

    def view(self, start: int, nbytes: int) -> memoryview:
        """A part of it, see `ipc.view`."""
        return ipc.view(self.address + start, nbytes, self)


class NcclRank:
    """One end of a communicator, on a thread of its own; it joins at once, in the background."""

    def __init__(self, memory: NcclMemory, unique_id: bytes, rank: int) -> None:
        self._pair: nccl.NcclPair | None = None
        self._memory: NcclMemory | None = memory  # as long as the GPU may be at it
        self._worker = CallWorker(f"{NAME} rank {rank}")
        self.left = False
        driver = memory.driver
        self._joining = self._worker.submit(lambda: self._join(driver, unique_id, rank))

    async def send(self, data: memoryview) -> None:
        """Raises TransportError."""
        await self._run(lambda pair: pair.send(memory_of(data).address, data.nbytes, TRANSFER_S))

    async def receive(self, into: memoryview) -> None:
        """Raises TransportError."""
        await self._run(lambda pair: pair.receive(memory_of(into).address, into.nbytes, TRANSFER_S))

    def leave(self) -> None:
        """Abort the communicator once the call that runs has ended. Idempotent."""
        if not self.left:
            self.left = True
            self._worker.post(self._leave)
            self._worker.close()

    async def _run(self, call: _Transfer) -> None:
        if self.left:
            raise TransportError("the communicator was given up")
        try:
            await self._worker.run(lambda: call(self._joined()))
        except (KvmigError, TimeoutError) as error:
            self.leave()
            raise TransportError(f"NCCL: {error}") from error
        except BaseException:
            self.leave()  # given up while the other end may still wait for its half
            raise

    def _join(self, driver: CudaDriver, unique_id: bytes, rank: int) -> None:
        try:
            self._pair = nccl.NcclPair(driver, unique_id, rank, OPEN_S)
        except BaseException:
            self.leave()
            raise

    def _joined(self) -> nccl.NcclPair:
        self._joining.result()
        if self._pair is None:
            raise KvmigError("this side has left the communicator")
        return self._pair

    def _leave(self) -> None:
        pair, self._pair = self._pair, None
        try:
            if pair is not None:
                pair.abort()
        finally:
            self._memory = None


class NcclStaging(StagingPool):
    """Slots in the memory of the GPU that the KV cache is on."""

    transport = NAME

    def __init__(self, gpu: int | None, slots: int, slot_bytes: int) -> None:
        """Raises TransportError without NCCL or a GPU."""
        self._memory = NcclMemory(gpu, slots * slot_bytes)
        super().__init__(slots, slot_bytes)

    def buffer(self, slot: int) -> memoryview:
        """The slot [slot_bytes]; no host code may touch it, see `ipc.view`."""
        self.check(slot)
        return self._memory.view(slot * self.slot_bytes, self.slot_bytes)

    def offer(self) -> TransportOffer:
        """How many buffers the destination needs for it, and where this side is."""
        return TransportOffer(
            NAME, NcclOffer(self.slots, self.slot_bytes, self._memory.gpu).token()
        )

    def _connect(self, token: str) -> TransportChannel:
        try:
            place = msgspec.json.decode(token, type=NcclPlace)
            unique_id = base64.b85decode(place.unique_id)
        except (msgspec.DecodeError, ValueError) as error:
            raise PeerError(f"not a token of {NAME}: {error}") from error
        return NcclChannel(self, NcclRank(self._memory, unique_id, 0), place.slot_bytes)

    def close(self) -> None:
        """Leave all communicators; the memory goes with its last view."""
        if not self._closed:
            super().close()
            del self._memory


class NcclChannel(TransportChannel):
    """Sends a slot; each push ends when the destination has received it."""

    def __init__(self, staging: NcclStaging, rank: NcclRank, slot_bytes: int) -> None:
        self._staging, self._rank, self._slot_bytes = staging, rank, slot_bytes
        self._number = 0

    @property
    def stale(self) -> bool:
        """Whether the communicator was aborted."""
        return self._rank.left

    async def buffer(self, slot: int) -> memoryview:
        """The slot itself."""
        return self._staging.buffer(slot)

    async def push(self, chunk: Chunk, announce: AnnounceChunk) -> None:
        """Announce the chunk, for the destination must receive it for the send to end."""
        if chunk.nbytes > self._slot_bytes:
            raise PeerError(f"{chunk.nbytes} bytes for buffers of {self._slot_bytes}")
        self._number += 1
        announce(number=self._number)
        try:
            await self._rank.send(self._staging.buffer(chunk.slot)[: chunk.nbytes])
        except BaseException:
            self.broken = True
            raise

    def close(self) -> None:
        """Leave the communicator."""
        self._rank.leave()


class NcclInbox(TransportInbox):
    """Buffers like the source's, in another GPU's memory."""

    transport = NAME

    def __init__(self, offer: TransportOffer, gpu: int | None) -> None:
        """Raises TransportError without NCCL, without a GPU, and for a source on the same GPU."""
        self._shape = shape = NcclOffer.from_offer(offer)
        memory = NcclMemory(gpu, shape.slots * shape.slot_bytes)
        if memory.gpu == shape.gpu:
            raise TransportError("the source is on the same GPU, which NCCL doesn't take twice")
        try:
            unique_id = nccl.make_unique_id()
        except KvmigError as error:
            raise TransportError(f"no communicator of NCCL's: {error}") from error
        self._memory: NcclMemory | None = memory
        self._rank = NcclRank(memory, unique_id, 1)
        place = NcclPlace(base64.b85encode(unique_id).decode(), shape.slot_bytes)
        self.token = msgspec.json.encode(place).decode()
        self._taken = 0
        self._turns = asyncio.Condition()

    @property
    def stale(self) -> bool:
        """Whether the communicator was aborted."""
        return self._rank.left

    async def receive(self, chunk: Chunk, payload: bytes | memoryview | None) -> memoryview:
        """The chunk in its slot, received after all that were pushed before it."""
        self._shape.check_chunk(chunk, payload)
        if self._memory is None:
            raise TransportError("the buffers for this source were given up")
        view = self._memory.view(chunk.slot * self._shape.slot_bytes, chunk.nbytes)
        try:
            async with self._turns:
                # Another migration's may come later; the caller's time-out ends the wait.
                await self._turns.wait_for(lambda: self._taken >= chunk.number - 1)
                if self._taken >= chunk.number:
                    raise PeerError(f"push {chunk.number} was received before")
                await self._rank.receive(view)
                self._taken = chunk.number
                self._turns.notify_all()
        except BaseException:
            self.close()
            raise
        return view.toreadonly()

    def close(self) -> None:
        """Leave the communicator; the memory goes with its last view."""
        self._memory = None
        self._rank.leave()
