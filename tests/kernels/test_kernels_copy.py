from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmig.core.layout import BlockRegion, KVLayout, fused
from kvmig.kernels import select
from kvmig.kernels.copy import address_of, checksum_fused, copy_blocks
from kvmig.kernels.select import VARIABLE
from tests.support.examples import examples
from tests.support.kernel_backends import BACKENDS, WORKERS, check_copy, loaded
from tests.support.poisoned import Cache, caches, make_cache

Case = tuple[Cache, Cache, list[int], list[int]]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels that the checked functions use."""
    name = str(request.param)
    loaded(name)
    monkeypatch.setenv(VARIABLE, name)
    return name


@pytest.fixture
def pair() -> tuple[Cache, Cache]:
    return make_cache(1, [24, 8], [0, 8], 4), make_cache(2, [24, 8], [8, 0], 4)


def move(source: Cache, target: Cache, source_ids: list[int], target_ids: list[int]) -> list[int]:
    regions = source.layout.regions, target.layout.regions
    blocks = source.layout.num_blocks, target.layout.num_blocks
    return copy_blocks(*regions, source_ids, target_ids, *blocks)


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("backend_name", BACKENDS)
@examples(50, deadline=None)  # torch starts slowly on a busy machine
@given(case=caches())
def test_a_copy_writes_the_blocks_and_touches_nothing_else(
    backend_name: str, workers: int, case: Case
) -> None:
    check_copy(loaded(backend_name), *case, workers=workers)


@settings(deadline=None)
@given(case=caches())
def test_a_scatter_undoes_a_gather(case: Case) -> None:
    source, _, ids, places = case
    n, layout = len(ids), source.layout
    buffer = np.zeros(n * layout.block_bytes + 1, np.uint8)
    staged = fused(buffer.ctypes.data, layout)
    gathered = copy_blocks(layout.regions, staged, ids, range(n), layout.num_blocks, n)
    assert buffer[:-1].tobytes() == b"".join(source.block(number) for number in ids)
    target = make_cache(3, [region.run for region in layout.regions], [3] * len(layout.regions), 9)
    regions = target.layout.regions
    assert copy_blocks(staged, regions, range(n), places, n, 9) == gathered
    assert [target.block(place) for place in places] == [source.block(number) for number in ids]


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("shift", [0, 8, 4])
def test_copies_past_the_caches_are_the_same(workers: int, shift: int) -> None:
    """Ten megabytes, of runs that fill whole vectors, and of others; in and out of line."""
    runs = [65536, 18432 + 8, 30001]
    source, target = make_cache(1, runs, [shift] * 3, 100), make_cache(2, runs, [0] * 3, 101)
    ids = np.random.default_rng(0).permutation(100).tolist()
    check_copy(select.kernels("cpu"), source, target, ids, [*range(1, 101)], workers=workers)


@given(st.binary(min_size=1, max_size=200), st.integers(0), st.integers(1, 255))
def test_a_flipped_byte_changes_the_checksum(data: bytes, place: int, flip: int) -> None:
    flipped = bytearray(data)
    flipped[place % len(data)] ^= flip
    assert checksum_fused(flipped, len(data)) != checksum_fused(data, len(data))


def test_words_that_change_places_change_the_checksum() -> None:
    first, second = b"wordone.", b"wordtwo."
    assert checksum_fused(first + second, 16) != checksum_fused(second + first, 16)


def test_the_checksum_is_the_one_of_the_header(backend: str) -> None:
    """Worked by hand for the words 1 and 0x0203, so that no other build may differ."""

    def mix64(z: int) -> int:
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    golden = 0x9E3779B97F4A7C15
    words = ((1 + golden) % 2**64, (0x0203 + 2 * golden) % 2**64)
    data = (1).to_bytes(8, "little") + bytes([3, 2])
    assert checksum_fused(data, 10) == [sum(map(mix64, words)) % 2**64]


def test_checksums_of_a_copy_are_those_of_the_fused_buffer(
    backend: str, pair: tuple[Cache, Cache]
) -> None:
    source, target = pair
    sums = move(source, target, [3, 0], [1, 2])
    assert sums == checksum_fused(source.block(3) + source.block(0), 32)
    assert [target.block(1), target.block(2)] == [source.block(3), source.block(0)]


def test_a_copy_without_checksums_returns_none_and_copies(
    backend: str, pair: tuple[Cache, Cache]
) -> None:
    source, target = pair
    regions = source.layout.regions, target.layout.regions
    assert copy_blocks(*regions, [2], [0], 4, 4, checksums=False) == []
    assert target.block(0) == source.block(2)


def test_no_blocks_and_no_regions_are_fine(backend: str, pair: tuple[Cache, Cache]) -> None:
    assert move(*pair, [], []) == []
    assert copy_blocks([], [], [0, 1], [1, 0], 2, 2) == [0, 0]
    assert checksum_fused(b"", 8) == []


@pytest.mark.parametrize(
    ("source_ids", "target_ids", "message"),
    [
        ([0, 4], [0, 1], r"source block 4 is outside 0..3"),
        ([0, -1], [0, 1], r"source block -1 is outside"),
        ([0, 1], [0, 4], r"destination block 4 is outside 0..3"),
        ([0, 1], [0], r"2 source ids, but 1 destination ids"),
        ([0, 1], [2, 2], r"destination block 2 is named twice"),
        ([0.5], [1], r"source block ids are float64, not integers"),
        ([[0, 1]], [0, 1], r"source block ids have 2 dimensions, not one"),
    ],
)
def test_ids_that_do_not_fit_are_refused_before_anything_is_written(
    pair: tuple[Cache, Cache], source_ids: list[int], target_ids: list[int], message: str
) -> None:
    source, target = pair
    before = target.memory.copy()
    with pytest.raises(ValueError, match=message):
        move(source, target, source_ids, target_ids)
    assert np.array_equal(target.memory, before)


def test_regions_that_differ_are_refused(pair: tuple[Cache, Cache]) -> None:
    other = make_cache(3, [24, 9], [0, 0], 4)
    for target in (other.layout.regions, pair[1].layout.regions[:1]):
        with pytest.raises(ValueError, match="number or runs"):
            copy_blocks(pair[0].layout.regions, target, [0], [0], 4, 4)


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (BlockRegion(0, 8, 8), r"region 0 begins at address 0"),
        (BlockRegion(4096, 8, -8), r"region 0 has a run of -8 bytes"),
        (BlockRegion(4096, 7, 8), r"runs of 8 bytes overlap at a block stride of 7"),
    ],
)
def test_regions_that_can_not_be_are_refused(region: BlockRegion, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        copy_blocks([region], [region], [0], [1], 2, 2)


def test_less_than_no_workers_are_refused(pair: tuple[Cache, Cache]) -> None:
    regions = pair[0].layout.regions, pair[1].layout.regions
    with pytest.raises(ValueError, match="workers is -1"):
        copy_blocks(*regions, [0], [0], 4, 4, workers=-1)


@pytest.mark.parametrize("block_bytes", [0, 7])
def test_a_buffer_of_no_whole_blocks_is_refused(block_bytes: int) -> None:
    with pytest.raises(ValueError, match="no whole number of blocks"):
        checksum_fused(bytes(16), block_bytes)


def test_a_read_only_view_can_be_read() -> None:
    view = memoryview(b"12345678").toreadonly()
    assert checksum_fused(view, 8) == checksum_fused(bytearray(view), 8)


def test_a_layout_of_its_own_block_size_is_gathered_where_it_is_asked_for(backend: str) -> None:
    memory = np.arange(32, dtype=np.uint8)
    layout = KVLayout((BlockRegion(memory.ctypes.data, 8, 8),), 4, 16)
    buffer = bytearray(16)
    copy_blocks(layout.regions, fused(address_of(buffer), layout), [3, 1], [0, 1], 4, 2)
    assert bytes(buffer) == memory[24:32].tobytes() + memory[8:16].tobytes()
