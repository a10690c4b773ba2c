"""What the front end has of one request: table, splice, arbitration and recovery as they run.

The glue is that of `kvmig.gateway.router`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from kvmig.controlplane.messages import Discard, Fence, Fenced, Resolve, Resolved, Span, Submit
from kvmig.gateway.arbiter import FENCE_TIMEOUT_S
from kvmig.gateway.endings import Endings
from kvmig.gateway.errors import InstanceLost
from kvmig.gateway.ports import NOT_BEGUN, Arithmetic, Batch, Item, Unobserved
from kvmig.gateway.recovery import Recovery
from kvmig.gateway.requests import Entry, RequestTable
from kvmig.gateway.router import HOLD_S, TICK_S
from kvmig.gateway.splice import Action, Broken, Splicer, Stale, Switched
from kvmig.gateway.streams import Streams
from kvmig.gateway.verdict import Verdicts
from kvmig.ground.errors import NoInstance
from kvmig.ground.faults import FaultConfig
from kvmig.kvtransfer.messages import Message
from kvmig.kvtransfer.source_machine import LEAP
from kvmig.kvtransfer.wire import Frame
from kvmig_tools.check.part import Facts, Letter, Lost, Move, Part, Violation
from kvmig_tools.check.site import Left, Piece

ALWAYS = FaultConfig(max_crashes=99)
"""A request is never held back for what its instances' ends may mean."""


@dataclass
class Output:
    """An `Item`."""

    request_id: str
    new_token_ids: tuple[int, ...]
    finished: bool


