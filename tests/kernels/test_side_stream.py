"""Streams beside an engine's, and mappings whose pages are pinned."""

from __future__ import annotations

import errno
import mmap
import time
import weakref
from functools import partial

import pytest

from kvmig.core.errors import KvmigError
from kvmig.kernels.pinned import PinnedMemory
from kvmig.kernels.side_stream import SideStream
from kvmig.kvtransfer.transports.host_memory import unmap
from tests.support import fake_gpu
from tests.support.fake_gpu import FakeGpu

pytestmark = pytest.mark.usefixtures("gpus")
"""Which see that all is given back."""


def test_a_stream_settles_when_all_that_was_queued_is_done() -> None:
    gpu, done = FakeGpu(), list[int]()
    stream = SideStream(gpu)
    for number in range(3):
        gpu.queue(stream.handle, partial(done.append, number))
    stream.settle()
    assert done == [0, 1, 2]
    stream.close()


def test_a_stream_that_never_settles_is_a_timeout() -> None:
    gpu = FakeGpu()
    stream = SideStream(gpu)
    gpu.stick()
    with pytest.raises(TimeoutError, match=r"not done after 0\.01 s"):
        stream.settle(timeout_s=0.01)
    gpu.stick(False)
    stream.close()


def test_events_are_given_back_when_there_is_no_stream() -> None:
    gpu = FakeGpu()
    fake_gpu.fail("cuStreamCreateWithPriority")
    with pytest.raises(KvmigError, match="cuStreamCreateWithPriority"):
        SideStream(gpu)


def test_the_device_measures_what_is_queued_without_what_the_stream_waits_for() -> None:
    gpu = FakeGpu()
    engine, stream, step = gpu.new_stream(), SideStream(gpu), gpu.new_event()
    gpu.queue(engine, lambda: time.sleep(0.5))
    gpu.record(step, engine)
    gpu.wait(stream.handle, step)
    stream.begin()
    gpu.queue(stream.handle, lambda: time.sleep(0.02))
    stream.settle()
    assert 20 <= stream.took_ms() < 500
    stream.close()
    gpu.destroy_event(step)
    gpu.destroy_stream(engine)


def test_what_was_never_measured_has_no_time() -> None:
    stream = SideStream(FakeGpu())
    stream.settle()
    with pytest.raises(KvmigError, match="cuEventElapsedTime"):
        stream.took_ms()
    stream.close()


def test_of_many_mappings_those_used_last_are_pinned() -> None:
    gpu = FakeGpu()
    pins = PinnedMemory(gpu, most=2)
    mappings = [mmap.mmap(-1, mmap.PAGESIZE) for _ in range(3)]
    for index in (0, 1, 0, 2):
        assert pins.has(memoryview(mappings[index])[8:16])
    assert (gpu.pins, fake_gpu.held()["pinned"]) == (3, 2)
    mappings[1].close()  # nobody holds it any more
    assert pins.has(memoryview(mappings[0]))
    assert gpu.pins == 3
    pins.close()
    for mapping in mappings:
        mapping.close()


def test_a_mapping_that_its_owner_has_closed_is_unmapped_at_the_next_use_by_all_that_pin_it() -> (
    None
):
    """As a source's that was killed: /dev/shm would fill up with those of each of its starts."""
    gpu, mapping, other = FakeGpu(), mmap.mmap(-1, mmap.PAGESIZE), mmap.mmap(-1, mmap.PAGESIZE)
    engines, there = [PinnedMemory(gpu), PinnedMemory(gpu)], weakref.ref(mapping)
    for pins in engines:
        assert pins.has(memoryview(mapping))
    unmap(mapping)
    del mapping
    for pins, left in zip(engines, (1, 0), strict=True):
        assert pins.has(memoryview(other))
        assert fake_gpu.held()["pinned"] == left + 1
        assert (there() is None) == (not left)
    for pins in engines:
        pins.close()
    other.close()


def test_a_mapping_that_cannot_be_pinned_is_tried_once() -> None:
    gpu = FakeGpu()
    pins, mapping = PinnedMemory(gpu), mmap.mmap(-1, mmap.PAGESIZE)
    fake_gpu.fail("cuMemHostRegister_v2")
    assert not pins.has(memoryview(mapping))
    fake_gpu.fail("")
    assert not pins.has(memoryview(mapping))
    pins.close()
    mapping.close()


class AdvisedMapping(mmap.mmap):
    """Notes what the kernel is advised, and knows none of it if it is old."""

    old = False

    def __init__(self, *_: int) -> None:
        self.advice: list[int] = []

    def madvise(self, option: int, start: int = 0, length: int | None = None) -> None:
        self.advice.append(option)
        if self.old:
            raise OSError(errno.EINVAL, "Invalid argument")
        super().madvise(option)


@pytest.mark.parametrize("old", [False, True])
def test_pages_are_there_before_they_are_pinned_and_huge_where_they_can_be(old: bool) -> None:
    pins, mapping = PinnedMemory(FakeGpu()), AdvisedMapping(-1, mmap.PAGESIZE)
    mapping.old = old
    assert pins.has(memoryview(mapping))
    assert pins.has(memoryview(mapping))
    populate_write = 23
    assert mapping.advice == [mmap.MADV_HUGEPAGE, populate_write]
    pins.close()
    mapping.close()


def test_memory_that_is_no_mapping_is_not_pinned() -> None:
    gpu = FakeGpu()
    assert not PinnedMemory(gpu).has(memoryview(bytearray(8)))
    assert gpu.pins == 0
