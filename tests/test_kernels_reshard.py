from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvmig.kernels.face import Grid, Shard
from kvmig.kernels.layouts import CacheGroup, grids, row_bytes
from kvmig.kernels.reshard import End, start_reshard
from tests.kernel_backends import BACKENDS, ORACLE, WORKERS, loaded
from tests.poisoned import make_paged, paged

ORDERS = ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "2BNHC", "B2HNC"]


@dataclass
class Rank:
    """The cache of one tensor-parallel rank, and the blocks that its request has there."""

    group: CacheGroup
    memory: NDArray[np.uint8]
    shard: Shard

    @property
    def end(self) -> End:
        return End(self.group.blocks, self.group.heads)

    @property
    def heads(self) -> range:
        return range(self.shard.first_head, self.shard.first_head + self.group.heads)

    def tokens(self, memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """What the request has there: [layers, halves, tokens of its blocks, heads, content]."""
        moved = replace(self.group, bases=(self.group.bases[0] + _apart(memory, self.memory),))
        blocks = paged(moved, memory)[:, :, self.shard.ids]
        layers, halves, n, heads, tokens, content = blocks.shape
        return np.moveaxis(blocks, 3, 4).reshape(layers, halves, n * tokens, heads, content)


def _apart(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> int:
    return int(one.ctypes.data - other.ctypes.data)


def make_rank(
    order: str, heads: range, block_tokens: int, n: int, head_size: int, seed: int
) -> Rank:
    """Room for `n` tokens in blocks that are anywhere."""
    needed = -(-n // block_tokens)
    group, memory = make_paged(
        order, layers=2, blocks=needed + 2, heads=len(heads), block_tokens=block_tokens,
        head_size=head_size, head_size_v=head_size, itemsize=2,
    )  # fmt: skip
    ids = np.random.default_rng(seed).permutation(needed + 2)[:needed].astype(np.int64)
    shard = Shard(grids(group, split=True), ids, block_tokens, heads.start)
    return Rank(group, memory, shard)


def make_ranks(order: str, cuts: list[int], block_tokens: int, n: int, seed: int) -> list[Rank]:
    """One rank for each piece of heads between two cuts."""
    pieces = itertools.pairwise(cuts)
    return [
        make_rank(order, range(*piece), block_tokens, n, 8, seed + number)
        for number, piece in enumerate(pieces)
    ]


def common(one: Rank, other: Rank) -> range:
    """The heads that both hold."""
    first = max(one.heads.start, other.heads.start)
    return range(first, max(first, min(one.heads.stop, other.heads.stop)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Rank], list[Rank], range]:
    """Ranks at either end that share out the same heads differently, and tokens to copy."""
    heads, n = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    inner = st.lists(st.integers(1, heads), max_size=2)
    ends = [
        make_ranks(
            draw(st.sampled_from(ORDERS)),
            sorted({0, heads, *draw(inner)}),
            draw(st.sampled_from([1, 3, 8, 16])),
            n,
            draw(st.integers(0, 1000)),
        )
        for _ in range(2)
    ]
    first = draw(st.integers(0, n))
    return ends[0], ends[1], range(first, draw(st.integers(first, n)))


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=30)
@given(case=cases())
def test_every_row_arrives_and_nothing_else_is_written(
    backend: str, workers: int, case: tuple[list[Rank], list[Rank], range]
) -> None:
    sources, targets, tokens = case
    random = np.random.default_rng(1)
    for source in sources:
        source.memory[:] = random.integers(0, 256, source.memory.shape, np.uint8)
    row = row_bytes(sources[0].group, split=True)
    for target in targets:
        before = target.memory.copy()
        for source in sources:
            heads = common(source, target)
            if not heads:
                continue
            start_reshard(
                loaded(backend), source.shard, target.shard, tokens, heads, row,
                src_end=source.end, dst_end=target.end, workers=workers,
            ).wait()  # fmt: skip
        assert np.array_equal(_whole([target], tokens), _whole(sources, tokens, target.heads))
        _erase(target, before, tokens)
        _erase(target, target.memory, tokens)
        assert np.array_equal(target.memory, before)


def _whole(ranks: list[Rank], tokens: range, heads: range | None = None) -> NDArray[np.uint8]:
    """[layers, tokens, heads, key and value], of all ranks' heads or of some."""
    parts = [rank.tokens(rank.memory)[:, :, tokens.start : tokens.stop] for rank in ranks]
    joined = np.concatenate(parts, axis=3)
    if heads is not None:
        joined = joined[:, :, :, heads.start : heads.stop]
    layers, halves, n, count, content = joined.shape
    return np.moveaxis(joined, 1, 3).reshape(layers, n, count, halves * content)


def _erase(rank: Rank, memory: NDArray[np.uint8], tokens: range) -> None:
    """Zeros where these tokens lie."""
    group = replace(rank.group, bases=(rank.group.bases[0] + _apart(memory, rank.memory),))
    whole = paged(group, memory)
    for token in tokens:
        block, place = divmod(token, group.block_tokens)
        whole[:, :, rank.shard.ids[block], :, place] = 0


def test_tensor_parallel_two_takes_from_three_and_gives_it_back() -> None:
    """Six heads: ranks of 2, 2, 2, then of 3, 3, then of 2, 2, 2 again, in another order."""
    n, tokens = 37, range(37)
    three = make_ranks("LBHNC", [0, 2, 4, 6], 16, n, 1)
    two = make_ranks("BLNHC", [0, 3, 6], 32, n, 2)
    again = make_ranks("2BNHC", [0, 2, 4, 6], 8, n, 3)
    for rank in three:
        rank.memory[:] = np.random.default_rng(5).integers(0, 256, rank.memory.shape, np.uint8)
    for sources, targets in ((three, two), (two, again)):
        for source in sources:
            for target in targets:
                if heads := common(source, target):
                    start_reshard(
                        ORACLE, source.shard, target.shard, tokens, heads, 16,
                        src_end=source.end, dst_end=target.end,
                    ).wait()  # fmt: skip
    assert np.array_equal(_whole(three, tokens), _whole(again, tokens))


@pytest.fixture
def pair() -> tuple[Rank, Rank]:
    return make_ranks("LBHNC", [0, 4], 16, 40, 1)[0], make_ranks("LBNHC", [0, 4], 8, 40, 2)[0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_tokens_no_heads_and_no_grids_are_fine(backend: str, pair: tuple[Rank, Rank]) -> None:
    source, target = pair
    before = target.memory.copy()
    none = (replace(source.shard, grids=()), replace(target.shard, grids=()))
    for shards, tokens, heads in (
        ((source.shard, target.shard), range(7, 7), range(4)),
        ((source.shard, target.shard), range(7), range(2, 2)),
        (none, range(7), range(4)),
    ):
        start_reshard(
            loaded(backend), *shards, tokens, heads, 16, src_end=source.end, dst_end=target.end
        ).wait()
    assert np.array_equal(target.memory, before)


GRID = Grid(4096, 64, 16, 64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": range(41, 50)}, "source: tokens up to 50 need 4 blocks of 16, but 3 ids"),
        ({"tokens": range(0, 8, 2)}, r"tokens is range\(0, 8, 2\), should go from 0"),
        ({"heads": range(-1, 2)}, r"heads is range\(-1, 2\), should go from 0"),
        ({"heads": range(3, 5)}, r"source holds heads range\(0, 4\), not all of range\(3, 5\)"),
        ({"row": -1}, "row is -1 bytes"),
        ({"row": 33}, "source grid 0: rows of 33 bytes overlap at a token stride of 32"),
        ({"workers": -1}, "workers is -1"),
        ({"dst_end": End(2, 4)}, r"destination block \d is outside 0..1"),
        ({"dst_end": End(7, 2)}, r"destination holds heads range\(0, 2\), not all of"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    pair: tuple[Rank, Rank], change: dict[str, object], message: str
) -> None:
    source, target = pair
    before = target.memory.copy()
    arguments: dict[str, object] = {
        "tokens": range(40), "heads": range(4), "row": 16,
        "src_end": source.end, "dst_end": target.end,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        start_reshard(ORACLE, source.shard, target.shard, **arguments | change)  # type: ignore[arg-type]
    assert np.array_equal(target.memory, before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.array([1, 1, 0, 2, 3])}, "destination block 1 is named twice"),
        ({"ids": np.array([1, 0])}, "destination: tokens up to 40 need 5 blocks of 8"),
        ({"block_tokens": 0}, "destination block_tokens is 0"),
        ({"grids": (GRID,)}, "4 source grids, but 1 destination grids"),
        ({"grids": (replace(GRID, base=0),) * 4}, "destination grid 0 begins at address 0"),
        ({"first_head": 1}, r"destination holds heads range\(1, 5\), not all of range\(0, 4\)"),
    ],
)
def test_a_shard_that_can_not_be_is_refused(
    pair: tuple[Rank, Rank], change: dict[str, object], message: str
) -> None:
    source, target = pair
    before = target.memory.copy()
    wrong = replace(target.shard, **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        start_reshard(
            ORACLE, source.shard, wrong, range(40), range(4), 16,
            src_end=source.end, dst_end=target.end,
        )  # fmt: skip
    assert np.array_equal(target.memory, before)
