"""Two models of transformers' engine in one pool of KV cache: the same tokens as alone, nobody
starves, and whatever ends gives back what it held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from transformers.generation.continuous_batching.requests import RequestState as State

from kvmig.core.errors import ConfigError
from kvmig.engines.transformers import pooled
from kvmig.engines.transformers.payload import SubmittedRequest, encode
from kvmig.engines.transformers.serving import ServingTransformers
from tests.support.pool_bench import DRAWN, SECTOR, SECTORS, PoolBench, fields, other_model
from tests.support.transformers_bench import benched

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return other_model(tmp_path_factory.mktemp("other"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(other: Path) -> AsyncIterator[PoolBench]:
    async with benched(lambda: PoolBench(other, "sectors")) as made:
        yield made


async def test_two_models_in_one_pool_give_what_each_gives_alone(bench: PoolBench) -> None:
    await bench.assert_same_as_alone()


@pytest.mark.long
async def test_an_engine_waits_for_one_that_has_filled_the_pool_and_goes_on_rightly(
    bench: PoolBench,
) -> None:
    expected = await bench.alone("b", 300)
    ids, late = await bench.waits_for_the_other()
    assert await bench.finish(late) == expected
    for n, one in enumerate(ids, 1):
        assert await bench.finish(one) == await bench.alone("a", 100 * n, 100, **DRAWN)
    await bench.settle()


async def test_a_stream_of_requests_of_one_model_does_not_starve_the_other(
    bench: PoolBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the other is short of its floor, the one above its own admits nobody."""
    a, b = bench.pool.shares
    scheduler, offered = bench.scheduler("a"), list[int]()
    candidates = scheduler._get_waiting_candidates

    def watched() -> list[State]:
        found: list[State] = candidates()
        if b.is_short() and b.live() < b.floor() and a.live() > a.floor():
            offered.append(len(found))
        return found

    monkeypatch.setattr(scheduler, "_get_waiting_candidates", watched)
    with bench.slow("a", 0.02):
        ids = await bench.fill("a")
        late = bench.submit("b", 300, 100)
        ids += [bench.submit("a", 100 * n, 100) for n in range(6, 26)]
    await bench.finish(late)
    assert offered
    assert not any(offered)
    assert not bench.has_ended(ids[-1])
    bench.engines["a"].abort(ids)
    await bench.settle()


@pytest.mark.parametrize("more", [{}, DRAWN])
async def test_a_request_moves_into_a_pool_and_out_of_it(
    bench: PoolBench, more: dict[str, Any]
) -> None:
    for name in "ab":
        await bench.assert_moves_change_nothing(name, **more)


async def test_a_request_does_not_move_to_another_model(bench: PoolBench) -> None:
    async with bench.migrator() as move:
        stays = bench.submit("a", 500, 60)
        await bench.reach(stays, 5)
        report = await move.migrate(stays, "a", "b")
        assert (report.state, report.reason) == ("aborted", "incompatible")
        assert await bench.finish(stays) == await bench.alone("a", 500, 60)


async def test_a_migration_that_is_given_up_frees_every_sector(bench: PoolBench) -> None:
    a, source = bench.engines["a"], bench.engines["a alone"]
    moves = bench.submit("a alone", 500, 100)
    await bench.reach(moves, 5)
    await a.reserve(await source.export(moves))
    await a.grow(moves, 6 * 16)
    assert bench.live()["a"] == 3
    await a.cancel(moves)
    assert bench.live()["a"] == 0
    await source.resume(moves)
    await bench.finish(moves)
    await bench.settle()


async def test_a_reservation_that_has_no_room_leaves_nothing_and_the_request_stays(
    bench: PoolBench,
) -> None:
    async with bench.migrator() as move:
        expected = await bench.alone("a", 500, 100)
        full = [bench.submit("b", 100 * n, 110) for n in range(1, 5)]
        await bench.reach(full[0], 98)
        with bench.slow("b", 0.1), bench.slow("a alone", 0.02):
            moves = bench.submit("a alone", 500, 100)
            await bench.reach(moves, 5)
            report = await move.migrate(moves, "a alone", "a")
        assert (report.state, report.reason) == ("aborted", "no_blocks")
        assert bench.live()["a"] == 0
        assert await bench.finish(moves) == expected


async def test_a_load_says_how_much_the_other_engine_has_left(bench: PoolBench) -> None:
    full = [bench.submit("b", 100 * n, 110) for n in range(1, 5)]
    await bench.reach(full[0], 60)
    async with asyncio.timeout(10):
        while bench.engines["a"].load().used_blocks < 6 * 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert bench.engines["a"].load().total_blocks == SECTORS * 3
    bench.engines["b"].abort(full)
    await bench.settle()


def failing() -> None:
    """A step that ends its engine."""
    raise RuntimeError("this step fails")


@pytest.mark.parametrize("way", ["closed", "failed"])
async def test_an_engine_that_ends_leaves_the_pool_to_the_others(other: Path, way: str) -> None:
    engines = pooled(SECTORS * SECTOR, {name: fields(other, name) for name in "ab"})
    ended = asyncio.Event()
    for engine in engines.values():
        engine.connect(lambda *out: None, lambda *done: None, lambda error: ended.set())
    share = engines["b"]._blocks.share
    assert share is not None
    request = SubmittedRequest(prompt_token_ids=[50] * 40, max_tokens=100)
    engines["a"].submit(1, "r", [encode(request)])
    async with asyncio.timeout(20):
        while share.blocks_left() == SECTORS * 4:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        if way == "failed":
            engines["a"]._loop.after_step = failing
        else:
            await engines["a"].close(10)
        await ended.wait()
    assert share.blocks_left() == SECTORS * 4
    assert len(share.free_sectors) == SECTORS
    for engine in engines.values():
        await engine.close(10)


@pytest.mark.parametrize(
    ("num_bytes", "changed", "sentence"),
    [
        (1 << 30, {"a": {"dtype": "bfloat16"}}, "dtype is .*'bfloat16', .*must be alike for all"),
        (1 << 30, {"a": {"device": "cuda"}}, "device is .*must be alike for all"),
        (
            5 * SECTOR,
            {},
            r"are 5 units of 196608, but one longest request of each engine takes"
            r" \{'a': 3, 'b': 3\}: 196608 bytes are missing",
        ),
        (0, {}, "0 units of 196608"),
        (1 << 30, {"b": {"num_blocks": 0}}, "num_blocks is 0, must be 1 or more"),
        (1 << 30, {"b": {"model": "/nowhere"}}, "model is '/nowhere'"),
    ],
)
async def test_engines_that_can_not_share_are_refused_before_a_model_is_loaded(
    other: Path,
    num_bytes: int,
    changed: dict[str, Any],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ServingTransformers, "__init__", None)
    engines = {name: fields(other, name) | changed.get(name, {}) for name in "ab"}
    with pytest.raises(ConfigError, match=sentence):
        pooled(num_bytes, engines)
