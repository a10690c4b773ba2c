"""Chunks of KV blocks on their way into a destination's cache: received, scattered and checked.

While one chunk is scattered, the chunk behind it is received, and its copy waits in the engine. The
engine runs one copy after the other, so the next one begins without a turn of this process's event
loop, which checks and answers the chunk before it meanwhile. Urgent copies go before those that
wait, so they wait for one copy at most, as before.

The machine gets each chunk in its turn, whenever its copy has begun: what is wrong with a chunk is
raised then. What the chunk behind it has written lies in blocks that are reserved still.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from kvmig.core.clock import TimeSource
from kvmig.engines.base import CameBlocks, Engine, device_ms_of
from kvmig.kvtransfer.messages import Chunk

UNDER_WAY = 2
"""Chunks of one migration whose copies run, or wait in the engine, at once."""

Receive = Callable[[], Awaitable[CameBlocks]]
"""Gets a chunk's bytes, and the blocks that they are for."""


class LandedChunk(NamedTuple):
    """How long a chunk took since it began, or since the copy before it was over."""

    ms: float
    device_ms: float | None
    """Time of the scatter on a device, by its events."""


class ChunkLandings:
    """The chunks of one migration that are being received or scattered, in their order."""

    def __init__(self, engine: Engine, clock: TimeSource, timeout_s: float) -> None:
        """timeout_s: that a scatter may take, with the one before it."""
        self._engine = engine
        self._clock = clock
        self._timeout_s = timeout_s
        self._going: deque[tuple[Chunk, asyncio.Task[LandedChunk]]] = deque()
        self._received = False
        """Whether the last chunk that has begun is received."""
        self._copied_at = 0.0

    def __len__(self) -> int:
        return len(self._going)

    def can_follow(self, chunk: Chunk) -> bool:
        """Whether the chunk may begin now: right behind the last one, which is received."""
        if not self._going or len(self._going) >= UNDER_WAY or not self._received:
            return False
        last, _ = self._going[-1]
        return chunk.first == last.first + len(last.checksums)

    def begin(self, chunk: Chunk, receive: Receive, on_received: Callable[[], None]) -> None:
        """Receive the chunk, and scatter it once the engine has made the copies before it.

        on_received: called just before it asks the engine: another chunk may follow then.
        """
        self._received = False
        landing = asyncio.create_task(self._land(chunk, receive, on_received))
        self._going.append((chunk, landing))

    async def finish(self) -> LandedChunk:
        """Wait for the end of the oldest chunk. Raises what was wrong with it."""
        _, landing = self._going[0]
        await asyncio.wait([landing])
        self._going.popleft()
        try:
            return landing.result()
        finally:
            del landing  # an error keeps this frame, which would keep the error and its buffer

    async def call_off(self) -> None:
        """Give all chunks up: no copy of one runs when this returns, nor begins later."""
        landings = [landing for _, landing in self._going]
        for landing in landings:
            landing.cancel()
        if landings:
            await asyncio.wait(landings)
        for landing in landings:
            if not landing.cancelled():
                landing.exception()  # of a chunk whose turn never came
        self._going.clear()

    async def _land(
        self, chunk: Chunk, receive: Receive, on_received: Callable[[], None]
    ) -> LandedChunk:
        """Raises MigrationRefused if the chunk came changed, and what the ways here raise."""
        began = self._clock()
        came = await receive()
        self._received = True
        on_received()
        async with asyncio.timeout(self._timeout_s):
            sums = await self._engine.scatter(came.block_ids, came.fused, chunk.urgent)
        came.check(sums)
        began, self._copied_at = max(began, self._copied_at), self._clock()
        return LandedChunk((self._copied_at - began) * 1e3, device_ms_of(sums))
