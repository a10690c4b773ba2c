"""The vLLM adapter's copies on a GPU, with the CUDA kernels on a GPU of the tests' own."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np
import pytest

from kvmig.engines.block_copies import Blocks, HostCopies
from kvmig.engines.device_copies import CTAS_FOR_HOST, CTAS_ON_DEVICE, DeviceCopies
from kvmig.engines.vllm.units import LayerCache, RankCache, UnitMap, Units
from kvmig.ground.errors import KvmigError, UnsupportedLayout
from kvmig.kernels.arrays import address_of, memory_of
from kvmig.kernels.face import Device
from kvmig.kvtransfer.transports.base import unmap
from kvmig.kvtransfer.transports.mapped import MappedInbox, MappedStaging, view
from tests.host_memory import HostMemory
from tests.poisoned import make_cache
from tests.queued_gpu import HIGHEST, QueuedGpu, QueuedKernels
from tests.test_transports import chunk

FIT = 3
"""Blocks that the scratch memory holds."""
IDS = [6, 0, 3, 7, 1, 4, 2]
"""More than twice as many."""


class World:
    """A KV cache of eight blocks in a GPU's memory."""

    def __init__(self, steps_overlap: bool = False) -> None:
        self.gpu = QueuedGpu()
        self.kernels = QueuedKernels(self.gpu)
        self.launches = self.kernels.launches
        self.cache = make_cache(1, [48, 4096, 56], [0, 16, 8], 8)
        self.size = self.cache.layout.block_bytes
        self.engine = self.gpu.new_stream()
        plan = Blocks(self.cache.layout)
        self.copies = DeviceCopies(
            plan, self.gpu, self.kernels, steps_overlap, FIT * self.size + self.size - 1
        )

    def blocks(self, ids: list[int]) -> bytes:
        return b"".join(self.cache.block(number) for number in ids)

    def assert_all_comes_back(self) -> None:
        """Once nothing fails any more."""
        self.gpu.fails = ""
        self.copies.close()
        self.kernels.close()
        self.gpu.settle(self.engine)
        self.gpu.destroy_stream(self.engine)
        assert self.gpu.empty()


@pytest.fixture
def world() -> Iterator[World]:
    """All of it is given back afterwards."""
    world = World()
    yield world
    world.assert_all_comes_back()


def buffer_of(kind: str, nbytes: int) -> memoryview:
    """A part in the middle of a buffer: of a GPU, a mapping, or a library."""
    whole = nbytes + 2 * mmap.PAGESIZE
    middle = slice(mmap.PAGESIZE, mmap.PAGESIZE + nbytes)
    if kind == "mapping":
        return memoryview(mmap.mmap(-1, whole))[middle]
    memory = memoryview(bytearray(whole))
    if kind == "device":
        return view(address_of(memory), whole, memory, "cuda")[middle]
    return memory[middle]


KINDS = ["device", "mapping", "unpinnable mapping", "bytes"]


