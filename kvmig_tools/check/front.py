"""The front end's part in one request: table, streams and ownership as they run.

The glue is that of `kvmig.frontend.router`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvmig.asgi.errors import InstanceLost
from kvmig.controlplane.messages import Fence, Fenced, Outputs, Resolve, Resolved
from kvmig.core.config import FaultConfig
from kvmig.core.errors import Failure, NoInstance
from kvmig.frontend.instances import TICK_S
from kvmig.frontend.ownership import RequestOwnership
from kvmig.frontend.ports import (
    NOT_BEGUN,
    DispatchOrder,
    EngineArithmetic,
    OutputBatch,
    OutputItem,
    RouterObserver,
)
from kvmig.frontend.requests import LiveRequest, RequestTable
from kvmig.frontend.router import FENCE_TIMEOUT_S, HOLD_S
from kvmig.frontend.splice import StreamSplicer
from kvmig.frontend.streams import RequestStreams
from kvmig.kvtransfer.source_machine import LEAP
from kvmig.rpc.codec import Frame
from kvmig.rpc.messages import RpcMessage
from kvmig_tools.check.part import Facts, Letter, Lost, Move, Part, Violation
from kvmig_tools.check.site import Left, Piece

ALWAYS = FaultConfig(max_crashes=99)
"""A request is never held back for what its instances' ends may mean."""


