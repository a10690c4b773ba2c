"""All migrations of one llumlet, in both directions.

Every method is called on the llumlet's event loop. Each migration has a task of its
own, so several requests move at once; messages find theirs by `mid`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from kvmig.engines.base import Engine, Tail
from kvmig.ground.clock import monotonic
from kvmig.ground.config import MigrationConfig
from kvmig.ground.errors import MigrationRefused, PeerError
from kvmig.ground.layout import KVLayout
from kvmig.kvtransfer.bandwidth import Throttle
from kvmig.kvtransfer.copying import ChunkSizer, Send, Shuttle
from kvmig.kvtransfer.destination import CancelArrival, DestinationSession, Fence
from kvmig.kvtransfer.destination_machine import Action, Answer, DestinationMachine, Tombstones
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
    Message,
    Refused,
    Reserve,
    Reserved,
)
from kvmig.kvtransfer.pause import Experience
from kvmig.kvtransfer.report import MigrationReport, Move, Timeline
from kvmig.kvtransfer.source import Cancel, Foretell, PeerLost, Resolve, SourceSession, nothing_told
from kvmig.kvtransfer.source_machine import Epochs
from kvmig.kvtransfer.transports.base import Staging
from kvmig.kvtransfer.transports.select import Inboxes, site_of
from kvmig.kvtransfer.wire import Frame, Refusals


def kv_bytes(num_tokens: int, layout: KVLayout) -> int:
    """Bytes of KV cache that a request of so many tokens holds.

    Example: 33 tokens in blocks of 16 tokens and 1000 bytes are 3000 bytes.
    """
    return -(-num_tokens // layout.block_tokens) * layout.block_bytes


def admit(config: MigrationConfig, way: str, under_way: Sequence[int], nbytes: int) -> None:
    """Let one more migration of `nbytes` begin beside those `under_way`, of so many bytes each.

    way: "in" or "out". One that is over `max_migration_bytes` by itself goes alone.
    Raises MigrationRefused ("busy") that says which limit is reached.
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


OnCommit = Callable[[str, int, int, str], None]
"""(request_id, epoch, num_output_tokens, gateway), before the engine can emit a token."""


