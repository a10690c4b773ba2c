"""The copying half of a source session: slot, gather, Chunk, and the slot back at ChunkDone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from msgspec.structs import replace

from kvmig.engines.base import Engine
from kvmig.ground.clock import Clock
from kvmig.ground.errors import MigrationRefused, TransportError
from kvmig.kvtransfer.chunks import ChunkSizer, cut
from kvmig.kvtransfer.messages import PAYLOAD_SLOT, Chunk, Message
from kvmig.kvtransfer.report import StageParts
from kvmig.kvtransfer.throttle import Line
from kvmig.kvtransfer.transports.base import Channel, Staging
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
        channel: Channel,
        line: Line,
    ) -> None:
        self._mid = mid
        self._engine = engine
        self._staging = staging
        self._sizer = sizer
        self._send = send
        self._timeout_s = timeout_s
        self._clock = clock
        self._channel = channel
        self._line = line
        self._spare: int | None = None
        self._flying: deque[tuple[int, StageParts]] = deque()
        self._parts = StageParts()
        self.bytes = 0

    @property
    def transport(self) -> str:
        """Its name."""
        return self._staging.transport

    async def ready(self, stop: asyncio.Event) -> bool:
        """Have bandwidth and a slot for the next chunk; False if `stop` is set.

        Raises MigrationRefused when there are none in time.
        """
        if stop.is_set() or self._spare is not None:
            return not stop.is_set()
        waiting = asyncio.ensure_future(self._prepare())
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait((waiting, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            waiting.cancel()
        if waiting.done() and (error := waiting.exception()) is not None:
            if isinstance(error, TransportError):
                raise MigrationRefused("timeout", str(error)) from error
            raise error
        return not stop.is_set()

    async def _prepare(self) -> None:
        started = self._clock()
        await self._line.wait(self._sizer.blocks() * self._engine.layout.block_bytes)
        self._spare = await self._staging.acquire(self._timeout_s)
        self._parts.wait += (self._clock() - started) * 1e3

    def room(self) -> memoryview:
        """The slot that `ready` took, as far as one copy may fill it."""
        nbytes = self._sizer.blocks() * self._engine.layout.block_bytes
        return self._staging.buffer(self._slot())[:nbytes]

    async def send(
        self, stage: int, first: int, block_ids: Sequence[int], urgent: bool = False
    ) -> None:
        """Gather one chunk into the slot that `ready` took, and bring it there."""
        buffer = self._staging.buffer(self._slot())
        nbytes = len(block_ids) * self._engine.layout.block_bytes
        started = self._clock()
        async with asyncio.timeout(self._timeout_s):
            checksums = await self._engine.gather(block_ids, buffer[:nbytes], urgent)
        ms = (self._clock() - started) * 1e3
        self._sizer.observe(nbytes, ms)
        self._parts.gather += ms
        await self.push(stage, first, checksums, self._send, urgent)

    async def push(
        self, stage: int, first: int, checksums: list[int], say: Send, urgent: bool = False
    ) -> None:
        """Bring the chunk that was gathered into the slot there; `say` gets its message."""
        slot, parts, started = self._slot(), self._parts, self._clock()
        nbytes = len(checksums) * self._engine.layout.block_bytes
        self._line.use(nbytes)
        self._spare = None
        self._flying.append((slot, parts))
        chunk = Chunk(self._mid, stage, first, slot, nbytes, checksums, urgent=urgent)

        def announce(payload: Sequence[Frame] = (), number: int = 0) -> None:
            say(replace(chunk, slot=PAYLOAD_SLOT if payload else slot, number=number), payload)

        async with asyncio.timeout(self._timeout_s):
            await self._channel.push(chunk, announce)
        parts.push += (self._clock() - started) * 1e3
        self.bytes += nbytes

    def _slot(self) -> int:
        if self._spare is None:
            raise ValueError("no slot: call ready first")
        return self._spare

    def end_stage(self) -> StageParts:
        """Where the stage's time went; grows with what is still on its way."""
        parts, self._parts = self._parts, StageParts()
        return parts

    def cut(self, block_ids: Sequence[int]) -> Iterator[tuple[int, Sequence[int]]]:
        """Chunks of `block_ids` as (position of the first, ids)."""
        return cut(block_ids, self._sizer)

    def done(self, scatter_ms: float = 0.0) -> None:
        """The destination has read a chunk. They come in order, so it is the oldest."""
        if self._flying:
            slot, parts = self._flying.popleft()
            parts.scatter += scatter_ms
            self._staging.release(slot)

    def close(self) -> None:
        """Give all slots back. A chunk still read over there will differ from its checksums."""
        if self._spare is not None:
            self._staging.release(self._spare)
            self._spare = None
        while self._flying:
            self.done()
        self._line.leave()
