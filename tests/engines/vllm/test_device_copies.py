"""The vLLM adapter's copies on a GPU, with the CUDA kernels on a GPU of the tests' own."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from ctypes import c_size_t, c_ubyte, c_void_p
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from kvmig.core.errors import KvmigError, UnsupportedLayout
from kvmig.core.layout import BlockRegion, KVLayout
from kvmig.engines import device_copies
from kvmig.engines.base import device_ms_of
from kvmig.engines.block_copies import BlockPlan, HostCopies
from kvmig.engines.copy_width import CTAS_WHILE_IDLE
from kvmig.engines.device_copies import (
    CTAS_OF_TMA,
    CTAS_WITHOUT_TMA,
    TMA_RUN,
    DeviceCopies,
    load,
)
from kvmig.engines.vllm.subblocks import LayerCache, RankCache, SubBlocks, UnitMap
from kvmig.kernels.arrays import memory_of
from kvmig.kvtransfer.transports.cuda_ipc import IpcMemory
from kvmig.kvtransfer.transports.host_memory import unmap
from kvmig.rpc.codec import RefusalCounter
from tests.support import fake_gpu
from tests.support.fake_gpu import HANDLE_BYTES, HIGHEST, DeviceCache, FakeGpu, FakeKernels, segment
from tests.support.poisoned import make_cache

pytestmark = pytest.mark.usefixtures("gpus")
"""Which see that all comes back."""

FIT = 2
"""Blocks that half of the scratch memory holds."""
IDS = [6, 0, 3, 7, 1, 4, 2]
"""More than three times as many."""


SHORT = (48, 4096, 56)
LONG = (TMA_RUN, TMA_RUN + 16, 2 * TMA_RUN)
"""Bytes of a block's runs, which warps or the TMA copy."""


class World:
    """A KV cache of eight blocks in a GPU's memory."""

    def __init__(self, steps_overlap: bool = False, runs: Sequence[int] = SHORT) -> None:
        self.gpu = FakeGpu()
        self.kernels = FakeKernels(self.gpu)
        self.launches = self.kernels.launches
        self.runs = [*runs]
        self.host = make_cache(1, self.runs, [0, 16, 32 if runs == LONG else 8], 8)
        self.cache = DeviceCache(self.gpu, self.host)
        self.size = self.cache.layout.block_bytes
        self.engine = self.gpu.new_stream()
        plan = BlockPlan(self.cache.layout)
        self.copies = DeviceCopies(
            plan, self.gpu, self.kernels, steps_overlap, 2 * FIT * self.size + self.size - 1
        )

    def blocks(self, ids: list[int]) -> bytes:
        return b"".join(self.host.block(number) for number in ids)

    def buffer(self, kind: str, nbytes: int) -> memoryview:
        """A part in the middle of a buffer: of a GPU, a mapping, or a library."""
        whole = nbytes + 2 * mmap.PAGESIZE
        middle = slice(mmap.PAGESIZE, mmap.PAGESIZE + nbytes)
        if kind == "device":
            memory = IpcMemory(0, whole, RefusalCounter())
            memory.close()
            return memory.view(0, whole)[middle]
        if kind == "bytes":
            return memoryview(bytearray(whole))[middle]
        if kind.startswith("unpinnable"):
            fake_gpu.fail("cuMemHostRegister_v2")
        return memoryview(mmap.mmap(-1, whole))[middle]

    def read(self, buffer: memoryview) -> bytes:
        """Whosever memory it is."""
        memory = memory_of(buffer)
        if memory.device == "cpu":
            return bytes(buffer)
        return self.gpu.read(memory.address, memory.nbytes)

    def write(self, buffer: memoryview, data: bytes) -> None:
        memory = memory_of(buffer)
        if memory.device == "cpu":
            buffer[:] = data
        else:
            self.gpu.write(memory.address, data)

    def close(self) -> None:
        """Once nothing fails any more."""
        fake_gpu.fail("")
        self.gpu.finish(self.engine)
        self.copies.close()
        self.kernels.close()
        self.cache.free()
        self.gpu.destroy_stream(self.engine)


@pytest.fixture
def world(gpus: None) -> Iterator[World]:
    world = World()
    yield world
    world.close()


@pytest.fixture(params=[SHORT, LONG], ids=["short runs", "long runs"])
def any_world(request: pytest.FixtureRequest, gpus: None) -> Iterator[World]:
    world = World(runs=request.param)
    yield world
    world.close()


KINDS = ["device", "mapping", "unpinnable mapping", "bytes"]


