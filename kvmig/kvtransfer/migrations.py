"""All migrations of one llumlet, in both directions.

Every method is called on the llumlet's event loop. Each migration has a task of its
own, so several requests move at once; messages find theirs by `mid`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from kvmig.engines.base import Engine
from kvmig.ground.clock import monotonic
from kvmig.ground.config import MigrationConfig
from kvmig.ground.errors import MigrationRefused
from kvmig.kvtransfer.admission import admit, kv_bytes
from kvmig.kvtransfer.arbitration import Resolve
from kvmig.kvtransfer.arrivals import Arrivals, OnCommit
from kvmig.kvtransfer.chunks import ChunkSizer
from kvmig.kvtransfer.epochs import Epochs
from kvmig.kvtransfer.errand import Foretell, nothing_told
from kvmig.kvtransfer.experience import Experience
from kvmig.kvtransfer.mailbox import Cancel, PeerLost
from kvmig.kvtransfer.messages import (
    Aborted,
    ChunkDone,
    Committed,
    FirstToken,
    Message,
    Refused,
    Reserve,
    Reserved,
)
from kvmig.kvtransfer.refusals import Refusals
from kvmig.kvtransfer.report import MigrationReport
from kvmig.kvtransfer.shuttle import Shuttle
from kvmig.kvtransfer.source_session import SourceSession
from kvmig.kvtransfer.throttle import Throttle
from kvmig.kvtransfer.timeline import Move, Timeline
from kvmig.kvtransfer.transports.base import Staging
from kvmig.kvtransfer.wire import Frame

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
            return Timeline(monotonic).report(move, "aborted", (error.reason, error.detail))
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
