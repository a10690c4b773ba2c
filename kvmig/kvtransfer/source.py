"""The source session runs a `SourceMachine` against an engine and a peer: awaits, measures, frees.

Engine calls run to their end or their time-out; only waits for the peer are
interrupted, by a message or a cancellation. Whatever ends the session, no slot,
reservation or suspended request is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from msgspec import structs

from kvmig.engines import base
from kvmig.engines.base import Engine, too_large
from kvmig.ground.clock import Clock, monotonic
from kvmig.ground.config import MigrationConfig
from kvmig.ground.errors import KvmigError, MigrationRefused, PeerError, TransportError
from kvmig.kvtransfer import source_machine as do
from kvmig.kvtransfer.bandwidth import UNLIMITED, Throttle
from kvmig.kvtransfer.copying import Copier, Send, Shuttle
from kvmig.kvtransfer.messages import (
    Abort,
    Aborted,
    ChunkDone,
    Committed,
    FirstToken,
    Message,
    Refused,
    Reserve,
    Reserved,
)
from kvmig.kvtransfer.pause import Experience, Pause
from kvmig.kvtransfer.report import MigrationReport, Move, Timeline
from kvmig.kvtransfer.source_machine import Action, S, SendReserve, SourceMachine
from kvmig.kvtransfer.transports.base import Staging


class Cancel(msgspec.Struct, frozen=True):
    """The client left, or the instance stops."""

    reason: str


class PeerLost(msgspec.Struct, frozen=True):
    """The connection to the destination is gone."""


Event = Message | Cancel | PeerLost


class Mailbox:
    """Events in order; `feed` gives one to the machine and returns its actions."""

    def __init__(self, feed: Callable[[Event], list[Action]]) -> None:
        self._feed = feed
        self._events: deque[Event] = deque()
        self.news = asyncio.Event()
        """Set while there is something to read: what may wait, waits for this, too."""

    def put(self, event: Event) -> None:
        """From outside."""
        self._events.append(event)
        self.news.set()

    def read(self) -> list[Action]:
        """Feed what has come, up to the first event that asks for something."""
        while self._events:
            if actions := self._feed(self._events.popleft()):
                return actions
        self.news.clear()
        return []

    async def wait(self, timeout_s: float) -> list[Action]:
        """Wait for news at most so long; what they ask for, [] if nothing."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.news.wait()
        return self.read()

    async def listen(self) -> list[Action]:
        """Wait for an event that asks for something."""
        while True:
            await self.news.wait()
            if actions := self.read():
                return actions


T = TypeVar("T")
Foretell = Callable[[str, float, float], bool]
"""(request_id, pause_ms, stretch_ms): its client waits soon, see `kvmig.kvtransfer.pause`. Says
whether anybody was told."""


@dataclass(frozen=True, slots=True)
class Errand:
    """One migration out of this instance, as far as it doesn't change."""

    move: Move
    engine: Engine
    send: Send
    mailbox: Mailbox
    timeline: Timeline
    clock: Clock
    timeout_s: float
    foretell: Foretell

    async def bounded(self, call: Awaitable[T]) -> T:
        """Raises TimeoutError when it takes longer than an answer may."""
        async with asyncio.timeout(self.timeout_s):
            return await call


def nothing_told(request_id: str, pause_ms: float, stretch_ms: float) -> bool:
    """Where no front end is, no pause is spread."""
    return False


class BlockSender:
    """Every method returns what a message asks for instead, [] if none came in between."""

    def __init__(
        self, copier: Copier, mailbox: Mailbox, timeline: Timeline, block_bytes: int
    ) -> None:
        self.copier = copier
        self._mailbox = mailbox
        self._timeline = timeline
        self._block_bytes = block_bytes

    async def send_live(
        self, stage: int, first: int, block_ids: Sequence[int], places: Sequence[int] = ()
    ) -> list[Action]:
        """`send` while the request decodes: one stage of the report."""
        started = self._timeline.now()
        if stop := await self.send(stage, first, block_ids, places):
            return stop
        size = len(block_ids)
        parts = self.copier.end_stage()
        self._timeline.stage(size, size * self._block_bytes, started, parts)
        return []

    async def send(
        self,
        stage: int,
        first: int,
        block_ids: Sequence[int],
        places: Sequence[int] = (),
        urgent: bool = False,
    ) -> list[Action]:
        """Gather and send blocks of the request after the `first` ones that were sent.

        urgent: in the pause, each chunk by itself; else with those of other migrations.
        """
        for offset, ids in self.copier.cut(block_ids):
            where = places[offset : offset + len(ids)]
            if urgent:
                if stop := await self.ready():
                    return stop
                await self.copier.send(stage, first + offset, ids, urgent, where)
            else:
                news = self._mailbox.news
                while not await self.copier.ship(stage, first + offset, ids, where, news):
                    if stop := self._mailbox.read():
                        return stop
        return []

    async def ready(self) -> list[Action]:
        """Have a slot in hand for what comes next."""
        while not await self.copier.ready(self._mailbox.news):
            if stop := self._mailbox.read():
                return stop
        return []


