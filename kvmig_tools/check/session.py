"""A session that no request belongs to moves, and its next turn comes at any time.

The parts are those of a request (`site`, `departure`, `arrival`, `front`) with a prefix cache in
place of what decodes. The turn is a request. Machines, tombstones and the front end's memory are
those that run; the glue is that of `kvmig.frontend.session_moves`.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kvmig.asgi.errors import InstanceLost, UnknownSession
from kvmig.controlplane.messages import MoveSession, Submit
from kvmig.controlplane.session_hints import SessionHints, SessionPlace
from kvmig.engines.base import RequestExport, RequestTail, StagedBlocks
from kvmig.frontend.requests import LiveRequest, RequestTable
from kvmig.frontend.session_memory import RememberedSession, SessionMemory
from kvmig.frontend.splice import StreamSplicer
from kvmig.kvtransfer import destination_machine as there
from kvmig.kvtransfer import source_machine as here
from kvmig.kvtransfer.messages import Reserve
from kvmig.kvtransfer.source_machine import SourceMachine
from kvmig_tools.check.arrival import Arrival
from kvmig_tools.check.cluster import DEAD, Edge, State
from kvmig_tools.check.departure import Departure
from kvmig_tools.check.front import Front, no_time
from kvmig_tools.check.part import Facts, Move, Violation
from kvmig_tools.check.prefix_cache import SessionEngine
from kvmig_tools.check.request import Request
from kvmig_tools.check.site import Left, Order, Shape, Site

OWNER = 1
"""What stands for the session."""


@dataclass
class SessionDeparture(Departure):
    """The source's side of a session's move. engine: the source's."""

    engine: SessionEngine = field(default_factory=SessionEngine)

    def _perform(self, site: Site, action: here.Action) -> list[here.Action]:
        match action:
            case here.SendReserve(0, tokens, last):
                export = RequestExport(self.run, tokens, [], idle=True)
                self._say(site, Reserve(self.mid, self.run, self.epoch, 0, tokens, export,
                                        last=last))  # fmt: skip
            case here.ResumeRequest():
                self.engine.keep(self.run)
            case here.ReleaseRequest():
                self.engine.release(self.run)
            case _:
                return super()._perform(site, action)
        return []

    def _look(
        self, site: Site, action: here.ExportRequest | here.CheckRequest
    ) -> list[here.Action]:
        blocks = len(self.engine.leaving[self.run])
        if isinstance(action, here.ExportRequest):
            return self.machine.exported(blocks)
        return self.machine.checked(StagedBlocks(list(range(action.sent, blocks)), blocks))

    def _done(self, site: Site, doing: here.Action | None) -> list[here.Action]:
        self.engine.check_content(self.run)
        if isinstance(doing, here.SuspendRequest):
            blocks = len(self.engine.leaving[self.run])
            return self.machine.suspended(
                RequestTail(list(range(doing.sent, blocks)), blocks, 0, b"")
            )
        return super()._done(site, doing)


@dataclass
class SessionArrival(Arrival):
    """The destination's side. engine: the destination's."""

    engine: SessionEngine = field(default_factory=SessionEngine)

    def _perform(self, site: Site, action: there.Action) -> list[there.Action]:
        machine, move = self.machine, self.opening.request_id
        match action:
            case there.FreeBlocks():
                self.engine.cancel(move)
            case there.ReserveBlocks(export) if export is not None:
                if not site.front_known:
                    return machine.failed("incompatible")
                if site.oracle.choose(("", 0), ("has no room", 0)):
                    return machine.failed("no_blocks")
                return machine.reserved(self.engine.reserve(move), "tcp")
            case there.SendAnswer():
                return super()._perform(site, action)
            case _ if site.fails():
                return machine.failed("error")
            case there.ReserveBlocks():
                return machine.reserved()
            case there.ScatterChunk(chunk):
                self.engine.write(move, chunk)
                return machine.scattered(chunk, 0.0)
            case there.RunRequest(_, last):
                if self.attempt in site.committed:
                    raise Violation("a commit is carried out twice")
                site.committed[self.attempt] = machine.key
                self.engine.commit_session(move, last)
                return machine.committed(0.0)
        return []