class Front(Part):
    """Also the fleet and the sink of the code that runs. given: tokens that the client has."""

    def __init__(
        self,
        instances: Sequence[str],
        tokens: int,
        owner: str,
        request: str = "r",
        table: RequestTable | None = None,
    ) -> None:
        """table: that of other requests here, too."""
        super().__init__()
        self.request = request
        self.alive = list(instances)
        self.given = 0
        self.failed = ""
        self._tokens = tokens
        self._batch: list[Item] = []
        self._asking: dict[str, tuple[Resolve, str]] = {}
        """Questions of sources that the destination was asked for, by migration."""
        self._strays: set[tuple[str, str, int]] = set()
        self.table = RequestTable() if table is None else table
        self._endings = Endings(self.table, self, self)
        self._recovery = Recovery(self.table, self, self._endings, Unobserved(), _no_time, ALWAYS)
        self._verdicts = Verdicts(self.table, self._discard)
        self._streams = Streams(
            self.table, self, self._decode, _no_index, self._act, self._stray, Unobserved()
        )
        self.table.add(Entry(request, request, request, Splicer(owner), 1, 0, (), 0.0))

    def facts(self) -> Facts:
        """See `Part`; decodes: the run whose tokens count, and the epochs that are fenced."""
        moves = [
            Move(f" hears nothing of {question.destination}", ("unanswered", mid), "timer",
                 FENCE_TIMEOUT_S)
            for mid, (question, _) in self._asking.items()
        ]  # fmt: skip
        entry = self.table.entries.get(self.request)
        if entry is None:
            return Facts(tuple(moves), links=tuple(self.alive))
        unplaced = entry.unplaced_since is not None
        missing = not unplaced and entry.instance not in self.alive
        returned = any(one in self.alive for one in self._recovery.missing)
        if (unplaced and self.alive) or missing or returned or entry.heir in entry.lost:
            moves.append(Move(" looks at the instances", ("look",), "go", TICK_S))
        if entry.splicer.waits_since(1.0):
            moves.append(Move(" waits too long for tokens", ("overdue",), "hold", HOLD_S))
        known = [*range(9), *range(LEAP, LEAP + 9)]
        fenced = tuple((entry.run_id, epoch) for epoch in known if entry.splicer.fenced(epoch))
        alive = tuple(self.alive)
        return Facts(tuple(moves), holds=(entry.run_id,), decodes=fenced, links=alive)

    # -- events

    def hear(self, channel: str, message: object) -> None:
        """As `Router.on_message`."""
        instance = channel.partition(">")[0]
        match message:
            case Piece(outputs, token, finished):
                self._batch = [Output(outputs.spans[0].request_id, (token,), finished)]
                self._streams.take(instance, outputs, (), 0.0)
                self._batch = []
            case Left():
                self._left(message)
            case Resolve():
                self._resolve(instance, message)
            case Fenced(call_id=epoch, committed=committed):
                for mid, (question, _) in list(self._asking.items()):
                    if question.epoch == epoch and question.destination == instance:
                        self._say(mid, committed)
            case Lost():
                self._lost(instance)

    def unanswered(self, mid: str) -> None:
        """No Fenced came in time."""
        self._say(mid, committed=False)

    def look(self) -> None:
        """As `Router._look`."""
        self._recovery.tick()

    def overdue(self) -> None:
        """As `Router._look`, long after an item was held."""
        self._recovery.run_again(list(self.table), "tokens of its last owner were lost")

    def back(self, instance: str) -> None:
        """It was connected to again."""
        self.alive.append(instance)
        self.alive.sort()

    def client_leaves(self) -> None:
        """As `Router.abort`."""
        entry = self.table.remove(self.request)
        if entry is not None:
            self._endings.abort([entry])

    def _lost(self, instance: str) -> None:
        if instance in self.alive:
            self.alive.remove(instance)
        self._recovery.lost(instance, f"instance {instance} is lost")
        for mid, (question, _) in list(self._asking.items()):
            if question.destination == instance:
                self._say(mid, committed=False)

    def _left(self, left: Left) -> None:
        entry = self.table.runs.get(left.run)
        if entry is not None and left.committed:
            self._recovery.moved(entry, left.destination, left.epoch, left.before)
        if entry is not None and left.reason == "orphaned":
            self._recovery.run_again([entry], left.reason)

    def _resolve(self, source: str, question: Resolve) -> None:
        known = self._verdicts.known(question)
        if known is not None:
            self._endings.tell(source, Resolved(question.mid, known))
        elif question.mid in self._asking:
            self._asking[question.mid] = question, source
        else:
            self._asking[question.mid] = question, source
            fence = Fence(question.epoch, question.request_id, question.epoch)
            try:
                self.send(question.destination, fence)
            except InstanceLost:
                self._say(question.mid, committed=False)

    def _say(self, mid: str, committed: bool) -> None:
        question, source = self._asking.pop(mid)
        moved = self._verdicts.after(question, committed)
        self._endings.tell(source, Resolved(mid, moved))

    def _discard(self, question: Resolve) -> None:
        with contextlib.suppress(InstanceLost):
            self.send(question.destination, Discard(question.request_id, question.epoch))

    def _act(self, entry: Entry, action: Action) -> None:
        match action:
            case Stale(instance, epoch):
                if self._endings.tell(instance, Discard(entry.run_id, epoch)):
                    entry.splicer.told(action)
            case Switched(epoch=epoch):
                entry.reached(epoch)
            case Broken(reason):
                self._recovery.run_again([entry], reason)

    def _stray(self, instance: str, span: Span, last: bool) -> None:
        key = (instance, span.request_id, span.epoch)
        if last or key in self._strays:
            return
        if self._endings.tell(instance, Discard(span.request_id, span.epoch)):
            self._strays.add(key)

    # -- a fleet

    def fit(self, instance: str) -> bool:
        """Those that are connected."""
        return instance in self.alive

    def any_fit(self) -> bool:
        """Whether one is connected."""
        return bool(self.alive)

    def others_serve(self, instance: str, begun: Arithmetic = NOT_BEGUN) -> bool:
        """Whether another one is connected."""
        return any(one != instance for one in self.alive)

    def ailing(self) -> dict[str, str]:
        """An instance is connected or lost here."""
        return {}

    def send(self, instance: str, message: Message, payload: Sequence[Frame] = ()) -> None:
        """Raises InstanceLost if it is known to be."""
        if instance not in self.alive:
            raise InstanceLost(f"instance {instance} is not connected")
        self.outbox.append(Letter(f"F>{instance}", message))

    def dispatch(
        self,
        tokens: int,
        priority: int,
        message: Message,
        payload: Sequence[Frame],
        *,
        fit: bool = False,
        begun: Arithmetic = NOT_BEGUN,
    ) -> str:
        """To the first that is connected."""
        if not self.alive:
            raise NoInstance("no instance is connected")
        assert isinstance(message, Submit)
        self.send(self.alive[0], message)
        return self.alive[0]

    # -- a sink

    def deliver(self, index: int, items: Sequence[Item], meta: object) -> None:
        """The client's own look at what comes."""
        for item in items:
            for token in item.new_token_ids:
                if token != self.given:
                    raise Violation(f"the client gets token {token}, and has {self.given}")
                self.given += 1
            if item.finished and self.given != self._tokens:
                raise Violation(f"the stream ends after {self.given} of {self._tokens} tokens")

    def fail(self, request_ids: Sequence[str], reason: str, retry: bool) -> None:
        """The request was given up."""
        self.failed = reason

    def _decode(self, payload: Sequence[memoryview]) -> Batch:
        return Batch(self._batch)


def _no_time() -> float:
    return 0.0


def _no_index(instance: str) -> int:
    return 0
