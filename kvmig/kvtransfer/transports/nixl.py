"""NIXL over UCX: one-sided WRITE into the destination's registered buffers, with a notification.

RDMA where there is a device for it, else shared memory or TCP as UCX finds them. Where the KV cache
is on a GPU so are the buffers, if RDMA devices reach that GPU's memory (GPUDirect) and NIXL takes
it: a chunk then crosses no memory of the host. Else they are the host's, and the log has the
reason. The destination's kernel, which is launched once the notification is there, checks all it
reads. Each end has an agent, used by one thread: an agent isn't thread-safe, and its calls may
block. Agents run no progress thread; both ends drive UCX only while a chunk is on its way. The
bytes are not encrypted: in `auto` only machines with an RDMA device offer it.
"""

from __future__ import annotations

import base64
import importlib
import logging
import mmap
import os
import secrets
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from kvmig.core.errors import PeerError, TransportError
from kvmig.kernels import ipc
from kvmig.kernels.copy import address_of
from kvmig.kernels.driver import CudaDriver
from kvmig.kvtransfer.messages import Chunk, TransportOffer
from kvmig.kvtransfer.transports import ucx
from kvmig.kvtransfer.transports.base import (
    AnnounceChunk,
    BufferShape,
    StagingPool,
    TransportChannel,
    TransportInbox,
)
from kvmig.kvtransfer.transports.host_memory import unmap
from kvmig.kvtransfer.transports.worker import CallWorker

NAME = "nixl"
MODULES = ("nixl_cu13._api", "nixl_cu12._api")
"""Modules of the API in PyPI's wheels; which CUDA they were built for doesn't matter here."""
RDMA = Path("/sys/class/infiniband")
POLL_S = 0.00005
"""Pause between two polls, while a transfer is on its way."""
SLICE_S = 0.005
"""Time that the thread polls before other work has its turn."""
IDLE_S = 0.02
"""The same while nothing is."""
OPEN_TIMEOUT_S = 30.0
REMEMBERED = 4096
"""Notifications of chunks that were not asked for, because their migration had ended."""

T = TypeVar("T")
Kind = Literal["DRAM", "VRAM"]
"""NIXL's words for the host's memory and a GPU's."""

log = logging.getLogger(__name__)


class RdmaOffer(BufferShape, frozen=True):
    """The offer's token. gpus: whether the source can write to a GPU's memory."""

    gpus: bool = False


class RdmaPlace(msgspec.Struct, frozen=True):
    """The inbox's token: whom to write to, and where."""

    metadata: str
    base: int
    slot_bytes: int
    kind: Kind = "DRAM"
    device: int = 0


def has_rdma() -> bool:
    """Whether this machine has an RDMA device."""
    return RDMA.is_dir() and any(RDMA.iterdir())


def load() -> Any:
    """NIXL's module. Raises TransportError if it isn't installed or doesn't load here."""
    # Its loggers write a line for every agent; UCX warns of each device that isn't there.
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    reasons = []
    for name in MODULES:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reasons.append(str(error))
    raise TransportError(f"NIXL is not installed (kvmig[nixl]): {reasons[0]}")


class HostMemory:
    """Memory of this process."""

    kind: Kind = "DRAM"
    device = 0

    def __init__(self, nbytes: int) -> None:
        self._mapping = mmap.mmap(-1, nbytes)
        self.base = address_of(memoryview(self._mapping))

    @property
    def mapped(self) -> memoryview | None:
        """The memory as the host sees it."""
        return memoryview(self._mapping)

    def view(self, start: int, nbytes: int) -> memoryview:
        """A part of it."""
        return memoryview(self._mapping)[start : start + nbytes]

    def close(self) -> None:
        """Release the memory; it is freed with its last view."""
        unmap(self._mapping)


class RdmaMemory:
    """Memory of a GPU that RDMA devices reach; it goes with its last view."""

    kind: Kind = "VRAM"
    mapped: memoryview | None = None

    def __init__(self, gpu: int, nbytes: int) -> None:
        """Raises KvmigError if there is no such, or not as much."""
        driver = CudaDriver(gpu)
        if not driver.attribute(ipc.CAN_RDMA):
            raise TransportError(f"RDMA devices don't reach memory of GPU {gpu}")
        mapping, descriptor = ipc.create(driver, nbytes)
        os.close(descriptor)
        weakref.finalize(self, ipc.close, driver, mapping)
        self.base, self.device = mapping.address, gpu
        self.dma_buf = bool(driver.attribute(ipc.HAS_DMA_BUF))

    def view(self, start: int, nbytes: int) -> memoryview:
        """A part of it, see `ipc.view`."""
        return ipc.view(self.base + start, nbytes, self)

    def close(self) -> None:
        """Release the memory; it is freed with its last view."""


