"""The copying half of a source session: slot, gather, Chunk, and the slot back at ChunkDone."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from kvmig.engines.base import Engine
from kvmig.ground.clock import Clock
from kvmig.ground.errors import MigrationRefused, TransportError
from kvmig.kvtransfer.chunks import ChunkSizer, cut
from kvmig.kvtransfer.messages import PAYLOAD_SLOT, Chunk
from kvmig.kvtransfer.report import StageParts
from kvmig.kvtransfer.shuttle import Part, Send, Shuttle, SlotShare
from kvmig.kvtransfer.throttle import Line
from kvmig.kvtransfer.transports.base import Channel, Staging
from kvmig.kvtransfer.wire import Frame

__all__ = ["Copier", "Send"]


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
        shuttle: Shuttle,
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
        self._shuttle = shuttle
        self._spare: int | None = None
        self._flying: deque[tuple[SlotShare, StageParts]] = deque()
        self._closed = False
        self._parts = StageParts()
        self.bytes = 0
        self.fused = 0
        """Chunks that went with those of other migrations."""

    @property
    def transport(self) -> str:
        """Its name."""
        return self._staging.transport

    async def ready(self, stop: asyncio.Event) -> bool:
        """Have bandwidth and a slot of its own for the next chunk; False if `stop` is set.

        Raises MigrationRefused when there are none in time.
        """
        if stop.is_set() or self._spare is not None:
            return not stop.is_set()
        try:
            await _either(self._prepare(), stop)
        except TransportError as error:
            raise MigrationRefused("timeout", str(error)) from error
        return not stop.is_set()

    async def _prepare(self) -> None:
        started = self._clock()
        await self._turn()
        self._spare = await self._staging.acquire(self._timeout_s)
        self._parts.wait += (self._clock() - started) * 1e3

    async def _turn(self) -> None:
        await self._line.wait(self._sizer.blocks() * self._engine.layout.block_bytes)

    async def ship(
        self,
        stage: int,
        first: int,
        block_ids: Sequence[int],
        places: Sequence[int],
        stop: asyncio.Event,
    ) -> bool:
        """Send one chunk, with those of other migrations if some wait; False if `stop` is set
        before it is on its way. Raises MigrationRefused when there is no room in time."""
        started = self._clock()
        await _either(self._turn(), stop)
        if stop.is_set():
            return False
        boarding = self._parts
        part = Part(
            self._mid, stage, first, block_ids, self._staging, self._channel, self._send,
            lambda share: self._board(share, boarding), places,
        )  # fmt: skip
        self._shuttle.add(part)
        try:
            await _either(_outcome(part), stop)
            if not part.sent.done() and self._shuttle.withdraw(part):
                return False
            gather_ms, push_ms = await _outcome(part)
        except BaseException:
            self._shuttle.withdraw(part)
            raise
        nbytes = len(block_ids) * self._engine.layout.block_bytes
        self._line.use(nbytes)
        self.bytes += nbytes
        self.fused += part.fused
        boarding.gather += gather_ms
        boarding.push += push_ms
        boarding.wait += max(0.0, (self._clock() - started) * 1e3 - gather_ms - push_ms)
        return True

    def _board(self, share: SlotShare, parts: StageParts) -> None:
        if self._closed:
            share.drop()
        else:
            self._flying.append((share, parts))

    def room(self) -> memoryview:
        """The slot that `ready` took, as far as one copy may fill it."""
        nbytes = self._sizer.blocks() * self._engine.layout.block_bytes
        return self._staging.buffer(self._slot())[:nbytes]

    async def send(
        self,
        stage: int,
        first: int,
        block_ids: Sequence[int],
        urgent: bool = False,
        places: Sequence[int] = (),
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
        await self.push(stage, first, checksums, self._send, urgent, places)

    async def push(
        self,
        stage: int,
        first: int,
        checksums: list[int],
        say: Send,
        urgent: bool = False,
        places: Sequence[int] = (),
    ) -> None:
        """Bring the chunk that was gathered into the slot there; `say` gets its message."""
        slot, parts, started = self._slot(), self._parts, self._clock()
        nbytes = len(checksums) * self._engine.layout.block_bytes
        self._line.use(nbytes)
        self._spare = None
        self._flying.append((SlotShare(self._staging, slot, 1), parts))
        chunk = Chunk(
            self._mid, stage, first, slot, nbytes, checksums, urgent=urgent, places=list(places)
        )

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
            share, parts = self._flying.popleft()
            parts.scatter += scatter_ms
            share.drop()

    def close(self) -> None:
        """Give all slots back. A chunk still read over there will differ from its checksums."""
        self._closed = True
        if self._spare is not None:
            self._staging.release(self._spare)
            self._spare = None
        while self._flying:
            self.done()
        self._line.leave()


async def _outcome(part: Part) -> tuple[float, float]:
    # Shielded: other migrations' chunks may be in the same transfer.
    return await asyncio.shield(part.sent)


async def _either(work: Coroutine[Any, Any, object], stop: asyncio.Event) -> None:
    """Until `work` is done or `stop` is set. Raises what `work` does."""
    waiting = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait((waiting, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        waiting.cancel()
    if waiting.done() and (error := waiting.exception()) is not None:
        raise error
