"""KV caches that shrink and grow, of engines that are stepped by hand."""

from __future__ import annotations

import asyncio

from kvmig.engines.vllm.balloon import CacheBalloon
from tests.support.vllm_side import Side


def balloon(side: Side) -> CacheBalloon:
    found = side.device.balloon
    assert found is not None
    return found


async def resize(side: Side, quota: int, most: int, patience_s: float = 60.0) -> None:
    """Give a cache this quota of `most` bytes; it is kept as far as it could be by then."""
    sharing = side.engine.sharing
    assert not isinstance(sharing, str)
    task = asyncio.ensure_future(sharing.resize(quota, most, patience_s))
    while not task.done():
        side.take_calls()
        await asyncio.sleep(0)
    await task
    await settled(side)


async def settled(side: Side) -> None:
    """Wait until the cache has given back what it was about to."""
    async with asyncio.timeout(10):
        while balloon(side)._giving:
            side.take_calls()
            await asyncio.sleep(0.001)
