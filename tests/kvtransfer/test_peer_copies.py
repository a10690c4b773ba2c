"""Blocks between two GPUs: the source's kernel writes into the destination's inbox, in one pass."""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from ctypes import c_size_t, c_ubyte, c_void_p
from threading import Event, Thread
from typing import NamedTuple

import numpy as np
import pytest

from kvmig.core.errors import KvmigError, TransportError
from kvmig.engines.block_copies import BlockPlan, HostCopies
from kvmig.engines.device_copies import CTAS_OF_TMA, CTAS_WITHOUT_TMA, TMA_RUN, load
from kvmig.kernels.api import FinishedWork
from kvmig.kernels.arrays import memory_of
from kvmig.kernels.call_memory import QueuedCall
from kvmig.kernels.gpu import GpuKernels
from kvmig.kernels.side_stream import SideStream
from kvmig.kvtransfer.messages import Chunk
from kvmig.kvtransfer.transports.base import StagingPool, TransportChannel
from kvmig.kvtransfer.transports.cuda_ipc import IpcMemory
from kvmig.kvtransfer.transports.select import TransportSite, open_offer, open_staging
from kvmig.rpc.codec import Frame, RefusalCounter
from tests.support.fake_gpu import FakeGpu
from tests.support.gpu_end import IDS, INTO, RUNS, GpuEnd
from tests.support.inbox_process import Destination, digest

pytestmark = pytest.mark.usefixtures("gpus")
"""Which see that all comes back."""


@pytest.fixture
def source() -> Iterator[GpuEnd]:
    made = GpuEnd(0, 1)
    yield made
    made.close()


def staging_of(end: GpuEnd) -> StagingPool:
    slots = open_staging("cuda-ipc", "test", "a", 2, len(IDS) * end.size, TransportSite(gpu=0))
    return slots["cuda-ipc"]


def announced(payload: Sequence[Frame] = (), number: int = 0) -> None:
    assert not payload


async def gathered(end: GpuEnd, channel: TransportChannel, slot: int) -> list[int]:
    """As a chunk's sender does."""
    out = (await channel.buffer(slot))[: len(IDS) * end.size]
    return await asyncio.to_thread(end.copies.gather, IDS, out)


@pytest.mark.parametrize("there", [0, 1])
async def test_blocks_cross_to_another_gpu_by_one_copy_and_to_their_places_by_another(
    source: GpuEnd, there: int
) -> None:
    target, staging = GpuEnd(there, 2), staging_of(source)
    inbox = open_offer([staging.offer()], "cuda-ipc", TransportSite(gpu=there))
    slot, channel = await staging.acquire(1), staging.channel(inbox.token)
    sums = await gathered(source, channel, slot)
    chunk = Chunk("m", 0, 0, slot, len(IDS) * source.size, sums)
    await channel.push(chunk, announced)
    came = await inbox.receive(chunk, None)
    assert target.copies.scatter(INTO, came) == sums
    expected = dict(zip(INTO, map(source.host.block, IDS), strict=True))
    assert np.array_equal(target.cache.memory(), target.cache.expected(expected))
    for end in (source, target):
        assert (end.launches.workers, end.launches.by_tma) == ([CTAS_OF_TMA], 1)
    del came
    inbox.close()
    staging.close()
    target.close()


def buffer_for(end: GpuEnd, shift: int = 0) -> memoryview:
    """In the GPU's memory, for all IDS."""
    memory = IpcMemory(0, len(IDS) * end.size + shift, RefusalCounter())
    memory.close()
    return memory.view(shift, len(IDS) * end.size)


@pytest.mark.parametrize(
    ("runs", "shift"),
    [((48, TMA_RUN), 0), ((TMA_RUN - 16, TMA_RUN), 0), ((TMA_RUN + 8, TMA_RUN), 0), (RUNS, 8)],
    ids=["short", "a little short", "no multiple of 16", "a buffer that begins between"],
)
def test_what_the_tma_does_not_copy_or_copies_slowly_the_others_do(
    gpus: None, runs: tuple[int, ...], shift: int
) -> None:
    end = GpuEnd(0, 1, runs)
    out = buffer_for(end, shift)
    end.copies.gather(IDS, out)
    assert end.gpu.read(memory_of(out).address, len(IDS) * end.size) == end.blocks(IDS)
    assert (end.launches.workers, end.launches.by_tma) == ([CTAS_WITHOUT_TMA], 0)
    del out
    end.close()


