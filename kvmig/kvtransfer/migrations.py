"""The migrations of one llumlet, in both directions.

Every method is called on the llumlet's event loop. Each migration has a session and a task of its
own, so several requests move at once; messages find their session by `mid`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from msgspec.structs import replace

from kvmig.core.background import cancel_tasks
from kvmig.core.clock import monotonic
from kvmig.core.config import MigrationConfig
from kvmig.core.errors import MigrationRefused, PeerError
from kvmig.core.layout import KVLayout
from kvmig.engines.base import Engine
from kvmig.kvtransfer.context import LlumletPort, SourceContext
from kvmig.kvtransfer.copying import ChunkBatcher
from kvmig.kvtransfer.destination import (
    DestinationContext,
    DestinationSession,
    FenceQuestion,
    SourceEvent,
)
from kvmig.kvtransfer.destination_machine import (
    Action,
    DestinationMachine,
    MachineTombstones,
    SendAnswer,
)
from kvmig.kvtransfer.mailbox import CancelMigration, PeerLost
from kvmig.kvtransfer.messages import (
    Abort,
    Aborted,
    Bundle,
    Chunk,
    ChunkDone,
    Commit,
    Committed,
    Expect,
    FirstToken,
    Refused,
    Reserve,
    Reserved,
)
from kvmig.kvtransfer.report import MigrationReport
from kvmig.kvtransfer.source import SourceSession
from kvmig.kvtransfer.source_machine import EpochCounter
from kvmig.kvtransfer.timeline import MigrationSpec, MigrationTimeline
from kvmig.kvtransfer.transports.base import StagingPool
from kvmig.kvtransfer.transports.select import InboxCache, TransportSite, site_of
from kvmig.rpc.codec import RefusalCounter
from kvmig.rpc.messages import RpcMessage

log = logging.getLogger(__name__)

END_S = 5.0
"""Within which a process that loses its connections has ended, with a GPU's memory."""


