"""Runs of one request, some of them given up while they go on: the client's stream is exact."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.messages import Outputs, OutputSpan
from kvmig.core.errors import Failure
from kvmig.frontend.ports import EngineArithmetic, OutputBatch, OutputItem, RouterObserver
from kvmig.frontend.requests import LiveRequest, RequestTable
from kvmig.frontend.splice import StreamGap, StreamSplicer
from kvmig.frontend.streams import RequestStreams

if TYPE_CHECKING:
    from kvmig.frontend.ports import InstancePort

INSTANCES = "abc"


@dataclass
class Tokens:
    """Token i is the number i, whoever computes it."""

    request_id: str
    new_token_ids: Sequence[int]
    finished: bool = False


@dataclass
class Copy:
    """The request at an instance."""

    instance: str
    run_id: str
    epoch: int
    position: int


@dataclass
class World:
    """Instances that step, move and lose a request, and a front end that hears them.

    Each instance has a connection, whose messages come in their order, but when they like.
    """

    table: RequestTable = field(default_factory=RequestTable)
    delivered: list[int] = field(default_factory=list)
    stale: set[str] = field(default_factory=set)
    copies: list[Copy] = field(default_factory=list)
    sent: dict[str, deque[tuple[OutputSpan, Tokens]]] = field(
        default_factory=lambda: {instance: deque() for instance in INSTANCES}
    )

    def __post_init__(self) -> None:
        self.entry = LiveRequest("r", "x", "x", StreamSplicer("a"), 9, 0, [b""], 0.0)
        self.table.add(self.entry)
        self.copies.append(Copy("a", "r", 0, 0))
        self.streams = RequestStreams(
            self.table,
            self,
            lambda payload: OutputBatch([self.item]),
            cast("InstancePort", self),
            RouterObserver(),
            lambda: 0.0,
        )

    # -- the front end

    def deliver(self, index: int, items: Sequence[OutputItem], meta: object) -> None:
        for item in items:
            assert item.request_id == "r"
            self.delivered += item.new_token_ids

    def finish(self, request_ids: Sequence[str]) -> None:
        raise AssertionError(request_ids)

    def fail(self, request_ids: Sequence[str], reason: str, kind: Failure) -> None:
        raise AssertionError(reason)

    def index(self, instance: str) -> int:
        return INSTANCES.index(instance)

    def arithmetic(self, instance: str) -> EngineArithmetic:
        return EngineArithmetic()

    def hear(self, instance: str) -> None:
        if not self.sent[instance]:
            return
        span, self.item = self.sent[instance].popleft()
        for _, item in self.streams.deliver_outputs(instance, Outputs([span]), [memoryview(b"")]):
            request = self.table.runs.get(span.request_id)
            if request is None:
                self.stale.add(span.request_id)
                continue
            actions = self.streams.splice(request, instance, span, item)
            assert not any(isinstance(action, StreamGap) for action in actions)

    def run_again(self, instance: str) -> None:
        """Give the present run up, whatever it does, and start one there."""
        self.table.next_run(self.entry, 0.0)
        self.entry.unplaced_since = None
        self.entry.splicer.restart(instance)
        known = len(self.entry.output_token_ids)
        self.copies.append(Copy(instance, self.entry.run_id, 0, known))

    # -- the instances

    def step(self, copy: Copy, count: int, last: bool = False) -> None:
        tokens = Tokens(copy.run_id, range(copy.position, copy.position + count), last)
        self.sent[copy.instance].append(
            (OutputSpan(copy.run_id, copy.epoch, copy.position), tokens)
        )
        copy.position += count

    def move(self, copy: Copy, instance: str) -> None:
        self.copies.remove(copy)
        self.copies.append(Copy(instance, copy.run_id, copy.epoch + 1, copy.position))


@given(st.data())
def test_the_stream_is_exact_whatever_earlier_runs_still_put_out(data: st.DataObject) -> None:
    world = World()
    for _ in range(data.draw(st.integers(0, 40))):
        instance = data.draw(st.sampled_from(INSTANCES))
        copy = data.draw(st.sampled_from(world.copies))
        match data.draw(st.sampled_from(["step", "step", "hear", "hear", "move", "again", "cut"])):
            case "step":
                world.step(copy, data.draw(st.integers(0, 3)))
            case "hear":
                world.hear(instance)
            case "move":
                world.move(copy, instance)
            case "again":
                world.run_again(instance)
            case "cut":  # its connection: what was on its way is lost
                world.sent[instance].clear()
                world.run_again(data.draw(st.sampled_from(INSTANCES)))
        assert world.delivered == list(range(len(world.delivered)))
        assert world.entry.output_token_ids == world.delivered

    world.run_again(data.draw(st.sampled_from(INSTANCES)))
    world.step(world.copies[-1], 2, last=True)
    while any(world.sent.values()):
        world.hear(data.draw(st.sampled_from(INSTANCES)))
    assert world.delivered == list(range(world.copies[-1].position))
    assert len(world.table) == 0
    assert world.entry.run_id not in world.stale