def buffer_in(world: World, kind: str, nbytes: int) -> memoryview:
    world.gpu.unpinnable = kind.startswith("unpinnable")
    return buffer_of(kind.removeprefix("unpinnable "), nbytes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ids", [IDS, [5], []])
def test_blocks_are_gathered_with_the_checksums_of_a_cpu(
    world: World, kind: str, ids: list[int]
) -> None:
    out = buffer_in(world, kind, len(ids) * world.size)
    sums = world.copies.gather(ids, out)
    on_cpu = bytearray(out.nbytes)
    assert sums == HostCopies(Blocks(world.cache.layout)).gather(ids, memoryview(on_cpu))
    assert bytes(out) == bytes(on_cpu) == world.blocks(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_scattered_and_nothing_else_is_touched(world: World, kind: str) -> None:
    data = buffer_in(world, kind, len(IDS) * world.size)
    source = make_cache(2, [48, 4096, 56], [0, 0, 0], 8)
    sums = HostCopies(Blocks(source.layout)).gather(IDS, host_view(data))
    expected = world.cache.memory.copy()
    for number in IDS:
        world.cache.with_block(expected, number, source.block(number))
    assert world.copies.scatter(IDS, data.toreadonly()) == sums
    assert np.array_equal(world.cache.memory, expected)


def host_view(buffer: memoryview) -> memoryview:
    """The same memory without the word that it is a GPU's."""
    return view(memory_of(buffer).address, buffer.nbytes, buffer)


def test_a_corrupt_byte_shows_in_its_blocks_checksum(world: World) -> None:
    out = buffer_of("mapping", 4 * world.size)
    sums = world.copies.gather([0, 1, 2, 3], out)
    out[2 * world.size + 5] ^= 1
    found = world.copies.scatter([4, 5, 6, 7], out)
    assert [a == b for a, b in zip(sums, found, strict=True)] == [True, True, False, True]


def test_a_gpus_buffer_is_written_by_the_kernels_themselves(world: World) -> None:
    out = buffer_of("device", len(IDS) * world.size)
    world.copies.gather(IDS, out)
    world.copies.scatter(IDS, out)
    assert world.launches.workers == [CTAS_ON_DEVICE] * 2
    assert not [move for move in world.gpu.moved if move[2] >= world.size]


@pytest.mark.parametrize("direction", ["download", "upload"])
def test_a_pinned_buffer_is_copied_without_the_cpu(world: World, direction: str) -> None:
    buffer = buffer_of("mapping", len(IDS) * world.size)
    copy = world.copies.gather if direction == "download" else world.copies.scatter
    copy(IDS, buffer)
    start = memory_of(buffer).address
    assert [move for move in world.gpu.moved if move[2] >= world.size] == [
        (direction, start + first * world.size, min(FIT, len(IDS) - first) * world.size)
        for first in range(0, len(IDS), FIT)
    ]
    assert world.launches.workers == [CTAS_FOR_HOST] * 3


def test_scratch_memory_is_bounded_and_used_again(world: World) -> None:
    for _ in range(3):
        for kind in ("bytes", "mapping", "device"):
            out = buffer_of(kind, len(IDS) * world.size)
            world.copies.gather(IDS, out)
            world.copies.scatter(IDS, out)
    large = [len(one) for one in world.gpu.buffers.values() if len(one) >= FIT * world.size]
    assert large == [FIT * world.size] * 2  # the GPU's, and pinned


def test_a_block_that_is_larger_than_the_scratch_gets_room() -> None:
    gpu = QueuedGpu()
    cache = make_cache(3, [4096], [0], 2)
    kernels = QueuedKernels(gpu)
    copies = DeviceCopies(Blocks(cache.layout), gpu, kernels, False, scratch_bytes=16)
    out = buffer_of("mapping", 2 * 4096)
    copies.gather([1, 0], out)
    assert bytes(out) == cache.block(1) + cache.block(0)
    copies.close()
    kernels.close()
    assert gpu.empty()


def test_a_mapping_is_pinned_once(world: World) -> None:
    mapping = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    whole = memoryview(mapping)
    for start in (0, mmap.PAGESIZE, 2 * mmap.PAGESIZE):
        world.copies.gather([1], whole[start : start + world.size])
    assert world.gpu.pins == 1
    assert world.gpu.pinned == {address_of(whole): 4 * mmap.PAGESIZE}


def test_a_mapping_that_its_owner_closes_stays_as_long_as_it_is_pinned(world: World) -> None:
    mapping = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    world.copies.gather([1], memoryview(mapping)[: world.size])
    unmap(mapping)
    assert not mapping.closed
    assert world.gpu.pinned
    world.copies._pins.close()
    mapping.close()


def step(world: World, number: int, written: list[int]) -> None:
    """The engine launches a step: it fills block `number` and leaves its event."""

    def run() -> None:
        written.append(number)
        world.cache.with_block(world.cache.memory, number, bytes([number]) * world.size)

    world.gpu.queue(world.engine, run)
    world.copies.after_step(world.engine)


def test_a_copy_comes_after_the_steps_that_wrote_its_blocks(world: World) -> None:
    written: list[int] = []
    step(world, 5, written)
    out = buffer_of("mapping", world.size)
    world.copies.gather([5], out)
    assert bytes(out) == bytes([5]) * world.size


def test_a_copy_does_not_wait_for_the_step_that_was_launched_last_when_steps_overlap() -> None:
    world, written = World(steps_overlap=True), list[int]()
    for number in (1, 2, 3):
        step(world, number, written)
    world.copies.gather([1, 2], buffer_of("mapping", 2 * world.size))
    assert written == [1, 2]
    world.assert_all_comes_back()


@pytest.mark.parametrize("copy", ["gather", "scatter"])
@pytest.mark.parametrize("kind", ["device", "mapping"])
def test_an_urgent_copy_has_the_stream_of_the_highest_priority(
    world: World, copy: str, kind: str
) -> None:
    buffer = buffer_of(kind, len(IDS) * world.size)
    for urgent, priority in ((False, 0), (True, HIGHEST), (False, 0)):
        world.launches.on.clear()
        getattr(world.copies, copy)(IDS, buffer, urgent)
        assert {world.gpu.priorities[stream] for stream in world.launches.on} == {priority}


STEPS = ["enter", "wait", "upload", "download", "happened"]


@pytest.mark.parametrize("name", [*STEPS, "pin", "allocate_pinned"])
@pytest.mark.parametrize("copy", ["gather", "scatter"])
def test_a_copy_that_fails_leaves_nothing_behind(name: str, copy: str) -> None:
    world = World()
    kind = "bytes" if name == "allocate_pinned" else "mapping"
    buffer = buffer_of(kind, len(IDS) * world.size)
    run = getattr(world.copies, copy)
    run(IDS[:1], buffer_of("mapping", world.size))
    world.gpu.fails = name
    if name == "pin":  # not an error: the copy goes by pinned scratch memory
        run(IDS, buffer)
    else:
        with pytest.raises(KvmigError, match=f"{name}: out of luck"):
            run(IDS, buffer)
    world.assert_all_comes_back()


@pytest.mark.parametrize("copy", ["gather", "scatter"])
def test_what_was_queued_before_a_failure_is_over_when_it_is_told(world: World, copy: str) -> None:
    world.launches.fails_after = 2
    buffer = buffer_of("mapping", len(IDS) * world.size)
    with pytest.raises(KvmigError, match="launch: out of luck"):
        getattr(world.copies, copy)(IDS, buffer)
    assert [world.gpu.pending(stream) for stream in world.gpu.streams] == [0, 0, 0]


@pytest.mark.parametrize("name", ["new_event", "new_stream", "allocate"])
def test_a_start_that_fails_gives_back_what_it_had(name: str) -> None:
    gpu = QueuedGpu()
    gpu.fails = name
    layout = make_cache(1, [64], [0], 2).layout
    with pytest.raises(KvmigError, match=f"{name}: out of luck"):
        DeviceCopies(Blocks(layout), gpu, QueuedKernels(gpu), True)
    assert gpu.empty()


def test_ids_that_are_not_there_are_refused_before_anything_is_queued(world: World) -> None:
    with pytest.raises(ValueError, match=r"source block 8 is outside 0\.\.7"):
        world.copies.gather([8], buffer_of("device", world.size))
    assert world.launches.workers == []


@pytest.mark.parametrize("copy", ["gather", "scatter"])
def test_a_buffer_that_is_too_small_is_refused(world: World, copy: str) -> None:
    buffer = buffer_of("device", 2 * world.size - 1)
    with pytest.raises(ValueError, match=f"2 blocks are {2 * world.size} bytes, but the buffer "):
        getattr(world.copies, copy)([1, 2], buffer)
    assert world.launches.workers == []


def units(memory: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> UnitMap:
    """Two layers of 6 blocks, 2 heads, 32 tokens of 64 bytes, in units of 16 tokens."""
    shape, strides = (6, 2, 32, 32), (2 * 32 * 64, 32 * 64, 64, 2)
    start, size = int(memory.ctypes.data), 6 * strides[0]
    layers = tuple(
        LayerCache(start + layer * size, shape, strides, 2, "bfloat16") for layer in range(2)
    )
    return UnitMap([RankCache(start, 2 * size, (), layers)], 2, 6, Units(16, 2), "HND")


def test_units_of_other_shapes_are_copied_by_the_same_kernels() -> None:
    gpu = QueuedGpu()
    kernels = QueuedKernels(gpu)
    memory = np.random.default_rng(4).integers(0, 256, 2 * 6 * 4096, np.uint8)
    plan, ids = units(memory), [11, 2, 5, 0]
    copies = DeviceCopies(plan, gpu, kernels, False, 3 * plan.unit_bytes)
    out, on_cpu = (buffer_of("mapping", 4 * plan.unit_bytes) for _ in range(2))
    sums = copies.gather(ids, out)
    assert sums == HostCopies(plan).gather(ids, on_cpu)
    assert bytes(out) == bytes(on_cpu)
    moved, by_cpu = np.zeros_like(memory), np.zeros_like(memory)
    there = DeviceCopies(units(moved), gpu, kernels, False)
    assert there.scatter(ids, out) == sums
    HostCopies(units(by_cpu)).scatter(ids, out)
    assert np.array_equal(moved, by_cpu)
    for one in (copies, there, kernels):
        one.close()
    assert gpu.empty()


def test_a_plan_of_several_copies_is_refused_by_name() -> None:
    memory = np.zeros(2 * 6 * 4096, np.uint8)
    plan = units(memory)
    plan._parts *= 2
    gpu = QueuedGpu()
    with pytest.raises(UnsupportedLayout, match="one copy of the kernels, not 2"):
        DeviceCopies(plan, gpu, QueuedKernels(gpu), False)
    assert gpu.empty()


@pytest.mark.parametrize("copy", ["gather", "scatter"])
def test_an_engine_on_a_cpu_refuses_a_gpus_buffer_by_name(copy: str) -> None:
    layout = make_cache(1, [64], [0], 2).layout
    buffer = buffer_of("device", 64)
    with pytest.raises(ValueError, match="64 bytes is a GPU's memory, not the host's"):
        getattr(HostCopies(Blocks(layout)), copy)([1], buffer)


class GpuMemory(HostMemory):
    device: Device = "cuda"


async def test_transports_say_that_their_buffers_are_a_gpus() -> None:
    staging = MappedStaging(GpuMemory(), 2, 4096)
    inbox = MappedInbox(GpuMemory(), staging.offer())
    slot = await staging.acquire(1)
    assert memory_of(staging.buffer(slot)[:64]).device == "cuda"
    received = await inbox.receive(chunk(slot, 64), None)
    assert (memory_of(received).device, memory_of(received).nbytes) == ("cuda", 64)
    assert received.readonly
    inbox.close()
    staging.close()