@dataclass
class Output:
    """An `OutputItem`."""

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
        self._batch: list[OutputItem] = []
        self._asking: dict[str, tuple[Resolve, str]] = {}
        """Questions of sources that the destination was asked for, by migration."""
        self.table = RequestTable() if table is None else table
        observer = RouterObserver()
        self._streams = RequestStreams(self.table, self, self._decode, self, observer, no_time)
        self._ownership = RequestOwnership(
            self.table, self, self._streams.fail, observer, no_time, ALWAYS
        )
        self.table.add(LiveRequest(request, request, request, StreamSplicer(owner), 1, 0, (), 0.0))

    def facts(self) -> Facts:
        """See `Part`; decodes: the run whose tokens count, and the epochs that are fenced."""
        moves = [
            Move(f" hears nothing of {question.destination}", ("unanswered", mid), "timer",
                 FENCE_TIMEOUT_S)
            for mid, (question, _) in self._asking.items()
        ]  # fmt: skip
        request = self.table.live.get(self.request)
        if request is None:
            return Facts(tuple(moves), links=tuple(self.alive))
        unplaced = request.unplaced_since is not None
        missing = not unplaced and request.instance not in self.alive
        returned = any(one in self.alive for one in self._ownership.missing)
        if (
            (unplaced and self.alive)
            or missing
            or returned
            or request.moved_to in request.reconnected
        ):
            moves.append(Move(" looks at the instances", ("look",), "go", TICK_S))
        if request.splicer.waits_since(1.0):
            moves.append(Move(" waits too long for tokens", ("overdue",), "hold", HOLD_S))
        known = [*range(9), *range(LEAP, LEAP + 9)]
        fenced = tuple((request.run_id, epoch) for epoch in known if request.splicer.fenced(epoch))
        alive = tuple(self.alive)
        return Facts(tuple(moves), holds=(request.run_id,), decodes=fenced, links=alive)

    # -- events

    def hear(self, channel: str, message: object) -> None:
        """As `FrontendRouter.on_message`."""
        instance = channel.partition(">")[0]
        match message:
            case Piece(outputs, token, finished):
                self._batch = [Output(outputs.spans[0].request_id, (token,), finished)]
                self._take(instance, outputs)
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

    def _take(self, instance: str, outputs: Outputs) -> None:
        """As `FrontendRouter.on_message` and `FrontendRouter._splice`."""
        for span, item in self._streams.deliver_outputs(instance, outputs, (memoryview(b""),)):
            if span.epoch < 0:
                continue
            request = self.table.runs.get(span.request_id)
            if request is None:
                self._ownership.stop_unknown_output(instance, span, item.finished)
                continue
            for action in self._streams.splice(request, instance, span, item):
                self._ownership.act(request, action)

    def unanswered(self, mid: str) -> None:
        """No Fenced came in time."""
        self._say(mid, committed=False)

    def look(self) -> None:
        """As `FrontendRouter._look`."""
        self._ownership.tick()

    def overdue(self) -> None:
        """As `FrontendRouter._look`, long after an item was held."""
        self._ownership.run_again(list(self.table), "tokens of its last owner were lost")

    def back(self, instance: str) -> None:
        """It was connected to again."""
        self.alive.append(instance)
        self.alive.sort()

    def client_leaves(self) -> None:
        """As `FrontendRouter.abort`."""
        request = self.table.remove(self.request)
        if request is not None:
            self._ownership.abort([request])

    def _lost(self, instance: str) -> None:
        if instance in self.alive:
            self.alive.remove(instance)
        self._ownership.lost(instance, f"instance {instance} is lost")
        for mid, (question, _) in list(self._asking.items()):
            if question.destination == instance:
                self._say(mid, committed=False)

    def _left(self, left: Left) -> None:
        request = self.table.runs.get(left.run)
        if request is not None and left.committed:
            self._ownership.moved(request, left.destination, left.epoch, left.before)
        if request is not None and left.reason == "orphaned":
            self._ownership.run_again([request], left.reason)

    def _resolve(self, source: str, question: Resolve) -> None:
        owner = self._ownership.owner(question)
        if owner is not None:
            self._ownership.send_quietly(source, Resolved(question.mid, owner != "source"))
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
        owner = self._ownership.decide(question, committed)
        self._ownership.send_quietly(source, Resolved(mid, owner != "source"))

    # -- a fleet

    def is_healthy(self, instance: str) -> bool:
        """Those that are connected."""
        return instance in self.alive

    def any_healthy(self) -> bool:
        """Whether one is connected."""
        return bool(self.alive)

    def others_serve(self, instance: str, begun: EngineArithmetic = NOT_BEGUN) -> bool:
        """Whether another one is connected."""
        return any(one != instance for one in self.alive)

    def unhealthy_instances(self) -> dict[str, str]:
        """An instance is connected or lost here."""
        return {}

    def index(self, instance: str) -> int:
        """Nobody looks at it."""
        return 0

    def arithmetic(self, instance: str) -> EngineArithmetic:
        """All are alike."""
        return NOT_BEGUN

    def send(self, instance: str, message: RpcMessage, payload: Sequence[Frame] = ()) -> None:
        """Raises InstanceLost if it is known to be."""
        if instance not in self.alive:
            raise InstanceLost(f"instance {instance} is not connected")
        self.outbox.append(Letter(f"F>{instance}", message))

    def dispatch(self, order: DispatchOrder) -> str:
        """To the first that is connected."""
        if not self.alive:
            raise NoInstance("no instance is connected")
        self.send(self.alive[0], order.submit)
        return self.alive[0]

    def note_prompt(self, tokens: int, seconds: float) -> None:
        """Nothing is measured here."""

    # -- a sink

    def deliver(self, index: int, items: Sequence[OutputItem], meta: object) -> None:
        """The client's own look at what comes."""
        for item in items:
            for token in item.new_token_ids:
                if token != self.given:
                    raise Violation(f"the client gets token {token}, and has {self.given}")
                self.given += 1
            if item.finished and self.given != self._tokens:
                raise Violation(f"the stream ends after {self.given} of {self._tokens} tokens")

    def finish(self, request_ids: Sequence[str]) -> None:
        """No request has a quota."""
        raise Violation(f"{request_ids} end before their time")

    def fail(self, request_ids: Sequence[str], reason: str, kind: Failure) -> None:
        """The request was given up."""
        self.failed = reason

    def _decode(self, payload: Sequence[memoryview]) -> OutputBatch:
        return OutputBatch(self._batch)


def no_time() -> float:
    """No time passes here."""
    return 0.0