class Opening:
    """Of one migration; the rest of what it needs to send blocks."""

    def __init__(
        self,
        errand: Errand,
        stagings: Mapping[str, Staging],
        experience: Experience,
        shuttle: Shuttle,
        throttle: Throttle,
    ) -> None:
        """`stagings`: by transport's name, the best first; all are offered."""
        self._errand = errand
        self._stagings = stagings
        self._experience = experience
        self._shuttle = shuttle
        self._throttle = throttle

    def reserve(self, asked: SendReserve, export: base.Export | None) -> Reserve:
        """The message; stage 0 brings the offers and, in its payload, the request."""
        move, stage, num_tokens = self._errand.move, asked.stage, asked.num_tokens
        if stage:
            return Reserve(
                move.mid, move.request_id, move.epoch, stage, num_tokens, last=asked.last
            )
        return Reserve(
            move.mid,
            move.request_id,
            move.epoch,
            stage,
            num_tokens,
            export=export and structs.replace(export, payload=[]),
            gateway=move.gateway,
            output_tokens=move.output_tokens,
            model=self._errand.engine.layout.fingerprint,
            numerics=self._errand.engine.numerics,
            inexact=move.inexact,
            offers=[staging.offer() for staging in self._stagings.values()],
        )

    def sender(self, answer: Reserved) -> BlockSender:
        """Over the transport that the destination wants. Raises PeerError for an unknown one."""
        errand, staging = self._errand, self._stagings.get(answer.transport)
        if staging is None:
            raise PeerError(f"the destination wants transport {answer.transport!r}")
        errand.timeline.exact = answer.exact
        errand.timeline.hit_blocks = answer.hit_blocks
        errand.timeline.transport = answer.transport
        copier = Copier(
            errand.move.mid,
            errand.engine,
            staging,
            self._experience.sizer,
            errand.send,
            errand.timeout_s,
            errand.clock,
            staging.channel(answer.token),
            self._throttle.line(errand.move.mid, errand.move.destination),
            self._shuttle,
        )
        return BlockSender(
            copier, errand.mailbox, errand.timeline, errand.engine.layout.block_bytes
        )


log = logging.getLogger(__name__)

Resolve = Callable[[str, str, int, str], Awaitable[bool]]
"""(mid, request_id, epoch, destination) -> whether it moved. Raises when nobody can say; may wait
for ever: `ask_arbiter` gives each question a reply's time-out."""


async def ask_arbiter(machine: SourceMachine, errand: Errand, resolve: Resolve) -> list[Action]:
    """The arbiter's word, or a late answer of the destination: whichever comes first.

    The machine says how many questions may stay unanswered.
    """
    move = errand.move
    asking = asyncio.ensure_future(
        errand.bounded(resolve(move.mid, move.request_id, move.epoch, move.destination))
    )
    listening = asyncio.ensure_future(errand.mailbox.listen())
    try:
        await asyncio.wait((asking, listening), return_when=asyncio.FIRST_COMPLETED)
        return listening.result() if listening.done() else _resolved(machine, asking)
    finally:
        asking.cancel()
        listening.cancel()


def _resolved(machine: SourceMachine, asked: asyncio.Future[bool]) -> list[Action]:
    error = asked.exception()
    if error is None:
        return machine.resolved(moved=asked.result())
    if isinstance(error, TimeoutError):
        return machine.unreachable()
    log.error("%s: nobody can say who runs the request: %r", machine.key, error)
    return machine.orphaned()


log = logging.getLogger(__name__)


