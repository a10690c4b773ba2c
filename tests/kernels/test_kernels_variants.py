"""Kernels that might take the place of csrc's (bench/gpu/variants.cu): run on the CPU against the
reference as csrc's are, and what nvcc makes of them. kvmig uses none until a GPU has measured them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.gpu.cuda_ways import variant_kernels, variants, variants_library
from kvmig.core.errors import KernelUnavailable
from kvmig.kernels import abi, build
from kvmig.kernels.api import BlockCopy
from kvmig.kernels.gpu import GpuKernels
from kvmig.kernels.native import load
from tests.support import fake_gpu
from tests.support.examples import examples
from tests.support.fake_gpu import FakeGpu
from tests.support.kernel_backends import ORACLE, check_copy
from tests.support.machine_code import code_of, registers_of
from tests.support.poisoned import Cache, caches, make_cache

VECTORS = ("rolling", "rolling-tiles")
RINGS = {"tma-32k": 32, "tma-64k": 64, "tma-deep": 16}
"""KiB of a stage."""
KERNELS = {
    "kvmig_rolling_kernel", "kvmig_rolling_sum_kernel", "kvmig_tiles_kernel",
    "kvmig_tiles_sum_kernel", "kvmig_ring_32k_kernel", "kvmig_ring_64k_kernel",
    "kvmig_ring_deep_kernel",
}  # fmt: skip
WORKERS = st.sampled_from([0, 1, 3])


@pytest.fixture(scope="module")
def emulated() -> Iterator[dict[str, GpuKernels]]:
    with fake_gpu.installed():
        found = [by for by, _ in variant_kernels(fake_gpu.library(), FakeGpu())]
        yield {by.name: by for by in found}
        for by in found:
            by.close()


def test_the_variants_are_those_that_are_tested(emulated: dict[str, GpuKernels]) -> None:
    assert set(emulated) == {*VECTORS, *RINGS}


@pytest.mark.parametrize("name", VECTORS)
@examples(20, deadline=None)
@given(case=caches(), workers=WORKERS)
def test_a_copy_writes_the_blocks_and_touches_nothing_else(
    emulated: dict[str, GpuKernels],
    name: str,
    case: tuple[Cache, Cache, list[int], list[int]],
    workers: int,
) -> None:
    check_copy(emulated[name], *case, workers=workers)


@pytest.mark.parametrize("name", VECTORS)
@pytest.mark.parametrize("gap", [0, 8])
def test_whole_pieces_one_after_the_other_and_others_between_are_copied(
    emulated: dict[str, GpuKernels], name: str, gap: int
) -> None:
    """A piece has 4 KiB: a warp that loads the next one early must notice that it isn't whole."""
    runs = [131072, 4096, 0, 4096 + 16, 30000, 16384]
    source, target = (make_cache(seed, runs, [gap] * len(runs), 4) for seed in (1, 2))
    check_copy(emulated[name], source, target, [3, 0, 3], [0, 1, 2], workers=2)


@pytest.mark.parametrize("name", VECTORS)
def test_a_copy_without_checksums_copies(emulated: dict[str, GpuKernels], name: str) -> None:
    source, target = (make_cache(seed, [69632, 48], [0, 0], 3) for seed in (1, 2))
    ids = np.array([2, 0], np.int64), np.array([1, 2], np.int64)
    blocks = BlockCopy(source.layout.regions, target.layout.regions, *ids)
    assert emulated[name].copy(blocks, checksums=False, workers=1).wait() == []
    assert [target.block(1), target.block(2)] == [source.block(2), source.block(0)]