def test_what_is_made_at_the_first_use_is_made_at_the_start(world: World) -> None:
    """A12: else requests decode beside it, and the first copies' rate is taken for any one's."""
    copies = load(BlockPlan(world.cache.layout), 0, steps_overlap=True)
    before = fake_gpu.held()
    assert world.cache.memory().tobytes() == world.host.memory.tobytes()
    for kind in ("bytes", "mapping"):
        for urgent in (False, True):
            out = world.buffer(kind, world.size)
            sums = copies.gather([3], out, urgent)
            assert copies.scatter([3], out, urgent) == sums
    copies._pins.close()
    assert fake_gpu.held() == before
    copies.close()


def test_a_gpu_that_copies_wrongly_is_noticed_at_the_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DeviceCopies, "scatter", lambda *_: [0])
    with pytest.raises(KvmigError, match="a copy on GPU 0 and back isn't the same block"):
        load(BlockPlan(world.cache.layout), 0, steps_overlap=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ids", [IDS, [5], []])
def test_blocks_are_gathered_with_the_checksums_of_a_cpu(
    any_world: World, kind: str, ids: list[int]
) -> None:
    out = any_world.buffer(kind, len(ids) * any_world.size)
    sums = any_world.copies.gather(ids, out)
    on_cpu = bytearray(out.nbytes)
    assert sums == HostCopies(BlockPlan(any_world.host.layout)).gather(ids, memoryview(on_cpu))
    assert any_world.read(out) == bytes(on_cpu) == any_world.blocks(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_scattered_and_nothing_else_is_touched(any_world: World, kind: str) -> None:
    data = any_world.buffer(kind, len(IDS) * any_world.size)
    source = make_cache(2, any_world.runs, [0, 0, 0], 8)
    fused = bytearray(data.nbytes)
    sums = HostCopies(BlockPlan(source.layout)).gather(IDS, memoryview(fused))
    any_world.write(data, bytes(fused))
    expected = any_world.cache.expected({number: source.block(number) for number in IDS})
    assert any_world.copies.scatter(IDS, data.toreadonly()) == sums
    assert np.array_equal(any_world.cache.memory(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gpus_own_time_of_a_copy_comes_with_its_checksums(world: World, kind: str) -> None:
    """Without that of the engine's step, which the copy comes after."""
    buffer, step_ms = world.buffer(kind, len(IDS) * world.size), 300.0
    for copy in (world.copies.gather, world.copies.scatter):
        world.gpu.queue(world.engine, lambda: time.sleep(step_ms / 1e3))
        world.copies.after_step(world.engine)
        began = time.monotonic()
        device_ms = device_ms_of(copy(IDS, buffer))
        assert device_ms is not None
        assert 0 < device_ms < (time.monotonic() - began) * 1e3 - step_ms / 2


def test_a_copy_whose_time_the_device_cannot_say_has_failed_and_holds_nothing(
    world: World,
) -> None:
    fake_gpu.fail("cuEventElapsedTime")
    with pytest.raises(KvmigError, match="cuEventElapsedTime"):
        world.copies.gather([1], world.buffer("mapping", world.size))


def test_blocks_may_lie_across_pieces_of_physical_memory(world: World) -> None:
    """A3: torch's pieces are of 20 MiB, wherever a block begins or ends."""
    run, gpu = 30_000, world.gpu
    data = np.random.default_rng(5).integers(0, 256, 2 * HANDLE_BYTES, np.uint8).tobytes()
    with segment(gpu, 2) as address:
        gpu.write(address, data)
        regions = (BlockRegion(address, run, run),)
        blocks = 2 * HANDLE_BYTES // run
        plan = BlockPlan(KVLayout(regions, blocks, 16))
        copies = DeviceCopies(plan, gpu, world.kernels, False)
        across = HANDLE_BYTES // run
        for kind in ("device", "mapping"):
            out = world.buffer(kind, run)
            copies.gather([across], out)
            assert world.read(out) == data[across * run : (across + 1) * run]
        copies.close()


def test_a_corrupt_byte_shows_in_its_blocks_checksum(any_world: World) -> None:
    out = any_world.buffer("mapping", 4 * any_world.size)
    sums = any_world.copies.gather([0, 1, 2, 3], out)
    out[2 * any_world.size + 5] ^= 1
    found = any_world.copies.scatter([4, 5, 6, 7], out)
    assert [a == b for a, b in zip(sums, found, strict=True)] == [True, True, False, True]


@pytest.mark.parametrize("kind", ["device", "mapping"])
def test_the_kernels_themselves_write_and_read_what_they_reach(world: World, kind: str) -> None:
    """And nothing else copies: a GPU's memory, and pinned pages of the host's."""
    out = world.buffer(kind, len(IDS) * world.size)
    world.copies.gather(IDS, out)
    world.copies.scatter(IDS, out)
    assert world.launches.workers == [CTAS_WITHOUT_TMA] * 2
    assert not [move for move in world.gpu.moved if move[2] >= world.size]


@pytest.mark.parametrize("kind", ["device", "mapping"])
def test_long_runs_go_through_the_tma_to_whatever_it_reaches(gpus: None, kind: str) -> None:
    world = World(runs=LONG)
    out = world.buffer(kind, len(IDS) * world.size)
    sums = world.copies.gather(IDS, out)
    assert world.read(out) == world.blocks(IDS)
    assert world.copies.scatter(IDS, out) == sums
    assert world.launches.workers == [CTAS_OF_TMA] * 2
    del out
    world.close()


@pytest.mark.parametrize(("runs", "few"), [(SHORT, CTAS_WITHOUT_TMA), (LONG, CTAS_OF_TMA)])
@pytest.mark.parametrize("kind", ["device", "mapping"])
def test_an_idle_engine_copies_wide_to_a_gpu_and_from_it_and_not_to_the_host(
    gpus: None, monkeypatch: pytest.MonkeyPatch, runs: Sequence[int], few: int, kind: str
) -> None:
    """The host's link takes no more than few bring."""
    monkeypatch.setenv("KVMIG_FAKE_SMS", "64")
    world = World(runs=runs)
    out = world.buffer(kind, len(IDS) * world.size)
    for idle in (True, False):
        world.copies.width.engine_idle = partial(bool, idle)
        sums = world.copies.gather(IDS, out)
        assert world.read(out) == world.blocks(IDS)
        assert world.copies.scatter(IDS, out) == sums
    wide = CTAS_WHILE_IDLE if kind == "device" else few
    assert world.launches.workers == [wide, wide, few, few]
    del out
    world.close()


@pytest.mark.parametrize(("copy", "queued"), [("gather", [2, 3, 4, 4]), ("scatter", [0, 1, 2, 3])])
def test_the_gpu_has_one_half_of_the_scratch_while_the_cpu_has_the_other(
    world: World, monkeypatch: pytest.MonkeyPatch, copy: str, queued: list[int]
) -> None:
    before: list[int] = []
    """Kernels that were queued before each of the CPU's copies."""

    def memmove(to: int, source: int, nbytes: int) -> None:
        if nbytes >= world.size:
            before.append(len(world.launches.workers))
        ctypes.memmove(to, source, nbytes)

    monkeypatch.setattr(device_copies, "ctypes", SimpleNamespace(memmove=memmove))
    getattr(world.copies, copy)(IDS, world.buffer("bytes", len(IDS) * world.size))
    assert before == queued


def test_engines_of_one_process_share_the_pin_of_a_mapping(world: World) -> None:
    """The driver pins no page twice."""
    plan = BlockPlan(world.cache.layout)
    other = DeviceCopies(plan, world.gpu, world.kernels, False)
    out = world.buffer("mapping", world.size)
    sums = other.gather([3], out)
    assert world.copies.scatter([3], out) == sums
    assert world.gpu.pins == 1
    assert world.launches.workers == [CTAS_WITHOUT_TMA] * 2
    other.close()
    world.copies.gather([2], out)
    assert bytes(out) == world.blocks([2])


def test_pages_that_the_gpu_sees_elsewhere_are_not_pinned(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(FakeGpu, "attribute", lambda *_: 0)
    out = world.buffer("mapping", world.size)
    world.copies.gather([3], out)
    assert bytes(out) == world.blocks([3])
    assert world.gpu.pins == 0
    assert "take a detour, which is slower: GPU 0 doesn't use the host's addresses" in caplog.text


def test_scratch_memory_is_bounded_and_used_again(world: World) -> None:
    held: list[list[int]] = []
    for _ in range(3):
        for kind in ("bytes", "mapping", "device"):
            out = world.buffer(kind, len(IDS) * world.size)
            world.copies.gather(IDS, out)
            world.copies.scatter(IDS, out)
            del out
        held.append(fake_gpu.sizes())
    assert held[0] == held[1] == held[2]
    assert max(held[0]) < (2 * FIT + 1) * world.size + max(world.cache.nbytes, 512)


def test_a_block_that_is_larger_than_the_scratch_gets_room(world: World) -> None:
    gpu, host = FakeGpu(), make_cache(3, [4096], [0], 2)
    cache, kernels = DeviceCache(gpu, host), FakeKernels(gpu)
    copies = DeviceCopies(BlockPlan(cache.layout), gpu, kernels, False, scratch_bytes=16)
    out = world.buffer("mapping", 2 * 4096)
    copies.gather([1, 0], out)
    assert bytes(out) == host.block(1) + host.block(0)
    copies.close()
    kernels.close()
    cache.free()


def test_a_mapping_is_pinned_once(world: World) -> None:
    mapping = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    whole = memoryview(mapping)
    for start in (0, mmap.PAGESIZE, 2 * mmap.PAGESIZE):
        world.copies.gather([1], whole[start : start + world.size])
    assert world.gpu.pins == 1


@pytest.mark.parametrize("copy", ["gather", "scatter"])
def test_a_copy_of_no_blocks_pins_for_those_that_follow(world: World, copy: str) -> None:
    whole = memoryview(mmap.mmap(-1, mmap.PAGESIZE + world.size))
    assert getattr(world.copies, copy)([], whole[:0]) == []
    assert world.gpu.pins == 1
    assert not world.launches.on
    world.copies.gather([1], whole[mmap.PAGESIZE :])
    assert world.gpu.pins == 1


def test_a_mapping_that_its_owner_closes_stays_as_long_as_it_is_pinned(world: World) -> None:
    mapping = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    world.copies.gather([1], memoryview(mapping)[: world.size])
    unmap(mapping)
    assert not mapping.closed
    world.copies._pins.close()
    mapping.close()


class Steps:
    """The engine's, each of which fills a block and leaves its event."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.done: list[int] = []
        self.last = threading.Event()
        """Until it is set, step 3 runs."""

    def launch(self, number: int) -> None:
        world = self._world
        if number == 3:
            world.gpu.queue(world.engine, lambda: self.last.wait(20))
        for region in world.cache.layout.regions:
            address = region.base + number * region.block_stride
            filled = c_void_p(address), c_ubyte(number), c_size_t(region.run)
            world.gpu.call("cuMemsetD8Async", *filled, c_void_p(world.engine))
        world.gpu.queue(world.engine, partial(self.done.append, number))
        world.copies.after_step(world.engine)


def test_a_copy_comes_after_the_steps_that_wrote_its_blocks(any_world: World) -> None:
    Steps(any_world).launch(5)
    out = any_world.buffer("mapping", any_world.size)
    any_world.copies.gather([5], out)
    assert bytes(out) == bytes([5]) * any_world.size


def test_a_copy_does_not_wait_for_the_step_that_was_launched_last_when_steps_overlap() -> None:
    world = World(steps_overlap=True)
    steps = Steps(world)
    for number in (1, 2, 3):
        steps.launch(number)
    world.copies.gather([1, 2], world.buffer("mapping", 2 * world.size))
    assert steps.done == [1, 2]
    steps.last.set()
    world.close()


@pytest.mark.parametrize("copy", ["gather", "scatter"])
@pytest.mark.parametrize("kind", ["device", "mapping"])
def test_an_urgent_copy_has_the_stream_of_the_highest_priority(
    world: World, copy: str, kind: str
) -> None:
    buffer = world.buffer(kind, len(IDS) * world.size)
    for urgent, priority in ((False, 0), (True, HIGHEST), (False, 0)):
        world.launches.on.clear()
        getattr(world.copies, copy)(IDS, buffer, urgent)
        assert {world.gpu.priority(stream) for stream in world.launches.on} == {priority}


STEPS = ["cuCtxSetCurrent", "cuStreamWaitEvent", "cuEventRecord", "cuEventQuery"]
COPIES = ["cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2"]
"""Of a call's tables and sums."""


@pytest.mark.parametrize("name", [*STEPS, *COPIES, "cuMemHostRegister_v2", "cuMemHostAlloc"])
@pytest.mark.parametrize("copy", ["gather", "scatter"])
def test_a_copy_that_fails_leaves_nothing_behind(world: World, name: str, copy: str) -> None:
    kind = "bytes" if name == "cuMemHostAlloc" else "mapping"
    buffer = world.buffer(kind, len(IDS) * world.size)
    run = getattr(world.copies, copy)
    run(IDS[:1], world.buffer("mapping", world.size))
    fake_gpu.fail(name)
    if name == "cuMemHostRegister_v2":  # not an error: the copy goes by pinned scratch memory
        run(IDS, buffer)
    else:
        with pytest.raises(KvmigError, match=f"{name}: invalid argument"):
            run(IDS, buffer)


@pytest.mark.parametrize("copy", ["gather", "scatter"])
def test_what_was_queued_before_a_failure_is_over_when_it_is_told(world: World, copy: str) -> None:
    world.launches.fails_after = 2
    buffer = world.buffer("bytes", len(IDS) * world.size)
    with pytest.raises(KvmigError, match="launch: out of luck"):
        getattr(world.copies, copy)(IDS, buffer)
    assert {world.gpu.pending(stream) for stream in world.launches.on} == {0}


@pytest.mark.parametrize("name", ["cuEventCreate", "cuStreamCreateWithPriority"])
def test_a_start_that_fails_gives_back_what_it_had(name: str) -> None:
    gpu, layout = FakeGpu(), make_cache(1, [64], [0], 2).layout
    fake_gpu.fail(name)
    with pytest.raises(KvmigError, match=f"{name}: invalid argument"):
        DeviceCopies(BlockPlan(layout), gpu, FakeKernels(gpu), True)


def test_ids_that_are_not_there_are_refused_before_anything_is_queued(world: World) -> None:
    with pytest.raises(ValueError, match=r"source block 8 is outside 0\.\.7"):
        world.copies.gather([8], world.buffer("device", world.size))
    assert world.launches.workers == []


@pytest.mark.parametrize("copy", ["gather", "scatter"])
def test_a_buffer_that_is_too_small_is_refused(world: World, copy: str) -> None:
    buffer = world.buffer("device", 2 * world.size - 1)
    with pytest.raises(ValueError, match=f"2 blocks are {2 * world.size} bytes, but the buffer "):
        getattr(world.copies, copy)([1, 2], buffer)
    assert world.launches.workers == []


SHAPE, STRIDES = (6, 2, 32, 32), (2 * 32 * 64, 32 * 64, 64, 2)
LAYERS = 2
NBYTES = LAYERS * SHAPE[0] * STRIDES[0]


def units(start: int) -> UnitMap:
    """Two layers of 6 blocks, 2 heads, 32 tokens of 64 bytes, in units of 16 tokens."""
    layers = tuple(
        LayerCache(start + layer * NBYTES // LAYERS, SHAPE, STRIDES, 2, "bfloat16")
        for layer in range(LAYERS)
    )
    return UnitMap([RankCache(start, NBYTES, (), layers)], 2, SHAPE[0], SubBlocks(16, 2), "HND")


def test_units_of_other_shapes_are_copied_by_the_same_kernels(world: World) -> None:
    gpu, kernels, ids = world.gpu, world.kernels, [11, 2, 5, 0]
    memory = np.random.default_rng(4).integers(0, 256, NBYTES, np.uint8)
    by_cpu = np.zeros_like(memory)
    here, there = gpu.allocate(NBYTES), gpu.allocate(NBYTES)
    gpu.write(here, memory.tobytes())
    gpu.write(there, by_cpu.tobytes())
    on_host, size = units(int(memory.ctypes.data)), units(here).unit_bytes
    source = DeviceCopies(units(here), gpu, kernels, False, 3 * size)
    target = DeviceCopies(units(there), gpu, kernels, False)
    out, on_cpu = (world.buffer("mapping", 4 * size) for _ in range(2))
    sums = source.gather(ids, out)
    assert sums == HostCopies(on_host).gather(ids, on_cpu)
    assert bytes(out) == bytes(on_cpu)
    assert target.scatter(ids, out) == sums
    HostCopies(units(int(by_cpu.ctypes.data))).scatter(ids, out)
    assert gpu.read(there, NBYTES) == by_cpu.tobytes()
    for one in (source, target):
        one.close()
    gpu.free(here)
    gpu.free(there)


def test_a_plan_of_several_copies_is_refused_by_name() -> None:
    plan, gpu = units(4096), FakeGpu()
    plan._parts *= 2
    with pytest.raises(UnsupportedLayout, match="one copy of the kernels, not 2"):
        DeviceCopies(plan, gpu, FakeKernels(gpu), False)


@pytest.mark.parametrize("copy", ["gather", "scatter"])
def test_an_engine_on_a_cpu_refuses_a_gpus_buffer_by_name(world: World, copy: str) -> None:
    layout = make_cache(1, [64], [0], 2).layout
    buffer = world.buffer("device", 64)
    with pytest.raises(ValueError, match="64 bytes is a GPU's memory, not the host's"):
        getattr(HostCopies(BlockPlan(layout)), copy)([1], buffer)