def test_a_library_without_code_for_the_tma_copies_by_few_blocks_of_threads(
    gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU of sm_90 that runs what was compiled for sm_80, the kernel would do nothing."""
    monkeypatch.setenv("KVMIG_FAKE_PTX", "80")
    end = GpuEnd(0, 1)
    out = buffer_for(end)
    sums = end.copies.gather(IDS, out)
    on_cpu = memoryview(bytearray(len(IDS) * end.size))
    assert sums == HostCopies(BlockPlan(end.host.layout)).gather(IDS, on_cpu)
    assert (end.launches.workers, end.launches.by_tma) == ([CTAS_WITHOUT_TMA], 0)
    del out
    end.close()


def test_the_tma_is_tried_out_at_the_start(source: GpuEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    copy_tma = GpuKernels.copy_tma

    def noted(*arguments: object, **options: int) -> object:
        calls.append(options.get("workers", 0))
        return copy_tma(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(GpuKernels, "copy_tma", noted)
    load(BlockPlan(source.cache.layout), 0, steps_overlap=True).close()
    assert calls.count(CTAS_OF_TMA) == 10, "to a mapping, to scratch, to a GPU, and back"


def test_a_tma_that_does_nothing_is_noticed_at_the_start(
    source: GpuEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gives the same checksums there and back: none."""
    lazy = FinishedWork([0])
    monkeypatch.setattr(GpuKernels, "copy_tma", lambda *_, **__: lazy)
    with pytest.raises(KvmigError, match="a copy on GPU 0 and back isn't the same block"):
        load(BlockPlan(source.cache.layout), 0, steps_overlap=True)


# -- copies that end late, or never


def started(end: GpuEnd, out: memoryview) -> Future[list[int]]:
    """A gather on a thread, of which nothing has happened so far."""
    done: Future[list[int]] = Future()

    def run() -> None:
        try:
            done.set_result(end.copies.gather(IDS, out))
        except BaseException as error:  # noqa: BLE001 - it is the future's
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return done


async def queued(end: GpuEnd) -> None:
    """Until the gather is on its stream."""
    async with asyncio.timeout(10):
        while not end.launches.workers:  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_a_late_copy_meets_no_memory_of_a_destination_that_has_given_up(
    source: GpuEnd,
) -> None:
    """A4: a migration is given up, its inbox too, and the engine takes new memory; then the source,
    which was slow, writes."""
    staging, other = staging_of(source), FakeGpu(1)
    inbox = open_offer([staging.offer()], "cuda-ipc", TransportSite(gpu=1))
    slot, channel = await staging.acquire(1), staging.channel(inbox.token)
    out, gate = (await channel.buffer(slot))[: len(IDS) * source.size], Event()
    source.queue_copy(lambda: gate.wait(20))
    late = started(source, out)
    del out
    await queued(source)
    inbox.close()
    staging.release(slot)
    staging.close()
    del inbox, channel
    new = [other.allocate(1 << 20) for _ in range(3)]
    for memory in new:
        other.write(memory, bytes(1 << 20))
    gate.set()
    assert len(late.result(20)) == len(IDS)
    for memory in new:
        assert other.read(memory, 1 << 20) == bytes(1 << 20)
        other.free(memory)


async def test_a_destination_that_is_killed_under_a_copy_costs_the_source_nothing(
    source: GpuEnd,
) -> None:
    staging = staging_of(source)
    with Destination(staging.offer(), gpu=1) as there:
        slot, channel = await staging.acquire(1), staging.channel(there.token)
        out = (await channel.buffer(slot))[: len(IDS) * source.size]
        source.gpu.stick()
        late = started(source, out)
        await queued(source)
        there.process.kill()
        there.process.join(20)
        source.gpu.stick(False)
        assert len(late.result(20)) == len(IDS)
        assert source.gpu.read(memory_of(out).address, len(out)) == source.blocks(IDS)
        chunk = Chunk("m", 0, 0, slot, len(out), late.result())
        with pytest.raises(TransportError, match="the destination is gone"):
            await channel.push(chunk, there.announce(chunk))
        del out
    staging.close()


async def test_another_process_has_what_was_gathered(source: GpuEnd) -> None:
    staging = staging_of(source)
    with Destination(staging.offer(), gpu=1) as there:
        slot, channel = await staging.acquire(1), staging.channel(there.token)
        sums = await gathered(source, channel, slot)
        chunk = Chunk("m", 0, 0, slot, len(IDS) * source.size, sums)
        await channel.push(chunk, there.announce(chunk))
        assert await asyncio.to_thread(there.hear) == digest(source.blocks(IDS))
        there.end()
    staging.close()


@pytest.mark.long  # a minute
def test_memory_is_never_unmapped_under_a_copy_that_does_not_end(
    source: GpuEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = SideStream.settle
    monkeypatch.setattr(SideStream, "settle", lambda stream: settle(stream, 0.05))
    out = buffer_for(source)
    address = memory_of(out).address
    source.gpu.stick()
    with pytest.raises(TimeoutError, match=r"not done after 0\.05 s"):
        source.copies.gather(IDS, out)
    del out
    source.gpu.stick(False)
    monkeypatch.setattr(SideStream, "settle", settle)
    source.settle_copies()
    assert source.gpu.read(address, source.size) == source.blocks(IDS[:1])
    source.forget_copies()


class StuckScatter(NamedTuple):
    """A scatter that was given up after its time: it writes IDS's blocks to INTO once `go_on` is
    set. A step was recorded on the stream `engine` before."""

    go_on: Event
    engine: int


@pytest.fixture
def stuck(source: GpuEnd, monkeypatch: pytest.MonkeyPatch) -> Iterator[StuckScatter]:
    data, gate = buffer_for(source), Event()
    source.copies.gather(IDS, data)
    engine = source.gpu.new_stream()
    source.copies.after_step(engine)
    with monkeypatch.context() as patch:
        settle, wait = SideStream.settle, QueuedCall.wait
        patch.setattr(SideStream, "settle", lambda stream: settle(stream, 0.05))
        patch.setattr(QueuedCall, "wait", lambda call: wait(call, 0.05))
        source.queue_copy(lambda: gate.wait(20))
        with pytest.raises(TimeoutError, match=r"not done after 0\.05 s"):
            source.copies.scatter(INTO, data)
    yield StuckScatter(gate, engine)
    gate.set()
    source.gpu.finish(engine)
    source.gpu.destroy_stream(engine)
    source.forget_copies()


def first_run(end: GpuEnd, number: int) -> int:
    """The address of a block's first run."""
    region = end.cache.layout.regions[0]
    return region.base + number * region.block_stride


def test_a_step_comes_after_a_scatter_that_did_not_end_in_time(
    source: GpuEnd, stuck: StuckScatter
) -> None:
    """The migration has been given up, and the step's request has got its blocks."""
    gpu, address = source.gpu, first_run(source, INTO[0])
    filled = c_void_p(address), c_ubyte(7), c_size_t(RUNS[0])
    gpu.call("cuMemsetD8Async", *filled, c_void_p(stuck.engine))
    time.sleep(0.1)
    stuck.go_on.set()
    gpu.settle()
    assert gpu.read(address, RUNS[0]) == bytes([7]) * RUNS[0]


@pytest.mark.parametrize("urgent", [False, True])
def test_another_copy_comes_after_a_scatter_that_did_not_end_in_time(
    source: GpuEnd, stuck: StuckScatter, urgent: bool
) -> None:
    other = memoryview(mmap.mmap(-1, source.size))
    other[:] = bytes([9]) * source.size
    copy = Thread(target=source.copies.scatter, args=([INTO[0]], other, urgent))
    copy.start()
    time.sleep(0.1)
    stuck.go_on.set()
    copy.join(20)
    source.gpu.settle()
    assert source.gpu.read(first_run(source, INTO[0]), RUNS[0]) == bytes([9]) * RUNS[0]