class RdmaAgent:
    """A NIXL agent with registered memory."""

    memory: HostMemory | RdmaMemory

    def __init__(self, nbytes: int, gpu: int | None) -> None:
        """gpu: whose memory it is, if that can be; None: the host's. Raises TransportError if NIXL
        can't be had."""
        if gpu is not None:
            ucx.name_gpu_transports()
        api = load()
        self.name = f"kvmig-{secrets.token_hex(8)}"
        self.arrived: OrderedDict[int, None] = OrderedDict()
        """Numbers of the chunks that have come, and were not taken."""
        # Without progress here a writer would wait for one who has stopped to listen.
        self.worker = CallWorker(f"nixl {self.name}", self._progress, IDLE_S)
        self.metadata = b""
        """What another agent needs to write here."""
        self._registered: Any = None
        self._agent: Any = None
        try:
            if gpu is None or not self._on_gpu(api, gpu, nbytes):
                self._have(api, HostMemory(nbytes), nbytes)
        except Exception as error:
            self.close()
            raise TransportError(f"no NIXL agent: {error!r}") from error

    async def run(self, call: Callable[[Any], T]) -> T:
        """`call(agent)` on the agent's thread. Raises TransportError if it raises."""
        try:
            return await self.worker.run(lambda: call(self._agent))
        except TransportError:
            raise
        except Exception as error:
            raise TransportError(f"NIXL: {error!r}") from error

    async def await_chunk(self, number: int) -> None:
        """Wait until the chunk of this number has come."""
        while number not in self.arrived:
            await self.run(lambda agent: self._listen(number))
        del self.arrived[number]

    def forget(self, peer: str) -> None:
        """Disconnect from another agent."""
        self.worker.post(lambda: self._agent.remove_remote_agent(peer))

    def close(self) -> None:
        """Give everything back, once the call that runs has ended. Idempotent."""
        self.worker.post(self._close)
        self.worker.close()

    def _on_gpu(self, api: Any, gpu: int, nbytes: int) -> bool:
        try:
            memory = RdmaMemory(gpu, nbytes)
            self._have(api, memory, nbytes)
        except Exception as error:  # noqa: BLE001 - of NIXL's own kinds, and said
            log.warning("NIXL brings blocks through the host's memory: %s", repr(error))
            return False
        for missing in ucx.find_fall_backs(memory.dma_buf):
            log.warning("NIXL, GPU %d: %s", gpu, missing)
        return True

    def _have(self, api: Any, memory: HostMemory | RdmaMemory, nbytes: int) -> None:
        self.worker.submit(lambda: self._open(api, memory, nbytes)).result(OPEN_TIMEOUT_S)

    def _open(self, api: Any, memory: HostMemory | RdmaMemory, nbytes: int) -> None:
        # An agent that has failed to register memory tells others what they can't read.
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        agent = api.nixl_agent(self.name, config)
        listed = [(memory.base, nbytes, memory.device, "")]
        self._registered = agent.register_memory(listed, memory.kind)
        self.metadata = agent.get_agent_metadata()
        self._agent, self.memory = agent, memory

    def _listen(self, number: int) -> None:
        until = time.monotonic() + SLICE_S
        self._progress()
        while number not in self.arrived and time.monotonic() < until:
            time.sleep(POLL_S)
            self._progress()

    def _progress(self) -> None:
        if self._agent is None:
            return
        for notes in self._agent.get_new_notifs().values():
            self.arrived.update(dict.fromkeys(map(int, notes)))
        while len(self.arrived) > REMEMBERED:
            self.arrived.popitem(last=False)

    def _close(self) -> None:
        if self._registered is not None:
            self._agent.deregister_memory(self._registered)
            self.memory.close()
        self._registered = self._agent = None


class NixlStaging(StagingPool):
    """Slots in registered memory."""

    transport = NAME

    def __init__(self, slots: int, slot_bytes: int, gpu: int | None = None) -> None:
        """gpu: that the KV cache is on. Raises TransportError if NIXL can't be had."""
        self.agent = RdmaAgent(slots * slot_bytes, gpu)
        super().__init__(slots, slot_bytes)

    @property
    def memory(self) -> memoryview | None:
        """See `StagingPool`."""
        return self.agent.memory.mapped

    def buffer(self, slot: int) -> memoryview:
        """The slot [slot_bytes], see `TransportChannel.buffer`."""
        self.check(slot)
        return self.agent.memory.view(slot * self.slot_bytes, self.slot_bytes)

    def offer(self) -> TransportOffer:
        """How many buffers the destination needs for it."""
        return TransportOffer(NAME, RdmaOffer(self.slots, self.slot_bytes, gpus=True).token())

    def _connect(self, token: str) -> TransportChannel:
        try:
            place = msgspec.json.decode(token, type=RdmaPlace)
        except msgspec.DecodeError as error:
            raise PeerError(f"not a token of NIXL: {error}") from error
        return NixlChannel(self, place)

    def close(self) -> None:
        """Give the memory back to NIXL and the system."""
        if not self._closed:
            super().close()
            self.agent.close()