class Arrivals:
    """The incoming half of `Migrations`."""

    def __init__(
        self,
        engine: Engine,
        config: MigrationConfig,
        on_commit: OnCommit,
        on_commit_failed: Callable[[str], None],
        on_broken: Callable[[Exception], None],
        refusals: Refusals,
        has_front: Callable[[str], bool],
    ) -> None:
        """on_broken: a migration ended with an error that nothing was made for.

        has_front: whether the front end of this name is connected here.
        refusals: counts strangers at the transports' own sockets.
        """
        self._engine = engine
        self._config = config
        self._on_commit = on_commit
        self._on_commit_failed = on_commit_failed
        self._on_broken = on_broken
        self._has_front = has_front
        self._inboxes = Inboxes(config.transport, site_of(config, refusals))
        self._live: dict[str, DestinationSession] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tombstones = Tombstones()
        self._unstepped: dict[str, DestinationSession] = {}
        self.committed = 0
        """Requests that came, ever."""

    @property
    def request_ids(self) -> list[str]:
        """Of the requests that come just now."""
        return [session.request_id for session in self._live.values()]

    def receive(
        self, message: Message, payload: list[memoryview], send: Send, refusal: str = ""
    ) -> None:
        """A message of a source, to be answered with `send`.

        refusal: why a new migration can't begin, if it can't.
        """
        match message:
            case Bundle(chunks):
                for chunk in chunks:
                    self.receive(chunk, _part(payload, chunk), send)
                return
            case Expect(mid, ms):
                if mid in self._live:
                    self._live[mid].expect(ms)
                return
            case Reserve() | Chunk() | Commit() | Abort():
                mid = message.mid
            case _:
                raise PeerError(f"{type(message).__name__} isn't for a migration's destination")
        if mid in self._live:
            self._live[mid].deliver(message, payload)
        elif (
            isinstance(message, Reserve)
            and message.export is not None
            and not self._tombstones.knows(mid)
        ):
            request = replace(message.export, payload=[bytes(frame) for frame in payload])
            self._begin(replace(message, export=request), send, refusal)
        else:
            _answer(self._tombstones.answer(mid, message), send)

    async def fence(self, request_id: str, epoch: int) -> bool:
        """Whether this attempt is committed; if not, it never will be.

        Raises TimeoutError when a commit under way takes longer than a lease.
        """
        key = (request_id, epoch)
        for session in self._live.values():
            if session.attempt == key:
                answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
                session.deliver(Fence(answer))
                async with asyncio.timeout(self._config.lease_ms / 1e3):
                    return await answer
        return self._tombstones.fence(key)

    def cancel(self, request_id: str, reason: str) -> None:
        """The request isn't wanted any more."""
        self._unstepped.pop(request_id, None)
        for session in self._live.values():
            if session.request_id == request_id:
                session.deliver(CancelArrival(reason))

    def stepped(self, request_id: str) -> None:
        """The request got a token here; only the first after a commit is told."""
        session = self._unstepped.pop(request_id, None)
        if session is not None:
            session.first_token()

    async def close(self, timeout_s: float) -> None:
        """Give all up that aren't committed; free what was mapped."""
        for session in self._live.values():
            session.deliver(CancelArrival("shutdown"))
        tasks = list(self._tasks.values())
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        self._inboxes.close()

    def _begin(self, message: Reserve, send: Send, refusal: str) -> None:
        key = (message.request_id, message.epoch)
        try:
            self._check_in(message, "superseded" if self._tombstones.used(key) else refusal)
        except MigrationRefused as error:
            machine = DestinationMachine(message.mid)
            _answer(machine.failed(error.reason, error.detail), send)
            self._tombstones.bury(machine, key)
            return
        older = [
            self._tasks[mid]
            for mid, session in self._live.items()
            if session.request_id == message.request_id
        ]
        self.cancel(message.request_id, "superseded")
        session = DestinationSession(
            message,
            self._engine,
            self._config,
            self._inboxes,
            send,
            self._commits,
            self._commit_failed,
        )
        self._live[message.mid] = session
        task = asyncio.create_task(self._run(session, older), name=f"in {message.mid}")
        task.add_done_callback(self._over)
        self._tasks[message.mid] = task

    def _check_in(self, message: Reserve, refusal: str) -> None:
        """Raises MigrationRefused if the request must not come now."""
        if refusal:
            raise MigrationRefused(refusal)
        if self._engine.unmovable:
            raise MigrationRefused("unsupported", f"nothing can come: {self._engine.unmovable}")
        if not self._has_front(message.gateway):
            raise MigrationRefused(
                "incompatible", f"front end {message.gateway} is not connected here"
            )
        layout = self._engine.layout
        under_way = [
            kv_bytes(session.opening.num_tokens, layout)
            for session in self._live.values()
            if session.request_id != message.request_id
        ]
        admit(self._config, "in", under_way, kv_bytes(message.num_tokens, layout))

    async def _run(self, session: DestinationSession, older: list[asyncio.Task[None]]) -> None:
        mid = session.machine.key
        try:
            # An engine holds one reservation a request: the older one goes first.
            await asyncio.gather(*older, return_exceptions=True)
            await session.run()
            self.committed += session.machine.committed_here
        finally:
            del self._live[mid], self._tasks[mid]
            self._tombstones.bury(session.machine, session.attempt)

    def _over(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._on_broken(error)

    def _commits(self, session: DestinationSession, tail: Tail) -> None:
        opening = session.opening
        self._on_commit(opening.request_id, opening.epoch, tail.num_output_tokens, opening.gateway)
        self._unstepped[opening.request_id] = session

    def _commit_failed(self, session: DestinationSession) -> None:
        self._unstepped.pop(session.request_id, None)
        self._on_commit_failed(session.request_id)


def _part(payload: list[memoryview], chunk: Chunk) -> list[memoryview]:
    """The chunk's bytes, if they came with the message."""
    return [frame[chunk.offset : chunk.offset + chunk.nbytes] for frame in payload]


def _answer(actions: list[Action], send: Send) -> None:
    for action in actions:
        if isinstance(action, Answer):
            send(action.message, ())


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Departure:
    """A migration out that is under way."""

    session: SourceSession
    endpoint: str
    task: asyncio.Task[MigrationReport]


class Migrations:
    """Starts and feeds sessions. Hooks run on the loop, and must not block."""

    def __init__(
        self,
        instance: str,
        engine: Engine,
        config: MigrationConfig,
        stagings: Mapping[str, Staging],
        *,
        send_to: Callable[[str, Message, Sequence[Frame]], None],
        reply: Callable[[bytes, Message, Sequence[Frame]], None],
        resolve: Resolve,
        on_commit: OnCommit,
        on_commit_failed: Callable[[str], None],
        on_left: Callable[[str, str], None],
        foretell: Foretell = nothing_told,
        on_no_memory: Callable[[MemoryError], None] = lambda error: None,
        refusals: Refusals | None = None,
        has_front: Callable[[str], bool] = lambda gateway: True,
    ) -> None:
        """stagings: by transport's name, the best first; whoever opened them closes them.

        send_to: to the llumlet at an endpoint; reply: to an identity of `receive`; both
        raise TransportError if it is gone. resolve: asks the front end, see `Resolve`.
        on_commit: (request_id, epoch, num_output_tokens, gateway), just before a request
        starts here, may raise MigrationRefused; on_commit_failed: (request_id), undoes it.
        on_left: (request_id, endpoint), once a request runs there.
        foretell: tells the request's front end, see `Foretell`.
        on_no_memory: a migration ended anywhere, maybe between a state and its actions: it may
        hold blocks still, and what it answers needn't be true.
        refusals: counts strangers at the transports' own sockets.
        has_front: whether the front end of this name is connected here; a request of another is
        refused before anything is copied.
        """
        self._instance = instance
        self._engine = engine
        self._config = config
        self._stagings = stagings
        self._send_to = send_to
        self._reply = reply
        self._resolve = resolve
        self._on_left = on_left
        self._foretell = foretell
        self._on_no_memory = on_no_memory
        self._arrivals = Arrivals(
            engine,
            config,
            on_commit,
            on_commit_failed,
            self._broken,
            refusals or Refusals(),
            has_front,
        )
        self._experience = Experience(
            ChunkSizer(engine.layout.block_bytes, config.chunk_bytes, config.chunk_ms)
        )
        self._throttle = Throttle(
            config.max_bandwidth, config.max_pair_bandwidth, config.lease_ms / 2e3
        )
        self._free = asyncio.Semaphore(config.max_migrations)
        self._queued: set[str] = set()
        self._departures: dict[str, Departure] = {}
        self._shuttles: dict[str, Shuttle] = {}
        self._epochs = Epochs()
        self._closing = False

    # -- what is under way

    @property
    def incoming(self) -> int:
        """Migrations into this instance now."""
        return len(self._arrivals.request_ids)

    @property
    def outgoing(self) -> int:
        """Migrations out of this instance now."""
        return len(self._going())

    @property
    def staging_used(self) -> int:
        """Staging buffers that migrations hold now."""
        return sum(staging.held for staging in self._stagings.values())

    def moving(self) -> set[str]:
        """Requests that come or go now, or wait for their turn to go."""
        return {*self._arrivals.request_ids, *self._leaving()}

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
    ) -> MigrationReport:
        """Move a request to the llumlet `destination` at `endpoint`; says how it ended.

        epoch: under which it runs here; urgent, inexact: see `Move`. Waits while `max_migrations`
        others go; once it has begun, cancelling the wait doesn't stop the migration.
        """
        move = Move(
            mid=f"{self._instance}-{secrets.token_hex(8)}",
            request_id=request_id,
            epoch=self._epochs.after(request_id, epoch),
            source=self._instance,
            destination=destination,
            gateway=gateway,
            output_tokens=output_tokens,
            urgent=urgent,
            inexact=inexact,
        )
        try:
            await self._take_turn(request_id)
        except MigrationRefused as error:
            return Timeline(monotonic).report(
                move, "aborted", (error.reason, error.detail), ended_at=time.time()
            )
        session = SourceSession(
            move,
            self._engine,
            self._config,
            self._stagings,
            self._experience,
            self._shuttle(endpoint),
            partial(self._send_to, endpoint),
            self._resolve,
            lambda move: self._on_left(move.request_id, endpoint),
            self._free.release,
            throttle=self._throttle,
            admit=self._admit,
            foretell=self._foretell,
        )
        task = asyncio.create_task(session.run(), name=f"out {move.mid}")
        self._departures[move.mid] = Departure(session, endpoint, task)
        task.add_done_callback(lambda _: self._ended(move.mid, task))
        return await asyncio.shield(task)

    def _shuttle(self, endpoint: str) -> Shuttle:
        """Of all that go there; those of instances that nothing goes to any more are forgotten."""
        used = {departure.endpoint for departure in self._departures.values()}
        for idle in self._shuttles.keys() - used - {endpoint}:
            del self._shuttles[idle]
        timeout_s = self._config.reply_timeout_ms / 1e3
        return self._shuttles.setdefault(
            endpoint, Shuttle(self._engine, self._experience.sizer, timeout_s, monotonic)
        )

    async def _take_turn(self, request_id: str) -> None:
        """Wait until one more may go. Raises MigrationRefused if this one may not."""
        self._check_out(request_id)
        self._queued.add(request_id)
        try:
            async with asyncio.timeout(self._config.lease_ms / 1e3):
                await self._free.acquire()
        except TimeoutError:
            admit(self._config, "out", [0] * self._config.max_migrations, 0)
        finally:
            self._queued.remove(request_id)
        try:
            self._check_out(request_id)
        except MigrationRefused:
            self._free.release()
            raise

    def _check_out(self, request_id: str) -> None:
        if self._engine.unmovable:
            raise MigrationRefused("unsupported", self._engine.unmovable)
        refusal = self._refusal(request_id)
        if not refusal and request_id in self._arrivals.request_ids:
            refusal = "already_migrating"
        if refusal:
            raise MigrationRefused(refusal)

    def _admit(self, mid: str, num_tokens: int) -> None:
        """Raises MigrationRefused if so much more must not be on the move."""
        layout = self._engine.layout
        others = [
            kv_bytes(departure.session.num_tokens, layout)
            for departure in self._going()
            if departure.session.move.mid != mid
        ]
        admit(self._config, "out", others, kv_bytes(num_tokens, layout))

    def _ended(self, mid: str, task: asyncio.Task[MigrationReport]) -> None:
        session = self._departures.pop(mid).session
        if session.machine.fenced:
            self._epochs.fenced(session.move.request_id, session.move.epoch)
        if not session.over:  # it has never begun
            self._free.release()
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._broken(error)

    def _broken(self, error: Exception) -> None:
        log.error("a migration broke off", exc_info=error)
        if isinstance(error, MemoryError):
            self._on_no_memory(error)

    def receive_reply(self, endpoint: str, message: Message, payload: list[memoryview]) -> None:
        """A destination's answer. One for a migration that is over is dropped."""
        match message:
            case (
                Reserved() | Refused() | ChunkDone() | Committed() | FirstToken()
                | Aborted()
            ) if message.mid in self._departures:  # fmt: skip
                departure = self._departures[message.mid]
                if departure.endpoint == endpoint:
                    departure.session.deliver(message)
            case _:
                log.debug("%s: late or unknown %s", endpoint, type(message).__name__)

    def peer_lost(self, endpoint: str) -> None:
        """The connection to a destination is gone."""
        for departure in self._departures.values():
            if departure.endpoint == endpoint:
                departure.session.deliver(PeerLost())

    # -- in

    def receive(self, sender: bytes, message: Message, payload: list[memoryview]) -> None:
        """A source's message. Raises PeerError for one that a source doesn't send."""
        refusal = self._refusal(message.request_id) if isinstance(message, Reserve) else ""
        self._arrivals.receive(message, payload, partial(self._reply, sender), refusal)

    async def fence(self, request_id: str, epoch: int) -> bool:
        """Whether the migration to `epoch` is committed here; if not, it never will be."""
        return await self._arrivals.fence(request_id, epoch)

    def stepped(self, request_id: str, tokens: int) -> None:
        """A request got so many tokens here."""
        self._arrivals.stepped(request_id)
        for departure in self._departures.values():
            if departure.session.move.request_id == request_id:
                departure.session.stepped(tokens)

    # -- both

    def cancel_request(self, request_id: str, reason: str) -> None:
        """Nobody wants the request any more. Unknown ids are ignored."""
        for departure in self._departures.values():
            if departure.session.move.request_id == request_id:
                departure.session.deliver(Cancel(reason))
        self._arrivals.cancel(request_id, reason)

    async def close(self, timeout_s: float) -> None:
        """Give up what can be given up; after `timeout_s` the rest, too. Leaves nothing."""
        self._closing = True
        tasks = [departure.task for departure in self._departures.values()]
        for departure in self._going():
            departure.session.deliver(Cancel("shutdown"))
        arrivals = asyncio.ensure_future(self._arrivals.close(timeout_s))
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await arrivals
        await asyncio.gather(*(shuttle.close() for shuttle in self._shuttles.values()))

    def _going(self) -> list[Departure]:
        return [one for one in self._departures.values() if not one.session.over]

    def _refusal(self, request_id: str) -> str:
        if self._closing:
            return "shutdown"
        return "already_migrating" if request_id in self._leaving() else ""

    def _leaving(self) -> set[str]:
        return self._queued | {departure.session.move.request_id for departure in self._going()}
