"""Whether an engine has given the memory of its KV cache back."""

from __future__ import annotations

import asyncio

from kvmig.engines.base import ServingEngine


class EngineParking:
    """Parks one engine and wakes it. Orders take turns, and one that was carried out already isn't
    carried out again: a server that was killed may have given the same order.
    """

    def __init__(self, engine: ServingEngine) -> None:
        self.parked = False
        self._engine = engine
        self._turn = asyncio.Lock()

    async def set_parked(self, parked: bool) -> None:
        """Raises NotParked; the engine is as it was then."""
        async with self._turn:
            if parked == self.parked:
                return
            await (self._engine.park() if parked else self._engine.unpark())
            self.parked = parked
