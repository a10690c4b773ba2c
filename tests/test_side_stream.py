"""Streams beside an engine's, and mappings whose pages are pinned."""

from __future__ import annotations

import mmap
from functools import partial

import pytest

from kvmig.ground.errors import KvmigError
from kvmig.kernels.pinned import Pins
from kvmig.kernels.side_stream import SideStream
from tests.queued_gpu import QueuedGpu


def test_a_stream_settles_when_all_that_was_queued_is_done() -> None:
    gpu, done = QueuedGpu(), list[int]()
    stream = SideStream(gpu)
    for number in range(3):
        gpu.queue(stream.handle, partial(done.append, number))
    stream.settle()
    assert done == [0, 1, 2]
    stream.close()
    assert gpu.empty()


def test_a_stream_that_never_settles_is_a_timeout() -> None:
    gpu = QueuedGpu()
    stream = SideStream(gpu)
    gpu.stuck = True
    with pytest.raises(TimeoutError, match=r"not done after 0\.01 s"):
        stream.settle(timeout_s=0.01)


def test_an_event_is_given_back_when_there_is_no_stream() -> None:
    gpu = QueuedGpu()
    gpu.fails = "new_stream"
    with pytest.raises(KvmigError, match="new_stream"):
        SideStream(gpu)
    assert gpu.empty()


def test_of_many_mappings_those_used_last_are_pinned() -> None:
    gpu = QueuedGpu()
    pins = Pins(gpu, most=2)
    mappings = [mmap.mmap(-1, mmap.PAGESIZE) for _ in range(3)]
    for index in (0, 1, 0, 2):
        assert pins.has(memoryview(mappings[index])[8:16])
    assert (gpu.pins, len(gpu.pinned)) == (3, 2)
    mappings[1].close()  # nobody holds it any more
    assert pins.has(memoryview(mappings[0]))
    assert gpu.pins == 3
    pins.close()
    assert gpu.empty()
    for mapping in mappings:
        mapping.close()


def test_a_mapping_that_cannot_be_pinned_is_tried_once() -> None:
    gpu = QueuedGpu()
    pins, mapping = Pins(gpu), mmap.mmap(-1, mmap.PAGESIZE)
    gpu.unpinnable = True
    assert not pins.has(memoryview(mapping))
    gpu.unpinnable = False
    assert not pins.has(memoryview(mapping))
    pins.close()
    mapping.close()


def test_memory_that_is_no_mapping_is_not_pinned() -> None:
    gpu = QueuedGpu()
    assert not Pins(gpu).has(memoryview(bytearray(8)))
    assert gpu.pins == 0
