"""GB/s of KV blocks between two processes by each transport, each end with its KV cache on a GPU
and the vLLM adapter's copies: gathered into a slot, brought over, scattered, the sums compared.

With two GPUs the destination has the second. A transport that isn't there is said, with its reason;
for NIXL the sample also says whose memory its buffers are, and what UCX lacks (GPUDirect).
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, cast

import torch
from msgspec.structs import replace

from bench.gpu.device import Deadline, Site, note_gpu, options_of
from bench.gpu.shapes import SHAPES, Shape, ids
from bench.report import Result, begin, finish, say, table
from kvmig.core.config import Transport
from kvmig.core.errors import KvmigError, TransportError
from kvmig.engines.block_copies import BlockPlan, CopyBackend, HostCopies
from kvmig.engines.device_copies import load
from kvmig.kernels.api import Device
from kvmig.kvtransfer.messages import PAYLOAD_SLOT, Chunk
from kvmig.kvtransfer.transports.base import StagingPool, TransportChannel
from kvmig.kvtransfer.transports.select import TransportSite, open_offer, open_staging
from kvmig.rpc.codec import Frame

NAMES: dict[Device, tuple[Transport, ...]] = {
    "cuda": ("cuda-ipc", "nixl", "nccl", "shm", "tcp"),
    "cpu": ("shm", "tcp"),
}
SLOTS = 4
REPEATS = 3
MOST_S = 45.0
ANSWER_S = 30.0
HOST_GB_S = 45.0
"""What `shm` should reach, through memory of the host that both GPUs reach."""


class CopyingEnd:
    """A KV cache on one device, and the adapter's copies of it."""

    def __init__(self, device: Device, gpu: int, shape: Shape, blocks: int) -> None:
        if device == "cuda":
            torch.cuda.set_device(gpu)
        site = Site(device)
        self.memory = site.memory(blocks * shape.block_bytes)
        site.settle()
        self.site = TransportSite(gpu=gpu if device == "cuda" else None, host="127.0.0.1")
        plan = BlockPlan(shape.layout(self.memory.data_ptr(), blocks))
        self._close: Callable[[], None] = lambda: None
        self.copies: CopyBackend = HostCopies(plan)
        if device == "cuda":
            self.copies = copies = load(plan, gpu, steps_overlap=False)
            self._close = copies.close

    def close(self) -> None:
        self._close()


class LogLines(logging.Handler):
    """What is said of a transport meanwhile."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def destination(
    link: Connection, name: Transport, device: Device, gpu: int, shape: Shape, blocks: int
) -> None:
    """The other process: scatters what comes to the blocks that it is told, until told nothing."""
    end = CopyingEnd(device, gpu, shape, blocks)
    try:
        asyncio.run(_serve(link, name, end))
    finally:
        end.close()


async def _serve(link: Connection, name: Transport, end: CopyingEnd) -> None:
    link.send("ready")
    offer = await asyncio.to_thread(link.recv)
    try:
        inbox = await asyncio.to_thread(open_offer, [offer], name, end.site)
    except TransportError as error:
        link.send(str(error))
        return
    link.send((inbox.token,))
    try:
        while (asked := await asyncio.to_thread(link.recv)) is not None:
            chunk, frames, places = asked
            async with asyncio.timeout(ANSWER_S):
                data = await inbox.receive(chunk, frames[0] if frames else None)
            sums = await asyncio.to_thread(end.copies.scatter, places, data)
            del data
            link.send((chunk.slot, sums == chunk.checksums))
    finally:
        inbox.close()


class Sender:
    """This process's half. Raises TransportError."""

    def __init__(
        self, link: Connection, end: CopyingEnd, staging: StagingPool, channel: TransportChannel
    ) -> None:
        self._link, self._end, self._staging, self._channel = link, end, staging, channel
        self._slots: list[int] = []
        """Of chunks that are not answered, in their order."""
        self.wrong = 0

    async def carry(self, chunks: Sequence[list[int]], nbytes: int) -> float:
        """GB/s of all chunks' blocks, each of `nbytes`, to blocks of the same numbers."""
        began = time.perf_counter()
        answers = asyncio.create_task(self._answers(len(chunks)))
        for number, chosen in enumerate(chunks):
            slot = await self._staging.acquire(ANSWER_S)
            out = (await self._channel.buffer(slot))[:nbytes]
            sums = await asyncio.to_thread(self._end.copies.gather, chosen, out)
            del out
            chunk = Chunk("bench", 0, number, slot, nbytes, sums)
            async with asyncio.timeout(ANSWER_S):
                await self._channel.push(chunk, partial(self._announce, chunk, chosen))
        await answers
        return len(chunks) * nbytes / (time.perf_counter() - began) / 1e9

    def _announce(
        self, chunk: Chunk, chosen: list[int], payload: Sequence[Frame] = (), number: int = 0
    ) -> None:
        slot = PAYLOAD_SLOT if payload else chunk.slot
        frames = [bytes(frame) for frame in payload]
        self._slots.append(chunk.slot)
        self._link.send((replace(chunk, slot=slot, number=number), frames, chosen))

    async def _answers(self, count: int) -> None:
        for _ in range(count):
            if not await asyncio.to_thread(self._link.poll, ANSWER_S):
                raise TransportError("the destination is silent")
            _, right = self._link.recv()
            self.wrong += not right
            self._staging.release(self._slots.pop(0))


