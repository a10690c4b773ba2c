"""Two models of transformers' engine in one pool, and the same two in memory of their own."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import torch

from kvmig.embed.migrator import Migrator
from kvmig.engines.base import Emitted, Frame
from kvmig.engines.transformers import factory, pooled
from kvmig.engines.transformers.payload import Output, Submitted, decode, encode
from kvmig.engines.transformers.pool import Cut, Pool
from kvmig.ground.config import MigrationConfig
from kvmig.models import BUNDLED

SECTOR = 3 << 16
"""Three blocks of the bundled model (4 layers), four of `other` (3 layers)."""
SECTORS = 8
FLOOR_BLOCKS = 9
"""Three sectors of either model: two more are for whoever comes first."""
PATIENT = MigrationConfig(transport="tcp", reply_timeout_ms=20000, lease_ms=60000)
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


class Bench:
    """Engines a and b in one pool; alone are the same models in memory of their own."""

    def __init__(self, other: Path, cut: Cut) -> None:
        engines = {name: fields(other, name) for name in "ab"}
        self.engines = pooled(SECTORS * SECTOR, engines, cut)
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
            while self.live()[name] < self.pool.num_units:  # noqa: ASYNC110
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
        """Units that requests of each engine hold."""
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
            assert self.pool.free_units() == self.pool.num_units
            assert len(set(self.pool.free_sectors)) == len(self.pool.free_sectors)

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


@asynccontextmanager
async def benched(other: Path, cut: Cut) -> AsyncIterator[Bench]:
    """One, with steps on one thread; closed at the end."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Bench(other, cut)
    yield made
    await asyncio.gather(*(engine.close(10) for engine in made.engines.values()))
    torch.set_num_threads(threads)


DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 3}
