"""NIXL over UCX: one-sided WRITE into the destination's registered buffers, with a notification.

RDMA where there is a device for it, else shared memory or TCP as UCX finds them. Each end
has an agent, used by one thread: an agent isn't thread-safe, and its calls may block. Agents
run no progress thread; both ends drive UCX only while a chunk is on its way. The bytes are
not encrypted: in `auto` only machines with an RDMA device offer it.
"""

from __future__ import annotations

import base64
import importlib
import mmap
import os
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvmig.ground.errors import PeerError, TransportError
from kvmig.kernels.copy import address_of
from kvmig.kvtransfer.messages import Chunk, Offer
from kvmig.kvtransfer.transports.base import (
    Announce,
    Channel,
    HostChannel,
    HostStaging,
    Inbox,
    Shape,
    check_slot,
    unmap,
)
from kvmig.kvtransfer.transports.worker import Worker

NAME = "nixl"
MODULES = ("nixl_cu13._api", "nixl_cu12._api")
"""Where the wheels of PyPI keep the API; which CUDA they were built for doesn't matter here."""
RDMA = Path("/sys/class/infiniband")
POLL_S = 0.00005
"""Between two looks, while something is on its way."""
SLICE_S = 0.005
"""So long the thread looks before others have their turn."""
IDLE_S = 0.02
"""The same while nothing is."""
OPEN_TIMEOUT_S = 30.0
REMEMBERED = 4096
"""Notifications of chunks that nobody asked for, because their migration had ended."""

T = TypeVar("T")


class Place(msgspec.Struct, frozen=True):
    """The inbox's token: whom to write to, and where."""

    metadata: str
    base: int
    slot_bytes: int


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


class Agent:
    """A NIXL agent with one registered mapping."""

    def __init__(self, nbytes: int) -> None:
        """Raises TransportError if NIXL can't be had."""
        api = load()
        self.name = f"kvmig-{secrets.token_hex(8)}"
        self.memory = mmap.mmap(-1, nbytes)
        self.base = address_of(memoryview(self.memory))
        self.arrived: OrderedDict[int, None] = OrderedDict()
        """Numbers of the chunks that have come, and that nobody has taken."""
        # Without progress here a writer would wait for one who has stopped to listen.
        self.worker = Worker(f"nixl {self.name}", self._progress, IDLE_S)
        self.metadata = b""
        """What another agent needs to write here."""
        self._registered: Any = None
        self._agent: Any = None
        try:
            self.worker.submit(lambda: self._open(api, nbytes)).result(OPEN_TIMEOUT_S)
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

    async def take(self, number: int) -> None:
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

    def _open(self, api: Any, nbytes: int) -> None:
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent = api.nixl_agent(self.name, config)
        self._registered = self._agent.register_memory([(self.base, nbytes, 0, "")], "DRAM")
        self.metadata = self._agent.get_agent_metadata()

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
        self._registered = self._agent = None
        unmap(self.memory)


class NixlStaging(HostStaging):
    """Slots in registered memory."""

    transport = NAME

    def __init__(self, slots: int, slot_bytes: int) -> None:
        """Raises TransportError if NIXL can't be had."""
        self.agent = Agent(slots * slot_bytes)
        super().__init__(self.agent.memory, slots, slot_bytes)

    def offer(self) -> Offer:
        """How many buffers the destination needs for it."""
        return Offer(NAME, Shape(self.slots, self.slot_bytes).token())

    def _connect(self, token: str) -> Channel:
        try:
            place = msgspec.json.decode(token, type=Place)
        except msgspec.DecodeError as error:
            raise PeerError(f"not a token of NIXL: {error}") from error
        return NixlChannel(self, place)

    def _free_memory(self) -> None:
        self.agent.close()


class NixlChannel(HostChannel):
    """Writes a slot into the inbox's slot of the same number."""

    def __init__(self, staging: NixlStaging, place: Place) -> None:
        super().__init__(staging)
        self._agent = staging.agent
        self._place = place
        self._slot_bytes = staging.slot_bytes
        self._peer: str | None = None
        self._number = 0

    async def push(self, chunk: Chunk, announce: Announce) -> None:
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
        here = self._agent.base + chunk.slot * self._slot_bytes
        there = self._place.base + chunk.slot * self._place.slot_bytes
        return agent.initialize_xfer(
            "WRITE",
            agent.get_xfer_descs([(here, chunk.nbytes, 0)], "DRAM"),
            agent.get_xfer_descs([(there, chunk.nbytes, 0)], "DRAM"),
            self._peer,
            b"%d" % number,
        )


class NixlInbox(Inbox):
    """Registered buffers like the source's."""

    transport = NAME
    stale = False

    def __init__(self, offer: Offer) -> None:
        """Raises TransportError if NIXL can't be had."""
        self._shape = Shape.of(offer)
        self._agent = Agent(self._shape.slots * self._shape.slot_bytes)
        metadata = base64.b85encode(self._agent.metadata).decode()
        place = Place(metadata, self._agent.base, self._shape.slot_bytes)
        self.token = msgspec.json.encode(place).decode()

    @property
    def memory(self) -> memoryview:
        """See `Inbox`."""
        return memoryview(self._agent.memory)

    async def receive(self, chunk: Chunk, payload: bytes | memoryview | None) -> memoryview:
        """The chunk in its slot, once the source's notification is here."""
        check_slot(chunk, payload, self._shape.slots, self._shape.slot_bytes)
        await self._agent.take(chunk.number)
        start = chunk.slot * self._shape.slot_bytes
        return memoryview(self._agent.memory)[start : start + chunk.nbytes].toreadonly()

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
