"""A destination in a process of its own: an inbox that receives what a test announces."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from hashlib import blake2b
from multiprocessing.connection import Connection

from msgspec.structs import replace

from kvmig.ground.errors import KvmigError, TransportError
from kvmig.kvtransfer.messages import PAYLOAD_SLOT, Chunk, Offer
from kvmig.kvtransfer.transports.base import Announce, Inbox, Staging
from kvmig.kvtransfer.transports.mapped import MappedInbox, MappedStaging
from kvmig.kvtransfer.transports.select import open_offer, open_staging
from kvmig.kvtransfer.wire import Frame
from tests.host_memory import HostMemory

TIMEOUT_S = 20.0
RECEIVE_S = 3.0
"""For one chunk; the transports' own time-outs are longer."""


def staging_of(transport: str, slots: int, slot_bytes: int) -> Staging:
    """A source's; `mapped` is CUDA IPC's code on host memory. Raises TransportError."""
    if transport == "mapped":
        memory = HostMemory()
        staging = MappedStaging(memory, slots, slot_bytes)
        memory.forget()
        return staging
    return open_staging(transport, "test", "a", slots, slot_bytes)[transport]  # type: ignore[arg-type]


def inbox_of(offer: Offer) -> Inbox:
    """A destination's."""
    if offer.transport == "cuda-ipc":
        return MappedInbox(HostMemory(), offer)
    return open_offer([offer])


def digest(data: bytes | memoryview) -> bytes:
    """What the destination says that it has got."""
    return blake2b(data, digest_size=16).digest()


class Destination:
    """The process, seen from the test."""

    def __init__(self, offer: Offer) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.inbox_process", "torch"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, offer), daemon=True)
        self.process.start()
        theirs.close()
        self.token = str(self.hear())

    def hear(self) -> object:
        """Its next word."""
        assert self.pipe.poll(TIMEOUT_S), "the destination says nothing"
        return self.pipe.recv()

    def announce(self, chunk: Chunk) -> Announce:
        """What a channel calls to tell it of `chunk`."""

        def send(payload: Sequence[Frame] = (), number: int = 0) -> None:
            slot = PAYLOAD_SLOT if payload else chunk.slot
            frames = [bytes(frame) for frame in payload]
            try:
                self.pipe.send((replace(chunk, slot=slot, number=number), frames))
            except OSError as error:
                raise TransportError(f"the destination is gone: {error}") from error

        return send

    def end(self) -> None:
        """Let it close its inbox and leave."""
        self.pipe.send(None)
        self.process.join(TIMEOUT_S)
        assert self.process.exitcode == 0

    def close(self) -> None:
        """Whatever state it is in."""
        self.process.kill()
        self.process.join(TIMEOUT_S)
        self.process.close()
        self.pipe.close()


def _serve(pipe: Connection, offer: Offer) -> None:
    asyncio.run(_receive(pipe, offer))


async def _receive(pipe: Connection, offer: Offer) -> None:
    inbox = await asyncio.to_thread(inbox_of, offer)
    pipe.send(inbox.token)
    while (told := await asyncio.to_thread(pipe.recv)) is not None:
        chunk, frames = told
        try:
            async with asyncio.timeout(RECEIVE_S):
                data = await inbox.receive(chunk, frames[0] if frames else None)
            pipe.send(digest(data))
        except (KvmigError, TimeoutError) as error:
            pipe.send(f"{type(error).__name__}: {error}")
    inbox.close()