def kv_bytes(num_tokens: int, layout: KVLayout) -> int:
    """Bytes of KV cache that a request of `num_tokens` tokens holds.

    Example: 33 tokens in blocks of 16 tokens and 1000 bytes are 3000 bytes.
    """
    return -(-num_tokens // layout.block_tokens) * layout.block_bytes


def admit(config: MigrationConfig, way: str, under_way: Sequence[int], nbytes: int) -> None:
    """Let one more migration of `nbytes` begin besides those `under_way`, given by their bytes.

    way: "in" or "out". One that is over `max_migration_bytes` by itself goes alone.
    Raises MigrationRefused ("busy") that names the limit.
    """
    if len(under_way) >= config.max_migrations:
        raise MigrationRefused(
            "busy",
            f"{len(under_way)} migrations {way}, --max-migrations is {config.max_migrations}",
        )
    most, total = config.max_migration_bytes, sum(under_way) + nbytes
    if most and under_way and total > most:
        raise MigrationRefused(
            "busy", f"{total} bytes would migrate {way}, --max-migration-bytes is {most}"
        )


class MigrationSessions:
    """Starts sessions and delivers messages to them."""

    def __init__(
        self,
        instance: str,
        engine: Engine,
        config: MigrationConfig,
        stagings: Mapping[str, StagingPool],
        host: LlumletPort,
        site: TransportSite | None = None,
        epochs: EpochCounter | None = None,
    ) -> None:
        """stagings: by transport's name, the best first; their opener closes them.

        site: where the transports of this side are; None: with engines of this process only.
        epochs: shared by all instances, where no message carries the epoch that a request runs
        under; None: this instance's own.
        """
        self._instance = instance
        self._engine = engine
        self._config = config
        self._host = host
        self._closing = False
        self._tasks: dict[str, asyncio.Task[object]] = {}
        """Tasks of all sessions, by migration."""
        # Out of this instance.
        self._out = SourceContext(host, engine, config, stagings)
        self._queued: set[str] = set()
        self._departures: dict[str, SourceSession] = {}
        self._batchers: dict[str, ChunkBatcher] = {}
        self._epochs = epochs or EpochCounter()
        # Into this instance.
        site = site or site_of(config, engine.layout.gpu, RefusalCounter())
        self._on_gpu = engine.layout.gpu is not None
        ready = partial(engine.scatter, []) if self._on_gpu else None
        inboxes = InboxCache(config.transport, site, ready)
        self._in = DestinationContext(host, engine, config, inboxes)
        self._arrivals: dict[str, DestinationSession] = {}
        self._tombstones = MachineTombstones()

    # -- what is under way

    @property
    def incoming(self) -> int:
        """Migrations into this instance now."""
        return len(self._arrivals)

    @property
    def outgoing(self) -> int:
        """Migrations out of this instance now."""
        return len(self._going())

    @property
    def staging_used(self) -> int:
        """Staging buffers that migrations hold now."""
        return sum(staging.held for staging in self._out.stagings.values())

    @property
    def blocks_s(self) -> float:
        """KV blocks per second that migrations have lately sent; 0: none was measured."""
        return self._out.rate.blocks_s

    def moving(self) -> set[str]:
        """Requests that come or go now, or wait for their turn to go."""
        return {*self._coming(), *self._leaving()}

    async def get_ready(self) -> None:
        """Let the engine's GPU pin the staging buffers, before requests decode."""
        if not self._on_gpu or self._engine.unmovable:
            return
        for staging in self._out.stagings.values():
            if (memory := staging.memory) is not None:
                await self._engine.gather([], memory)

    # -- out

    async def migrate(
        self,
        request_id: str,
        destination: str,
        endpoint: str,
        *,
        gateway: str = "",
        epoch: int = 0,
        output_tokens: int = 0,
        urgent: bool = False,
        inexact: bool = False,
        after_prompt: bool = False,
        idle: bool = False,
    ) -> MigrationReport:
        """Move a request to the llumlet `destination` at `endpoint`; returns the report.

        epoch: under which it runs here; urgent and the rest: see `MigrationSpec`. Waits while
        `max_migrations` others go; once it has begun, cancelling the wait doesn't stop the
        migration.
        """
        move = MigrationSpec(
            mid=f"{self._instance}-{secrets.token_hex(8)}",
            request_id=request_id,
            epoch=self._epochs.after(request_id, epoch),
            source=self._instance,
            destination=destination,
            gateway=gateway,
            output_tokens=output_tokens,
            urgent=urgent,
            inexact=inexact,
            after_prompt=after_prompt,
            idle=idle,
        )
        try:
            await self._take_turn(request_id)
        except MigrationRefused as error:
            return MigrationTimeline(move, monotonic).aborted(error.reason, error.detail)
        session = SourceSession(move, endpoint, self._batcher(endpoint), self._admit)
        self._departures[move.mid] = session
        task = asyncio.create_task(session.run(), name=f"out {move.mid}")
        self._tasks[move.mid] = task
        task.add_done_callback(lambda _: self._departed(session, task))
        return await asyncio.shield(task)

    async def _take_turn(self, request_id: str) -> None:
        """Wait until one more may go. Raises MigrationRefused if this one may not."""
        self._check_out(request_id)
        self._queued.add(request_id)
        try:
            async with asyncio.timeout(self._config.lease_ms / 1e3):
                await self._out.places.acquire()
        except TimeoutError:
            admit(self._config, "out", [0] * self._config.max_migrations, 0)
        finally:
            self._queued.remove(request_id)
        try:
            self._check_out(request_id)
        except MigrationRefused:
            self._out.places.release()
            raise

    def _check_out(self, request_id: str) -> None:
        if self._engine.unmovable:
            raise MigrationRefused("unsupported", self._engine.unmovable)
        refusal = self._refusal(request_id)
        if not refusal and request_id in self._coming():
            refusal = "already_migrating"
        if refusal:
            raise MigrationRefused(refusal)

    def _admit(self, session: SourceSession) -> None:
        """Raise MigrationRefused if that many bytes more must not be on the move."""
        layout = self._engine.layout
        others = [
            kv_bytes(other.num_tokens, layout) for other in self._going() if other is not session
        ]
        admit(self._config, "out", others, kv_bytes(session.num_tokens, layout))

    def _batcher(self, endpoint: str) -> ChunkBatcher:
        """The batcher of a destination; batchers that no migration uses are forgotten."""
        used = {session.endpoint for session in self._departures.values()}
        for idle in self._batchers.keys() - used - {endpoint}:
            del self._batchers[idle]
        return self._batchers.setdefault(endpoint, ChunkBatcher(self._out, endpoint))

    def _departed(self, session: SourceSession, task: asyncio.Task[MigrationReport]) -> None:
        move = session.move
        del self._departures[move.mid]
        if session.machine.fenced:
            self._epochs.fenced(move.request_id, move.epoch)
        if not session.over:  # it has never begun
            self._out.places.release()
        self._ended(move.mid, task)

    def receive_reply(self, endpoint: str, message: RpcMessage) -> None:
        """Take a destination's answer. One for a migration that is over is dropped."""
        match message:
            case (
                Reserved() | Refused() | ChunkDone() | Committed() | FirstToken()
                | Aborted()
            ) if message.mid in self._departures:  # fmt: skip
                session = self._departures[message.mid]
                if session.endpoint == endpoint:
                    session.deliver(message)
            case _:
                log.debug("%s: late or unknown %s", endpoint, type(message).__name__)

    def peer_lost(self, endpoint: str) -> bool:
        """The connection to a destination is gone; whether a migration went there."""
        lost = [one for one in self._departures.values() if one.endpoint == endpoint]
        for session in lost:
            session.deliver(PeerLost())
        self._let_go()
        asyncio.get_running_loop().call_later(END_S, self._let_go)
        return bool(lost)

    def _let_go(self) -> None:
        for staging in self._out.stagings.values():
            staging.let_go()

    # -- in

    def receive(self, sender: bytes, message: RpcMessage, payload: list[memoryview]) -> None:
        """Take a source's message. Raises PeerError for one that a source doesn't send."""
        match message:
            case Bundle(chunks):
                for chunk in chunks:
                    self.receive(sender, chunk, _part(payload, chunk))
            case Expect(mid, ms):
                if mid in self._arrivals:
                    self._engine.expect(self._arrivals[mid].request_id, ms)
            case Reserve() | Chunk() | Commit() | Abort():
                session = self._arrivals.get(message.mid)
                if session is not None:
                    session.deliver(SourceEvent(message, payload))
                elif (
                    isinstance(message, Reserve)
                    and message.export is not None
                    and not self._tombstones.has_ended(message.mid)
                ):
                    request = replace(message.export, payload=[bytes(frame) for frame in payload])
                    self._begin(sender, replace(message, export=request))
                else:
                    self._answer(sender, self._tombstones.answer(message.mid, message))
            case _:
                raise PeerError(f"{type(message).__name__} isn't for a migration's destination")

    async def fence(self, request_id: str, epoch: int) -> bool:
        """Whether the migration to `epoch` is committed here; if not, it never will be.

        Raises TimeoutError when a commit under way takes longer than a lease.
        """
        for session in self._arrivals.values():
            if session.attempt == (request_id, epoch):
                answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
                session.deliver(FenceQuestion(answer))
                async with asyncio.timeout(self._config.lease_ms / 1e3):
                    return await answer
        return self._tombstones.fence((request_id, epoch))

    def _begin(self, sender: bytes, message: Reserve) -> None:
        attempt = message.request_id, message.epoch
        try:
            self._check_in(message)
        except MigrationRefused as error:
            machine = DestinationMachine(message.mid)
            self._answer(sender, machine.failed(error.reason, error.detail))
            self._tombstones.bury(machine, attempt)
            return
        older = [
            self._tasks[mid]
            for mid, session in self._arrivals.items()
            if session.request_id == message.request_id
        ]
        self._cancel_arrivals(message.request_id, "superseded")
        session = DestinationSession(self._in, sender, message)
        self._arrivals[message.mid] = session
        task = asyncio.create_task(self._arrive(session, older), name=f"in {message.mid}")
        task.add_done_callback(lambda _: self._ended(message.mid, task))
        self._tasks[message.mid] = task

    def _check_in(self, message: Reserve) -> None:
        """Raises MigrationRefused if the request must not come now."""
        used = self._tombstones.used((message.request_id, message.epoch))
        if refusal := "superseded" if used else self._refusal(message.request_id):
            raise MigrationRefused(refusal)
        if self._engine.unmovable:
            raise MigrationRefused("unsupported", f"nothing can come: {self._engine.unmovable}")
        if not self._host.has_front(message.gateway):
            raise MigrationRefused(
                "incompatible", f"front end {message.gateway} is not connected here"
            )
        layout, idle = self._engine.layout, _is_idle(message)
        under_way = [
            kv_bytes(session.opening.num_tokens, layout)
            for session in self._arrivals.values()
            if session.request_id != message.request_id
            and (idle or not _is_idle(session.opening))  # a session is in no request's way
        ]
        admit(self._config, "in", under_way, kv_bytes(message.num_tokens, layout))

    async def _arrive(
        self, session: DestinationSession, older: Iterable[asyncio.Task[object]]
    ) -> None:
        try:
            # An engine holds one reservation a request: the older one goes first.
            await asyncio.gather(*older, return_exceptions=True)
            await session.run()
        finally:
            del self._arrivals[session.machine.key]
            self._tombstones.bury(session.machine, session.attempt)

    def _answer(self, sender: bytes, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, SendAnswer):
                self._host.reply(sender, action.message)

    # -- both

    def stepped(self, request_id: str, tokens: int) -> None:
        """Record a request's tokens here; the first after a commit is reported to its source."""
        arrived = self._in.unstepped.pop(request_id, None)
        if arrived is not None:
            arrived.first_token()
        for session in self._departures.values():
            if session.move.request_id == request_id:
                session.pause.add_tokens(tokens)

    def cancel_request(self, request_id: str, reason: str) -> None:
        """End the migration of a request that has been aborted. Unknown ids are ignored."""
        for session in self._departures.values():
            if session.move.request_id == request_id:
                session.deliver(CancelMigration(reason))
        self._cancel_arrivals(request_id, reason)

    async def close(self, timeout_s: float) -> None:
        """Give up what can be given up; after `timeout_s` the rest, too. Leaves nothing."""
        self._closing = True
        tasks = list(self._tasks.values())
        for departure in self._going():
            departure.deliver(CancelMigration("shutdown"))
        for arrival in self._arrivals.values():
            arrival.deliver(CancelMigration("shutdown"))
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            await cancel_tasks(*late)
        self._in.inboxes.close()
        await asyncio.gather(*(batcher.close() for batcher in self._batchers.values()))

    def _cancel_arrivals(self, request_id: str, reason: str) -> None:
        self._in.unstepped.pop(request_id, None)
        for session in self._arrivals.values():
            if session.request_id == request_id:
                session.deliver(CancelMigration(reason))

    def _ended(self, mid: str, task: asyncio.Task[MigrationReport] | asyncio.Task[None]) -> None:
        del self._tasks[mid]
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            log.error("a migration broke off", exc_info=error)
            if isinstance(error, MemoryError):
                self._host.on_no_memory(error)

    def _going(self) -> list[SourceSession]:
        return [session for session in self._departures.values() if not session.over]

    def _coming(self) -> set[str]:
        return {session.request_id for session in self._arrivals.values()}

    def _leaving(self) -> set[str]:
        return self._queued | {session.move.request_id for session in self._going()}

    def _refusal(self, request_id: str) -> str:
        if self._closing:
            return "shutdown"
        return "already_migrating" if request_id in self._leaving() else ""


def _is_idle(opening: Reserve) -> bool:
    """Whether a session without a request comes."""
    return opening.export is not None and opening.export.idle


def _part(payload: list[memoryview], chunk: Chunk) -> list[memoryview]:
    """The chunk's bytes, if they came with the message."""
    return [frame[chunk.offset : chunk.offset + chunk.nbytes] for frame in payload]
