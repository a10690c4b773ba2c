"""What one instance has of one request: the llumlet's part of the model.

Glue as in `kvmig.controlplane.llumlet`; machines, tracking and tombstones are those that run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvmig.controlplane.fronts import OwnershipTable
from kvmig.controlplane.messages import (
    AbortRequests,
    Discard,
    Fence,
    Fenced,
    Outputs,
    Resolved,
    Submit,
)
from kvmig.engines.base import EmittedTokens
from kvmig.kvtransfer.destination_machine import (
    Action,
    DestinationMachine,
    MachineTombstones,
    SendAnswer,
    SourceMessage,
)
from kvmig.kvtransfer.messages import ChunkDone, Reserve
from kvmig.kvtransfer.source_machine import QUESTIONS, EpochCounter, SourceMachine
from kvmig.rpc.messages import RpcMessage
from kvmig_tools.check.arrival import Arrival, answered
from kvmig_tools.check.departure import Departure
from kvmig_tools.check.engine import Engine, Slot
from kvmig_tools.check.part import Facts, Letter, Lost, Move, Part, Violation

MIGRATIONS = 2
"""Out of one instance, of one request: more orders are not obeyed."""


@dataclass(frozen=True)
class Shape:
    """What migrations look like. together: a tail's blocks go with Commit; waits: the request
    waits at first, and may begin to run at any time; questions: to the front end that a source
    asks before it drops the request; chunks: of its prompt, which is computed before it goes."""

    tokens: int
    stages: int
    together: bool = False
    waits: bool = False
    questions: int = QUESTIONS
    chunks: int = 0


class Order(NamedTuple):
    """Of the scheduler: move the request there."""

    destination: str


class Piece(NamedTuple):
    """What a step gave: Outputs of one span, and its item."""

    outputs: Outputs
    token: int
    finished: bool


class Left(NamedTuple):
    """What `Migrated` says to the front end."""

    run: str
    destination: str
    epoch: int
    before: int
    committed: bool
    reason: str


class Site(Part):
    """front_known: the front end counts as connected; front_up: it is."""

    def __init__(self, name: str, shape: Shape, request: str = "r") -> None:
        super().__init__()
        self.name = name
        self.request = request
        self.shape = shape
        self.engine = Engine()
        self.tracking = OwnershipTable()
        self.out: Departure | None = None
        self.arrivals: dict[str, Arrival] = {}
        self.tombstones = MachineTombstones()
        self.committed: dict[tuple[str, int], str] = {}
        """Attempts that were committed here, ever, and their migrations."""
        self.unheard: set[str] = set()
        """Migrations whose source has no connection to here now."""
        self.front_known = self.front_up = True
        self._epochs = EpochCounter()
        self._begun = 0

    def share(self, other: Site) -> None:
        """Let `other`, of another request here, have the tables that a llumlet has once."""
        other.engine, other.tracking, other.arrivals = self.engine, self.tracking, self.arrivals
        other.tombstones, other.committed = self.tombstones, self.committed
        other.unheard, other._epochs = self.unheard, self._epochs

    def begin(self) -> None:
        """The request is submitted here."""
        self.hear(f"F>{self.name}", Submit(self.request))

    def facts(self) -> Facts:
        """See `Part`."""
        slots = {run: slot for run, slot in self.engine.slots.items() if self._ours(run)}
        moves = [Move(f"'s engine decodes a token of {run}", ("emit", run), "token")
                 for run, slot in slots.items() if slot.decodes]  # fmt: skip
        moves += [Move(f"'s engine begins to run {run}", ("begin_to_run", run), "token")
                  for run, slot in slots.items()
                  if slot.state == "active" and slot.full < 0]  # fmt: skip
        moves += [Move(f"'s engine computes a chunk of {run}", ("compute", run), "token")
                  for run, slot in slots.items()
                  if slot.state == "active" and slot.chunks]  # fmt: skip
        holds = [f"{slot.state} blocks of {run}" for run, slot in slots.items()]
        deaf = frozenset[str]()
        if self.out is not None:
            moves += self.out.moves()
            holds.append(f"migration {self.out.mid} out")
            if not self.out.listens:
                deaf = frozenset([self.out.replies])
        for mid, arrival in self.arrivals.items():
            if self._ours(arrival.opening.request_id):
                moves += arrival.moves()
                holds.append(f"migration {mid} in")
        if self.front_known and not self.front_up:
            moves.append(Move("notices that the front end is gone", ("front_gone",)))
        decodes = [
            (run, track.epoch)
            for run in slots
            if self.engine.active(run) and (track := self.tracking.get(run))
        ]
        reply = self.out.replies if self.out is not None else ""
        links = (self.out.destination,) if self.out is not None else ()
        return Facts(tuple(moves), deaf, tuple(holds), tuple(decodes), links, reply)

    def _ours(self, run: str) -> bool:
        return run.partition("+")[0] == self.request

    # -- helpers of its sessions

    def fails(self) -> bool:
        """Whether the engine, or the copy, fails now: a fault."""
        return bool(self.oracle.choose(("", 0), ("that fails", 1)))

    def reservation(self, room: bool) -> Slot:
        """Of a request that comes; with blocks, if it doesn't wait."""
        return Slot("reserved", room=room)

    def arrival(self, message: Reserve) -> Arrival:
        """Of what comes with this message."""
        return Arrival(message, DestinationMachine(message.mid))

    def hears_front(self, run: str) -> bool:
        """Whether the front end of this run can be asked."""
        return self.front_known and self.front_up and self.tracking.get(run) is not None

    def tell_front(self, message: object) -> None:
        """What can't be sent shows that it is gone."""
        if self.front_up:
            self.outbox.append(Letter(f"{self.name}>F", message))
        elif self.front_known:
            self.front_gone()

    def answer(self, mid: str, message: RpcMessage) -> None:
        """To a source; lost without a connection, and logged. ChunkDone is for buffers only."""
        if isinstance(message, ChunkDone):
            return
        letter = answered(self, mid, message)
        if mid not in self.unheard:
            self.outbox.append(letter)

    def departed(self, out: Departure) -> None:
        """The migration is over: `_tell` says so to front ends."""
        machine, self.out = out.machine, None
        committed = machine.state == "committed"
        if machine.fenced:
            self._epochs.fenced(out.run, out.epoch)
        if self.front_known:
            left = Left(out.run, out.destination, out.epoch, out.before, committed, machine.reason)
            self.tell_front(left)

    def arrived(self, arrival: Arrival) -> None:
        """The migration is over; late messages are answered by what it leaves."""
        if self.arrivals.pop(arrival.machine.key, None) is not None:
            self.tombstones.bury(arrival.machine, arrival.attempt)

    # -- events of its own

    def emit(self, run: str) -> None:
        """A step ends: as `_on_outputs`."""
        slot = self.engine.slots[run]
        token = slot.tokens
        slot.tokens += 1
        finished = slot.tokens >= self.shape.tokens
        if finished:
            del self.engine.slots[run]
        (span,) = self.tracking.spans([EmittedTokens(run, 1, finished)])
        if finished:
            self._cancel(run, "finished")
        self.tell_front(Piece(Outputs([span]), token, finished))

    def begin_to_run(self, run: str) -> None:
        """The request that waited gets blocks."""
        self.engine.slots[run].full = 2

    def compute(self, run: str) -> None:
        """A chunk of the prompt is computed; the last one gives a token."""
        slot = self.engine.slots[run]
        slot.chunks -= 1
        slot.full += 2
        if not slot.chunks:
            self.emit(run)

    def push(self) -> None:
        """See `Departure`."""
        self._departure().push(self)

    def give_up(self) -> None:
        """See `Departure`."""
        self._departure().give_up(self)

    def time_out(self) -> None:
        """See `Departure`."""
        self._departure().time_out(self)

    def lease_ends(self, mid: str) -> None:
        """Nothing was heard of the migration for long."""
        arrival = self.arrivals[mid]
        arrival.follow(self, arrival.machine.cancel("timeout"))

    def front_gone(self) -> None:
        """As `_front_lost`, which goes from request to request."""
        self.front_known = False
        self._abort([run for run in self.tracking.requests_of("F") if self._ours(run)])

    def front_cut(self) -> None:
        """The connection to the front end broke; it shows with the next thing to send."""
        self.front_up = False

    def front_back(self) -> None:
        """The front end has connected again: of its runs before that it wants none."""
        if self.front_known:
            self.front_gone()
        self.front_known = self.front_up = True

    def peer_cut(self, mid: str) -> None:
        """The source's connection broke."""
        self.unheard.add(mid)

    def _departure(self) -> Departure:
        if self.out is None:
            raise Violation("nothing is moved")
        return self.out

    # -- messages

    def hear(self, channel: str, message: object) -> None:
        """As `_handle`."""
        mid = channel.partition(":")[2]
        match message:
            case Order(destination):
                self._migrate(destination)
            case Submit(request_id=run, output_token_ids=known):
                self.tracking.begin(run, 0, len(known), "F")
                chunks = self.shape.chunks
                full = -1 if self.shape.waits else 0 if chunks else 2
                self.engine.slots[run] = Slot("active", len(known), full, chunks)
            case AbortRequests(request_ids=runs):
                self._abort(runs)
            case Discard(request_id=run, epoch=epoch):
                track = self.tracking.get(run)
                if track is not None and track.epoch == epoch:
                    self.engine.abort(run)
                    self.tracking.end(run)
            case Fence():
                self._fence(message)
            case Resolved():
                if self.out is not None and self.out.mid == message.mid and self._asks(self.out):
                    self.out.hear(self, message)
            case _ if mid.startswith(self.name):
                if self.out is not None and self.out.mid == mid:
                    self.out.hear(self, message)
            case _ if not isinstance(message, Lost):
                self.unheard.discard(mid)
                self._receive(mid, message)

    def _asks(self, out: Departure) -> bool:
        return out.doing is not None and type(out.doing).__name__ == "AskArbiter"

    def _migrate(self, destination: str) -> None:
        runs = [run for run in self.engine.slots if self.engine.active(run) and self._ours(run)]
        if self.out is not None or not runs or self._begun >= MIGRATIONS:
            return
        run = runs[0]
        if any(arrival.attempt[0] == run for arrival in self.arrivals.values()):
            return
        track = self.tracking.get(run)
        before = track.epoch if track else 0
        epoch = self._epochs.after(run, before)
        self._begun += 1
        mid = f"{self.name}{self._begun}{self.request}"
        shape = self.shape
        machine = SourceMachine(mid, shape.stages, shape.questions, after_prompt=shape.chunks > 0)
        self.out = Departure(mid, run, epoch, before, self.name, destination, machine)
        self.out.start(self)

    def _receive(self, mid: str, message: object) -> None:
        """As `Migrations.receive`."""
        if mid in self.arrivals:
            self.arrivals[mid].hear(self, message)
        elif (
            isinstance(message, Reserve)
            and message.export is not None
            and not self.tombstones.has_ended(mid)
        ):
            self._begin(mid, message)
        elif isinstance(message, SourceMessage):
            self._answers(mid, self.tombstones.answer(mid, message))

    def _begin(self, mid: str, message: Reserve) -> None:
        attempt = (message.request_id, message.epoch)
        leaves = self.out is not None and self.out.run == message.request_id
        if self.tombstones.used(attempt) or leaves:
            machine = DestinationMachine(mid)
            self._answers(mid, machine.failed("superseded"))
            self.tombstones.bury(machine, attempt)
            return
        self._cancel_arrivals(message.request_id, "superseded")
        self.arrivals[mid] = arrival = self.arrival(message)
        arrival.hear(self, message)

    def _answers(self, mid: str, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, SendAnswer):
                self.answer(mid, action.message)

    def _fence(self, message: Fence) -> None:
        key = (message.request_id, message.epoch)
        for arrival in list(self.arrivals.values()):
            if arrival.attempt == key:
                arrival.follow(self, arrival.machine.fence())
                committed = arrival.machine.committed_here
                break
        else:
            committed = self.tombstones.fence(key)
        if committed != (key in self.committed):
            raise Violation("the front end is told something else than what was committed")
        self.tell_front(Fenced(message.call_id, committed))

    def _abort(self, runs: list[str]) -> None:
        for run in runs:
            self.engine.abort(run)
            self._cancel(run, "aborted_by_client")
            self.tracking.end(run)
            went = self.tracking.went_to(run)
            if went is not None:
                self.outbox.append(Letter(f"{self.name}>{went}:-", AbortRequests([run])))

    def _cancel(self, run: str, reason: str) -> None:
        if self.out is not None and self.out.run == run and not self.out.cancelled:
            self.out.cancelled = reason
        self._cancel_arrivals(run, reason)

    def _cancel_arrivals(self, run: str, reason: str) -> None:
        for arrival in list(self.arrivals.values()):
            if arrival.attempt[0] == run:
                arrival.follow(self, arrival.machine.cancel(reason))
