"""The CUDA kernels themselves, run on the CPU (support/fake_gpu.py), against the reference."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.layout import BlockRegion
from kvmig.kernels.api import BlockCopy
from kvmig.kernels.copy import start_copy
from kvmig.kernels.gpu import GpuKernels
from tests.support import fake_gpu
from tests.support.examples import examples
from tests.support.fake_gpu import FakeGpu, FakeKernels
from tests.support.kernel_backends import ORACLE, check_copy
from tests.support.poisoned import Cache, caches, make_cache

WORKERS = st.sampled_from([0, 1, 3])


@pytest.fixture(scope="module")
def emulated() -> Iterator[GpuKernels]:
    with fake_gpu.installed():
        kernels = FakeKernels(FakeGpu())
        yield kernels
        kernels.close()


@examples(40, deadline=None)
@given(case=caches(), workers=WORKERS)
def test_a_copy_writes_the_blocks_and_touches_nothing_else(
    emulated: GpuKernels, case: tuple[Cache, Cache, list[int], list[int]], workers: int
) -> None:
    check_copy(emulated, *case, workers=workers)


@pytest.mark.parametrize("gap", [0, 16, 8, 4, 2, 1])
def test_every_width_of_access_copies_runs_of_many_pieces(emulated: GpuKernels, gap: int) -> None:
    runs = [65536, 4096, 4096 + 16, 30000]
    source, target = (make_cache(seed, runs, [gap] * 4, 4) for seed in (1, 2))
    check_copy(emulated, source, target, [3, 0, 3], [0, 1, 2], workers=3)


def test_runs_are_found_among_many_regions_and_empty_ones(emulated: GpuKernels) -> None:
    runs = [16 * (number % 5) for number in range(75)]
    source, target = (make_cache(seed, runs, [0] * 75, 6) for seed in (1, 2))
    check_copy(emulated, source, target, [5, 4, 0], [0, 3, 5], workers=3)


def test_a_copy_without_checksums_copies(emulated: GpuKernels) -> None:
    source, target = (make_cache(seed, [8192, 48], [8, 0], 3) for seed in (1, 2))
    ends = source.layout.regions, target.layout.regions
    assert start_copy(emulated, *ends, [2], [1], 3, 3, checksums=False).wait() == []
    assert target.block(1) == source.block(2)


@examples(20, deadline=None)
@given(case=caches(), workers=WORKERS)
def test_checksums_are_those_of_the_reference(
    emulated: GpuKernels, case: tuple[Cache, Cache, list[int], list[int]], workers: int
) -> None:
    source, _, ids, _ = case
    numbers = np.array(ids, np.int64)
    wanted = ORACLE.checksum(source.layout.regions, numbers).wait()
    assert emulated.checksum(source.layout.regions, numbers, workers=workers).wait() == wanted


def aligned(cache: Cache) -> tuple[BlockRegion, ...]:
    """Its regions, all on 16-byte boundaries. NumPy's memory begins on one."""
    assert all((r.base | r.block_stride | r.run) % 16 == 0 for r in cache.layout.regions)
    return cache.layout.regions


@examples(25, deadline=None)
@given(
    runs=st.lists(st.sampled_from([0, 16, 48, 18432, 32768, 65536 + 16]), max_size=5),
    n=st.integers(0, 6),
    workers=WORKERS,
    checksums=st.booleans(),
)
def test_the_ring_of_the_tma_copies_and_sums(
    emulated: GpuKernels, runs: list[int], n: int, workers: int, checksums: bool
) -> None:
    """Its bulk copies happen late and at random: a stage given up too early would be noticed."""
    source, target = (make_cache(seed, runs, [16] * len(runs), 6) for seed in (1, 2))
    source_ids, target_ids = [5, 4, 4, 1, 0, 3][:n], [0, 1, 2, 3, 4, 5][:n]
    expected = target.memory.copy()
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        target.with_block(expected, target_id, source.block(source_id))
    ids = np.array(source_ids, np.int64), np.array(target_ids, np.int64)
    blocks = BlockCopy(aligned(source), aligned(target), *ids)
    sums = emulated.copy_tma(blocks, checksums=checksums, workers=workers).wait()
    assert np.array_equal(target.memory, expected)
    wanted = ORACLE.checksum(source.layout.regions, ids[0]).wait()
    assert sums == (wanted if checksums else [])


def test_the_c_functions_refuse_what_makes_no_sense(emulated: GpuKernels) -> None:
    launcher = emulated._launcher
    with pytest.raises(ValueError, match="refused"):
        launcher.copy(0, 0, -1, 0, 0, 0, 0, 0, 0)
    with pytest.raises(ValueError, match="refused"):
        launcher.copy(0, 0, 1, 0, 0, 1, 0, 0, 0)
    with pytest.raises(ValueError, match="refused"):
        launcher.checksum(0, 0, 0, 1, 0, 0, 0)
