"""The copying half of a source session: slot, gather, Chunk, and the slot back at ChunkDone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from kvmig.engines.base import Engine
from kvmig.ground.clock import Clock
from kvmig.ground.errors import MigrationRefused, TransportError
from kvmig.kvtransfer.chunks import ChunkSizer, cut
from kvmig.kvtransfer.messages import PAYLOAD_SLOT, Chunk, Message
from kvmig.kvtransfer.transports.base import Staging
from kvmig.kvtransfer.wire import Frame

Send = Callable[[Message, Sequence[Frame]], None]
"""Queue a message for the peer, at once. Raises TransportError if it is gone."""


class Copier:
    """Sends one migration's blocks, never holding more slots than the pool has."""

    def __init__(
        self,
        mid: str,
        engine: Engine,
        staging: Staging,
        sizer: ChunkSizer,
        send: Send,
        timeout_s: float,
        clock: Clock,
    ) -> None:
        self._mid = mid
        self._engine = engine
        self._staging = staging
        self._sizer = sizer
        self._send = send
        self._timeout_s = timeout_s
        self._clock = clock
        self._spare: int | None = None
        self._flying: deque[int] = deque()
        self.bytes = 0

    @property
    def transport(self) -> str:
        """Its name."""
        return self._staging.transport

    async def ready(self, stop: asyncio.Event) -> bool:
        """Have a slot for the next chunk; False if `stop` is set.

        Raises MigrationRefused when the destination gives none back in time.
        """
        if stop.is_set() or self._spare is not None:
            return not stop.is_set()
        waiting = asyncio.ensure_future(self._staging.acquire(self._timeout_s))
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((waiting, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            if not waiting.done():
                waiting.cancel()
            elif waiting.exception() is None:
                self._spare = waiting.result()
        if waiting.done() and (error := waiting.exception()) is not None:
            if isinstance(error, TransportError):
                raise MigrationRefused("timeout", str(error)) from error
            raise error
        return not stop.is_set()

    async def send(self, stage: int, first: int, block_ids: Sequence[int]) -> None:
        """Gather and send one chunk, in the slot that `ready` took."""
        slot = self._spare
        if slot is None:
            raise ValueError("no slot: call ready first")
        nbytes = len(block_ids) * self._engine.layout.block_bytes
        started = self._clock()
        async with asyncio.timeout(self._timeout_s):
            checksums = await self._engine.gather(block_ids, self._staging.buffer(slot)[:nbytes])
        self._sizer.observe(nbytes, (self._clock() - started) * 1e3)
        payload = self._staging.payload(slot, nbytes)
        named = slot if payload is None else PAYLOAD_SLOT
        chunk = Chunk(self._mid, stage, first, named, nbytes, checksums)
        self._send(chunk, () if payload is None else (payload,))
        self._spare = None
        self._flying.append(slot)
        self.bytes += nbytes

    def cut(self, block_ids: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Chunks of `block_ids` as (position of the first, ids)."""
        return cut(block_ids, self._sizer)

    def done(self) -> None:
        """The destination has read a chunk. They come in order, so it is the oldest."""
        if self._flying:
            self._staging.release(self._flying.popleft())

    def close(self) -> None:
        """Give all slots back. A chunk still read over there will differ from its checksums."""
        if self._spare is not None:
            self._staging.release(self._spare)
            self._spare = None
        while self._flying:
            self.done()
