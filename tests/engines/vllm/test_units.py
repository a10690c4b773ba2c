"""Units of KV cache between engines of different block sizes, workers and attention kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvmig.core.errors import ConfigError, UnsupportedLayout
from kvmig.engines.block_copies import HostCopies
from kvmig.engines.vllm.subblocks import LayerCache, RankCache, SubBlocks, UnitMap, units_of

POISON = 0xA5A5
DIMENSIONS = 32
"""Of a head's keys, and of its values."""

Logical = NDArray[np.uint16]
"""What a model keeps: [layers, heads, tokens, keys or values, dimensions]."""
Place = tuple[int, int, int, int, NDArray[np.int64], int, slice]
"""Worker, layer, kernel block, head there, its elements in it; head of the model, tokens."""


@dataclass(frozen=True)
class Shape:
    """One engine."""

    workers: int
    block_tokens: int
    kernel_tokens: int
    attention: str = "vec"
    blocks: int = 12


def in_head(attention: str, tokens: int) -> NDArray[np.int64]:
    """Where a head's block keeps each element, [tokens, keys or values, dimensions].

    Written from the loops of vLLM's `reshape_and_cache`, not from `strips`.
    """
    token, dimension = np.meshgrid(np.arange(tokens), np.arange(DIMENSIONS), indexing="ij")
    if attention == "":
        row = 2 * DIMENSIONS
        return np.stack([token * row + dimension, token * row + DIMENSIONS + dimension], 1)
    values = tokens * DIMENSIONS
    if attention == "amx":
        group, lane = token // 16, token % 16
        pair, half = dimension // 2, dimension % 2
        keys = ((group * (DIMENSIONS // 2) + pair) * 16 + lane) * 2 + half
        column, inside = dimension // 16, dimension % 16
        at = (column * (tokens // 2) + token // 2) * 32 + inside * 2 + token % 2
        return np.stack([keys, values + at], 1)
    return np.stack([dimension * tokens + token, values + token * DIMENSIONS + dimension], 1)


class Engine:
    """Workers' memory with vLLM's order in it, and a view of it as `UnitMap` wants one."""

    def __init__(self, shape: Shape, layers: int, heads: int, unit_tokens: int) -> None:
        self.shape, self.layers, self.heads = shape, layers, heads
        self.held = max(1, heads // shape.workers)
        self.split = shape.block_tokens // shape.kernel_tokens
        kernel_blocks = shape.blocks * self.split
        self.head = shape.kernel_tokens * 2 * DIMENSIONS
        size = (shape.workers, layers, kernel_blocks, self.held, self.head)
        self.memory = np.full(size, POISON, np.uint16)
        strides = (self.held * self.head * 2, self.head * 2, 4 * DIMENSIONS, 2)
        dims = (kernel_blocks, self.held, shape.kernel_tokens, 2 * DIMENSIONS)
        ranks = [
            RankCache(
                worker.ctypes.data,
                worker.nbytes,
                (),
                tuple(
                    LayerCache(layer.ctypes.data, dims, strides, 2, "uint16", shape.attention)
                    for layer in worker
                ),
            )
            for worker in self.memory
        ]
        self.units = units_of(shape.block_tokens, unit_tokens)
        self.map = UnitMap(ranks, heads, shape.blocks, self.units, "LBHNC")
        self.copies = HostCopies(self.map)

    def write(self, kept: Logical, block_ids: list[int]) -> None:
        """What the workers' attention does when a prompt comes."""
        for worker, layer, block, local, place, head, tokens in self._places(kept, block_ids):
            self.memory[worker, layer, block, local][place] = kept[layer, head, tokens]

    def read(self, kept: Logical, block_ids: list[int]) -> None:
        """What the workers' attention sees must be `kept`, in every copy of a head."""
        for worker, layer, block, local, place, head, tokens in self._places(kept, block_ids):
            seen = self.memory[worker, layer, block, local][place]
            np.testing.assert_array_equal(seen, kept[layer, head, tokens])

    def _places(self, kept: Logical, block_ids: list[int]) -> Iterator[Place]:
        shape, place = self.shape, in_head(self.shape.attention, self.shape.kernel_tokens)
        for worker in range(shape.workers):
            for local in range(self.held):
                head = worker * self.heads // shape.workers + local
                for layer in range(self.layers):
                    for number in range(kept.shape[2] // shape.kernel_tokens):
                        block = block_ids[number // self.split] * self.split + number % self.split
                        start = number * shape.kernel_tokens
                        tokens = slice(start, start + shape.kernel_tokens)
                        yield worker, layer, block, local, place, head, tokens


def shapes(attention: str) -> st.SearchStrategy[Shape]:
    """Blocks of 32 to 128 tokens, whole or in two kernel blocks; 1 to 4 workers."""
    return st.builds(
        lambda workers, kernel, split: Shape(workers, kernel * split, kernel, attention),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([32, 64]),
        st.sampled_from([1, 2]),
    )


@st.composite
def moves(draw: st.DrawFn) -> tuple[Engine, Engine, int]:
    """Two engines of one model, and how many units are moved."""
    attention = draw(st.sampled_from(["", "vec", "vec16", "amx"]))
    layers, heads = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    unit = draw(st.sampled_from([16, 32]))
    source, target = (Engine(draw(shapes(attention)), layers, heads, unit) for _ in range(2))
    blocks = max(source.shape.block_tokens, target.shape.block_tokens) // unit
    return source, target, draw(st.integers(1, 3)) * blocks


def filled(engine: Engine, units: int) -> Logical:
    """As many tokens of random content."""
    size = (engine.layers, engine.heads, units * engine.units.tokens, 2, DIMENSIONS)
    return np.random.default_rng(units).integers(0, POISON, size, np.uint16)


def some_blocks(engine: Engine, tokens: int, seed: int) -> list[int]:
    chosen = np.random.default_rng(seed).permutation(engine.shape.blocks)
    return [int(one) for one in chosen[: -(-tokens // engine.shape.block_tokens)]]


@given(moves())
def test_what_one_engine_wrote_another_of_any_shape_reads(move: tuple[Engine, Engine, int]) -> None:
    source, target, units = move
    kept = filled(source, units)
    from_blocks = some_blocks(source, kept.shape[2], 1)
    to_blocks = some_blocks(target, kept.shape[2], 2)
    source.write(kept, from_blocks)
    buffer = memoryview(bytearray(units * source.map.unit_bytes))

    sent = source.copies.gather(source.units.ids(from_blocks)[:units], buffer)
    came = target.copies.scatter(target.units.ids(to_blocks)[:units], buffer)

    assert sent == came
    assert source.map.wire_regions == target.map.wire_regions
    target.read(kept, to_blocks)


@given(moves(), st.data())
def test_units_travel_in_any_order_and_leave_their_neighbours_alone(
    move: tuple[Engine, Engine, int], data: st.DataObject
) -> None:
    source, target, units = move
    kept = filled(source, units)
    blocks = some_blocks(source, kept.shape[2], 1)
    source.write(kept, blocks)
    wanted = data.draw(st.lists(st.integers(0, units - 1), unique=True, min_size=1))
    ids = source.units.ids(blocks)
    into = target.units.ids(some_blocks(target, kept.shape[2], 2))
    buffer = memoryview(bytearray(len(wanted) * source.map.unit_bytes))

    source.copies.gather([ids[one] for one in wanted], buffer)
    target.copies.scatter([into[one] for one in wanted], buffer)

    written = len(wanted) * source.map.unit_bytes // 2
    copies = max(1, target.shape.workers // target.heads)
    assert int((target.memory != POISON).sum()) == written * copies
    again = memoryview(bytearray(len(wanted) * source.map.unit_bytes))
    target.copies.gather([into[one] for one in wanted], again)
    assert again == buffer


@given(st.integers(1, 8), st.lists(st.integers(0, 1000), unique=True))
def test_a_blocks_units_follow_each_other(per_block: int, blocks: list[int]) -> None:
    ids = SubBlocks(16, per_block).ids(blocks)

    assert [unit // per_block for unit in ids[::per_block]] == blocks
    assert [unit % per_block for unit in ids] == [n % per_block for n, _ in zip(count(), ids)]


def test_units_that_do_not_fill_a_block_are_refused() -> None:
    with pytest.raises(ConfigError, match="--block-size is 48, must be a multiple of 32"):
        units_of(48, 32)


@pytest.mark.parametrize(
    ("attention", "itemsize", "named"),
    [("neon", 2, "CPU attention neon"), ("vec", 1, "8-bit floats")],
)
def test_an_unknown_order_of_keys_and_values_is_refused(
    attention: str, itemsize: int, named: str
) -> None:
    strides = tuple(stride * itemsize for stride in (4096, 2048, 64, 1))
    layer = LayerCache(4096, (4, 2, 32, 64), strides, itemsize, "x", attention)

    with pytest.raises(UnsupportedLayout, match=named):
        UnitMap([RankCache(4096, 1 << 20, (), (layer,))], 2, 4, SubBlocks(32), "LBHNC")


def test_tokens_before_heads_are_refused_by_the_layouts_name() -> None:
    layer = LayerCache(4096, (4, 2, 32, 64), (8192, 128, 256, 2), 2, "x")

    with pytest.raises(UnsupportedLayout, match="KV layout LBNHC"):
        UnitMap([RankCache(4096, 1 << 20, (), (layer,))], 2, 4, SubBlocks(32), "LBNHC")


def test_layers_of_different_shape_are_refused() -> None:
    layers = tuple(
        LayerCache(4096, (4, heads, 32, 64), (4096 * heads, 4096, 128, 2), 2, "x")
        for heads in (2, 4)
    )

    with pytest.raises(UnsupportedLayout, match="layers differ"):
        UnitMap([RankCache(4096, 1 << 20, (), layers)], 2, 4, SubBlocks(32), "LBHNC")


def test_a_cache_mapped_elsewhere_keeps_its_inner_distances() -> None:
    layer = LayerCache(5000, (4, 2, 32, 64), (8192, 4096, 128, 2), 2, "x")

    moved = RankCache(4096, 1 << 20, (), (layer,)).mapped_at(100_000)

    assert (moved.address, moved.layers[0].address) == (100_000, 100_904)
