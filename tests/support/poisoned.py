"""Memory in which every byte that no kernel may touch is poison, and checked to be so still."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvmig.core.layout import BlockRegion, KVLayout
from kvmig.kernels.layouts import CacheGroup

POISON = 0xA5
GUARD = 64
"""Poisoned bytes at either end."""


@dataclass
class Cache:
    """An engine's memory: random blocks, and poison between and around them."""

    memory: NDArray[np.uint8]
    layout: KVLayout

    def block(self, number: int) -> bytes:
        """One block, fused."""
        start = self.memory.ctypes.data
        runs = ((r.base - start + number * r.block_stride, r.run) for r in self.layout.regions)
        return b"".join(self.memory[at : at + run].tobytes() for at, run in runs)

    def with_block(self, memory: NDArray[np.uint8], number: int, fused: bytes) -> None:
        """Write one fused block into `memory`, a copy of this one's."""
        taken = 0
        for region in self.layout.regions:
            at = region.base - self.memory.ctypes.data + number * region.block_stride
            run = fused[taken : taken + region.run]
            memory[at : at + region.run] = np.frombuffer(run, np.uint8)
            taken += region.run


def make_cache(seed: int, runs: list[int], gaps: list[int], blocks: int) -> Cache:
    """One region a run; a gap after each block, and before each region."""
    size = sum(gap + blocks * (run + gap) for run, gap in zip(runs, gaps, strict=True))
    memory = np.full(size + 2 * GUARD, POISON, np.uint8)
    random = np.random.default_rng(seed)
    regions: list[BlockRegion] = []
    offset = GUARD
    for run, gap in zip(runs, gaps, strict=True):
        offset += gap
        regions.append(BlockRegion(memory.ctypes.data + offset, run + gap, run))
        for _ in range(blocks):
            memory[offset : offset + run] = random.integers(0, 256, run, np.uint8)
            offset += run + gap
    return Cache(memory, KVLayout(tuple(regions), blocks, 16))


@st.composite
def caches(draw: st.DrawFn) -> tuple[Cache, Cache, list[int], list[int]]:
    """Two caches of the same runs, ids in the first, and as many different ones in the second."""
    runs = draw(st.lists(st.integers(0, 70) | st.sampled_from([4096, 8191, 20000]), max_size=4))
    sizes = (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    gaps = st.lists(st.integers(0, 17), min_size=len(runs), max_size=len(runs))
    seeds = st.integers(0, 1 << 30)
    source, target = (make_cache(draw(seeds), runs, draw(gaps), size) for size in sizes)
    target_ids = draw(st.lists(st.integers(0, sizes[1] - 1), unique=True))
    source_ids = [draw(st.integers(0, sizes[0] - 1)) for _ in target_ids]
    return source, target, source_ids, target_ids


def paged(group: CacheGroup, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A cache of one base address in `memory` as its logical shape [L, K, B, H, N, C bytes]."""
    sizes, strides = group.sizes(), group.strides()
    start = group.bases[0] - memory.ctypes.data
    return np.lib.stride_tricks.as_strided(
        memory[start:], [sizes[axis] for axis in "LKBHNC"], [strides[axis] for axis in "LKBHNC"]
    )


def make_paged(order: str, **sizes: int) -> tuple[CacheGroup, NDArray[np.uint8]]:
    """A cache of poison, with as much around it; sizes as CacheGroup's."""
    measured = CacheGroup(order, (GUARD,), **sizes)
    span = sum((size - 1) * measured.strides()[axis] for axis, size in measured.sizes().items())
    memory = np.full(span + 1 + 2 * GUARD, POISON, np.uint8)
    return replace(measured, bases=(memory.ctypes.data + GUARD,)), memory
