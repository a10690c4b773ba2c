"""Two models of transformers' engine in one pool, and the same two in memory of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from kvmig.engines.transformers import factory, pooled
from kvmig.engines.transformers.pool import Cut, SharedPool
from kvmig.engines.transformers.requests import CacheBlocks
from kvmig.models import BUNDLED
from tests.support.transformers_bench import Bench

SECTOR = 3 << 16
"""Three blocks of the bundled model (4 layers), four of `other` (3 layers)."""
SECTORS = 8
FLOOR_BLOCKS = 9
"""Three sectors of either model: two more are for whoever comes first."""
STEPS: dict[str, Any] = {"max_batch_tokens": 16, "max_batch_requests": 4}


def other_model(folder: Path) -> Path:
    """The configuration of a model of three layers; the bundled one has four."""
    config = json.loads(Path(BUNDLED, "config.json").read_text()) | {"num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def fields(other: Path, name: str) -> dict[str, Any]:
    """`a` is the bundled model, `b` the other."""
    drawn = {"model": str(other), "random_weights": True} if name == "b" else {}
    return {"num_blocks": FLOOR_BLOCKS, **STEPS, **drawn}


class PoolBench(Bench):
    """Engines a and b in one pool; alone are the same models in memory of their own."""

    def __init__(self, other: Path, cut: Cut) -> None:
        engines = pooled(SECTORS * SECTOR, {name: fields(other, name) for name in "ab"}, cut)
        alone = {f"{name} alone": factory(**fields(other, name)) for name in "ab"}
        super().__init__(engines | alone)

    def blocks(self, name: str) -> CacheBlocks:
        """The block manager of an engine."""
        return self.engines[name]._blocks

    def scheduler(self, name: str) -> Any:
        """transformers' own, of an engine."""
        return self.engines[name]._requests.scheduler

    @property
    def pool(self) -> SharedPool:
        share = self.blocks("a").share
        assert share is not None
        return share.pool

    def submit(self, name: str, start: int, max_tokens: int = 40, **more: Any) -> str:
        """Counts on from `start`."""
        prompt = list(" ".join(str(start + n) for n in range(7)).encode())
        return self.send(name, prompt, max_tokens, **more)

    async def fill(self, name: str, **more: Any) -> list[str]:
        """Let requests of this engine hold the whole pool."""
        ids = [self.submit(name, 100 * n, 100, **more) for n in range(1, 6)]
        async with asyncio.timeout(60):
            while self.live()[name] < self.pool.num_units:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return ids

    async def alone(self, name: str, start: int, max_tokens: int = 40, **more: Any) -> list[int]:
        return await self.finish(self.submit(f"{name} alone", start, max_tokens, **more))

    async def assert_same_as_alone(self) -> None:
        """Requests of both at once get what each gets alone."""
        wanted = [(name, 100 * n, more) for n in (1, 2) for name in "ab" for more in ({}, DRAWN)]
        alone = [self.submit(f"{name} alone", start, **more) for name, start, more in wanted]
        ids = [self.submit(name, start, **more) for name, start, more in wanted]
        for one, same in zip(ids, alone, strict=True):
            assert await self.finish(one) == await self.finish(same)
        await self.settle()

    async def assert_moves_change_nothing(self, name: str, **more: Any) -> None:
        """One request moves into the pool and out of it, while the other model computes."""
        async with self.migrator() as move:
            expected = await self.alone(name, 500, 60, **more)
            moves = self.submit(f"{name} alone", 500, 60, **more)
            beside = self.submit("b" if name == "a" else "a", 100)
            for at, way in ((3, (f"{name} alone", name)), (25, (name, f"{name} alone"))):
                await self.reach(moves, at)
                report = await move.migrate(moves, *way)
                assert report.state == "committed", (report.reason, report.detail)
            assert await self.finish(moves) == expected
            await self.finish(beside)

    async def waits_for_the_other(self) -> tuple[list[str], str]:
        """Requests of a that hold the whole pool; one of b, which waits for its room."""
        with self.slow("a", 0.02):
            ids = await self.fill("a", **DRAWN)
            late = self.submit("b", 300)
            await asyncio.sleep(0.02)
            (state,) = await self.engines["b"].requests()
            assert state.state == "waiting"
        return ids, late

    def live(self) -> dict[str, int]:
        """Units that requests of each engine hold."""
        with self.pool.lock:
            return dict(zip("ab", (one.live() for one in self.pool.shares), strict=True))

    async def settle(self) -> None:
        """Nothing is left of any request, and each engine could have all of the pool."""
        await super().settle()
        share = self.blocks("a").share
        assert share is not None
        with self.pool.lock:
            share.cache.evict_cached_blocks()
            assert self.pool.free_units() == self.pool.num_units
            assert len(set(self.pool.free_sectors)) == len(self.pool.free_sectors)


DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 3}
