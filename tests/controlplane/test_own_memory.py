"""What an instance takes beside its KV cache."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import replace

from kvmig.controlplane.own_memory import OwnMemory, cache_spans
from kvmig.core.layout import BlockRegion, KVLayout

SIZE = 64 << 20


def layout(*regions: BlockRegion, blocks: int = 4) -> KVLayout:
    return KVLayout(regions, blocks, 16)


def test_regions_that_lie_between_each_other_count_once() -> None:
    apart = layout(BlockRegion(1000, 8, 8), BlockRegion(2000, 8, 8))
    assert cache_spans(apart) == [(1000, 32), (2000, 32)]
    between = layout(BlockRegion(1008, 16, 8), BlockRegion(1000, 16, 8))
    assert cache_spans(between) == [(1000, 64)]


def test_a_cache_on_a_gpu_or_without_blocks_is_none_of_the_hosts() -> None:
    one = layout(BlockRegion(1000, 8, 8))
    assert cache_spans(replace(one, gpu=0)) == []
    assert cache_spans(replace(one, num_blocks=0)) == []


def test_what_is_written_into_the_cache_is_not_counted_and_the_most_stays() -> None:
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        own = OwnMemory(layout(BlockRegion(address, SIZE // 4, SIZE // 4)))
        other = OwnMemory(layout())
        own.measure()
        before = own.beside_kv
        ctypes.memset(address, 1, SIZE)
        own.measure()
        other.measure()
        assert own.beside_kv - before < SIZE // 8
        assert other.beside_kv - before > SIZE // 2


def test_what_was_there_while_it_was_parked_is_left_out_once_it_has_woken() -> None:
    own = OwnMemory(layout())
    own.measure()
    before = own.beside_kv
    with mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as weights:
        weights.write(b"1" * SIZE)
    own.forget_peak()
    own.measure()
    assert own.beside_kv - before < SIZE // 4
