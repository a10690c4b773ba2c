"""A real vLLM engine whose KV cache shrinks and grows while it serves: what it computes is what one
that is left alone computes, and its pages are really gone."""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from kvmig.core.errors import MigrationRefused, RequestGone, StartupError
from kvmig.engines.vllm.balloon import RETRY_S, STARVED_S, hold, unshared
from tests.engines.vllm.test_vllm_park import resident
from tests.support.balloons import balloon, resize, settled
from tests.support.vllm_pair import LONG, PROMPT, SAMPLING, Pair, assert_same
from tests.support.vllm_side import AS_SERVED, Configuration, Side

pytestmark = pytest.mark.engine

BLOCK = 64 << 10
"""Bytes of a block of the bundled model, 32 tokens."""
BLOCKS = 40


async def resized(side: Side, blocks: int, patience_s: float = 60.0) -> None:
    await resize(side, blocks * BLOCK, BLOCKS * BLOCK, patience_s)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="sync", marks=pytest.mark.long),
        pytest.param(True, id="async", marks=pytest.mark.long),
    ],
)
def configurations(request: pytest.FixtureRequest) -> tuple[Configuration, Configuration]:
    wanted = Configuration(request.param, (AS_SERVED,), shared=True)
    return wanted, wanted


@pytest.fixture
async def both(pair: Pair) -> AsyncIterator[Pair]:
    """Both with all their memory; the last test may have left less."""
    for side in (pair.a, pair.b):
        await resized(side, BLOCKS)
        side.scheduler.reset_prefix_cache()
    yield pair
    await pair.idle()
    for side in (pair.a, pair.b):
        await resized(side, BLOCKS)


async def test_its_pages_come_as_they_are_written_and_go_with_the_quota(both: Pair) -> None:
    a = both.a
    await resized(a, 1)
    assert resident(a) <= BLOCK, "vLLM's null block"
    await resized(a, BLOCKS)
    assert resident(a) <= BLOCK, "nothing is written"
    await both.run(a, "one", LONG, until=2)
    await both.finish("one")
    await both.idle()
    assert resident(a) >= len(LONG) // 32 * BLOCK
    await resized(a, 5)
    assert resident(a) <= 5 * BLOCK


