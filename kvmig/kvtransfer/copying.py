"""Chunks of KV blocks on their way to the destination: sized, gathered, sent, answered.

Several short requests that move the same way would each take a buffer, a copy and a message for a
few blocks. While one transfer is under way, the next chunks gather in a queue; the next transfer
takes as many of them as one copy may last. Each chunk is still its own migration's: it is checked,
scattered and answered by itself, and the buffer is free when the last of them is done. Chunks of
the pause go alone, in a slot that is held before the request is suspended.

Two transfers are under way at once: one is gathered while the one before it is pushed, and where
that takes no time, its copy waits behind the other's, so that the copies follow one another without
a turn of this process's event loop between them. They are pushed in their order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from traceback import clear_frames
from typing import Any, NamedTuple

from msgspec.structs import replace

from kvmig.core.errors import MigrationRefused, TransportError
from kvmig.engines.base import device_ms_of
from kvmig.kvtransfer.context import SourceContext
from kvmig.kvtransfer.mailbox import EventMailbox
from kvmig.kvtransfer.messages import PAYLOAD_SLOT, Bundle, Chunk
from kvmig.kvtransfer.report import ChunkTimes, StageParts
from kvmig.kvtransfer.timeline import MigrationSpec, MigrationTimeline
from kvmig.kvtransfer.transports.base import StagingPool, TransportChannel
from kvmig.rpc.codec import Frames
from kvmig.rpc.messages import RpcMessage

Send = Callable[[RpcMessage, Frames], None]
UNDER_WAY = 2
"""Transfers to one destination that are gathered or pushed at once, and chunks of a stage that wait
for a transfer or are in one. The engine copies one after the other, so that a step waits for one
copy of `--chunk-ms` at most however many there are."""
MOST_CHUNKS = 64
"""Chunks of a stage whose times are kept: its first ones."""


class SharedSlot:
    """A slot that several chunks are in: it is released with the last one."""

    def __init__(self, staging: StagingPool, slot: int, chunks: int) -> None:
        self._staging = staging
        self._slot = slot
        self._chunks = chunks

    def drop(self) -> None:
        """Count one chunk as done."""
        self._chunks -= 1
        if self._chunks == 0:
            self._staging.release(self._slot)


class TransferTimes(NamedTuple):
    """When a transfer's copy began, when it was gathered, and when it was pushed: by the clock."""

    gather: float
    push: float
    sent: float
    device_ms: float | None
    """Time of the gather on a device, by its events."""


@dataclass(slots=True)
class SentChunk:
    """A chunk that the destination has not read. began: of its stage, by the clock."""

    slot: SharedSlot
    parts: StageParts
    times: ChunkTimes | None = None
    began: float = 0.0


