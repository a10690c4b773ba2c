"""Chunks of live stages on their way to one destination: those that wait together go together.

Several short requests that move the same way would each take a buffer, a copy and a message for a
few blocks. While one transfer is under way, what comes gathers in a queue; the next transfer takes
as much of it as one copy may last. Each chunk is still its own migration's: it is checked,
scattered and answered by itself, and the buffer is free when the last of them is done.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

from msgspec.structs import replace

from kvmig.engines.base import Engine
from kvmig.ground.clock import Clock
from kvmig.ground.errors import MigrationRefused, TransportError
from kvmig.kvtransfer.chunks import ChunkSizer
from kvmig.kvtransfer.messages import PAYLOAD_SLOT, Bundle, Chunk, Message
from kvmig.kvtransfer.transports.base import Channel, Staging
from kvmig.kvtransfer.wire import Frame

Send = Callable[[Message, Sequence[Frame]], None]


class SlotShare:
    """A slot that several chunks are in: it goes back with the last one."""

    def __init__(self, staging: Staging, slot: int, chunks: int) -> None:
        self._staging = staging
        self._slot = slot
        self._chunks = chunks

    def drop(self) -> None:
        """One of them is done."""
        self._chunks -= 1
        if self._chunks == 0:
            self._staging.release(self._slot)


@dataclass(eq=False, slots=True)
class Part:
    """One migration's chunk that waits."""

    mid: str
    stage: int
    first: int
    block_ids: Sequence[int]
    staging: Staging
    channel: Channel
    send: Send
    board: Callable[[SlotShare], None]
    """Called just before the chunk is announced."""
    places: Sequence[int] = ()
    sent: asyncio.Future[tuple[float, float]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Milliseconds of the gather and of the push; or what went wrong."""
    fused: bool = False
    """Whether others are in the same transfer."""

    def __post_init__(self) -> None:
        # Whoever waited may be gone: then nobody asks what went wrong.
        self.sent.add_done_callback(lambda sent: sent.cancelled() or sent.exception())


class Shuttle:
    """To one destination. Used on one event loop."""

    def __init__(self, engine: Engine, sizer: ChunkSizer, timeout_s: float, clock: Clock) -> None:
        self._engine = engine
        self._sizer = sizer
        self._timeout_s = timeout_s
        self._clock = clock
        self._queue: deque[Part] = deque()
        self._task: asyncio.Task[None] | None = None

    def add(self, part: Part) -> None:
        """Send it with the next transfer that has room; `part.sent` tells when."""
        self._queue.append(part)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def withdraw(self, part: Part) -> bool:
        """Take it back; False if it is on its way already."""
        if part not in self._queue:
            return False
        self._queue.remove(part)
        return True

    async def close(self) -> None:
        """Everything that waits, or is under way, is cancelled."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        while self._queue:
            self._queue.popleft().sent.cancel()

    async def _run(self) -> None:
        while self._queue:
            staging = self._queue[0].staging
            try:
                slot = await staging.acquire(self._timeout_s)
            except TransportError as error:
                _tell(list(self._queue), MigrationRefused("timeout", str(error)))
                self._queue.clear()
                return
            parts = self._take(staging)
            if not parts:
                staging.release(slot)
                continue
            try:
                times = await self._carry(parts, staging, slot)
            except BaseException as error:
                _tell(parts, error)
                if not isinstance(error, Exception):
                    raise
            else:
                for part in parts:
                    if not part.sent.done():
                        part.sent.set_result(times)

    def _take(self, staging: Staging) -> list[Part]:
        """From the head of the queue, as many as one copy and one slot may hold; at least one."""
        parts: list[Part] = []
        room = self._sizer.blocks()
        while self._queue:
            part = self._queue[0]
            if part.staging is not staging or (parts and part.channel is not parts[0].channel):
                break
            if parts and (not staging.fuses or len(part.block_ids) > room):
                break
            room -= len(part.block_ids)
            parts.append(self._queue.popleft())
        return parts

    async def _carry(
        self, parts: Sequence[Part], staging: Staging, slot: int
    ) -> tuple[float, float]:
        share, boarded = SlotShare(staging, slot, len(parts)), 0
        try:
            chunks, gather_ms = await self._gather(parts, staging.buffer(slot), slot)
            whole = replace(chunks[0], nbytes=sum(chunk.nbytes for chunk in chunks))

            def announce(payload: Sequence[Frame] = (), number: int = 0) -> None:
                nonlocal boarded
                for part in parts:
                    boarded += 1
                    part.fused = len(parts) > 1
                    part.board(share)
                at = PAYLOAD_SLOT if payload else slot
                said = [replace(chunk, slot=at, number=number) for chunk in chunks]
                parts[0].send(said[0] if len(said) == 1 else Bundle(said), payload)

            started = self._clock()
            async with asyncio.timeout(self._timeout_s):
                await parts[0].channel.push(whole, announce)
            return gather_ms, (self._clock() - started) * 1e3
        except BaseException:
            for _ in range(len(parts) - boarded):
                share.drop()
            raise

    async def _gather(
        self, parts: Sequence[Part], buffer: memoryview, slot: int
    ) -> tuple[list[Chunk], float]:
        """All their blocks in one copy; the chunk of each, and milliseconds."""
        block_bytes = self._engine.layout.block_bytes
        ids = [block for part in parts for block in part.block_ids]
        started = self._clock()
        async with asyncio.timeout(self._timeout_s):
            sums = await self._engine.gather(ids, buffer[: len(ids) * block_bytes])
        ms = (self._clock() - started) * 1e3
        self._sizer.observe(len(ids) * block_bytes, ms)
        ends = accumulate((len(part.block_ids) for part in parts), initial=0)
        chunks = [
            Chunk(
                part.mid, part.stage, part.first, slot, (end - begin) * block_bytes,
                sums[begin:end], offset=begin * block_bytes, places=list(part.places),
            )
            for part, (begin, end) in zip(parts, pairwise(ends), strict=True)
        ]  # fmt: skip
        return chunks, ms


def _tell(parts: Sequence[Part], error: BaseException) -> None:
    for part in parts:
        if part.sent.done():
            continue
        if isinstance(error, Exception):
            part.sent.set_exception(error)
        else:
            part.sent.cancel()
