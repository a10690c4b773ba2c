"""Two models of transformers' engine in one pool of KV cache: the same tokens as alone, nobody
starves, and whatever ends gives back what it held."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers.generation.continuous_batching.requests import RequestState as State

from kvmig.embed.migrator import Migrator
from kvmig.engines.base import Emitted, Frame
from kvmig.engines.transformers import factory, pooled
from kvmig.engines.transformers.payload import Output, Submitted, decode, encode
from kvmig.engines.transformers.pool import Pool
from kvmig.engines.transformers.serving import ServingTransformers
from kvmig.ground.config import MigrationConfig
from kvmig.ground.errors import ConfigError
from kvmig.models import BUNDLED

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

SECTOR = 3 << 16
"""Three blocks of the bundled model (4 layers), four of `other` (3 layers)."""
SECTORS = 8
FLOOR_BLOCKS = 9
"""Three sectors of either model: two more are for whoever comes first."""
PATIENT = MigrationConfig(transport="tcp", reply_timeout_ms=20000, lease_ms=60000)
STEPS: dict[str, Any] = {"max_batch_tokens": 16, "max_batch_requests": 4}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a model of three layers."""
    folder = tmp_path_factory.mktemp("other")
    config = json.loads(Path(BUNDLED, "config.json").read_text()) | {"num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fields(other: Path, name: str) -> dict[str, Any]:
    """`a` is the bundled model, `b` the other."""
    drawn = {"model": str(other), "random_weights": True} if name == "b" else {}
    return {"num_blocks": FLOOR_BLOCKS, **STEPS, **drawn}


class Bench:
    """Engines a and b in one pool; alone are the same models in memory of their own."""

    def __init__(self, other: Path) -> None:
        self.engines = pooled(SECTORS * SECTOR, {name: fields(other, name) for name in "ab"})
        alone = {f"{name} alone": factory(**fields(other, name)) for name in "ab"}
        self.engines |= alone
        self.got: dict[str, list[Output]] = {}
        self.changed = asyncio.Event()
        self.numbers = iter(range(1, 100_000))
        for engine in self.engines.values():
            engine.connect(self._take, lambda *done: None, lambda error: None)

    @property
    def pool(self) -> Pool:
        share = self.engines["a"]._blocks.share
        assert share is not None
        return share.pool

    def _take(self, client: int, emitted: list[Emitted], frames: list[Frame]) -> None:
        for output in decode(bytes(frames[0]), list[Output]):
            self.got.setdefault(output.request_id, []).append(output)
        self.changed.set()

    def submit(self, name: str, start: int, max_tokens: int = 40, **more: Any) -> str:
        request_id = f"r{next(self.numbers)}"
        prompt = list(" ".join(str(start + n) for n in range(7)).encode())
        request = {"prompt_token_ids": prompt, "max_tokens": max_tokens, **more}
        self.engines[name].submit(1, request_id, [encode(Submitted(**request))])
        return request_id

    async def reach(self, request_id: str, tokens: int) -> list[Output]:
        async with asyncio.timeout(60):
            while True:
                got = self.got.get(request_id, [])
                if len(got) >= tokens or (got and got[-1].finish_reason):
                    return got
                self.changed.clear()
                await self.changed.wait()

    async def finish(self, request_id: str) -> list[int]:
        got = await self.reach(request_id, 1 << 30)
        assert got[-1].finish_reason in ("length", "stop"), got[-1]
        return [token for output in got for token in output.token_ids]

    def has_ended(self, request_id: str) -> bool:
        return bool(self.got.get(request_id) and self.got[request_id][-1].finish_reason)

    async def fill(self, name: str, **more: Any) -> list[str]:
        """Let requests of this engine hold the whole pool."""
        ids = [self.submit(name, 100 * n, 100, **more) for n in range(1, 6)]
        async with asyncio.timeout(60):
            while self.live()[name] < SECTORS:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return ids

    async def alone(self, name: str, start: int, max_tokens: int = 40, **more: Any) -> list[int]:
        return await self.finish(self.submit(f"{name} alone", start, max_tokens, **more))

    @contextmanager
    def slow(self, name: str, step_s: float = 0.1) -> Iterator[None]:
        """Steps of at least so long: its requests stay what they are while others do something."""
        loop = self.engines[name]._loop
        after_step, loop.after_step = loop.after_step, lambda: time.sleep(step_s)
        try:
            yield
        finally:
            loop.after_step = after_step

    def live(self) -> dict[str, int]:
        """Sectors that requests of each engine hold."""
        with self.pool.lock:
            return dict(zip("ab", (one.live() for one in self.pool.shares), strict=True))

    async def settle(self) -> None:
        """Nothing is left of any request, and each engine could have all of the pool."""
        async with asyncio.timeout(20):
            for engine in self.engines.values():
                while await engine.requests() or engine.load().used_blocks:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
                assert len(engine._destination) == 0
        share = self.engines["a"]._blocks.share
        assert share is not None
        with self.pool.lock:
            share.cache.evict_cached_blocks()
            assert sorted(self.pool.free_sectors) == list(range(2, SECTORS + 2))

    @asynccontextmanager
    async def migrator(self) -> AsyncIterator[Migrator]:
        """Whoever leaves it has left nothing."""

        def assign(request_id: str, name: str) -> None:
            self.engines[name].assign(request_id, 1)

        async with Migrator(self.engines, PATIENT, on_commit=assign, close_timeout_s=1) as made:
            try:
                yield made
            finally:
                for engine in self.engines.values():
                    engine.abort(list(self.got))
        await self.settle()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(other: Path) -> AsyncIterator[Bench]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Bench(other)
    yield made
    await asyncio.gather(*(engine.close(10) for engine in made.engines.values()))
    torch.set_num_threads(threads)


DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 3}