async def test_who_watches_hears_whenever_its_use_changes(both: Pair) -> None:
    a, heard = both.a, list[int]()
    sharing = a.engine.sharing
    assert not isinstance(sharing, str)
    sharing.watch(lambda: heard.append(sharing.use.lease // BLOCK))
    await resized(a, 30)
    assert heard[-1] == 30
    seen = len(heard)
    await both.run(a, "one", LONG, until=2)
    assert len(heard) > seen
    sharing.watch(lambda: None)
    await both.finish("one")


@pytest.mark.parametrize(("tokens", "more"), [(20, 0), (60, 1), (300, 4)])
async def test_a_request_wants_no_more_blocks_than_its_tokens_will_fill(
    both: Pair, tokens: int, more: int
) -> None:
    both.submit(both.a, "one", PROMPT, max_tokens=tokens)
    await both.step(both.a, until=("one", 2))
    both.a.look_at_load()
    use = balloon(both.a).use
    assert (use.wanted - use.used) // BLOCK == more
    await both.finish("one")


async def test_a_prompt_that_is_partly_computed_wants_blocks_for_the_rest_of_it(
    both: Pair,
) -> None:
    both.submit(both.a, "one", LONG, max_tokens=1)
    both.a.step()
    both.a.look_at_load()
    use = balloon(both.a).use
    assert use.used < len(LONG) // 32 * BLOCK, "its prompt was shorter"
    assert use.wanted - BLOCK == -(-len(LONG) // 32) * BLOCK, "and vLLM's null block"
    await both.finish("one")


async def test_an_engine_looks_seldom_where_what_waits_does_not_fit(both: Pair) -> None:
    a = both.a
    rest_s = balloon(a).rest_s
    assert rest_s() == 0.0, "it has all its memory"
    await resized(a, 2)
    assert rest_s() == RETRY_S
    both.submit(a, "long", LONG)
    await a.entered()
    a.take_calls()
    assert rest_s() == STARVED_S
    await resized(a, BLOCKS - 1)
    assert rest_s() == RETRY_S
    await both.finish("long")


async def test_others_see_an_engine_as_large_as_its_quota(both: Pair) -> None:
    await resized(both.a, 11)
    load = both.a.engine.load()
    assert (load.total_blocks, load.limit_blocks) == (10, BLOCKS - 1)
    assert both.a.scheduler.kv_cache_manager.usage == 0.0
    assert both.a.engine.layout.num_blocks == BLOCKS


async def test_a_prefix_whose_pages_are_given_back_is_forgotten(both: Pair) -> None:
    alone = await both.unmoved(PROMPT)
    both.submit(both.a, "one", PROMPT)
    assert_same(await both.finish("one"), alone)
    await both.idle()
    await resized(both.a, 1)
    await resized(both.a, BLOCKS)
    both.submit(both.a, "again", PROMPT)
    both.a.take_calls()
    (request,) = both.a.scheduler.waiting
    manager = both.a.scheduler.kv_cache_manager
    assert manager.get_computed_blocks(request)[1] == 0
    assert_same(await both.finish("again"), alone)


async def test_cold_prefixes_go_before_those_that_were_used_lately(both: Pair) -> None:
    cold, warm = PROMPT, [one + 1 for one in PROMPT]
    for name, prompt in (
        ("cold", cold),
        ("warm", warm),
        ("cold again", cold),
        ("warm again", warm),
    ):
        both.submit(both.a, name, prompt, max_tokens=2)
        await both.finish(name)
    await both.idle()
    await resized(both.a, 4)  # the null block, and 3 full blocks of the warm one
    manager = both.a.scheduler.kv_cache_manager
    hits = {}
    for name, prompt in (("cold", cold), ("warm", warm)):
        both.submit(both.a, name + " at last", prompt, max_tokens=2)
        both.a.take_calls()
        (request,) = both.a.scheduler.waiting
        hits[name] = manager.get_computed_blocks(request)[1]
        both.a.engine.abort([name + " at last"])
        await both.idle()
    assert hits == {"cold": 0, "warm": 96}


@pytest.mark.parametrize("kind", ["seeded", "greedy", "penalties"])
async def test_a_request_computes_the_same_while_the_balloon_grows_and_shrinks(
    both: Pair, kind: str
) -> None:
    params = SAMPLING[kind]
    alone = await both.unmoved(PROMPT, **params)
    both.submit(both.a, "one", PROMPT, **params)
    sizes = random.Random(3)
    while both.outputs.get("one") is None or both.outputs["one"].finish_reason is None:
        await resized(both.a, sizes.choice([1, 5, 9, 20, BLOCKS]))
        both.a.step()
        await both.settle()
    assert_same(both.outputs["one"], alone)


async def test_what_runs_keeps_what_it_holds_and_nothing_is_admitted_while_it_owes(
    both: Pair,
) -> None:
    alone = await both.unmoved(PROMPT)
    await both.run(both.a, "one", PROMPT, until=2)
    await resized(both.a, 2)
    both.submit(both.a, "two", PROMPT)
    await both.step(both.a, until=("one", 20))
    assert "two" not in both.outputs
    assert both.a.engine.load().used_blocks > both.a.engine.load().total_blocks
    assert_same(await both.finish("one"), alone)
    await resized(both.a, BLOCKS)
    assert_same(await both.finish("two"), alone)


async def test_after_its_patience_the_last_request_is_preempted_and_computes_the_same(
    both: Pair,
) -> None:
    alone = [await both.unmoved(prompt) for prompt in (PROMPT, LONG)]
    both.submit(both.a, "first", PROMPT)
    both.submit(both.a, "last", LONG)
    await both.step(both.a, until=("last", 5))
    await resized(both.a, 8, patience_s=0.0)
    both.a.step()
    scheduler = both.a.scheduler
    assert [one.request_id for one in scheduler.running] == ["first"]
    await settled(both.a)
    assert balloon(both.a).use.lease <= 8 * BLOCK
    await resized(both.a, BLOCKS)
    assert (await both.finish("first")).tokens == alone[0].tokens
    assert (await both.finish("last")).tokens == alone[1].tokens


async def test_a_request_moves_between_engines_that_shrink_and_grow(both: Pair) -> None:
    alone = await both.unmoved(LONG)
    await resized(both.b, 24)
    await both.run(both.a, "moved", LONG, until=10)
    await resized(both.a, 2)
    await both.move(both.a, both.b, "moved")
    await resized(both.a, 2)
    await settled(both.a)
    assert resident(both.a) <= 2 * BLOCK, "what it held is gone from there"
    await both.step(both.b, until=("moved", 30))
    await resized(both.a, 30)
    await resized(both.b, 3)
    await both.move(both.b, both.a, "moved")
    assert_same(await both.finish("moved"), alone)
    await resized(both.b, 3)
    assert resident(both.b) <= 3 * BLOCK


async def test_blocks_that_are_given_back_during_a_stage_are_not_read(both: Pair) -> None:
    await both.run(both.a, "one", LONG, until=2)
    await both.done(both.a.engine.export("one"))
    stage = await both.done(both.a.engine.stage("one", 0))
    both.a.engine.abort(["one"])
    await both.idle()
    await resized(both.a, 1)
    buffer = memoryview(bytearray(both.a.engine.layout.block_bytes * len(stage.block_ids)))
    with pytest.raises(RequestGone, match="its blocks are gone"):
        await both.done(both.a.engine.gather(stage.block_ids, buffer))
    assert resident(both.a) <= BLOCK
    await both.done(both.a.engine.resume("one"))


async def test_no_request_arrives_where_memory_is_owed(both: Pair) -> None:
    await both.run(both.a, "moves", PROMPT, until=2)
    await both.run(both.b, "stays", PROMPT, until=2)
    await resized(both.b, 2)
    export = await both.done(both.a.engine.export("moves"))
    with pytest.raises(MigrationRefused, match="no_blocks"):
        await both.done(both.b.engine.reserve(export))
    await both.done(both.a.engine.resume("moves"))
    for name in ("moves", "stays"):
        await both.finish(name)


async def test_an_engine_without_memory_for_what_waits_does_not_spin(both: Pair) -> None:
    await resized(both.a, 2)
    both.submit(both.a, "one", LONG, max_tokens=2)
    began, steps, cpu = time.monotonic(), 0, time.thread_time()  # others' threads compute, too
    while time.monotonic() - began < 0.5:
        both.a.step()
        steps += 1
    assert steps <= 15
    assert time.thread_time() - cpu < 0.1
    await resized(both.a, BLOCKS)
    await both.finish("one")


SIZE = 4


def pool_of(groups: int) -> Any:
    from vllm.v1.core.block_pool import BlockPool

    return BlockPool(groups * SIZE, enable_caching=True, hash_block_size=16)


def numbers(groups: list[list[Any]]) -> list[int]:
    return [group[0].block_id // SIZE for group in groups]


def test_groups_of_blocks_are_held_in_the_order_of_their_reuse() -> None:
    pool = pool_of(6)
    taken = pool.get_new_blocks(5 * SIZE)
    pool.free_blocks(taken[: 3 * SIZE - 1])
    pool.free_blocks(taken[3 * SIZE - 1 :])  # vLLM reuses first what has no prefix, the last first
    assert numbers(hold(pool, 3, SIZE)) == [3, 4, 1]
    assert numbers(hold(pool, 9, SIZE)) == [2, 5]
    assert pool.get_num_free_blocks() == SIZE - 1


def test_where_no_group_is_free_no_free_block_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = pool_of(6)
    taken = pool.get_new_blocks(6 * SIZE - 1)
    pool.free_blocks([one for one in taken if one.block_id % SIZE])
    monkeypatch.setattr(pool, "free_block_queue", None)
    assert hold(pool, 3, SIZE) == []


def test_a_vllm_that_takes_its_cache_otherwise_is_refused() -> None:
    from kvmig.engines.vllm.allocation import without_pages

    with pytest.raises(StartupError, match="by 0 allocations"), without_pages("cpu"):
        pass


@pytest.mark.parametrize(
    ("workers", "plain", "connector", "unmovable", "why"),
    [
        (2, True, None, "", "several workers"),
        (1, True, None, "KV cache kind X", "KV cache kind X"),
        (1, False, None, "", "KV cache of several kinds, windows or states"),
        (1, True, "some", "", "a KV connector, which reads blocks that are free"),
        (1, True, None, "", ""),
    ],
)
def test_an_engine_whose_cache_cannot_be_shared_says_why(
    workers: int, plain: bool, connector: str | None, unmovable: str, why: str
) -> None:
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=workers),
        kv_transfer_config=connector,
    )
    tables: Any = SimpleNamespace(plain=plain)
    assert unshared(config, tables, unmovable) == why