class NixlChannel(TransportChannel):
    """Writes a slot into the inbox's slot of the same number."""

    def __init__(self, staging: NixlStaging, place: RdmaPlace) -> None:
        self._staging = staging
        self._agent = staging.agent
        self._place = place
        self._slot_bytes = staging.slot_bytes
        self._peer: str | None = None
        self._number = 0

    async def buffer(self, slot: int) -> memoryview:
        """The slot itself."""
        return self._staging.buffer(slot)

    async def push(self, chunk: Chunk, announce: AnnounceChunk) -> None:
        """Announced first: the destination drives its half while it waits."""
        if chunk.nbytes > self._place.slot_bytes:
            raise PeerError(f"{chunk.nbytes} bytes for buffers of {self._place.slot_bytes}")
        self._number += 1
        number = self._number
        announce(number=number)
        handle = None
        try:
            handle = await self._agent.run(lambda agent: self._prepare(agent, chunk, number))
            state = await self._agent.run(lambda agent: agent.transfer(handle))
            while state == "PROC":
                state = await self._agent.run(lambda agent: _drive(agent, handle))
            if state != "DONE":
                raise TransportError(f"NIXL: a transfer ended as {state}")
        except BaseException:
            self.broken = True
            raise
        finally:
            if handle is not None:
                self._agent.worker.post(handle.release)

    def close(self) -> None:
        """Disconnect."""
        if self._peer is not None:
            self._agent.forget(self._peer)
            self._peer = None

    def _prepare(self, agent: Any, chunk: Chunk, number: int) -> Any:
        """The transfer, not begun."""
        if self._peer is None:
            metadata = base64.b85decode(self._place.metadata)
            self._peer = _text(agent.add_remote_agent(metadata))
        memory, place = self._agent.memory, self._place
        here = memory.base + chunk.slot * self._slot_bytes
        there = place.base + chunk.slot * place.slot_bytes
        return agent.initialize_xfer(
            "WRITE",
            agent.get_xfer_descs([(here, chunk.nbytes, memory.device)], memory.kind),
            agent.get_xfer_descs([(there, chunk.nbytes, place.device)], place.kind),
            self._peer,
            b"%d" % number,
        )


class NixlInbox(TransportInbox):
    """Registered buffers like the source's."""

    transport = NAME
    stale = False

    def __init__(self, offer: TransportOffer, gpu: int | None = None) -> None:
        """gpu: that the KV cache is on. Raises TransportError if NIXL can't be had."""
        self._shape = shape = RdmaOffer.from_offer(offer)
        wanted = gpu if shape.gpus else None
        self._agent = agent = RdmaAgent(shape.slots * shape.slot_bytes, wanted)
        metadata = base64.b85encode(agent.metadata).decode()
        memory = agent.memory
        place = RdmaPlace(metadata, memory.base, shape.slot_bytes, memory.kind, memory.device)
        self.token = msgspec.json.encode(place).decode()

    @property
    def memory(self) -> memoryview | None:
        """See `TransportInbox`."""
        return self._agent.memory.mapped

    async def receive(self, chunk: Chunk, payload: bytes | memoryview | None) -> memoryview:
        """The chunk in its slot, once the source's notification is here."""
        self._shape.check_chunk(chunk, payload)
        await self._agent.await_chunk(chunk.number)
        start = chunk.slot * self._shape.slot_bytes
        return self._agent.memory.view(start, chunk.nbytes).toreadonly()

    def close(self) -> None:
        """Give the memory back to NIXL and the system."""
        self._agent.close()


def _drive(agent: Any, handle: Any) -> str:
    """The transfer's state when it has ended, or after a while."""
    until = time.monotonic() + SLICE_S
    while (state := str(agent.check_xfer_state(handle))) == "PROC" and time.monotonic() < until:
        time.sleep(POLL_S)
    return state


def _text(name: bytes | str) -> str:
    return name.decode() if isinstance(name, bytes) else name
