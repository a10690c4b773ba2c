from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvmig.core.errors import UnsupportedLayout
from kvmig.core.layout import BlockRegion, fused
from kvmig.kernels.copy import copy_blocks
from kvmig.kernels.layouts import ORDERS, CacheGroup, kv_layout, regions
from tests.support.poisoned import GUARD, POISON, make_paged, paged

SHAPE = {
    "layers": 2, "blocks": 3, "heads": 4, "block_tokens": 16,
    "head_size": 64, "head_size_v": 64, "itemsize": 2,
}  # fmt: skip
EXAMPLE = CacheGroup("LBHNC", (4096,), **SHAPE)


@st.composite
def groups(draw: st.DrawFn) -> tuple[CacheGroup, NDArray[np.uint8]]:
    """Caches of every order, of poison."""
    order = draw(st.sampled_from(sorted(ORDERS)))
    halves = order.replace("2", "") != order
    key = draw(st.sampled_from([1, 3, 64]))
    value = key if halves else draw(st.sampled_from([0, key, 5]))
    return make_paged(
        order,
        layers=draw(st.integers(1, 3)),
        blocks=draw(st.integers(1, 4)),
        heads=draw(st.integers(1, 3)) if "H" in order else 1,
        block_tokens=draw(st.integers(1, 4)),
        head_size=key,
        head_size_v=value,
        itemsize=draw(st.sampled_from([1, 2])),
        padding=0 if halves else draw(st.sampled_from([0, 0, 7])),
    )


def at(memory: NDArray[np.uint8], address: int, nbytes: int) -> NDArray[np.uint8]:
    """A view of memory by address."""
    start = address - memory.ctypes.data
    return memory[start : start + nbytes]


def test_the_example_of_the_docstring() -> None:
    assert regions(EXAMPLE) == (
        BlockRegion(4096, 16384, 16384),
        BlockRegion(4096 + 3 * 16384, 16384, 16384),
    )


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("LBNHC", [BlockRegion(4096, 16384, 16384), BlockRegion(4096 + 49152, 16384, 16384)]),
        ("BLHNC", [BlockRegion(4096, 32768, 32768)]),
        ("BLNHC", [BlockRegion(4096, 32768, 32768)]),
        ("2BNHC", [BlockRegion(4096 + 24576 * half, 8192, 8192) for half in range(4)]),
        ("B2HNC", [BlockRegion(4096, 16384, 16384), BlockRegion(4096 + 49152, 16384, 16384)]),
    ],
)
def test_runs_are_as_long_as_the_order_allows(order: str, expected: list[BlockRegion]) -> None:
    assert regions(replace(EXAMPLE, order=order)) == tuple(expected)


@given(groups())
def test_the_regions_of_a_block_are_its_bytes_and_no_others(
    made: tuple[CacheGroup, NDArray[np.uint8]],
) -> None:
    group, memory = made
    block = group.blocks - 1
    expected = memory.copy()
    paged(replace(group, bases=(expected.ctypes.data + GUARD,)), expected)[:, :, block] = 1
    for region in regions(group):
        run = at(memory, region.base + block * region.block_stride, region.run)
        assert (run == POISON).all()  # no byte lies in two regions
        run[:] = 1
    assert np.array_equal(memory, expected)


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 192, 256, 576])
@pytest.mark.parametrize("itemsize", [1, 2])
def test_head_sizes_and_types_of_models_are_taken(head_size: int, itemsize: int) -> None:
    group = replace(EXAMPLE, head_size=head_size, head_size_v=head_size, itemsize=itemsize)
    assert {region.run for region in regions(group)} == {4 * 16 * 2 * head_size * itemsize}


def test_a_latent_is_one_head_without_a_value() -> None:
    latent = CacheGroup("LBNC", (4096,), 61, 10, 1, 16, 576, 0, 2)
    assert {region.run for region in regions(latent)} == {18432}
    assert kv_layout(latent).block_bytes == 61 * 18432


def test_layers_may_each_have_memory_of_their_own() -> None:
    apart = replace(EXAMPLE, bases=(4096, 1 << 20))
    assert [region.base for region in regions(apart)] == [4096, 1 << 20]


def test_groups_that_share_memory_are_copied_by_their_own_block_ids() -> None:
    full, memory = make_paged("LBHNC", **SHAPE)
    window = replace(full, layers=1)
    paged(full, memory)[...] = np.arange(3, dtype=np.uint8)[:, None, None, None]
    buffer = np.zeros(kv_layout(full).block_bytes + kv_layout(window).block_bytes, np.uint8)
    places = buffer.ctypes.data, buffer.ctypes.data + kv_layout(full).block_bytes
    for group, place, block in zip((full, window), places, (2, 1), strict=True):
        staged = fused(place, kv_layout(group))
        copy_blocks(regions(group), staged, [block], [0], group.blocks, 1)
    assert np.unique(buffer[: 2 * 16384]).tolist() == [2]
    assert np.unique(buffer[2 * 16384 :]).tolist() == [1]


@pytest.mark.parametrize("order", ["LHBNC", "BHLNC", "HND", "", "lbhnc"])
def test_other_orders_are_refused_by_name(order: str) -> None:
    with pytest.raises(UnsupportedLayout, match=f"KV layout {order} is not one of LBHNC, LBNHC"):
        replace(EXAMPLE, order=order)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers is 0, should be 1 or more"),
        ({"itemsize": 8}, "itemsize is 8, should be 1, 2 or 4"),
        ({"head_size_v": -1}, "head_size_v and padding should be 0 or more"),
        ({"order": "LBNC"}, "KV layout LBNC has one head, not 4"),
        ({"order": "2BNHC", "head_size_v": 0}, "KV layout 2BNHC: key and value differ"),
        ({"order": "2BNHC", "padding": 8}, "KV layout 2BNHC can't be padded"),
        ({"bases": (1, 2, 3)}, "KV layout LBHNC of 2 layers has 3 addresses"),
        ({"bases": (1, 2), "order": "BLHNC"}, "KV layout BLHNC of 2 layers has 2 addresses"),
    ],
)
def test_shapes_that_can_not_be_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedLayout, match=message):
        replace(EXAMPLE, **change)  # type: ignore[arg-type]