class BlockSender:
    """Sends one migration's blocks, never holding more slots than the pool has.

    Methods that wait raise ActionInterrupted when a message asks for something else, and
    MigrationRefused when there is no slot or bandwidth in time.
    """

    def __init__(
        self,
        move: MigrationSpec,
        batcher: ChunkBatcher,
        staging: StagingPool,
        token: str,
        mailbox: EventMailbox[Any, Any],
        timeline: MigrationTimeline,
    ) -> None:
        """token: of the inbox at the destination. Raises TransportError if it can't be reached."""
        self._mid = move.mid
        self._batcher = batcher
        self._context = batcher.context
        self._block_bytes = self._context.engine.layout.block_bytes
        self._staging = staging
        self._channel = staging.channel(token)
        self._line = self._context.throttle.line(move.mid, move.destination)
        self._mailbox = mailbox
        self._timeline = timeline
        self._slot: int | None = None
        """The slot for the next chunk that goes alone."""
        self._in_flight: deque[SentChunk] = deque()
        """Chunks that the destination has not read, in the order of their messages."""
        self._parts = StageParts()
        self._chunks: list[ChunkTimes] = []
        """Times of the present stage's chunks."""
        self._last: TransferTimes | None = None
        """The transfer of its last chunk that went."""
        self._closed = False

    # -- while the request decodes: with the chunks of other migrations

    async def send_live(
        self, stage: int, first: int, block_ids: Sequence[int], places: Sequence[int] = ()
    ) -> None:
        """Send one stage: the blocks of the request after the `first` ones that were sent."""
        clock, size = self._context.clock, len(block_ids)
        started, self._last = clock(), None
        going: deque[GoingChunk] = deque()
        try:
            for offset, ids in self._context.sizer.cut(block_ids):
                where = places[offset : offset + len(ids)]
                going.append(await self._queue_chunk(stage, started, first + offset, ids, where))
                if len(going) == UNDER_WAY:
                    await self._see_off(going)
            while going:
                await self._see_off(going)
        except BaseException as error:
            await self._call_back(going, wait=not isinstance(error, asyncio.CancelledError))
            raise
        parts, self._parts = self._parts, StageParts()
        chunks, self._chunks = self._chunks, []
        self._timeline.stage(size, size * self._block_bytes, started, parts, chunks)

    async def _queue_chunk(
        self,
        stage: int,
        began: float,
        first: int,
        block_ids: Sequence[int],
        places: Sequence[int],
    ) -> GoingChunk:
        """Queue one chunk for a transfer once there is bandwidth for it. began: the stage."""
        turned, parts = self._context.clock(), self._parts
        times = ChunkTimes(len(block_ids) * self._block_bytes, (turned - began) * 1e3)
        await self._until(self._reserve)
        chunk = QueuedChunk(
            self._mid, stage, first, block_ids, self._staging, self._channel,
            lambda slot: self._board(SentChunk(slot, parts, times, began)), places,
        )  # fmt: skip
        self._line.commit(times.bytes)
        self._batcher.add(chunk)
        return GoingChunk(chunk, times, turned, began)

    async def _see_off(self, going: deque[GoingChunk]) -> None:
        """Wait until the oldest of them is on its way to the destination."""
        sent = going[0].queued.sent
        await self._until(lambda: asyncio.wait([sent]))
        if not sent.cancelled() and sent.exception() is not None:
            # Raised once nothing waits any more: the others may fail by the same error, and the
            # frames that it has left are cleared then.
            await self._call_back(going, wait=True)
            sent.result()
        self._record(going.popleft())

    async def _call_back(self, going: deque[GoingChunk], wait: bool) -> None:
        """The stage ends early. wait: for chunks that can't be withdrawn any more."""
        while going:
            one = going.popleft()
            withdrawn = self._batcher.withdraw(one.queued)
            if wait and not withdrawn:
                await asyncio.wait([one.queued.sent])
            sent = one.queued.sent
            if withdrawn or (sent.done() and (sent.cancelled() or sent.exception() is not None)):
                self._line.give_back(one.times.bytes)
            elif sent.done():
                self._record(one)

    def _record(self, one: GoingChunk) -> None:
        """A chunk is on its way."""
        went, last, parts, times = one.queued.sent.result(), self._last, self._parts, one.times
        self._timeline.bytes += times.bytes
        self._timeline.fused_chunks += one.queued.fused
        if went is not last:  # else two of this stage went together
            free, pushed = (0.0, 0.0) if last is None else (last.push, last.sent)
            parts.wait += max(0.0, went.gather - max(one.turned, free)) * 1e3
            parts.gather += (went.push - went.gather) * 1e3
            parts.push += (went.sent - max(went.push, pushed)) * 1e3
            parts.gather_device = _sum(parts.gather_device, went.device_ms)
        self._last = went
        times.gather, times.push, times.sent = ((at - one.began) * 1e3 for at in went[:3])
        times.gather_device = went.device_ms
        if len(self._chunks) < MOST_CHUNKS:
            self._chunks.append(times)

    async def _until(self, wait: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Wait for it, and read what comes meanwhile."""
        while True:
            await _either(wait(), self._mailbox.news)
            if not self._mailbox.news.is_set():
                return
            self._mailbox.read()

    def _board(self, sent: SentChunk) -> None:
        if self._closed:
            sent.slot.drop()
        else:
            self._in_flight.append(sent)

    # -- in the pause: each chunk alone

    async def hold_slot(self) -> None:
        """Have bandwidth and a slot for the next chunk in hand."""
        self._mailbox.read()
        while self._slot is None:
            try:
                await _either(self._take_slot(), self._mailbox.news)
            except TransportError as error:
                raise MigrationRefused("timeout", str(error)) from error
            self._mailbox.read()

    async def _take_slot(self) -> None:
        started = self._context.clock()
        await self._reserve()
        self._slot = await self._staging.acquire(self._context.timeout_s)
        self._parts.wait += (self._context.clock() - started) * 1e3

    async def room(self) -> memoryview:
        """The slot in hand, as far as one copy may fill it."""
        async with asyncio.timeout(self._context.timeout_s):
            buffer = await self._channel.buffer(self._held_slot())
        return buffer[: self._context.sizer.blocks() * self._block_bytes]

    async def send_urgent(
        self, stage: int, first: int, block_ids: Sequence[int], places: Sequence[int]
    ) -> None:
        """Gather and send blocks of the request after the `first` ones that were sent."""
        context = self._context
        for offset, ids in context.sizer.cut(block_ids):
            await self.hold_slot()
            nbytes = len(ids) * self._block_bytes
            started = context.clock()
            async with asyncio.timeout(context.timeout_s):
                buffer = await self._channel.buffer(self._held_slot())
                checksums = await context.engine.gather(ids, buffer[:nbytes], urgent=True)
            ms = (context.clock() - started) * 1e3
            context.sizer.observe(nbytes, ms)
            self._parts.gather += ms
            where = places[offset : offset + len(ids)]
            await self.push(stage, first + offset, checksums, where, self._batcher.send)

    async def push(
        self, stage: int, first: int, checksums: list[int], places: Sequence[int], send: Send
    ) -> None:
        """Bring the blocks in the slot in hand to the destination; `send` gets their Chunk."""
        slot, parts, started = self._held_slot(), self._parts, self._context.clock()
        nbytes = len(checksums) * self._block_bytes
        self._line.commit(nbytes)
        self._slot = None
        self._in_flight.append(SentChunk(SharedSlot(self._staging, slot, 1), parts))
        chunk = Chunk(
            self._mid, stage, first, slot, nbytes, checksums, urgent=True, places=list(places)
        )

        def announce(payload: Frames = (), number: int = 0) -> None:
            send(replace(chunk, slot=PAYLOAD_SLOT if payload else slot, number=number), payload)

        async with asyncio.timeout(self._context.timeout_s):
            await self._channel.push(chunk, announce)
        parts.push += (self._context.clock() - started) * 1e3
        self._timeline.bytes += nbytes

    # -- afterwards

    def done(self, scatter_ms: float = 0.0, device_ms: float | None = None) -> None:
        """The destination has read a chunk. They come in order, so it is the oldest. device_ms: of
        the scatter on its device."""
        if not self._in_flight:
            return
        chunk = self._in_flight.popleft()
        chunk.parts.scatter += scatter_ms
        chunk.parts.scatter_device = _sum(chunk.parts.scatter_device, device_ms)
        if chunk.times is not None:
            chunk.times.answered = (self._context.clock() - chunk.began) * 1e3
            chunk.times.scatter, chunk.times.scatter_device = scatter_ms, device_ms
        chunk.slot.drop()

    def close(self) -> None:
        """Release all slots. A chunk still read over there will differ from its checksums."""
        self._closed = True
        if self._slot is not None:
            self._staging.release(self._slot)
            self._slot = None
        while self._in_flight:
            self._in_flight.popleft().slot.drop()
        self._line.release()

    # -- helpers

    async def _reserve(self) -> None:
        await self._line.reserve(self._context.sizer.blocks() * self._block_bytes)

    def _held_slot(self) -> int:
        if self._slot is None:
            raise ValueError("no slot: call hold_slot first")
        return self._slot


@dataclass(eq=False, slots=True)
class QueuedChunk:
    """One migration's chunk that waits for a transfer."""

    mid: str
    stage: int
    first: int
    block_ids: Sequence[int]
    staging: StagingPool
    channel: TransportChannel
    board: Callable[[SharedSlot], None]
    """Called just before the chunk is announced."""
    places: Sequence[int] = ()
    sent: asyncio.Future[TransferTimes] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The transfer's times, or what went wrong."""
    fused: bool = False
    """Whether others are in the same transfer."""

    def __post_init__(self) -> None:
        # Whoever waited may be gone: then nobody asks what went wrong.
        self.sent.add_done_callback(lambda sent: sent.cancelled() or sent.exception())


@dataclass(slots=True)
class GoingChunk:
    """A stage's chunk that waits for its transfer, or is in it. turned, began: when its turn came,
    and when the stage began, by the clock."""

    queued: QueuedChunk
    times: ChunkTimes
    turned: float
    began: float


class ChunkTransfer:
    """Chunks that go in one slot: gathered by one copy, and pushed."""

    def __init__(self, batch: Sequence[QueuedChunk], staging: StagingPool, slot: int) -> None:
        self._batch = batch
        self._slot = slot
        self._shared = SharedSlot(staging, slot, len(batch))
        self._announced = 0
        self.gathered_at = 0.0
        """Time by the clock; 0: it isn't gathered."""
        self.over = asyncio.Event()
        """Set at its end, however it went."""

    async def run(
        self, context: SourceContext, send: Send, former: ChunkTransfer | None
    ) -> TransferTimes:
        """Gather, which the engine does after the copy of the `former` one, and push after it."""
        clock, batch, slot = context.clock, self._batch, self._slot
        channel, block_bytes = batch[0].channel, context.engine.layout.block_bytes
        ids = [block for queued in batch for block in queued.block_ids]
        nbytes = len(ids) * block_bytes
        fused = len({queued.mid for queued in batch}) > 1
        async with asyncio.timeout(context.timeout_s):
            buffer = await channel.buffer(slot)
            began = clock()
            checksums = await context.engine.gather(ids, buffer[:nbytes])
        self.gathered_at = gathered = clock()
        if former is not None:
            began = max(began, former.gathered_at)
        context.sizer.observe(nbytes, (gathered - began) * 1e3)
        parts = _chunks(batch, slot, checksums, block_bytes)

        def announce(payload: Frames = (), number: int = 0) -> None:
            for queued in batch:
                self._announced += 1
                queued.fused = fused
                queued.board(self._shared)
            at = PAYLOAD_SLOT if payload else slot
            chunks = [replace(chunk, slot=at, number=number) for chunk in parts]
            send(chunks[0] if len(chunks) == 1 else Bundle(chunks), payload)

        if former is not None:
            await former.over.wait()
        async with asyncio.timeout(context.timeout_s):
            await channel.push(replace(parts[0], nbytes=nbytes), announce)
        return TransferTimes(began, gathered, clock(), device_ms_of(checksums))

    def end(self, task: asyncio.Task[TransferTimes]) -> None:
        """The task of `run` has ended, or never begun: answer all chunks, and keep nothing."""
        batch, self._batch = self._batch, ()
        for _ in range(len(batch) - self._announced):
            self._shared.drop()
        error = None if task.cancelled() else task.exception()
        _clear(error)
        for queued in batch:
            if queued.sent.done():
                continue
            if error is not None:
                queued.sent.set_exception(error)
            elif task.cancelled():
                queued.sent.cancel()
            else:
                queued.sent.set_result(task.result())
        self.over.set()


class ChunkBatcher:
    """Sends the queued chunks of all migrations to one destination, those that wait together."""

    def __init__(self, context: SourceContext, endpoint: str) -> None:
        self.context = context
        self._endpoint = endpoint
        self._queue: deque[QueuedChunk] = deque()
        self._task: asyncio.Task[None] | None = None
        self._places = asyncio.Semaphore(UNDER_WAY)
        self._transfers: set[asyncio.Task[TransferTimes]] = set()
        self._last: ChunkTransfer | None = None

    def send(self, message: RpcMessage, payload: Frames = ()) -> None:
        """Send to the destination. Raises TransportError if it is gone."""
        self.context.host.send_to(self._endpoint, message, payload)

    def add(self, chunk: QueuedChunk) -> None:
        """Send the chunk with the next transfer that has room; `chunk.sent` is set then."""
        self._queue.append(chunk)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def withdraw(self, chunk: QueuedChunk) -> bool:
        """Take a chunk back; False if it is on its way already."""
        if chunk not in self._queue:
            return False
        self._queue.remove(chunk)
        return True

    async def close(self) -> None:
        """Cancel everything that waits or is under way."""
        tasks: list[asyncio.Task[Any]] = [*self._transfers]
        if self._task is not None:
            tasks.append(self._task)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        while self._queue:
            self._queue.popleft().sent.cancel()

    async def _run(self) -> None:
        while self._queue:
            await self._places.acquire()
            begun = False
            try:
                begun = await self._begin()
            finally:
                if not begun:
                    self._places.release()

    async def _begin(self) -> bool:
        """Begin the next transfer; False if there is none."""
        if not self._queue:
            return False
        staging = self._queue[0].staging
        try:
            slot = await staging.acquire(self.context.timeout_s)
        except TransportError as error:
            while self._queue:
                refusal = MigrationRefused("timeout", str(error))
                self._queue.popleft().sent.set_exception(refusal)
            return False
        batch = self._take(staging)
        if not batch:
            staging.release(slot)
            return False
        transfer = ChunkTransfer(batch, staging, slot)
        task = asyncio.create_task(transfer.run(self.context, self.send, self._last))
        self._last = transfer
        self._transfers.add(task)
        task.add_done_callback(partial(self._ended, transfer))
        return True

    def _ended(self, transfer: ChunkTransfer, task: asyncio.Task[TransferTimes]) -> None:
        self._transfers.discard(task)
        self._places.release()
        transfer.end(task)

    def _take(self, staging: StagingPool) -> list[QueuedChunk]:
        """The chunks at the head of the queue that one copy and one slot can hold; at least one."""
        batch: list[QueuedChunk] = []
        room = self.context.sizer.blocks()
        while self._queue:
            head = self._queue[0]
            if head.staging is not staging or (batch and head.channel is not batch[0].channel):
                break
            if batch and (not staging.fuses or len(head.block_ids) > room):
                break
            room -= len(head.block_ids)
            batch.append(self._queue.popleft())
        return batch


def _chunks(
    batch: Sequence[QueuedChunk], slot: int, checksums: list[int], block_bytes: int
) -> list[Chunk]:
    """The message of each chunk: its blocks lie in the slot one after the other."""
    ends = accumulate((len(queued.block_ids) for queued in batch), initial=0)
    return [
        Chunk(
            queued.mid, queued.stage, queued.first, slot, (end - begin) * block_bytes,
            checksums[begin:end], offset=begin * block_bytes, places=list(queued.places),
        )
        for queued, (begin, end) in zip(batch, pairwise(ends), strict=True)
    ]  # fmt: skip


def _sum(known: float | None, more: float | None) -> float | None:
    """The sum of what is known; None: neither is."""
    return known if more is None else (known or 0.0) + more


def _clear(error: BaseException | None) -> None:
    """Clear the frames that the error has left: a transfer's buffer is there, and the batch, which
    leads to the error again. A dead destination's memory would stay until garbage is collected.
    """
    while error is not None:
        clear_frames(error.__traceback__)
        error = error.__context__


async def _either(work: Coroutine[Any, Any, object], news: asyncio.Event) -> None:
    """Wait until `work` is done or `news` is set. Raises what `work` does."""
    waiting = asyncio.ensure_future(work)
    stopped = asyncio.ensure_future(news.wait())
    try:
        await asyncio.wait((waiting, stopped), return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        waiting.cancel()
    if waiting.done() and (error := waiting.exception()) is not None:
        raise error
