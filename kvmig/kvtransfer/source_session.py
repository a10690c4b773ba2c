"""Runs a `SourceMachine` against an engine and a peer: awaits, measures, frees.

Engine calls run to their end or their time-out; only waits for the peer are
interrupted, by a message or a cancellation. Whatever ends the session, no slot,
reservation or suspended request is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from msgspec.structs import replace

from kvmig.engines import base
from kvmig.engines.base import Engine, Tail
from kvmig.ground.clock import Clock, monotonic
from kvmig.ground.config import Following as Wish
from kvmig.ground.config import MigrationConfig
from kvmig.ground.errors import KvmigError, MigrationRefused, PeerError, TransportError
from kvmig.kvtransfer import source_machine as do
from kvmig.kvtransfer.block_sender import BlockSender
from kvmig.kvtransfer.chunks import ChunkSizer
from kvmig.kvtransfer.compat import fingerprint
from kvmig.kvtransfer.copier import Copier, Send
from kvmig.kvtransfer.feed import Feed
from kvmig.kvtransfer.mailbox import Cancel, Event, Mailbox, PeerLost
from kvmig.kvtransfer.messages import (
    Abort,
    Aborted,
    Chunk,
    ChunkDone,
    Commit,
    Committed,
    FirstToken,
    Follow,
    Following,
    Message,
    Refused,
    Reserve,
    Reserved,
    Tokens,
)
from kvmig.kvtransfer.report import MigrationReport
from kvmig.kvtransfer.source_machine import Action, S, SourceMachine
from kvmig.kvtransfer.throttle import UNLIMITED, Throttle
from kvmig.kvtransfer.timeline import Move, Timeline
from kvmig.kvtransfer.transports.base import Staging
from kvmig.kvtransfer.wire import Frame

log = logging.getLogger(__name__)

T = TypeVar("T")

Resolve = Callable[[str, str, int, str], Awaitable[bool]]
"""(mid, request_id, epoch, destination) -> whether it moved. Raises when nobody can say."""


class SourceSession:
    """One migration out of this instance."""

    def __init__(
        self,
        move: Move,
        engine: Engine,
        config: MigrationConfig,
        stagings: Mapping[str, Staging],
        sizer: ChunkSizer,
        send: Send,
        resolve: Resolve,
        on_moved: Callable[[Move], None],
        clock: Clock = monotonic,
        throttle: Throttle = UNLIMITED,
        admit: Callable[[str, int], None] = lambda mid, num_tokens: None,
    ) -> None:
        """`stagings`: by transport's name, the best first; all are offered.

        on_moved: called at the moment that the request is the destination's.
        throttle: when the next chunk may go; admit: (mid, tokens), once the request's size
        is known, raises MigrationRefused if it must not move now.
        """
        self.move = move
        self.machine = SourceMachine(
            move.mid, config.max_stages, engine.can_follow and _wanted(config.follow, engine)
        )
        self._engine = engine
        self._timeout_s = config.reply_timeout_ms / 1e3
        self._stagings = stagings
        self._sizer = sizer
        self._send = send
        self._resolve = resolve
        self._on_moved = on_moved
        self._clock = clock
        self._throttle = throttle
        self._admit = admit
        self._mailbox = Mailbox(self._feed)
        self._undone: list[Action] = []
        self._sender: BlockSender | None = None
        self._export: base.Export | None = None
        self._commit: Commit | None = None
        self._payload: Sequence[Frame] = ()
        self._first_token: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._timeline = Timeline(clock)
        self._tokens = Feed(self._say_tokens, clock)
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
                if not self._first_token.done():
                    self._first_token.set_result(ms)
            case _:
                self._mailbox.put(event)

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
        finally:
            if self._sender is not None:
                self._timeline.bytes = self._sender.copier.bytes
                self._sender.copier.close()
            self._tokens.end()
            if self.machine.forked_there:
                self._timeline.followed = self._tokens.steps
            self.over = True
        machine, report = self.machine, self._timeline.report
        if machine.state is not S.COMMITTED:
            return report(self.move, "aborted", (machine.reason, machine.detail))
        await asyncio.wait((self._first_token,), timeout=self._timeout_s)
        first_token = self._first_token.result() if self._first_token.done() else None
        return report(self.move, "committed", first_token=first_token)

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
                self._export = await self._bounded(engine.export(request_id))
                self._admit(self.move.mid, self._export.num_tokens)
                return self.machine.exported(self._export.num_tokens)
            case do.SendReserve():
                self._send(self._reserve(action), ())
                return await self._answer()
            case do.Check(sent):
                return self.machine.checked(await self._bounded(engine.stage(request_id, sent)))
            case do.Copy():
                blocks = self._blocks()
                stop = await blocks.send_live(action.stage, action.first, action.block_ids)
                return stop or self.machine.copied()
            case do.Fork() | do.SendFork() | do.Listen():
                return await self._catch_up(action)
            case do.Suspend(sent):
                return await self._suspend(sent)
            case do.SendTail(first, tail):
                return await self._send_tail(first, tail)
            case do.SendCommit():
                self._send_commit()
                return await self._answer()
            case do.AskArbiter():
                return await self._ask_arbiter()
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

    def _reserve(self, asked: do.SendReserve) -> Reserve:
        move, stage, num_tokens = self.move, asked.stage, asked.num_tokens
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
            export=self._export,
            gateway=move.gateway,
            output_tokens=move.output_tokens,
            model=fingerprint(self._engine.layout),
            offers=[staging.offer() for staging in self._stagings.values()],
        )

    async def _catch_up(self, action: do.Fork | do.SendFork | do.Listen) -> list[Action]:
        match action:
            case do.Fork(sent):
                fork = self._engine.fork(self.move.request_id, sent, self._tokens.take)
                return self.machine.forked(await self._bounded(fork))
            case do.SendFork(first, fork):
                return await self._send_fork(first, fork)
            case do.Listen():
                return await self._answer()

    async def _send_fork(self, first: int, fork: Tail) -> list[Action]:
        blocks = self._blocks()
        if stop := await blocks.send_live(self.machine.stage, first, fork.block_ids):
            return stop
        self._send(Follow(self.move.mid, fork, first + len(fork.block_ids)), ())
        self._tokens.begin(fork.num_output_tokens)
        return self.machine.fork_sent(len(fork.block_ids))

    def _say_tokens(self, start: int, token_ids: list[int]) -> None:
        try:
            self._send(Tokens(self.move.mid, start, token_ids), ())
        except TransportError:
            self._mailbox.put(PeerLost())

    async def _suspend(self, sent: int) -> list[Action]:
        self._tokens.end()
        out: memoryview | None = None
        if not self.machine.forked_there:
            # A slot in hand, so that nobody else's chunks stand in the pause.
            if stop := await self._blocks().ready():
                return stop
            out = self._blocks().copier.room()
        self._timeline.pause()
        tail = await self._bounded(self._engine.suspend(self.move.request_id, sent, out))
        self._timeline.pause()
        return self.machine.suspended(tail)

    async def _send_tail(self, first: int, tail: Tail) -> list[Action]:
        self._timeline.tail_blocks = len(tail.block_ids)
        self._timeline.output_tokens = tail.num_output_tokens
        last: list[tuple[Chunk, Sequence[Frame]]] = []
        if tail.checksums:  # gathered already: goes with the commit

            def keep(message: Message, payload: Sequence[Frame]) -> None:
                assert isinstance(message, Chunk)
                last.append((message, payload))

            copier = self._blocks().copier
            await copier.push(self.machine.stage, first, tail.checksums, keep)
        elif stop := await self._blocks().send(self.machine.stage, first, tail.block_ids):
            return stop
        if stop := self._mailbox.read():
            return stop
        chunk, self._payload = last[0] if last else (None, ())
        self._commit = Commit(
            self.move.mid,
            self.move.request_id,
            self.move.epoch,
            replace(tail, checksums=[]),
            first + len(tail.block_ids),
            chunk,
        )
        self._send_commit()
        self._timeline.pause()
        self.machine.commit_sent()
        return await self._answer()

    def _send_commit(self) -> None:
        if self._commit is not None:
            self._send(self._commit, self._payload)

    async def _ask_arbiter(self) -> list[Action]:
        """The arbiter's word, or a late answer of the destination: whichever comes first."""
        move = self.move
        asking = asyncio.ensure_future(
            self._bounded(self._resolve(move.mid, move.request_id, move.epoch, move.destination))
        )
        listening = asyncio.ensure_future(self._mailbox.listen())
        try:
            await asyncio.wait((asking, listening), return_when=asyncio.FIRST_COMPLETED)
            return listening.result() if listening.done() else self._resolved(asking)
        finally:
            asking.cancel()
            listening.cancel()

    def _resolved(self, asked: asyncio.Future[bool]) -> list[Action]:
        error = asked.exception()
        if error is None:
            return self.machine.resolved(moved=asked.result())
        if isinstance(error, TimeoutError):
            return self.machine.unreachable()
        log.error("%s: nobody can say who runs the request: %r", self.move.mid, error)
        return self.machine.orphaned()

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
            case Reserved(stage=stage) if machine.expects(stage):
                if stage == 0:
                    self._open(event)
                return machine.reserved(event.hit_blocks, event.can_follow)
            case Reserved():
                return []  # answered twice
            case Refused(reason=reason, detail=detail):
                return machine.refused(reason, detail)
            case Aborted():
                return machine.refused("superseded", "given up by the destination")
            case Following(pace=pace, wait_ms=wait_ms):
                return machine.followed(pace, wait_ms, self._tokens.step_ms)
            case Committed():
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

    def _open(self, answer: Reserved) -> None:
        staging = self._stagings.get(answer.transport)
        if staging is None:
            raise PeerError(f"the destination wants transport {answer.transport!r}")
        self._timeline.hit_blocks = answer.hit_blocks
        self._timeline.transport = answer.transport
        copier = Copier(
            self.move.mid,
            self._engine,
            staging,
            self._sizer,
            self._send,
            self._timeout_s,
            self._clock,
            staging.channel(answer.token),
            self._throttle.line(self.move.mid, self.move.destination),
        )
        block_bytes = self._engine.layout.block_bytes
        self._sender = BlockSender(copier, self._mailbox, self._timeline, block_bytes)

    # -- helpers

    def _blocks(self) -> BlockSender:
        if self._sender is None:
            raise PeerError("no transport was agreed on")
        return self._sender

    async def _bounded(self, call: Awaitable[T]) -> T:
        async with asyncio.timeout(self._timeout_s):
            return await call


def _wanted(follow: Wish, engine: Engine) -> bool:
    return follow == "always" or (follow == "auto" and engine.following_pays)