class SourceSession:
    """One migration out of this instance."""

    def __init__(
        self,
        move: Move,
        engine: Engine,
        config: MigrationConfig,
        stagings: Mapping[str, Staging],
        experience: Experience,
        shuttle: Shuttle,
        send: Send,
        resolve: Resolve,
        on_moved: Callable[[Move], None],
        on_over: Callable[[], None] = lambda: None,
        clock: Clock = monotonic,
        throttle: Throttle = UNLIMITED,
        admit: Callable[[str, int], None] = lambda mid, num_tokens: None,
        foretell: Foretell = nothing_told,
    ) -> None:
        """`stagings`: by transport's name, the best first; all are offered.

        shuttle: of all migrations to this destination.
        on_moved: called at the moment that the request is the destination's.
        on_over: called once nothing is left here.
        throttle: when the next chunk may go; admit: (mid, tokens), once the request's size
        is known, raises MigrationRefused if it must not move now.
        """
        self.move = move
        self.machine = SourceMachine(move.mid, config.max_stages)
        self._engine = engine
        self._timeout_s = config.reply_timeout_ms / 1e3
        self._send = send
        self._resolve = resolve
        self._on_moved = on_moved
        self._on_over = on_over
        self._admit = admit
        self._mailbox = Mailbox(self._feed)
        self._undone: list[Action] = []
        self._sender: BlockSender | None = None
        self._export: base.Export | None = None
        self._first_token: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()
        self._timeline = Timeline(clock)
        self._errand = errand = Errand(
            move, engine, send, self._mailbox, self._timeline, clock, self._timeout_s, foretell
        )
        self._opening = Opening(errand, stagings, experience, shuttle, throttle)
        self._pause = Pause(errand, experience, 0.0 if move.urgent else config.spread)
        self.over = False
        """Whether nothing is left here; it may still wait for the first token's time."""

    # -- from outside

    def deliver(self, event: Event) -> None:
        """A message of this migration, or what happened here."""
        match event:
            case ChunkDone(scatter_ms=scatter_ms):
                if self._sender is not None:
                    self._sender.copier.done(scatter_ms)
            case FirstToken(ms=ms):
                self._hear_first_token(ms)
            case Cancel() | PeerLost() if self.machine.state is S.COMMITTED:
                self._hear_first_token(None)  # it won't come, or nobody would tell
            case _:
                self._mailbox.put(event)

    def stepped(self, tokens: int) -> None:
        """The request got so many tokens here."""
        self._pause.grew(tokens)

    @property
    def num_tokens(self) -> int:
        """Of the request when it was exported; 0 before."""
        return self._export.num_tokens if self._export else 0

    async def run(self) -> MigrationReport:
        """Move the request, or leave it as it was; the report says which."""
        try:
            await self._follow(self.machine.start())
        except asyncio.CancelledError:
            await self._follow(self._undone if self.machine.ended else self._stop())
            raise
        except MemoryError:
            if not self.machine.ended:
                await self._follow(self._stop())
            raise
        finally:
            if self._sender is not None:
                self._timeline.bytes = self._sender.copier.bytes
                self._timeline.fused_chunks = self._sender.copier.fused
                self._sender.copier.close()
            self.over = True
            self._on_over()
        machine, report = self.machine, self._timeline.report
        if machine.state is not S.COMMITTED:
            return report(
                self.move, "aborted", (machine.reason, machine.detail), ended_at=time.time()
            )
        if machine.decoding:
            await asyncio.wait((self._first_token,), timeout=self._timeout_s)
        first_token = self._first_token.result() if self._first_token.done() else None
        if first_token is not None:
            self._pause.first_token(first_token)
        return report(self.move, "committed", first_token=first_token, ended_at=time.time())

    def _hear_first_token(self, ms: float | None) -> None:
        if not self._first_token.done():
            self._first_token.set_result(ms)

    # -- the machine's actions

    async def _follow(self, actions: list[Action]) -> None:
        while actions:
            following: list[Action] = []
            for index, action in enumerate(actions):
                self._undone = actions[index:]
                following += await self._attempt(action)
            actions = following

    def _stop(self) -> list[Action]:
        """The session's task was cancelled."""
        if self.machine.beyond:
            return self.machine.orphaned()
        return self.machine.cancel("shutdown")

    async def _attempt(self, action: Action) -> list[Action]:
        try:
            return await self._perform(action)
        except MigrationRefused as error:
            return self._failed(action, error.reason, error.detail)
        except TimeoutError:
            return self._failed(action, "timeout", f"{type(action).__name__} took too long")
        except TransportError as error:
            return self._failed(action, "peer_lost", str(error))
        except KvmigError as error:
            return self._failed(action, "error", str(error))
        except MemoryError:
            raise  # it may have come between a state and its actions: see `Migrations`
        except Exception as error:
            log.exception("%s: %s failed", self.move.mid, action)
            return self._failed(action, "error", repr(error))

    def _failed(self, action: Action, reason: str, detail: str) -> list[Action]:
        if self.machine.ended:
            # Cleaning up: the next action must still have its turn.
            log.warning("%s: %s: %s", self.move.mid, type(action).__name__, detail)
            return []
        if self.machine.beyond:
            return self.machine.unreachable()
        return self.machine.failed(reason, detail)

    async def _perform(self, action: Action) -> list[Action]:
        engine, request_id = self._engine, self.move.request_id
        match action:
            case do.Export():
                self._export = await self._errand.bounded(engine.export(request_id))
                if size := too_large(self._export.payload):
                    raise MigrationRefused("unsupported", size)
                self._admit(self.move.mid, self._export.num_tokens)
                return self.machine.exported(self._export.num_tokens)
            case do.SendReserve():
                message = self._opening.reserve(action, self._export)
                self._pause.asks(message)
                opening = self._export if message.export else None
                self._send(message, opening.payload if opening else ())
                return await self._answer()
            case do.Check(sent):
                plan = await self._errand.bounded(engine.stage(request_id, sent))
                return self.machine.checked(plan)
            case do.Copy():
                blocks = self._blocks()
                stop = await blocks.send_live(
                    action.stage, action.first, action.block_ids, action.places
                )
                return stop or self.machine.copied()
            case do.Suspend(sent):
                return await self._suspend(sent)
            case do.SendTail():
                return await self._send_tail(action)
            case do.SendCommit():
                self._pause.send_commit()
                return await self._answer()
            case do.AskArbiter():
                return await ask_arbiter(self.machine, self._errand, self._resolve)
            case do.Resume() | do.Release() | do.SendAbort():
                await self._clean_up(action)
        return []

    async def _clean_up(self, action: do.Resume | do.Release | do.SendAbort) -> None:
        match action:
            case do.Resume():
                await self._engine.resume(self.move.request_id)
                self._timeline.resumed()
            case do.Release():
                self._timeline.resumed()
                if self.machine.state is S.COMMITTED:
                    self._on_moved(self.move)
                await self._engine.release(self.move.request_id)
            case do.SendAbort(reason):
                self._send(Abort(self.move.mid, reason), ())

    async def _suspend(self, sent: int) -> list[Action]:
        if self.machine.waits:  # nothing is copied, and nobody expects a token
            return self.machine.suspended(await self._pause.suspend(sent, None, decoding=False))
        if stop := await self._pause.put_off(self.machine.decoding):
            return stop
        blocks = self._blocks()
        if stop := await blocks.ready():
            return stop
        return self.machine.suspended(
            await self._pause.suspend(sent, blocks, self.machine.decoding)
        )

    async def _send_tail(self, rest: do.SendTail) -> list[Action]:
        if stop := await self._pause.send_tail(self.machine.stage, rest, self._blocks()):
            return stop
        self.machine.commit_sent()
        return await self._answer()

    # -- events

    async def _answer(self) -> list[Action]:
        """Wait for what moves the machine on."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._mailbox.listen()
        except TimeoutError:
            if self.machine.beyond:
                return self.machine.unanswered()
            raise

    def _feed(self, event: Event) -> list[Action]:
        machine = self.machine
        match event:
            case Reserved(stage=stage):
                self._pause.hears(event)
                if not machine.expects(stage):
                    return []  # answered once more
                if stage == 0:
                    self._sender = self._opening.sender(event)
                return machine.reserved(event.hit_blocks)
            case Refused(reason=reason, detail=detail):
                return machine.refused(reason, detail)
            case Aborted():
                return machine.refused("superseded", "given up by the destination")
            case Committed():
                self._pause.committed(event)
                return machine.committed()
            case Cancel(reason=reason):
                return machine.cancel(reason)
            case PeerLost() if machine.state is S.RESOLVING:
                return []
            case PeerLost() if machine.beyond:
                return machine.unreachable()
            case PeerLost():
                return machine.failed("peer_lost", f"no connection to {self.move.destination}")
        raise PeerError(f"{type(event).__name__} isn't for the source of a migration")

    # -- helpers

    def _blocks(self) -> BlockSender:
        if self._sender is None:
            raise PeerError("no transport was agreed on")
        return self._sender
