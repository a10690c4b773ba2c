"""A destination in a process of its own: an inbox that receives what a test announces."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Sequence
from contextlib import ExitStack
from hashlib import blake2b
from multiprocessing.connection import Connection
from typing import Self

from msgspec.structs import replace

from kvmig.core.errors import KvmigError, TransportError
from kvmig.kernels.arrays import memory_of
from kvmig.kernels.driver import CudaDriver
from kvmig.kvtransfer.messages import PAYLOAD_SLOT, Chunk, TransportOffer
from kvmig.kvtransfer.transports.base import AnnounceChunk, StagingPool
from kvmig.kvtransfer.transports.select import TransportSite, open_offer, open_staging
from kvmig.rpc.codec import Frame
from tests.support import fake_gpu, fake_nccl, mistaken_nixl

TIMEOUT_S = 20.0
RECEIVE_S = 3.0
"""For one chunk; the transports' own time-outs are longer."""


def staging_of(transport: str, slots: int, slot_bytes: int) -> StagingPool:
    """A source's; `cuda-ipc` on GPUs of the tests' own. Raises TransportError."""
    stagings = open_staging(
        transport,  # type: ignore[arg-type]
        *("test", "a", slots, slot_bytes),
        TransportSite(gpu=0, host="127.0.0.1"),
    )
    return stagings[transport]


def write(buffer: memoryview, data: bytes, gpu: int = 0) -> None:
    """Put `data` into a slot, whosever memory it is."""
    memory = memory_of(buffer)
    if memory.device == "cuda":
        CudaDriver(gpu).write(memory.address, data)
    else:
        buffer[: len(data)] = data


def digest(data: bytes | memoryview, gpu: int = 0) -> bytes:
    """What the destination says that it has got."""
    memory = memory_of(data)
    if memory.device == "cuda":
        data = CudaDriver(gpu).read(memory.address, memory.nbytes)
    return blake2b(data, digest_size=16).digest()


class Destination:
    """The process, seen from the test; it is ended at the end of a block."""

    def __init__(
        self, offer: TransportOffer, gpu: int = 0, fake: bool = True, gpu_memory: bool = False
    ) -> None:
        """gpu: where it has its buffers; fake: one of the tests' own. gpu_memory: NIXL brings the
        blocks there, else to the host's memory."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.support.inbox_process", "torch"])
        self.pipe, theirs = context.Pipe()
        order = theirs, offer, gpu, fake, gpu_memory
        self.process = context.Process(target=_serve, args=order, daemon=True)
        self.process.start()
        theirs.close()
        self.token = str(self.hear())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def hear(self) -> object:
        """Its next word."""
        assert self.pipe.poll(TIMEOUT_S), "the destination says nothing"
        return self.pipe.recv()

    def announce(self, chunk: Chunk) -> AnnounceChunk:
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


def _serve(pipe: Connection, offer: TransportOffer, gpu: int, fake: bool, gpu_memory: bool) -> None:
    with ExitStack() as installed:
        if fake and (gpu_memory or offer.transport in ("cuda-ipc", "nccl", "shm")):
            installed.enter_context(fake_gpu.installed())
        if offer.transport == "nccl":
            installed.enter_context(fake_nccl.installed())
        if fake and gpu_memory:
            installed.enter_context(mistaken_nixl.installed())
        asyncio.run(_receive(pipe, offer, gpu))


async def _receive(pipe: Connection, offer: TransportOffer, gpu: int) -> None:
    site = TransportSite(gpu=gpu, host="127.0.0.1")
    named = "nccl" if offer.transport == "nccl" else "auto"
    inbox = await asyncio.to_thread(open_offer, [offer], named, site)  # type: ignore[arg-type]
    pipe.send(inbox.token)
    while (told := await asyncio.to_thread(pipe.recv)) is not None:
        chunk, frames = told
        try:
            async with asyncio.timeout(RECEIVE_S):
                data = await inbox.receive(chunk, frames[0] if frames else None)
            pipe.send(digest(data, gpu))
            del data
        except (KvmigError, TimeoutError) as error:
            pipe.send(f"{type(error).__name__}: {error}")
    inbox.close()
