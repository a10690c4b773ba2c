"""The destination's session: one migration into this instance, from Reserve to the first token.

It runs a `DestinationMachine` against an engine. Everything goes through one mailbox, and an engine
call is over before the machine gets the next message; only the copy of the next chunk may have
begun (`landing`). However the session ends, nothing is left but the request, if it was committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from msgspec.structs import replace

from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.config import MigrationConfig
from kvmig.core.errors import MigrationRefused, PeerError, TransportError
from kvmig.engines.base import HOLE, CameBlocks, Engine, RequestExport, RequestTail
from kvmig.engines.identity import difference
from kvmig.kvtransfer.context import LlumletPort
from kvmig.kvtransfer.destination_machine import (
    Action,
    DestinationMachine,
    DestinationState,
    FreeBlocks,
    ReserveBlocks,
    RunRequest,
    ScatterChunk,
    SendAnswer,
    SourceMessage,
)
from kvmig.kvtransfer.landing import ChunkLandings
from kvmig.kvtransfer.mailbox import CancelMigration
from kvmig.kvtransfer.messages import Chunk, FirstToken, Reserve, Reserved
from kvmig.kvtransfer.session import MigrationSession
from kvmig.kvtransfer.transports.base import TransportInbox
from kvmig.kvtransfer.transports.select import InboxCache
from kvmig.rpc.messages import RpcMessage

log = logging.getLogger(__name__)


@dataclass
class DestinationContext:
    """Shared by all migrations into one instance."""

    host: LlumletPort
    engine: Engine
    config: MigrationConfig
    inboxes: InboxCache
    clock: TimeSource = monotonic
    unstepped: dict[str, DestinationSession] = field(default_factory=dict)
    """Committed requests whose first step here has not ended."""


@dataclass(frozen=True, slots=True)
class FenceQuestion:
    """Answer whether the migration is committed; from then on it stays so."""

    answer: asyncio.Future[bool]


@dataclass(frozen=True, slots=True)
class SourceEvent:
    """A message of the source, with the bytes that came along."""

    message: SourceMessage
    payload: Sequence[memoryview]


Event = SourceEvent | CancelMigration | FenceQuestion


class DestinationSession(MigrationSession[Event, Action]):
    """One migration into this instance. Messages come in at `deliver`.

    Nothing interrupts it: an action is over before the machine gets the next event.
    """

    machine: DestinationMachine

    def __init__(self, context: DestinationContext, sender: bytes, reserve: Reserve) -> None:
        """`reserve`: its first message; sender: who gets the answers."""
        super().__init__(context.config.reply_timeout_ms / 1e3)
        self.opening = reserve
        self.request_id = reserve.request_id
        self.attempt = reserve.request_id, reserve.epoch
        self.machine = DestinationMachine(reserve.mid)
        self._context = context
        self._engine = context.engine
        self._sender = sender
        self._exact = reserve.numerics == context.engine.numerics
        self._inbox: TransportInbox | None = None
        self._blocks: list[int] = []
        """The request's own, in their order; HOLE where none is kept."""
        self._payload: Sequence[memoryview] = ()
        """The bytes of the present message."""
        self._landings = ChunkLandings(self._engine, context.clock, self._timeout_s)
        self._fence: asyncio.Future[bool] | None = None
        """The answer that is due once the present event is dealt with."""
        self._committed_at = 0.0
        self.deliver(SourceEvent(reserve, ()))

    # -- events

    def deliver(self, event: Event) -> None:
        """Take an event. The copy of a chunk may begin at once, behind the present one."""
        super().deliver(event)
        self._begin_next()

    def first_token(self) -> None:
        """Inform the source that the request's first step here has ended."""
        ms = (self._context.clock() - self._committed_at) * 1e3
        self._answer(FirstToken(self.machine.key, max(0.0, ms) if self._committed_at else 0.0))

    async def run(self) -> None:
        """Run until the migration is committed or cancelled; then answer late messages."""
        try:
            while not self.machine.ended:
                try:
                    async with asyncio.timeout(self._context.config.lease_ms / 1e3):
                        actions = await self._mailbox.listen()
                except TimeoutError:
                    actions = self._hear(CancelMigration("timeout"))
                await self._deal_with(actions)
        except BaseException:  # a cancellation, or what nothing here was made for
            if not self.machine.committed_here:
                await self._free_blocks()
            raise
        finally:
            await self._take_late()
            self._mailbox.close()
            self._undone = []

    async def _take_late(self) -> None:
        while (event := self._mailbox.take_event()) is not None:
            if self.machine.ended:
                await self._deal_with(self._hear(event))
            elif isinstance(event, FenceQuestion) and not event.answer.done():
                event.answer.cancel()

    def _hear(self, event: Event) -> list[Action]:
        match event:
            case CancelMigration(reason=reason):
                return self.machine.cancel(reason)
            case FenceQuestion(answer):
                self._fence = answer
                return self.machine.fence()
            case SourceEvent(message, payload):
                self._payload = payload
                return self.machine.receive_message(message)

    async def _deal_with(self, actions: list[Action]) -> None:
        """Carry out what the last event led to; then a fence is answered."""
        await self._follow(actions)
        if self._fence is not None and not self._fence.done():
            self._fence.set_result(self.machine.committed_here)
        self._payload, self._fence = (), None

    def _give_up(self, reason: str, detail: str) -> list[Action]:
        return self.machine.failed(reason, detail)

    # -- the steps

    async def _perform(self, action: Action) -> list[Action]:
        match action:
            case ReserveBlocks(None, num_tokens, last):
                await self._grow(num_tokens)
                if last:
                    async with self._in_time():
                        await self._engine.prepare(self.request_id)
                return self.machine.reserved()
            case ReserveBlocks(export) if export is not None:
                return await self._open(export)
            case ScatterChunk(chunk):
                if self._landings:
                    self._begin_next()
                else:
                    self._begin(chunk, self._payload)
                ms, device_ms = await self._landings.finish()
                return self.machine.scattered(chunk, ms, device_ms)
            case RunRequest(tail, last):
                came_along = None if last is None else await self._receive(last, self._payload)
                return await self._commit(tail, came_along)
            case FreeBlocks():
                await self._free_blocks()
            case SendAnswer(message):
                self._answer(message)
        return []

    async def _open(self, export: RequestExport) -> list[Action]:
        """Take the first transport that works here, and reserve blocks for the request."""
        opening, engine = self.opening, self._engine
        try:
            async with self._in_time():
                self._inbox = await self._context.inboxes.open(opening.offers)
        except TransportError as error:
            raise MigrationRefused("incompatible", str(error)) from error
        # Just before the engine takes the request: its weights may have been updated meanwhile.
        ours = engine.layout.fingerprint
        if opening.model != ours:
            raise MigrationRefused("incompatible", f"{opening.model}; here: {ours}")
        if not (opening.inexact or self._exact):
            differs = difference(engine.numerics, opening.numerics)
            raise MigrationRefused("incompatible", f"its logits round differently: {differs}")
        async with self._in_time():
            hit_blocks = await engine.reserve(export)
        return self.machine.reserved(hit_blocks, self._inbox.transport)

    async def _grow(self, num_tokens: int) -> None:
        """Hold blocks for `num_tokens` tokens."""
        async with self._in_time():
            self._blocks = await self._engine.grow(self.request_id, num_tokens)

    async def _free_blocks(self) -> None:
        """Free what the engine holds for the request, which no copy is at any more."""
        await self._landings.call_off()
        await self._engine.cancel(self.request_id)

    # -- chunks

    def _begin_next(self) -> None:
        """Begin with the chunk that comes next, if it may follow the present one: not one of the
        pause, which goes before other copies, nor one that there is no room for yet. A refusal of
        more room frees what is there, which the present copy is at."""
        if self.machine.state is not DestinationState.SCATTERING:
            return
        match self._mailbox.first:
            case SourceEvent(Chunk(urgent=False) as chunk, payload):
                has_room = self._end(_places(chunk)) <= len(self._blocks)
                if has_room and self._landings.can_follow(chunk):
                    self._begin(chunk, payload)

    def _begin(self, chunk: Chunk, payload: Sequence[memoryview]) -> None:
        self._landings.begin(chunk, partial(self._receive, chunk, payload), self._begin_next)

    async def _receive(self, chunk: Chunk, payload: Sequence[memoryview]) -> CameBlocks:
        """The chunk's bytes, and blocks for them. Raises PeerError if they can't be blocks."""
        layout, count = self._engine.layout, len(chunk.checksums)
        if count == 0 or chunk.nbytes != count * layout.block_bytes or self._inbox is None:
            raise PeerError(f"{chunk.nbytes} bytes can't be {count} blocks")
        places = _places(chunk)
        if len(places) != count or min(places) < 0:
            raise PeerError(f"{count} blocks can't be at places {list(places)}")
        if (end := self._end(places)) > len(self._blocks):
            await self._grow(end // layout.tables * layout.block_tokens)
        block_ids = [self._blocks[place] if place < len(self._blocks) else HOLE for place in places]
        if HOLE in block_ids:
            raise MigrationRefused("no_blocks", f"none is kept at places {list(places)}")
        async with self._in_time():
            fused = await self._inbox.receive(chunk, payload[0] if payload else None)
        return CameBlocks(chunk.first, block_ids, fused, chunk.checksums)

    def _end(self, places: Sequence[int]) -> int:
        """How many places the request must have for blocks at these: all tables grow alike."""
        tables = self._engine.layout.tables
        return (max(places, default=-1) // tables + 1) * tables

    # -- the end

    async def _commit(self, tail: RequestTail, last: CameBlocks | None) -> list[Action]:
        """Run the request. Raises MigrationRefused if the host or the engine refuses."""
        context, request_id, opening = self._context, self.request_id, self.opening
        began = context.clock()
        if opening.export is not None and opening.export.idle:  # nothing runs, nobody waits for it
            await self._engine.commit(request_id, tail, last)
            return self.machine.committed((context.clock() - began) * 1e3)
        try:
            context.host.on_commit(
                request_id, opening.epoch, tail.num_output_tokens, opening.gateway
            )
            context.unstepped[request_id] = self
            # No time-out: it ends with a step, and until then nobody can say how.
            await self._engine.commit(request_id, tail, last)
        except BaseException:
            context.unstepped.pop(request_id, None)
            context.host.on_commit_failed(request_id)
            raise
        self._committed_at = context.clock()
        return self.machine.committed((self._committed_at - began) * 1e3)

    def _answer(self, message: RpcMessage) -> None:
        if isinstance(message, Reserved):
            token = self._inbox.token if self._inbox and message.stage == 0 else ""
            message = replace(
                message,
                token=token,
                cadence=self._engine.cadence(),
                can_hold=self._engine.can_hold,
                exact=self._exact,
            )
        try:
            self._context.host.reply(self._sender, message)
        except TransportError as error:
            # The source asks again, or the arbiter does; nothing here depends on it.
            log.warning("%s: %s: %s", self.machine.key, type(message).__name__, error)


def _places(chunk: Chunk) -> Sequence[int]:
    """Positions of the chunk's blocks in the request."""
    return chunk.places or range(chunk.first, chunk.first + len(chunk.checksums))
