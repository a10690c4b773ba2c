"""Chunks of KV blocks from the source's cache to the destination: sized, gathered, sent, answered.

Several short requests that move the same way would each take a buffer, a copy and a message for a
few blocks. While one transfer is under way, the next chunks gather in a queue; the next transfer
takes as many of them as one copy may last. Each chunk is still its own migration's: it is checked,
scattered and answered by itself, and the buffer is free when the last of them is done.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from msgspec.structs import replace

from kvmig.engines.base import Engine
from kvmig.ground.clock import Clock
from kvmig.ground.errors import MigrationRefused, TransportError
from kvmig.kvtransfer.bandwidth import Line
from kvmig.kvtransfer.messages import PAYLOAD_SLOT, Bundle, Chunk, Message
from kvmig.kvtransfer.report import StageParts
from kvmig.kvtransfer.transports.base import Channel, Staging
from kvmig.kvtransfer.wire import Frame

WEIGHT = 0.25
"""Of a new measurement in the average rate."""


def slot_bytes(chunk_bytes: int, block_bytes: int) -> int:
    """Bytes of a staging slot: `chunk_bytes`, or one block of a model whose blocks are larger."""
    return max(chunk_bytes, block_bytes)


class ChunkSizer:
    """Learns the rate of copies and sizes the next one by it.

    block_bytes: bytes of one fused block; chunk_bytes: the configured size of a chunk;
    chunk_ms: the longest time that a copy of several blocks should take.
    """

    def __init__(self, block_bytes: int, chunk_bytes: int, chunk_ms: float) -> None:
        self._block_bytes = block_bytes
        # An engine whose requests don't move may have no blocks to speak of.
        self._most = slot_bytes(chunk_bytes, block_bytes) // max(block_bytes, 1)
        self._chunk_ms = chunk_ms
        self._rate: float | None = None

    def blocks(self) -> int:
        """Blocks of the next chunk: 1 until a copy was measured, never less, never over a slot."""
        if self._rate is None:
            return 1
        in_time = self._rate * self._chunk_ms / self._block_bytes
        return int(max(1, min(self._most, in_time)))

    @property
    def bytes_per_ms(self) -> float | None:
        """Of copies; None until one was measured."""
        return self._rate

    def observe(self, nbytes: int, ms: float) -> None:
        """A copy of `nbytes` took `ms` (one that took no time tells nothing)."""
        if nbytes <= 0 or ms <= 0:
            return
        rate = nbytes / ms
        self._rate = rate if self._rate is None else self._rate + WEIGHT * (rate - self._rate)


def cut(block_ids: Sequence[int], sizer: ChunkSizer) -> Iterator[tuple[int, Sequence[int]]]:
    """Chunks of `block_ids` as (position of the first, ids), each sized when it's asked for."""
    first = 0
    while first < len(block_ids):
        ids = block_ids[first : first + sizer.blocks()]
        yield first, ids
        first += len(ids)


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
