"""The destination session runs a `DestinationMachine` against an engine, message by message.

Everything goes through one queue, so an engine call is over before the next message
is looked at. Whatever ends the session, nothing is left but the request, if it was
committed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from kvmig.engines.base import HOLE, CameBlocks, Engine, Export, Tail
from kvmig.engines.identity import difference
from kvmig.ground.clock import Clock, monotonic
from kvmig.ground.config import MigrationConfig
from kvmig.ground.errors import KvmigError, MigrationRefused, PeerError, TransportError
from kvmig.kvtransfer import destination_machine as do
from kvmig.kvtransfer.copying import Send
from kvmig.kvtransfer.destination_machine import Action, DestinationMachine
from kvmig.kvtransfer.messages import (
    Abort,
    Chunk,
    Commit,
    FirstToken,
    Message,
    Offer,
    Reserve,
    Reserved,
)
from kvmig.kvtransfer.transports.base import Inbox
from kvmig.kvtransfer.transports.select import Inboxes


@dataclass(frozen=True, slots=True)
class CancelArrival:
    """Give up, if it isn't too late."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fence:
    """Answer whether it is committed, and from then on it stays so."""

    answer: asyncio.Future[bool]


Event = Message | CancelArrival | Fence


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


log = logging.getLogger(__name__)