@contextmanager
def other_process(*arguments: Any) -> Iterator[Connection]:
    """The destination; it is ended whatever happens."""
    spawning = multiprocessing.get_context("spawn")
    link, far = spawning.Pipe()
    child = spawning.Process(target=destination, args=(far, *arguments), daemon=True)
    child.start()
    far.close()
    try:
        yield link
        with suppress(OSError):  # it is gone
            link.send(None)
        child.join(ANSWER_S)
    finally:
        if child.is_alive():
            child.kill()
            child.join(ANSWER_S)
        link.close()


async def measure(
    name: Transport, end: CopyingEnd, link: Connection, chunks: list[list[int]], nbytes: int
) -> dict[str, Any]:
    """One sample. Raises TransportError if the transport isn't there, or fails."""
    (staging,) = open_staging(name, "bench", "source", SLOTS, nbytes, end.site).values()
    try:
        link.send(staging.offer())
        if not await asyncio.to_thread(link.poll, ANSWER_S):
            raise TransportError("the destination is silent")
        if isinstance(answer := link.recv(), str):
            raise TransportError(answer)
        sender = Sender(link, end, staging, staging.channel(answer[0]))
        await sender.carry(chunks[:SLOTS], nbytes)
        rates = [await sender.carry(chunks, nbytes) for _ in range(REPEATS)]
        in_gpu = name in ("cuda-ipc", "nccl") or (name == "nixl" and staging.memory is None)
        return {
            "transport": name, "memory": "gpu" if in_gpu else "host", "gb_s": median(rates),
            "wrong": sender.wrong,
        }  # fmt: skip
    finally:
        staging.close()


def sample_of(
    name: Transport, device: Device, shape: Shape, chunks: list[list[int]], blocks: int
) -> dict[str, Any]:
    """One transport, between processes of its own."""
    lines = LogLines()
    logging.getLogger("kvmig").addHandler(lines)
    there = torch.cuda.device_count() - 1 if device == "cuda" else 0
    end = CopyingEnd(device, 0, shape, blocks)
    try:
        with other_process(name, device, there, shape, blocks) as link:
            if not link.poll(3 * ANSWER_S) or link.recv() != "ready":
                raise TransportError("the destination doesn't start")
            nbytes = len(chunks[0]) * shape.block_bytes
            sample = asyncio.run(measure(name, end, link, chunks, nbytes))
    except (KvmigError, RuntimeError, TimeoutError, OSError, EOFError) as error:
        sample = {"transport": name, "missing": f"{type(error).__name__}: {error}"}
    finally:
        end.close()
        logging.getLogger("kvmig").removeHandler(lines)
    return sample | {"said": lines.lines}


def main(arguments: list[str] | None = None) -> int:
    options = options_of(__doc__, arguments)
    device = cast("Device", options.device)
    shape = Shape("small", 4096, 2) if options.quick else SHAPES[1]
    chunk_bytes = (64 << 10) if options.quick else (32 << 20)
    blocks = (8 if options.quick else 32) * shape.blocks(chunk_bytes)
    order = [int(one) for one in ids("random", blocks, blocks)]
    step = shape.blocks(chunk_bytes)
    chunks = [order[first : first + step] for first in range(0, blocks, step)]
    result = begin("gpu transports", {"chunk_bytes": chunk_bytes, "chunks": len(chunks)})
    note_gpu(result)
    deadline = Deadline(MOST_S)
    for name in NAMES[device]:
        if deadline.over(result):
            break
        result.samples.append(sample_of(name, device, shape, chunks, blocks))
        say(str(result.samples[-1]))
    return _told(result, device, options)


def _told(result: Result, device: Device, options: Any) -> int:
    found = [sample for sample in result.samples if "gb_s" in sample]
    result.summary = {f"{one['transport']}_gb_s": float(one["gb_s"]) for one in found}
    result.summary["wrong"] = float(sum(one["wrong"] for one in found))
    result.targets = {"wrong": {"max": 0}}
    if device == "cuda":
        result.targets["shm_gb_s"] = {"min": HOST_GB_S}
    rows = [
        (
            one["transport"], one.get("memory", ""),
            f"{one['gb_s']:.1f}" if "gb_s" in one else one.get("missing", ""),
        )
        for one in result.samples if "transport" in one
    ]  # fmt: skip
    tables = [table("blocks between two processes", ("transport", "buffers", "GB/s"), rows)]
    return finish(result, options, tables)


if __name__ == "__main__":
    sys.exit(main())
