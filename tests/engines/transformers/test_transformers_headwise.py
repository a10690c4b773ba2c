"""The pool of two models in blocks of one head: the same tokens, and no unit is ever lost."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from kvmig.core.errors import ConfigError
from kvmig.engines.transformers import pooled
from kvmig.engines.transformers.headwise import HeadPlan, HeadwiseAllocator
from tests.support.pool_bench import DRAWN, SECTOR, SECTORS, PoolBench, fields, other_model
from tests.support.transformers_bench import benched

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_model(tmp_path_factory.mktemp("other"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(other: Path) -> AsyncIterator[PoolBench]:
    async with benched(lambda: PoolBench(other, "head-wise")) as made:
        yield made


async def test_two_models_in_head_wise_blocks_give_what_each_gives_alone(bench: PoolBench) -> None:
    await bench.assert_same_as_alone()


async def test_an_engine_waits_for_the_other_ones_heads_and_goes_on_rightly(
    bench: PoolBench,
) -> None:
    expected = await bench.alone("b", 300)
    ids, late = await bench.waits_for_the_other()
    assert await bench.finish(late) == expected
    bench.engines["a"].abort(ids)
    await bench.settle()


@pytest.mark.parametrize("name", ["a", "b"])
async def test_a_request_moves_between_head_wise_blocks_and_whole_ones(
    bench: PoolBench, name: str
) -> None:
    await bench.assert_moves_change_nothing(name, **DRAWN)


async def test_a_migration_that_is_given_up_frees_every_unit(bench: PoolBench) -> None:
    a, source = bench.engines["a"], bench.engines["a alone"]
    moves = bench.submit("a alone", 500, 60)
    await bench.reach(moves, 5)
    await a.reserve(await source.export(moves))
    await a.grow(moves, 5 * 16)
    assert bench.live()["a"] == 6 * 8
    await a.cancel(moves)
    assert bench.live()["a"] == 0
    await source.resume(moves)
    await bench.finish(moves)
    await bench.settle()


async def test_blocks_of_one_engine_lie_in_units_of_no_other(bench: PoolBench) -> None:
    ids = [bench.submit(name, 100 * n, 30) for n in (1, 2) for name in "ab"]
    for one in ids:
        await bench.reach(one, 10)
    with bench.pool.lock:
        held = [
            unit
            for share in bench.pool.shares
            for block in share.live_blocks()
            for unit in share.table[block].tolist()
        ]
    assert held
    assert len(set(held)) == len(held)
    for one in ids:
        await bench.finish(one)
    await bench.settle()


async def test_a_block_is_copied_as_the_bytes_of_a_whole_one(bench: PoolBench) -> None:
    """Layer, keys or values, token, head: as transformers lays a block out by itself."""
    allocator = bench.blocks("b")._allocator
    assert isinstance(allocator, HeadwiseAllocator)
    layers, heads, tokens, dim = 3, 2, 16, 64
    with bench.pool.lock:
        share = allocator.share
        share.allocate_sector(0)
        (block,) = share.get_free_blocks(0, 1)
        whole = torch.randn(layers, 2, tokens, heads, dim)
        for layer in range(layers):
            index = torch.arange(block * tokens, (block + 1) * tokens)
            none = torch.empty(0, dtype=torch.int64)
            allocator.update(whole[layer, 0], whole[layer, 1], layer, none, index)
        rows = HeadPlan(allocator).rows([block])
        copied = allocator.cache_tensor[torch.from_numpy(rows)]
        share.free_blocks(0, [block])
    assert torch.equal(copied, whole.view(-1, dim))
    await bench.settle()


@pytest.mark.parametrize(
    ("num_bytes", "changed", "cut", "sentence"),
    [
        (
            1 << 30,
            {"a": {"block_tokens": 32}},
            "head-wise",
            r"of \{'a': 16384, 'b': 8192\} bytes with block_tokens \{'a': 32, 'b': 16\}",
        ),
        (SECTORS * SECTOR >> 1, {}, "head-wise", r"\{'a': 72, 'b': 54\}: 245760 bytes are missing"),
        (1 << 30, {}, "pages", "cut is 'pages', must be sectors or head-wise"),
    ],
)
async def test_what_can_not_be_cut_so_is_refused(
    other: Path, num_bytes: int, changed: dict[str, Any], cut: Any, sentence: str
) -> None:
    engines = {name: fields(other, name) | changed.get(name, {}) for name in "ab"}
    with pytest.raises(ConfigError, match=sentence):
        pooled(num_bytes, engines, cut)