class SessionSite(Site):
    """An instance, with a prefix cache."""

    def __init__(self, name: str, shape: Shape, request: str = "r") -> None:
        super().__init__(name, shape, request)
        self.prefixes = SessionEngine()
        self.engine = self.prefixes

    def begin(self) -> None:
        """The session's last request has ended here."""
        cache = self.prefixes.cache
        cache.fill(range(len(cache.blocks) // 2))

    def facts(self) -> Facts:
        """See `Part`."""
        facts, cache = super().facts(), self.prefixes.cache
        holds = (*facts.holds, *[f"{cache.held} blocks"] * bool(cache.held))
        return replace(facts, holds=holds, cache=cache.state)

    def emit(self, run: str) -> None:
        """A turn's only step ends."""
        self.prefixes.end_turn(run)
        super().emit(run)

    def others_come(self) -> None:
        """Other requests need the room."""
        self.prefixes.cache.make_way()

    def arrival(self, message: Reserve) -> Arrival:
        """See `Site`."""
        machine = there.DestinationMachine(message.mid)
        return SessionArrival(message, machine, self.prefixes)

    def departed(self, out: Departure) -> None:
        """As the end of `Llumlet._move_session`."""
        self.prefixes.keep(out.run)
        super().departed(out)

    def hear(self, channel: str, message: object) -> None:
        """See `Site`."""
        if isinstance(message, MoveSession):
            self._move_session(message)
            return
        super().hear(channel, message)
        if isinstance(message, Submit):
            self.prefixes.begin_turn(message.request_id)

    def _move_session(self, order: MoveSession) -> None:
        """As `Llumlet._move_session`."""
        move, destination = order.request_id, order.destination
        if not self.prefixes.hold(move):
            self.tell_front(Left(move, destination, 0, 0, committed=False, reason="finished"))
            return
        self._begun += 1
        mid = f"{self.name}{self._begun}{self.request}"
        epoch = self._epochs.after(move, 0)
        machine = SourceMachine(mid, self.shape.stages, self.shape.questions, idle=True)
        self.out = SessionDeparture(
            mid, move, epoch, 0, self.name, destination, machine, engine=self.prefixes
        )
        self.out.start(self)


class SessionFront(Front):
    """Remembers the session, orders its moves, and has its client's next turn."""

    def __init__(
        self,
        instances: Sequence[str],
        tokens: int,
        owner: str,
        request: str = "r",
        table: RequestTable | None = None,
    ) -> None:
        super().__init__(instances, tokens, owner, request, table)
        self.table.remove(request)  # the turn, which comes later
        self.table.on_ended = self._remember
        self.turn = "to come"
        """Or: "came", or "came meanwhile", while the session moved."""
        self.memory = SessionMemory(no_time)
        self.memory.remember_session(_session_at(owner))
        self.hints = SessionHints()
        self.hints.remember_place(OWNER, SessionPlace(owner, 1.0))
        self.moving: RememberedSession | None = None
        self.unreported = False
        """Whether a move may still be under way, of which no report can come."""
        self._moves = 0

    @property
    def place(self) -> str:
        """Where it remembers the session."""
        try:
            return self.memory.find(OWNER).instance
        except UnknownSession:
            return ""

    def facts(self) -> Facts:
        """See `Part`; place: unless a move is under way, or a turn came during one."""
        facts = super().facts()
        moves = facts.moves
        if self.turn == "to come" and self.alive:
            moves += (Move("'s client sends the session's next turn", ("take_turn",), "token"),)
        known = self.moving is None and self.turn != "came meanwhile"
        return replace(facts, moves=moves, place=self.place if known else "")

    def take_turn(self) -> None:
        """The client's next turn: as `InstancePool.dispatch`, which prefers what is held."""
        known = self.moving is None and not self.unreported
        self.turn = "came" if known else "came meanwhile"
        last = self.hints.find(OWNER)
        first = last.instance if last is not None and last.instance in self.alive else self.alive[0]
        others = [(one, 0) for one in self.alive if one != first]
        at = self.oracle.choose(("", 0), *others) or first
        self.send(at, Submit(self.request))
        self.hints.remember_place(OWNER, SessionPlace(at, 1.0))
        name = self.request
        self.table.add(LiveRequest(name, name, name, StreamSplicer(at), 1, 0, (), 0.0))

    def hear(self, channel: str, message: object) -> None:
        """See `Front`."""
        match message:
            case Order(destination):
                self._move(destination)
            case Left(run=run) if run.startswith(f"{self.request}+move"):
                self._take_report(channel[0], message)
            case _:
                super().hear(channel, message)

    def _remember(self, request: LiveRequest) -> None:
        if request.instance is not None and request.output_token_ids:
            self.memory.remember_session(_session_at(request.instance))

    # -- as `SessionMoves`

    def _move(self, destination: str) -> None:
        source = self.place
        if self.table.live or self.moving is not None or source in ("", destination):
            return
        if not {source, destination} <= {*self.alive}:
            return
        self._moves += 1
        self.moving = self.memory.find(OWNER)
        move = f"{self.request}+move{self._moves}"
        try:
            self.send(source, MoveSession(0, move, destination, destination))
        except InstanceLost:
            self.moving = None

    def _take_report(self, source: str, left: Left) -> None:
        session, self.moving = self.moving, None
        if session is None or not left.committed:
            return
        if left.destination not in self.alive:
            self.memory.forget_at(OWNER, source)
            self.hints.forget_session(OWNER)
            return
        self.memory.note_move(OWNER, source, left.destination)
        hint = self.hints.find(OWNER)
        if hint is not None and hint.instance == source:
            self.hints.remember_place(OWNER, hint._replace(instance=left.destination))

    def _lost(self, instance: str) -> None:
        super()._lost(instance)
        self.memory.forget(instance)
        self.hints.forget(instance)
        if self.moving is not None and self.moving.instance == instance:
            self.moving, self.unreported = None, True
            self.memory.forget_at(OWNER, instance)
            self.hints.forget_session(OWNER)


def _session_at(instance: str) -> RememberedSession:
    return RememberedSession(OWNER, OWNER, instance, (), array("I"))


class SessionMove(Request):
    """The automaton of a session that lies at `names[0]`."""

    def site(self, instance: str) -> SessionSite:
        """See `Request`."""
        return SessionSite(instance, self.shape, self.name)

    def front(self, table: RequestTable | None = None) -> SessionFront:
        """See `Request`."""
        return SessionFront(sorted(self.names), self.shape.tokens, self.names[0], self.name, table)

    def broken(self, number: int) -> str:
        """See `Request`. As long as nobody died, and others needed no room, the session is whole
        somewhere, and where the front end remembers it."""
        state = self.state(number)
        caches = {
            name: self.library.facts[site].cache
            for name, site in zip(self.names, state.sites, strict=True)
            if site != DEAD
        }
        if len(caches) == len(self.names) and "evicted" not in caches.values():
            if "whole" not in caches.values():
                return "the session is whole nowhere"
            place = "" if state.front == DEAD else self.library.facts[state.front].place
            if place and caches[place] != "whole":
                return f"the front end remembers the session at {place}, where it isn't whole"
        return super().broken(number)

    def held(self, number: int) -> list[str]:
        """See `Request`. What the front end remembers of the lost counts, too."""
        found = super().held(number)
        state = self.state(number)
        if state.front == DEAD:
            return found
        front = self.library.part(state.front)
        assert isinstance(front, SessionFront)
        if front.moving:
            found.append("the front end waits for a report")
        at = front.place
        if at and state.sites[self.names.index(at)] == DEAD:
            found.append(f"the front end remembers the session at {at}, which is gone")
        hint = front.hints.find(OWNER)
        if hint is not None and state.sites[self.names.index(hint.instance)] == DEAD:
            found.append(f"the front end hints at {hint.instance}, which is gone")
        return found

    def own_faults(self, state: State) -> list[Edge]:
        """See `Request`: others need the room."""
        found: list[Edge] = []
        for name, site in zip(self.names, state.sites, strict=True):
            if site != DEAD:
                label = f"others need room at {name}"
                edges = self._cluster.outcomes(state, name, ("others_come",), label)
                found += [edge._replace(cost=1) for edge in edges if edge.state != state]
        return found
