"""Where the blocks of one migration come in: the transport that was agreed on, and the request's
own blocks at the destination."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from kvmig.engines.base import HOLE, CameBlocks, Engine
from kvmig.ground.errors import MigrationRefused, PeerError, TransportError
from kvmig.kvtransfer.messages import Chunk, Offer
from kvmig.kvtransfer.transports.base import Inbox
from kvmig.kvtransfer.transports.select import Inboxes

T = TypeVar("T")


class BlockReceiver:
    """Every call of the engine or the transport raises TimeoutError after `timeout_s`."""

    def __init__(self, request_id: str, engine: Engine, inboxes: Inboxes, timeout_s: float) -> None:
        self._request_id = request_id
        self._engine = engine
        self._inboxes = inboxes
        self._timeout_s = timeout_s
        self._inbox: Inbox | None = None
        self._blocks: list[int] = []

    @property
    def token(self) -> str:
        """What the source needs to push; empty while no transport is open."""
        return "" if self._inbox is None else self._inbox.token

    async def open(self, offers: Sequence[Offer]) -> str:
        """The first of these transports that works here. Raises MigrationRefused if none does."""
        try:
            self._inbox = await self.bounded(self._inboxes.open(offers))
        except TransportError as error:
            raise MigrationRefused("incompatible", str(error)) from error
        return self._inbox.transport

    async def grow(self, num_tokens: int) -> None:
        """Hold blocks for so many tokens."""
        self._blocks = await self.bounded(self._engine.grow(self._request_id, num_tokens))

    async def scatter(self, chunk: Chunk, payload: Sequence[memoryview]) -> None:
        """Copy the chunk into its blocks. Raises MigrationRefused if it came changed."""
        came = await self.came(chunk, payload)
        came.check(
            await self.bounded(self._engine.scatter(came.block_ids, came.fused, chunk.urgent))
        )

    async def came(self, chunk: Chunk, payload: Sequence[memoryview]) -> CameBlocks:
        """The chunk's bytes, and blocks for them. Raises PeerError if they can't be blocks."""
        layout, count = self._engine.layout, len(chunk.checksums)
        if count == 0 or chunk.nbytes != count * layout.block_bytes or self._inbox is None:
            raise PeerError(f"{chunk.nbytes} bytes can't be {count} blocks")
        places = chunk.places or range(chunk.first, chunk.first + count)
        if len(places) != count or min(places) < 0:
            raise PeerError(f"{count} blocks can't be at places {list(places)}")
        end = max(places) // layout.tables + 1
        if end * layout.tables > len(self._blocks):
            await self.grow(end * layout.block_tokens)
        block_ids = [self._blocks[place] if place < len(self._blocks) else HOLE for place in places]
        if HOLE in block_ids:
            raise MigrationRefused("no_blocks", f"none is kept at places {list(places)}")
        fused = await self.bounded(self._inbox.receive(chunk, payload[0] if payload else None))
        return CameBlocks(chunk.first, block_ids, fused, chunk.checksums)

    async def bounded(self, call: Awaitable[T]) -> T:
        """Raises TimeoutError when it takes longer than an answer may."""
        async with asyncio.timeout(self._timeout_s):
            return await call
