"""What a front end tells instances of copies that nobody wants: once, and heard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from kvmig.asgi.errors import InstanceLost
from kvmig.controlplane.messages import Discard, OutputSpan, Resolve
from kvmig.core.config import FaultConfig
from kvmig.core.errors import Failure, NoInstance
from kvmig.frontend.ownership import RequestOwnership
from kvmig.frontend.ports import RouterObserver
from kvmig.frontend.requests import LiveRequest, RequestTable
from kvmig.frontend.splice import StreamSplicer
from kvmig.rpc.messages import RpcMessage

if TYPE_CHECKING:
    from kvmig.frontend.ports import InstancePort


class Sends:
    """Instances, the first message to which is lost with its connection if `fails`. None takes a
    request."""

    def __init__(self, fails: bool = False) -> None:
        self.sent: list[tuple[str, RpcMessage]] = []
        self.fails = fails

    def send(self, instance: str, message: RpcMessage, payload: object = ()) -> None:
        self.sent.append((instance, message))
        if self.fails:
            self.fails = False
            raise InstanceLost("instance i0 is not connected")

    def dispatch(self, order: object) -> str:
        raise NoInstance("no instance takes requests")

    def fail(self, request_ids: Sequence[str], reason: str, kind: Failure) -> None:
        raise AssertionError(reason)


@dataclass
class Token:
    """An item of one token."""

    request_id: str
    new_token_ids: Sequence[int] = (7,)
    finished: bool = False


def ownership(table: RequestTable, sends: Sends) -> RequestOwnership:
    instances = cast("InstancePort", sends)
    return RequestOwnership(
        table, instances, sends.fail, RouterObserver(), lambda: 0.0, FaultConfig()
    )


def test_an_instance_that_could_not_be_told_is_told_again() -> None:
    sends = Sends(fails=True)
    it = ownership(RequestTable(), sends)
    for start in range(3):
        it.stop_unknown_output("i0", OutputSpan("r", 1, start), last=False)
    assert sends.sent == [("i0", Discard("r", 1))] * 2


def test_the_last_output_of_a_copy_needs_no_answer() -> None:
    sends = Sends()
    ownership(RequestTable(), sends).stop_unknown_output("i0", OutputSpan("r", 1, 0), last=True)
    assert sends.sent == []


def test_a_request_that_ended_has_no_owner_and_one_that_stays_keeps_its_source() -> None:
    sends, table = Sends(), RequestTable()
    it = ownership(table, sends)
    question = Resolve("m1", "r", 1, "b")
    assert it.owner(question) == "nobody"
    table.add(LiveRequest("r", "x", "x", StreamSplicer("a"), 9, 0, [b""], 0.0))
    assert it.owner(question) is None
    assert it.decide(question, committed=False) == "source"
    assert it.owner(question) == "source"
    assert sends.sent == [("b", Discard("r", 1))] * 2


def test_a_destination_that_committed_owns_the_request() -> None:
    table = RequestTable()
    it = ownership(table, Sends())
    request = LiveRequest("r", "x", "x", StreamSplicer("a"), 9, 0, [b""], 0.0)
    table.add(request)
    question = Resolve("m1", "r", 1, "b")
    assert it.decide(question, committed=True) == "destination"
    assert it.owner(question) == "destination"
    assert request.instance == "b"


def test_a_request_runs_again_when_the_instance_whose_tokens_wait_for_others_is_lost() -> None:
    """They may come after the loss, and that instance be back by then, without the request."""
    sends, table = Sends(), RequestTable()
    it = ownership(table, sends)
    request = LiveRequest("r", "x", "x", StreamSplicer("a"), 9, 0, [b""], 0.0)
    table.add(request)
    assert request.splicer.feed("b", OutputSpan("r", 1, 1), Token("r"), 0.0).deliver == []
    it.lost("b", "instance b is lost")
    assert request.run == 1
