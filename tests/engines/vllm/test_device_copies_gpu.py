"""The vLLM adapter's copies on a GPU that there is; needs torch, but not vLLM."""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from kvmig.core.layout import BlockRegion, KVLayout
from kvmig.engines.block_copies import BlockPlan
from kvmig.engines.device_copies import DeviceCopies, load
from kvmig.kernels import ipc
from kvmig.kernels.arrays import memory_of
from kvmig.kernels.copy import checksum_fused
from kvmig.kernels.driver import CudaDriver
from kvmig.kernels.ipc import view
from kvmig.kvtransfer.messages import Chunk
from kvmig.kvtransfer.transports.select import TransportSite, open_staging
from tests.support.inbox_process import Destination, digest

RUN, LAYERS, BLOCKS = 65536, 4, 600
SIZE = RUN * LAYERS
IDS = list(range(BLOCKS - 1, 100, -7))
"""More than the scratch memory holds."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def cache(fill: int | None = None) -> tuple[torch.Tensor, DeviceCopies]:
    """[layers, blocks, run] bytes at random or of `fill`, and its copies."""
    memory = torch.randint(256, (LAYERS, BLOCKS, RUN), dtype=torch.uint8, device="cuda")
    if fill is not None:
        memory.fill_(fill)
    torch.cuda.synchronize()
    layer = BLOCKS * RUN
    regions = (BlockRegion(memory.data_ptr() + index * layer, RUN, RUN) for index in range(LAYERS))
    return memory, load(BlockPlan(KVLayout(tuple(regions), BLOCKS, 16)), 0, steps_overlap=True)


def buffer_of(kind: str, nbytes: int) -> memoryview:
    if kind == "device":
        memory = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        return view(memory.data_ptr(), nbytes, memory)
    return memoryview(bytearray(nbytes) if kind == "bytes" else mmap.mmap(-1, nbytes))


@pytest.mark.parametrize("kind", ["device", "mapping", "bytes"])
def test_blocks_come_back_as_they_left(kind: str) -> None:
    source, copies = cache()
    target, copies_back = cache(fill=0xA5)
    buffer = buffer_of(kind, len(IDS) * SIZE)
    sums = copies.gather(IDS, buffer)
    assert sums == checksum_fused(buffer, SIZE)
    assert copies_back.scatter(IDS, buffer.toreadonly()) == sums
    expected = torch.full_like(source, 0xA5)
    expected[:, IDS] = source[:, IDS]
    assert torch.equal(target, expected)
    assert memory_of(buffer).nbytes == len(IDS) * SIZE
    copies.close()
    copies_back.close()


def test_a_copy_comes_after_the_engines_step() -> None:
    memory, copies = cache(fill=0)
    engine, buffer = torch.cuda.Stream(), buffer_of("mapping", SIZE)
    with torch.cuda.stream(engine):
        torch.cuda._sleep(100_000_000)  # cycles
        memory.fill_(7)
    for _ in range(2):  # the last one may be under way still
        copies.after_step(engine.cuda_stream)
    copies.gather([3], buffer)
    assert bytes(buffer) == bytes([7]) * SIZE
    copies.close()


async def test_a_chunk_reaches_another_process_through_memory_that_both_map() -> None:
    """On the last GPU there is: across two where there are two."""
    source, target = CudaDriver(0), torch.cuda.device_count() - 1
    staging = open_staging("cuda-ipc", "test", "a", 2, SIZE, TransportSite(gpu=0))["cuda-ipc"]
    with Destination(staging.offer(), gpu=target, fake=False) as there:
        slot, data = await staging.acquire(1), bytes(range(256)) * (SIZE // 256)
        channel, chunk = staging.channel(there.token), Chunk("m", 0, 0, slot, SIZE, [])
        source.write(memory_of(await channel.buffer(slot)).address, data)
        await channel.push(chunk, there.announce(chunk))
        assert await asyncio.to_thread(there.hear) == digest(data)
        there.end()
    staging.close()


def _allocate(pipe: Connection) -> None:
    """A worker of its own: memory of torch's, and what it becomes."""
    memory = torch.arange(SIZE, device="cuda").to(torch.uint8)
    torch.cuda.synchronize()
    pipe.send(ipc.export_allocation(CudaDriver(0), memory.data_ptr()))
    pipe.recv()
    pipe.send(bytes(memory.cpu().numpy()))


def test_what_another_process_has_allocated_is_copied_here() -> None:
    """As the KV caches of several workers are."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_allocate, args=(theirs,), daemon=True)
    process.start()
    assert pipe.poll(60)
    driver, exported = CudaDriver(0), pipe.recv()
    address = ipc.open_allocation(driver, exported)
    regions = (BlockRegion(address, RUN, RUN),)
    copies = load(BlockPlan(KVLayout(regions, LAYERS, 16)), 0, steps_overlap=True)
    out = memoryview(bytearray(SIZE))
    copies.gather(range(LAYERS), out)
    assert bytes(out) == bytes(range(256)) * (SIZE // 256)
    turned = memoryview(bytes(range(255, -1, -1)) * (SIZE // 256))
    copies.scatter(range(LAYERS), turned)
    pipe.send("look")
    assert pipe.poll(60)
    assert pipe.recv() == bytes(turned)
    copies.close()
    ipc.close_allocation(driver, exported, address)
    process.join(60)