@pytest.mark.parametrize("name", RINGS)
@examples(6, deadline=None)
@given(
    runs=st.lists(st.sampled_from([0, 16, 48, 18432, 65536, 131072 + 16]), max_size=4),
    n=st.integers(0, 4),
    workers=WORKERS,
    checksums=st.booleans(),
)
def test_a_ring_copies_and_sums(
    emulated: dict[str, GpuKernels],
    name: str,
    runs: list[int],
    n: int,
    workers: int,
    checksums: bool,
) -> None:
    """Its bulk copies happen late and at random: a stage given up too early would be noticed."""
    source, target = (make_cache(seed, runs, [16] * len(runs), 6) for seed in (1, 2))
    source_ids, target_ids = [5, 4, 4, 1][:n], [0, 1, 2, 3][:n]
    expected = target.memory.copy()
    for source_id, target_id in zip(source_ids, target_ids, strict=True):
        target.with_block(expected, target_id, source.block(source_id))
    ids = np.array(source_ids, np.int64), np.array(target_ids, np.int64)
    blocks = BlockCopy(source.layout.regions, target.layout.regions, *ids)
    sums = emulated[name].copy_tma(blocks, checksums=checksums, workers=workers).wait()
    assert np.array_equal(target.memory, expected)
    wanted = ORACLE.checksum(source.layout.regions, ids[0]).wait()
    assert sums == (wanted if checksums else [])


def test_a_variant_that_is_not_there_is_refused(emulated: dict[str, GpuKernels]) -> None:
    library = fake_gpu.library()
    assert library.kvmig_variant_name(len(emulated)) is None
    assert library.kvmig_copy_variant(len(emulated), *[0] * 9) == abi.BAD_ARGUMENT
    assert library.kvmig_copy_variant(0, 0, 0, -1, *[0] * 6) == abi.BAD_ARGUMENT


def test_kernels_without_a_tma_have_no_variants() -> None:
    assert variants(load()) == []


def test_variants_sum_nothing_alone(emulated: dict[str, GpuKernels]) -> None:
    source = make_cache(1, [64], [0], 1)
    with pytest.raises(KernelUnavailable, match="variants only copy"):
        emulated["rolling"].checksum(source.layout.regions, np.zeros(1, np.int64))


# -- what nvcc makes of them: for one target, in a library of their own


@pytest.fixture(scope="module")
def library() -> Path:
    try:
        build.nvcc()
    except KernelUnavailable as error:
        pytest.skip(str(error))
    return build.cached_library(variants_library())


@pytest.fixture(scope="module")
def code(library: Path) -> dict[str, str]:
    return {name: text for (_, name), text in code_of(library).items()}


def test_every_variant_is_compiled_and_spills_no_registers(code: dict[str, str]) -> None:
    assert code.keys() == KERNELS
    assert not [name for name, text in code.items() if re.search(r"\b(?:LDL|STL)\b", text)]


def test_a_variants_registers_leave_room_for_an_engines_kernels(library: Path) -> None:
    """At most 30 K of an SM's 64 K for 256 threads, 3 K more than csrc's take, and 16 K for the 288
    of a ring. variants.cu says how much shared memory each has."""
    found = registers_of(library)
    assert found.keys() >= KERNELS
    for name in KERNELS:
        registers, static_bytes = found[name]
        assert registers <= ((16 << 10) // 288 if "ring" in name else (30 << 10) // 256), name
        assert static_bytes <= 1 << 10, name


@pytest.mark.parametrize("kernel", ["kvmig_rolling_kernel", "kvmig_rolling_sum_kernel"])
def test_loads_of_the_next_piece_are_among_the_stores_of_this_one(
    code: dict[str, str], kernel: str
) -> None:
    """Eight of each, in turn: a warp waits neither for all loads nor for all sums."""
    wide = "".join(re.findall(r"\b(LDG|STG)\.\S*\b128\b", code[kernel]))
    assert "LDGLDGLDGLDGLDGLDGLDGLDG" in wide, "of the first piece"
    assert re.search(r"(?:STG(?:LDG)+){6}", wide)


def test_other_rings_move_by_bulk_copies_and_are_summed_by_128_bits(code: dict[str, str]) -> None:
    for kernel in sorted(one for one in KERNELS if "ring" in one):
        assert "UBLKCP.S.G" in code[kernel]
        assert "UBLKCP.G.S" in code[kernel]
        assert len(re.findall(r"\bLDS\.128\b", code[kernel])) >= 4
