"""Moves of sessions that have no request now: which one, from where, and what is known of it after.

The instance that ran the session's last request gives its blocks up; `SessionMemory` has what that
instance finds them by. A request of the session that comes meanwhile is dispatched as any other:
the blocks are whole at the source until the destination has committed, and then there.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable

from kvmig.asgi.errors import InstanceLost, MigrationDisabled, SameInstance, SessionBusy
from kvmig.controlplane.messages import Migrated, MoveSession
from kvmig.core.clock import Clock
from kvmig.core.config import ClusterConfig
from kvmig.frontend.instances import InstancePool
from kvmig.frontend.pending_calls import PendingCalls
from kvmig.frontend.requests import LiveRequest
from kvmig.frontend.session_memory import RememberedSession, SessionMemory
from kvmig.kvtransfer.report import MigrationReport

TIMEOUT_S = 120.0
"""Longest wait for a session to have moved."""


class SessionMoves:
    """Moves of one front end's sessions."""

    def __init__(
        self,
        fleet: InstancePool,
        questions: PendingCalls,
        config: ClusterConfig,
        clock: Clock,
        runs: Callable[[int], bool],
    ) -> None:
        """runs: whether a request of this session runs, or waits, now."""
        self.memory = SessionMemory(clock)
        self._fleet = fleet
        self._questions = questions
        self._enabled = config.scheduler.migration
        self._runs = runs
        self._moving: dict[str, RememberedSession] = {}
        """Sessions under way, by the id of the move."""

    def remember_request(self, request: LiveRequest) -> None:
        """A request has ended: its session, if its call has named one, may move from now on."""
        call, instance = request.call, request.instance
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
            )
        )

    async def move(
        self, name: int, owner: int | None, destination: str | None, *, inexact: bool = False
    ) -> MigrationReport:
        """Move a session and wait for the report, also of a move that was given up.

        name, owner: see `SessionMemory.find`. destination: None: the one with the most room.
        inexact: also to an instance where its tokens may differ. Raises what `kvmig.asgi.errors`
        names when it can't start.
        """
        if not self._enabled:
            raise MigrationDisabled("migration is off: the server runs with --no-migration")
        session = self.memory.find(name, owner)
        if self._runs(session.owner):
            raise SessionBusy("a request of the session runs: move it (POST /kvmig/v1/migrations)")
        if session in self._moving.values():
            raise SessionBusy("the session is being moved already")
        source = session.instance
        there = self._fleet.roomiest(source, inexact) if destination is None else destination
        endpoint = self._fleet.endpoint(there)
        if there == source:
            raise SameInstance(f"the session is on instance {there} already")
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
                    call_id, request_id, there, endpoint, tokens, shared, inexact
                ),
                Migrated,
                TIMEOUT_S,
                "MoveSession",
                session.payload,
            )
        except Exception:  # a call that is cancelled ends no move: its report comes still
            self._moving.pop(request_id, None)
            raise
        return answer.report

    def take_report(self, report: MigrationReport) -> None:
        """A migration has ended; ignored unless it is a session's."""
        session = self._moving.pop(report.request_id, None)
        if session is not None and report.state == "committed":
            session.instance = report.destination
            self._fleet.note_session_move(session.owner, report.source, report.destination)

    def forget(self, instance: str) -> None:
        """The instance is gone, with all that it held."""
        self.memory.forget(instance)
        for request_id in [one for one, it in self._moving.items() if it.instance == instance]:
            del self._moving[request_id]
