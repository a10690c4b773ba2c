"""Moves of sessions that have no request now: which one, from where, and what is known of it after.

The instance that ran the session's last request gives its blocks up; `SessionMemory` has what that
instance finds them by. A request of the session that comes meanwhile is dispatched as any other:
the blocks are whole at the source until the destination has committed, and then there.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from array import array
from collections.abc import Callable, Mapping

from kvmig.asgi.errors import (
    CallFailed,
    CallTimeout,
    GatewayError,
    InstanceLost,
    LauncherGone,
    MigrationDisabled,
    NoDestination,
    SameInstance,
    SessionBusy,
    UnknownInstance,
    UnknownSession,
)
from kvmig.controlplane.front_messages import (
    CarrySessions,
    FindSession,
    FoundSessionMoved,
    FrontReply,
    KnownSession,
    MoveFoundSession,
    SessionsAsked,
    SessionsFound,
)
from kvmig.controlplane.messages import Migrated, MoveSession
from kvmig.core.clock import TimeSource
from kvmig.core.config import ClusterConfig
from kvmig.core.errors import KvmigError, PeerError
from kvmig.frontend.instances import InstancePool
from kvmig.frontend.pending_calls import PendingCalls
from kvmig.frontend.ports import DispatchOrder, OtherFronts
from kvmig.frontend.requests import LiveRequest
from kvmig.frontend.session_carrier import SessionCarrier
from kvmig.frontend.session_memory import KEPT_S, RememberedSession, SessionMemory
from kvmig.frontend.session_search import SessionPlaceOfCall, find_latest
from kvmig.kvtransfer.report import MigrationReport

TIMEOUT_S = 120.0
"""Longest wait for a session to have moved."""
PASSED_ON_S = 10.0
"""Longer than that, if another front end moves it."""

log = logging.getLogger(__name__)

_PASSED: dict[str, type[GatewayError]] = {
    one.__name__: one
    for one in (
        CallTimeout,
        InstanceLost,
        MigrationDisabled,
        NoDestination,
        SameInstance,
        SessionBusy,
        UnknownInstance,
        UnknownSession,
    )
}
"""Errors that another front end may answer with."""


class SessionMoves:
    """Moves of one front end's sessions."""

    def __init__(
        self,
        fleet: InstancePool,
        questions: PendingCalls,
        config: ClusterConfig,
        clock: TimeSource,
        running: Callable[[], Mapping[int, int | None]],
    ) -> None:
        """running: sessions of which a request runs, or waits, now: the name of each, by owner."""
        self.others: OtherFronts | None = None
        """The server's other front ends; None: there are none."""
        self.memory = SessionMemory(clock)
        self._fleet = fleet
        self._questions = questions
        self._enabled = config.scheduler.migration
        self._clock = clock
        self._running = running
        self._carrier = SessionCarrier(self, fleet, clock)
        self._moving: dict[str, RememberedSession] = {}
        """Sessions under way, by the id of the move, until its report comes or their instance is
        lost; also those whose callers have got a timeout."""

    def remember_request(self, request: LiveRequest) -> None:
        """A request has ended: its session, if its call has named one, may move from now on.

        A request without a token, whose client left before, leaves nothing that is known.
        """
        call, instance = request.call, request.instance
        if not request.output_token_ids:
            return
        if not self._enabled or call is None or instance is None or request.search is not None:
            return
        if call.session is None or call.session_name is None:
            return
        self.memory.remember_session(
            RememberedSession(
                call.session,
                call.session_name,
                instance,
                request.payload,
                array("I", request.output_token_ids),
                request.marks,
                call.payer,
            )
        )

    async def move(
        self, name: int, owner: int | None, destination: str | None, *, inexact: bool = False
    ) -> MigrationReport:
        """Move a session and wait for the report, also of a move that was given up.

        name, owner: see `SessionMemory.find_all`. destination: None: the one with the most room.
        inexact: also to an instance where its tokens may differ. Raises what `kvmig.asgi.errors`
        names when it can't start.
        """
        if not self._enabled:
            raise MigrationDisabled("migration is off: the server runs with --no-migration")
        found = await self._find(name, owner)
        if found.front:
            return await self._pass_on(found, destination, inexact)
        return await self._move_here(found.owner, destination, inexact)

    async def reply(self, asked: SessionsAsked) -> FrontReply:
        """Answer another front end, or the launcher."""
        match asked:
            case FindSession(name, owner):
                return self._tell(name, owner)
            case CarrySessions():
                return await self._carrier.carry(asked)
            case MoveFoundSession(owner, destination, inexact):
                try:
                    return FoundSessionMoved(await self._move_here(owner, destination, inexact))
                except KvmigError as error:
                    return FoundSessionMoved(None, type(error).__name__, str(error))

    def _tell(self, name: int | None, owner: int | None) -> SessionsFound:
        known = self.memory.find_all(name, owner)
        return SessionsFound(
            tuple(KnownSession(one.owner, one.ended_at) for one in known),
            tuple(
                running
                for running, its_name in self._running().items()
                if name in (None, its_name) and owner in (None, running)
            ),
        )

    async def _find(self, name: int, owner: int | None) -> SessionPlaceOfCall:
        """The session, and the front end that served its last call; empty: this one. Without the
        launcher, what is known here counts."""
        found = {"": self._tell(name, owner)}
        if self.others is not None:
            try:
                replies = await self.others.ask_fronts(FindSession(name, owner))
            except LauncherGone:
                if not found[""].sessions:
                    raise
                replies = {}
            told = {name: one for name, one in replies.items() if isinstance(one, SessionsFound)}
            found |= told
        return find_latest(found)

    async def _pass_on(
        self, found: SessionPlaceOfCall, destination: str | None, inexact: bool
    ) -> MigrationReport:
        """Let the front end that knows the session move it."""
        assert self.others is not None
        order = MoveFoundSession(found.owner, destination, inexact)
        replies = await self.others.ask_fronts(order, found.front, TIMEOUT_S + PASSED_ON_S)
        reply = replies.get(found.front)
        if not isinstance(reply, FoundSessionMoved):
            raise CallTimeout(f"front end {found.front}, which knows the session, did not answer")
        if reply.report is None:
            raise _PASSED.get(reply.error, CallFailed)(reply.sentence)
        return reply.report

    async def _move_here(
        self, owner: int, destination: str | None, inexact: bool
    ) -> MigrationReport:
        session = self.memory.find(owner)
        source = session.instance
        self._check_still(session)
        there = self._fleet.roomiest(source, inexact) if destination is None else destination
        endpoint = self._fleet.endpoint(there)
        if there == source:
            raise SameInstance(f"the session is on instance {there} already")
        return await self._order_move(session, there, endpoint, inexact)

    async def carry(self, owner: int, destination: str, patience_s: float) -> MigrationReport:
        """Move a session out of an instance that drains, when no request moves there.

        patience_s: longest wait for that. Raises what `kvmig.asgi.errors` names when it can't
        start.
        """
        session, endpoint = self.memory.find(owner), self._fleet.endpoint(destination)
        self._check_still(session)
        return await self._order_move(session, destination, endpoint, False, patience_s)

    async def carry_ahead(self, turn: DispatchOrder) -> None:
        """Let a session's blocks go first to where its turn had better run, if that is sooner than
        to compute them there.

        The turn waits no longer than the computing takes; the move goes on then, and the turn runs
        where dispatch sends it, as it does when the move is given up.
        """
        session = None if turn.session is None else self.memory.find_if_known(turn.session)
        if session is None or not self._enabled:
            return
        found = self._fleet.find_carriage(turn, session.instance)
        if found is None:
            return
        there = found.destination
        try:
            self._check_still(session)
            async with asyncio.timeout(found.compute_s):
                endpoint = self._fleet.endpoint(there)
                report = await self._order_move(session, there, endpoint, False)
        except (TimeoutError, GatewayError, PeerError) as error:
            log.info("a turn doesn't wait for its session's move to %s: %r", there, error)
            return
        if report.state == "committed":
            self._fleet.expect_beginning(there, turn)

    def _check_still(self, session: RememberedSession) -> None:
        """Raises SessionBusy if the session has a request, or is moved."""
        if session.owner in self._running():
            raise SessionBusy("a request of the session runs: move it (POST /kvmig/v1/migrations)")
        self._forget_old()
        if any(one is session for one in self._moving.values()):
            raise SessionBusy("the session is being moved already")

    async def _order_move(
        self,
        session: RememberedSession,
        there: str,
        endpoint: str,
        inexact: bool,
        patience_s: float = 0.0,
    ) -> MigrationReport:
        source = session.instance
        for instance in (source, there):
            if instance not in self._fleet.alive:
                raise InstanceLost(f"instance {instance} is not connected")
        request_id = f"session-{secrets.token_hex(8)}"
        tokens = tuple(session.output_token_ids)
        shared = self.memory.find_shared_tokens(session)
        self._moving[request_id] = session
        try:
            answer, _ = await self._questions.call_instance(
                source,
                lambda call_id: MoveSession(
                    call_id, request_id, there, endpoint, tokens, shared, inexact, patience_s * 1e3
                ),
                Migrated,
                TIMEOUT_S + patience_s,
                "MoveSession",
                session.payload,
            )
        except CallTimeout:  # the move goes on, and its report says where the session is
            self._fleet.forget_session(session.owner)
            raise
        except InstanceLost:  # before the order was sent; else `lost` has forgotten the session
            self._moving.pop(request_id, None)
            raise
        except PeerError:
            self._forget_place(request_id)
            raise
        return answer.report

    def take_report(self, report: MigrationReport) -> None:
        """A migration has ended; ignored unless it is a session's. It may come after the caller has
        left, or got a timeout."""
        session = self._moving.pop(report.request_id, None)
        if session is None or report.state != "committed":
            return
        source = session.instance
        if report.destination not in self._fleet.alive:  # lost since it committed
            self.memory.forget_at(session.owner, source)
            self._fleet.forget_session(session.owner)
            return
        self.memory.note_move(session.owner, source, report.destination)
        self._fleet.note_session_move(session.owner, source, report.destination)

    def lost(self, instance: str) -> None:
        """The connection is gone, and with it the reports of sessions that were leaving the
        instance: forget these. Marks show where they are, and so do their next turns."""
        for request_id in [one for one, it in self._moving.items() if it.instance == instance]:
            self._forget_place(request_id)

    def forget(self, instance: str) -> None:
        """The instance is gone, with all that it held."""
        self.lost(instance)
        self.memory.forget(instance)

    def _forget_place(self, request_id: str) -> None:
        session = self._moving.pop(request_id)
        self.memory.forget_at(session.owner, session.instance)
        self._fleet.forget_session(session.owner)

    def _forget_old(self) -> None:
        """Wait no longer for a report than the session itself is remembered."""
        oldest = self._clock() - KEPT_S
        for request_id in [one for one, it in self._moving.items() if it.ended_at <= oldest]:
            del self._moving[request_id]