class DestinationSession:
    """One migration into this instance. `reserve` is its first message."""

    def __init__(
        self,
        reserve: Reserve,
        engine: Engine,
        config: MigrationConfig,
        inboxes: Inboxes,
        send: Send,
        on_commit: Callable[[DestinationSession, Tail], None],
        on_commit_failed: Callable[[DestinationSession], None],
        clock: Clock = monotonic,
    ) -> None:
        """on_commit: called before the engine can emit; may raise MigrationRefused.

        on_commit_failed: undoes it.
        """
        self.opening = reserve
        self.machine = DestinationMachine(reserve.mid)
        self._engine = engine
        self._lease_s = config.lease_ms / 1e3
        self._receiver = BlockReceiver(
            reserve.request_id, engine, inboxes, config.reply_timeout_ms / 1e3
        )
        self._send = send
        self._on_commit = on_commit
        self._on_commit_failed = on_commit_failed
        self._clock = clock
        self._events: asyncio.Queue[tuple[Event, list[memoryview]]] = asyncio.Queue()
        self._committed_at = 0.0
        self.deliver(reserve)

    @property
    def request_id(self) -> str:
        """Of the request that comes."""
        return self.opening.request_id

    @property
    def _exact(self) -> bool:
        return self.opening.numerics == self._engine.numerics

    @property
    def attempt(self) -> tuple[str, int]:
        """(request_id, epoch)."""
        return self.opening.request_id, self.opening.epoch

    # -- from outside

    def deliver(self, event: Event, payload: list[memoryview] | None = None) -> None:
        """A message of this migration, or what happened here."""
        self._events.put_nowait((event, payload or []))

    def expect(self, ms: float) -> None:
        """The source commits soon: told at once, for the step that it is about begins soon."""
        self._engine.expect(self.request_id, ms)

    def first_token(self) -> None:
        """The request's first step here has ended: tell the source."""
        ms = (self._clock() - self._committed_at) * 1e3
        self._answer(FirstToken(self.machine.key, max(0.0, ms) if self._committed_at else 0.0))

    async def run(self) -> None:
        """Until the migration is committed or cancelled; then late messages are answered."""
        try:
            while not self.machine.ended:
                try:
                    async with asyncio.timeout(self._lease_s):
                        event, payload = await self._events.get()
                except TimeoutError:
                    event, payload = CancelArrival("timeout"), []
                await self._take(event, payload)
        except BaseException:  # a cancellation, or what nothing here was made for
            if not self.machine.ended:
                await self._engine.cancel(self.request_id)
            raise
        finally:
            await self._rest()

    async def _rest(self) -> None:
        while not self._events.empty():
            event, payload = self._events.get_nowait()
            if self.machine.ended:
                await self._take(event, payload)
            elif isinstance(event, Fence) and not event.answer.done():
                event.answer.cancel()

    # -- the machine

    async def _take(self, event: Event, payload: list[memoryview]) -> None:
        actions = self._feed(event)
        while actions:
            following: list[Action] = []
            for action in actions:
                following += await self._attempt(action, payload)
            actions = following
        if isinstance(event, Fence) and not event.answer.done():
            event.answer.set_result(self.machine.committed_here)

    def _feed(self, event: Event) -> list[Action]:
        machine = self.machine
        match event:
            case Reserve():
                return machine.reserve(event)
            case Chunk():
                return machine.chunk(event)
            case Commit():
                return machine.commit(event)
            case Abort():
                return machine.abort()
            case Fence():
                return machine.fence()
            case CancelArrival(reason):
                return machine.cancel(reason)
        log.warning("%s: ignored %s from the source", machine.key, type(event).__name__)
        return []

    async def _attempt(self, action: Action, payload: list[memoryview]) -> list[Action]:
        try:
            return await self._perform(action, payload)
        except MigrationRefused as error:
            return self._failed(action, error.reason, error.detail)
        except TimeoutError:
            return self._failed(action, "timeout", f"{type(action).__name__} took too long")
        except KvmigError as error:
            return self._failed(action, "error", str(error))
        except MemoryError:
            raise  # it may have come between a state and its actions: see `Migrations`
        except Exception as error:
            log.exception("%s: %s failed", self.machine.key, type(action).__name__)
            return self._failed(action, "error", repr(error))

    def _failed(self, action: Action, reason: str, detail: str) -> list[Action]:
        if self.machine.ended:
            log.warning("%s: %s: %s", self.machine.key, type(action).__name__, detail)
            return []
        return self.machine.failed(reason, detail)

    async def _perform(self, action: Action, payload: list[memoryview]) -> list[Action]:
        match action:
            case do.ReserveBlocks(None, num_tokens, last):
                await self._receiver.grow(num_tokens)
                if last:
                    await self._receiver.bounded(self._engine.prepare(self.request_id))
                return self.machine.reserved()
            case do.ReserveBlocks(export) if export is not None:
                return await self._open(export)
            case do.Scatter(chunk):
                began = self._clock()
                await self._receiver.scatter(chunk, payload)
                return self.machine.scattered(chunk, (self._clock() - began) * 1e3)
            case do.RunRequest(tail, last):
                came = None if last is None else await self._receiver.came(last, payload)
                return await self._commit(tail, came)
            case do.FreeBlocks():
                await self._engine.cancel(self.request_id)
            case do.Answer(message):
                self._answer(message)
        return []

    async def _open(self, export: Export) -> list[Action]:
        ours = self._engine.layout.fingerprint
        if self.opening.model != ours:
            raise MigrationRefused("incompatible", f"{self.opening.model}; here: {ours}")
        if not (self.opening.inexact or self._exact):
            differs = difference(self._engine.numerics, self.opening.numerics)
            raise MigrationRefused("incompatible", f"its logits round differently: {differs}")
        transport = await self._receiver.open(self.opening.offers)
        hit_blocks = await self._receiver.bounded(self._engine.reserve(export))
        return self.machine.reserved(hit_blocks, transport)

    async def _commit(self, tail: Tail, last: CameBlocks | None) -> list[Action]:
        began = self._clock()
        try:
            self._on_commit(self, tail)
            # No time-out: it ends with a step, and until then nobody can say how.
            await self._engine.commit(self.request_id, tail, last)
        except BaseException:
            self._on_commit_failed(self)
            raise
        self._committed_at = self._clock()
        return self.machine.committed((self._committed_at - began) * 1e3)

    def _answer(self, message: Message) -> None:
        if isinstance(message, Reserved):
            message = msgspec.structs.replace(
                message,
                token=self._receiver.token if message.stage == 0 else "",
                cadence=self._engine.cadence(),
                can_hold=self._engine.can_hold,
                exact=self._exact,
            )
        try:
            self._send(message, ())
        except TransportError as error:
            # The source asks again, or the arbiter does; nothing here depends on it.
            log.warning("%s: %s: %s", self.machine.key, type(message).__name__, error)
