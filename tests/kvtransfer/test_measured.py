"""What migrations have measured, for those after them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.layout import BlockRegion, KVLayout
from kvmig.kvtransfer.measured import BlockRate, ChunkSizer, slot_bytes
from kvmig.kvtransfer.report import MigrationReport, StageReport


def layout(block_bytes: int, gpu: int | None = None) -> KVLayout:
    return KVLayout((BlockRegion(0, block_bytes, block_bytes),), 1, 16, gpu=gpu)


MS = st.floats(min_value=1e-6, max_value=1e6)
COPIES = st.lists(st.tuples(st.integers(0, 1 << 40), MS), max_size=20)


@pytest.mark.parametrize(("block", "slot"), [(100, 4096), (4096, 4096), (14_680_064, 14_680_064)])
def test_a_slot_is_of_chunk_bytes_or_of_one_larger_block(block: int, slot: int) -> None:
    assert slot_bytes(4096, layout(block)) == slot


@pytest.mark.parametrize(
    ("gpu", "block", "slot"),
    [(None, 100, 1 << 20), (0, 100, 32 << 20), (1, 33 << 20, 33 << 20)],
)
def test_a_gpu_has_larger_slots_unless_the_user_has_said_how_large(
    gpu: int | None, block: int, slot: int
) -> None:
    """A1: a chunk costs half a millisecond whatever its size, as long as a GPU's link takes for
    25 MB."""
    assert slot_bytes(None, layout(block, gpu)) == slot
    assert slot_bytes(40 << 20, layout(block, gpu)) == 40 << 20


@pytest.mark.parametrize("ms", [0.1, 2.0, 30.0])
def test_a_block_larger_than_chunk_bytes_travels_alone_however_long_its_copy_takes(
    ms: float,
) -> None:
    sizer = ChunkSizer(4097, 4096, 2.0)
    sizer.observe(4097, ms)
    assert sizer.blocks() == 1


def test_the_first_chunk_is_one_block_since_nothing_was_measured() -> None:
    assert ChunkSizer(100, 1000, 2.0).blocks() == 1


@pytest.mark.parametrize(
    ("slot", "target_ms", "copies", "blocks"),
    [
        pytest.param(1050, 2.0, [(100, 0.001)], 10, id="a fast copy fills the slot"),
        pytest.param(1000, 2.0, [(1000, 10.0)], 2, id="a slow one shrinks it to what fits"),
        pytest.param(100_000, 1.0, [(1000, 1.0), (200, 1.0)], 8, id="each counts by its weight"),
        pytest.param(1000, 2.0, [(100, 0.0), (0, 1.0)], 1, id="no time or no bytes: nothing"),
    ],
)
def test_a_chunk_has_as_many_blocks_as_the_copies_before_it_allow(
    slot: int, target_ms: float, copies: list[tuple[int, float]], blocks: int
) -> None:
    sizer = ChunkSizer(100, slot, target_ms)
    for copy in copies:
        sizer.observe(*copy)
    assert sizer.blocks() == blocks


@given(COPIES, st.integers(1, 1 << 20), st.integers(1, 64), MS)
def test_a_chunk_has_a_block_and_fits_its_slot(
    copies: list[tuple[int, float]], block_bytes: int, most: int, chunk_ms: float
) -> None:
    sizer = ChunkSizer(block_bytes, block_bytes * most, chunk_ms)
    for nbytes, ms in copies:
        sizer.observe(nbytes, ms)
        assert 1 <= sizer.blocks() <= most


@given(st.lists(st.integers(0, 1000), max_size=50), COPIES)
def test_chunks_put_together_are_the_blocks(
    ids: list[int], copies: list[tuple[int, float]]
) -> None:
    sizer = ChunkSizer(8, 64, 2.0)
    joined: list[int] = []
    for first, chunk in sizer.cut(ids):
        assert first == len(joined)
        joined.extend(chunk)
        if copies:
            sizer.observe(*copies.pop())
    assert joined == ids


def report(*stages: StageReport) -> MigrationReport:
    return MigrationReport(
        id="m", request_id="r", source="a", destination="b", state="committed", stages=[*stages]
    )


def test_the_first_measurement_counts_whole_and_later_ones_in_part() -> None:
    rate = BlockRate(block_bytes=1000)
    assert rate.blocks_s == 0
    rate.observe(report(StageReport(10, 10_000, 50.0), StageReport(10, 10_000, 50.0)))
    assert rate.blocks_s == pytest.approx(200)
    rate.observe(report(StageReport(10, 10_000, 100.0)))
    assert rate.blocks_s == pytest.approx(200 + 0.3 * (100 - 200))


def test_a_migration_that_copied_nothing_live_says_nothing() -> None:
    rate = BlockRate(block_bytes=1000)
    rate.observe(report(StageReport(10, 10_000, 50.0)))
    for nothing in (report(), report(StageReport(0, 0, 3.0))):
        rate.observe(nothing)
        assert rate.blocks_s == pytest.approx(200)