async def test_two_models_in_one_pool_give_what_each_gives_alone(bench: Bench) -> None:
    wanted = [(name, 100 * n, more) for n in (1, 2) for name in "ab" for more in ({}, DRAWN)]
    alone = [bench.submit(f"{name} alone", start, **more) for name, start, more in wanted]
    ids = [bench.submit(name, start, **more) for name, start, more in wanted]
    for one, same in zip(ids, alone, strict=True):
        assert await bench.finish(one) == await bench.finish(same)
    await bench.settle()


async def test_an_engine_waits_for_one_that_has_filled_the_pool_and_goes_on_rightly(
    bench: Bench,
) -> None:
    expected = await bench.alone("b", 300)
    with bench.slow("a", 0.02):
        ids = await bench.fill("a", **DRAWN)
        late = bench.submit("b", 300)
        await asyncio.sleep(0.02)
        (state,) = await bench.engines["b"].requests()
        assert state.state == "waiting"
    assert await bench.finish(late) == expected
    for n, one in enumerate(ids, 1):
        assert await bench.finish(one) == await bench.alone("a", 100 * n, 100, **DRAWN)
    await bench.settle()


async def test_a_stream_of_requests_of_one_model_does_not_starve_the_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the other is short of its floor, the one above its own admits nobody."""
    a, b = bench.pool.shares
    scheduler, offered = bench.engines["a"]._requests.scheduler, list[int]()
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
    bench: Bench, more: dict[str, Any]
) -> None:
    async with bench.migrator() as move:
        for name in "ab":
            expected = await bench.alone(name, 500, 60, **more)
            moves = bench.submit(f"{name} alone", 500, 60, **more)
            beside = bench.submit("b" if name == "a" else "a", 100)
            for at, way in ((3, (f"{name} alone", name)), (25, (name, f"{name} alone"))):
                await bench.reach(moves, at)
                report = await move.migrate(moves, *way)
                assert report.state == "committed", (report.reason, report.detail)
            assert await bench.finish(moves) == expected
            await bench.finish(beside)


async def test_a_request_does_not_move_to_another_model(bench: Bench) -> None:
    async with bench.migrator() as move:
        stays = bench.submit("a", 500, 60)
        await bench.reach(stays, 5)
        report = await move.migrate(stays, "a", "b")
        assert (report.state, report.reason) == ("aborted", "incompatible")
        assert await bench.finish(stays) == await bench.alone("a", 500, 60)


async def test_a_migration_that_is_given_up_frees_every_sector(bench: Bench) -> None:
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
    bench: Bench,
) -> None:
    async with bench.migrator() as move:
        expected = await bench.alone("a", 500, 100)
        full = [bench.submit("b", 100 * n, 110) for n in range(1, 5)]
        await bench.reach(full[0], 98)
        with bench.slow("b"), bench.slow("a alone", 0.02):
            moves = bench.submit("a alone", 500, 100)
            await bench.reach(moves, 5)
            report = await move.migrate(moves, "a alone", "a")
        assert (report.state, report.reason) == ("aborted", "no_blocks")
        assert bench.live()["a"] == 0
        assert await bench.finish(moves) == expected


async def test_a_load_says_how_much_the_other_engine_has_left(bench: Bench) -> None:
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
    request = Submitted(prompt_token_ids=[50] * 40, max_tokens=100)
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
        (1 << 30, {"a": {"device": "cuda"}}, "device is .*must be the same for all"),
        (
            5 * SECTOR,
            {},
            r"are 5 sectors of 196608, but one longest request of each engine takes"
            r" \{'a': 3, 'b': 3\}: 196608 bytes are missing",
        ),
        (0, {}, "0 sectors of 196608"),
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
