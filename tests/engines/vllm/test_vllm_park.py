"""A real engine gives the memory of its KV cache back, and computes the same afterwards."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections.abc import Awaitable

import pytest

from kvmig.core.errors import NotParked
from tests.support.vllm_pair import PROMPT, Engines, Pair
from tests.support.vllm_side import Configuration, Side

pytestmark = pytest.mark.engine

PATIENT_S = 60.0


async def stepped(side: Side, work: Awaitable[None]) -> None:
    """The engine's own thread is the test's."""
    task = asyncio.ensure_future(work)
    async with asyncio.timeout(PATIENT_S):
        while not task.done():
            side.step()
            await asyncio.sleep(0)
    await task


@pytest.fixture
async def side(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Side:
    """Warm; the engine is other tests', too, for whom it rounds like one that isn't."""
    engine = pair.a.engine
    monkeypatch.setattr(engine, "numerics", engine.numerics)
    monkeypatch.setattr(pair.a.own, "canary", "")
    await stepped(pair.a, engine.warm_up())
    pair.begin()
    return pair.a


def resident(side: Side) -> int:
    """Bytes of its KV cache that are in memory, whichever process has them."""
    (rank,) = side.cache.ranks
    begin = rank.address // mmap.PAGESIZE * mmap.PAGESIZE
    length = rank.address + rank.nbytes - begin
    pages = (ctypes.c_ubyte * (-(-length // mmap.PAGESIZE)))()
    libc = ctypes.CDLL(None)
    assert libc.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(length), pages) == 0
    return sum(int(page) & 1 for page in pages) * mmap.PAGESIZE


async def test_a_parked_engine_has_no_cache_in_memory_and_answers_as_before(
    pair: Pair, side: Side
) -> None:
    await pair.run(side, "before", PROMPT, until=1)
    before = await pair.finish("before")
    taken = resident(side)

    await stepped(side, side.engine.park())
    assert taken > 0
    assert resident(side) <= 2 * mmap.PAGESIZE  # at its ends

    await stepped(side, side.engine.unpark())
    await pair.run(side, "after", PROMPT, until=1)
    after = await pair.finish("after")
    assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)


async def test_one_with_a_request_is_not_parked(pair: Pair, side: Side) -> None:
    await pair.run(side, "runs", PROMPT, until=8)
    with pytest.raises(NotParked, match="has requests"):
        await stepped(side, side.engine.park())
    await pair.finish("runs")


async def test_one_that_computes_otherwise_than_before_does_not_come_back(side: Side) -> None:
    await stepped(side, side.engine.park())
    weight = next(side.core.model_executor.driver_worker.worker.get_model().parameters())
    right = weight.data.clone()
    try:
        weight.data.mul_(1.01)
        with pytest.raises(NotParked, match=r"it computes [0-9a-f]{12} where it computed"):
            await stepped(side, side.engine.unpark())
    finally:
        weight.data.copy_(right)
        side.core.reset_prefix_cache()
    await stepped(side, side.engine.unpark())


async def test_one_without_a_canary_is_not_parked(side: Side) -> None:
    side.own.canary = ""
    with pytest.raises(NotParked, match="nothing shows"):
        await stepped(side, side.engine.park())


@pytest.mark.long
async def test_memory_that_is_shared_with_a_worker_is_given_back_too(engines: Engines) -> None:
    apart = Configuration(apart=True)
    async with engines.lent(apart, Configuration()) as pair:
        side = pair.a
        await stepped(side, side.engine.warm_up())
        pair.begin()
        await pair.run(side, "before", PROMPT, until=1)
        before = await pair.finish("before")
        taken = resident(side)

        await stepped(side, side.engine.park())
        assert resident(side) < taken / 100
        await stepped(side, side.engine.unpark())
        await pair.run(side, "after", PROMPT, until=1)
        after = await pair.finish("after")
        assert (after.tokens, after.logprobs) == (before.tokens, before.logprobs)
