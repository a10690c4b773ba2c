"""The source's session: one migration out of this instance, from the export to the release.

It runs a `SourceMachine` against an engine and a destination: awaits, measures, frees. Engine
calls run to their end or their time-out; only waits for the destination are interrupted, by a
message or a cancellation. However the session ends, no slot, reservation or suspended request
is left.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from msgspec.structs import replace

from kvmig.core.errors import MigrationRefused, PeerError, TransportError
from kvmig.engines.base import RequestExport, RequestTail, StagedBlocks, too_large
from kvmig.kvtransfer.copying import BlockSender, ChunkBatcher
from kvmig.kvtransfer.mailbox import CancelMigration, PeerLost
from kvmig.kvtransfer.messages import (
    Abort,
    Aborted,
    ChunkDone,
    Committed,
    FirstToken,
    Refused,
    Reserve,
    Reserved,
)
from kvmig.kvtransfer.pause import MigrationPause
from kvmig.kvtransfer.report import MigrationReport
from kvmig.kvtransfer.session import MigrationSession
from kvmig.kvtransfer.source_machine import (
    Action,
    AskArbiter,
    CheckRequest,
    CopyStage,
    DestinationMessage,
    ExportRequest,
    FollowPrompt,
    ReleaseRequest,
    ResumeRequest,
    SendAbort,
    SendCommit,
    SendReserve,
    SendTail,
    SourceMachine,
    SourceState,
    SuspendRequest,
)
from kvmig.kvtransfer.timeline import MigrationSpec, MigrationTimeline

log = logging.getLogger(__name__)


Event = DestinationMessage | ChunkDone | FirstToken | CancelMigration | PeerLost


class SourceSession(MigrationSession[Event, Action]):
    """One migration out of this instance. Messages come in at `deliver`."""

    machine: SourceMachine

    def __init__(
        self,
        move: MigrationSpec,
        endpoint: str,
        batcher: ChunkBatcher,
        admit: Callable[[SourceSession], None],
    ) -> None:
        """batcher: of all migrations to this destination.

        admit: called once `num_tokens` is known; raises MigrationRefused if that many must
        not move now.
        """
        super().__init__(batcher.context.timeout_s)
        self.move = move
        self.endpoint = endpoint
        self.num_tokens = 0
        """The request's when it was exported; 0 before."""
        self.over = False
        """Whether nothing is left here; it may still wait for the first token's time."""
        self._context = context = batcher.context
        self.machine = SourceMachine(
            move.mid,
            context.config.max_stages,
            after_prompt=move.after_prompt,
            idle=move.idle,
        )
        self._engine = context.engine
        self._batcher = batcher
        self._admit = admit
        self._timeline = MigrationTimeline(move, context.clock)
        self.pause = MigrationPause(move, batcher, self._mailbox, self._timeline)
        self._export: RequestExport | None = None
        self._sender: BlockSender | None = None
        self._first_token: asyncio.Future[float | None] = asyncio.get_running_loop().create_future()

    # -- events

    def deliver(self, event: Event) -> None:
        """Take an event; one that concerns no state of the machine doesn't wait in the mailbox."""
        match event:
            case ChunkDone(scatter_ms=scatter_ms, device_ms=device_ms):
                if self._sender is not None:
                    self._sender.done(scatter_ms, device_ms)
            case FirstToken(ms=ms):
                self._hear_first_token(ms)
            case CancelMigration() | PeerLost() if self.machine.state is SourceState.COMMITTED:
                self._hear_first_token(None)  # it won't come, or nobody would tell
            case _:
                super().deliver(event)

    def _hear_first_token(self, ms: float | None) -> None:
        if not self._first_token.done():
            self._first_token.set_result(ms)

    def _hear(self, event: Event) -> list[Action]:
        machine = self.machine
        match event:
            case CancelMigration(reason=reason):
                return machine.cancel(reason)
            case PeerLost():
                return machine.lost(f"no connection to {self.move.destination}")
            case Reserved(stage=stage):
                self.pause.record_reserved(event)
                if stage == 0 and machine.expects(stage):
                    self._agree(event)
                return machine.receive_message(event)
            case Committed():
                self.pause.record_committed(event)
                return machine.receive_message(event)
            case Refused() | Aborted():
                return machine.receive_message(event)
        raise PeerError(f"{type(event).__name__} isn't for the source of a migration")

    def _agree(self, answer: Reserved) -> None:
        """Take the transport that the destination wants. Raises PeerError for an unknown one."""
        staging = self._context.stagings.get(answer.transport)
        if staging is None:
            raise PeerError(f"the destination wants transport {answer.transport!r}")
        timeline = self._timeline
        timeline.exact = answer.exact
        timeline.hit_blocks = answer.hit_blocks
        timeline.transport = answer.transport
        self._sender = BlockSender(
            self.move, self._batcher, staging, answer.token, self._mailbox, timeline
        )

    # -- from the beginning to the end

    async def run(self) -> MigrationReport:
        """Move the request, or leave it as it was; the report shows which.

        The migration's place (`SourceContext.places`) is released once nothing of it is left here.
        """
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
                self._sender.close()
            self._mailbox.close()
            self.over = True
            self._context.places.release()
        report = await self._report()
        self._context.rate.observe(report)
        return report

    async def _report(self) -> MigrationReport:
        """The report; waits for the first token at the destination, if one is to come soon."""
        machine = self.machine
        if machine.state is not SourceState.COMMITTED:
            return self._timeline.aborted(machine.reason, machine.detail)
        if machine.decoding:
            await asyncio.wait((self._first_token,), timeout=self._context.timeout_s)
        first_token = self._first_token.result() if self._first_token.done() else None
        if first_token is not None:
            self.pause.record_first_token(first_token)
        return self._timeline.committed(first_token)

    def _stop(self) -> list[Action]:
        """The session's task was cancelled."""
        return self.machine.orphaned() if self.machine.beyond else self.machine.cancel("shutdown")

    def _give_up(self, reason: str, detail: str) -> list[Action]:
        return self.machine.broken(reason, detail)

    def _reason(self, name: str, error: Exception) -> tuple[str, str]:
        if isinstance(error, TransportError):
            return "peer_lost", str(error)
        return super()._reason(name, error)

    async def _perform(self, action: Action) -> list[Action]:
        match action:
            case ExportRequest():
                async with self._in_time():
                    self._export = await self._engine.export(self.move.request_id)
                self.num_tokens = self._export.num_tokens
                if size := too_large(self._export.payload):
                    raise MigrationRefused("unsupported", size)
                self._admit(self)
                return self.machine.exported(self.num_tokens)
            case SendReserve():
                return await self._reserve(action)
            case CheckRequest(sent):
                async with self._in_time():
                    plan = await self._engine.stage(self.move.request_id, sent)
                return self.machine.checked(plan)
            case CopyStage(stage, first, block_ids, places):
                await self._blocks().send_live(stage, first, block_ids, places)
                return self.machine.copied()
            case FollowPrompt(sent, most_tokens):
                return self.machine.followed(await self._follow_prompt(sent, most_tokens))
            case SuspendRequest(sent):
                return await self._suspend(sent)
            case SendTail(first, tail):
                await self.pause.send_tail(self.machine.stage, first, tail, self._blocks())
                self.machine.commit_sent()
                return await self._answer()
            case SendCommit():
                self.pause.send_commit()
                return await self._answer()
            case AskArbiter():
                return await self._ask_arbiter()
            case ResumeRequest() | ReleaseRequest() | SendAbort():
                await self._clean_up(action)
        return []

    async def _reserve(self, action: SendReserve) -> list[Action]:
        """Ask for room; stage 0 brings the offers and, in its payload, the request."""
        move, export = self.move, self._export
        message = Reserve(
            move.mid,
            move.request_id,
            move.epoch,
            action.stage,
            action.num_tokens,
            last=action.last,
        )
        if action.stage == 0 and export is not None:
            message = replace(
                message,
                export=replace(export, payload=[]),
                gateway=move.gateway,
                output_tokens=move.output_tokens,
                model=self._engine.layout.fingerprint,
                numerics=self._engine.numerics,
                inexact=move.inexact,
                offers=[staging.offer() for staging in self._context.stagings.values()],
            )
        self.pause.record_reserve(message)
        self._batcher.send(message, export.payload if export and message.export else ())
        return await self._answer()

    async def _follow_prompt(self, sent: int, most_tokens: int) -> StagedBlocks | RequestTail:
        self._mailbox.read()
        self.pause.keep_lease()
        async with self._in_time():
            found = await self._engine.follow_prompt(self.move.request_id, sent, most_tokens)
        if isinstance(found, RequestTail):
            self.pause.record_suspended()
        return found

    async def _suspend(self, sent: int) -> list[Action]:
        decoding = self.machine.decoding
        if self.machine.waits:  # nothing is copied, and nobody expects a token
            return self.machine.suspended(await self.pause.suspend(sent, None, decoding=False))
        if decoding:
            await self.pause.spread_out()
        await self.pause.put_off()
        blocks = self._blocks()
        await blocks.hold_slot()
        return self.machine.suspended(await self.pause.suspend(sent, blocks, decoding))

    async def _answer(self) -> list[Action]:
        """Wait for what moves the machine on."""
        try:
            async with self._in_time():
                return await self._mailbox.listen()
        except TimeoutError:
            if self.machine.beyond:
                return self.machine.unanswered()
            raise

    async def _ask_arbiter(self) -> list[Action]:
        """The arbiter's word, or a late answer of the destination: whichever comes first.

        The machine decides how many questions may stay unanswered.
        """
        machine, move = self.machine, self.move
        question = self._context.host.resolve(
            move.mid, move.request_id, move.epoch, move.destination
        )
        asking = asyncio.ensure_future(asyncio.wait_for(question, self._context.timeout_s))
        listening = asyncio.ensure_future(self._mailbox.listen())
        try:
            await asyncio.wait((asking, listening), return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                return listening.result()
            if (error := asking.exception()) is None:
                return machine.resolved(moved=asking.result())
        finally:
            asking.cancel()
            listening.cancel()
        if isinstance(error, TimeoutError):
            return machine.unreachable()
        log.error("%s: which instance runs the request is not known: %r", move.mid, error)
        return machine.orphaned()

    async def _clean_up(
        self,
        action: ResumeRequest | ReleaseRequest | SendAbort,
    ) -> None:
        match action:
            case ResumeRequest():
                await self._engine.resume(self.move.request_id)
                self._timeline.resumed()
            case ReleaseRequest():
                self._timeline.resumed()
                if self.machine.state is SourceState.COMMITTED and not self.move.idle:
                    self._context.host.on_left(self.move.request_id, self.endpoint)
                await self._engine.release(self.move.request_id)
            case SendAbort(reason):
                self._batcher.send(Abort(self.move.mid, reason))

    # -- helpers

    def _blocks(self) -> BlockSender:
        if self._sender is None:
            raise PeerError("no transport was agreed on")
        return self._sender
