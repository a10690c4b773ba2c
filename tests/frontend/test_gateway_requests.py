"""The table of live requests, and questions to instances."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence

import pytest

from kvmig.asgi.errors import (
    AmbiguousRequest,
    CallTimeout,
    InstanceLost,
    RequestFinished,
    UnknownRequest,
)
from kvmig.controlplane.messages import Fence, Fenced, ListedRequests, ListRequests, Resolved
from kvmig.core.errors import PeerError
from kvmig.frontend import requests
from kvmig.frontend.pending_calls import PendingCalls
from kvmig.frontend.requests import (
    PATIENCE_S,
    InstanceCrashes,
    LiveRequest,
    RequestTable,
    Verdict,
    call_of,
)
from kvmig.frontend.splice import StreamSplicer
from kvmig.rpc.codec import Frame
from kvmig.rpc.messages import RpcMessage


def entry(request_id: str, external_id: str) -> LiveRequest:
    return LiveRequest(
        request_id, external_id, call_of(external_id), StreamSplicer("0"), 10, 0, [b"payload"], 0.0
    )


def fence(call_id: int) -> Fence:
    return Fence(call_id, "r", 1)


@pytest.mark.parametrize(
    ("external", "call"),
    [
        ("cmpl-X-0", "X"),
        ("cmpl-a-b-1-12", "a-b-1"),
        ("chatcmpl-X", "X"),
        ("chatcmpl-a-0", "a-0"),
        ("warm-up", "warm-up"),
    ],
)
def test_the_call_is_read_from_the_engines_id(external: str, call: str) -> None:
    assert call_of(external) == call


def test_a_request_is_found_by_its_own_id_its_external_one_and_its_calls() -> None:
    table = RequestTable()
    one = entry("chatcmpl-X-12345678", "chatcmpl-X")
    table.add(one)
    assert [table.find(name) for name in ("chatcmpl-X-12345678", "chatcmpl-X", "X")] == [one] * 3


def test_two_live_calls_of_one_id_are_ambiguous_until_one_ends() -> None:
    table = RequestTable()
    table.add(entry("cmpl-X-0-11111111", "cmpl-X-0"))
    table.add(entry("cmpl-X-0-22222222", "cmpl-X-0"))
    with pytest.raises(AmbiguousRequest, match="cmpl-X-0-11111111, cmpl-X-0-22222222"):
        table.find("X")
    table.remove("cmpl-X-0-11111111")
    assert table.find("X").request_id == "cmpl-X-0-22222222"


def test_an_ended_request_is_told_from_an_unknown_one() -> None:
    table = RequestTable()
    table.add(entry("cmpl-X-0-11111111", "cmpl-X-0"))
    assert table.remove("cmpl-X-0-11111111") is not None
    assert table.remove("cmpl-X-0-11111111") is None
    assert len(table) == 0
    for name in ("cmpl-X-0-11111111", "cmpl-X-0", "X"):
        with pytest.raises(RequestFinished):
            table.find(name)
    with pytest.raises(UnknownRequest, match="there is no request Y"):
        table.find("Y")


def test_ended_requests_are_forgotten_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "REMEMBERED", 2)
    table = RequestTable()
    for name in ("a", "b", "c"):
        table.add(entry(name, name))
        table.remove(name)
    with pytest.raises(UnknownRequest):
        table.find("a")
    with pytest.raises(RequestFinished):
        table.find("c")


def test_an_id_cannot_be_used_twice_at_once() -> None:
    table = RequestTable()
    table.add(entry("a", "a"))
    with pytest.raises(ValueError, match="a is running already"):
        table.add(entry("a", "a"))


async def test_an_answer_reaches_who_asked() -> None:
    def answer(instance: str, question: RpcMessage, payload: Sequence[Frame]) -> None:
        assert isinstance(question, Fence)
        call_id = question.call_id
        questions.answer(call_id + 1, Fenced(call_id + 1, committed=False), [])  # nobody's
        questions.answer(call_id, Fenced(call_id, committed=True), [memoryview(b"x")])
        questions.answer(call_id, Fenced(call_id, committed=False), [])  # too late

    questions = PendingCalls(answer)
    message, payload = await questions.call_instance("0", fence, Fenced, 1.0, "Fence")
    assert message.committed
    assert [bytes(frame) for frame in payload] == [b"x"]
    assert len(questions) == 0


async def test_a_question_ends_with_its_time_its_instance_or_a_wrong_answer() -> None:
    def send(instance: str, question: RpcMessage, payload: Sequence[Frame]) -> None:
        assert isinstance(question, Fence)
        if instance == "wrong":
            questions.answer(question.call_id, Resolved("", True), [])

    questions = PendingCalls(send)
    with pytest.raises(CallTimeout, match="instance 0 did not answer Fence within 0 s"):
        await questions.call_instance("0", fence, Fenced, 0.0, "Fence")
    with pytest.raises(PeerError, match="wrong answered Fence with Resolved"):
        await questions.call_instance("wrong", fence, Fenced, 1, "Fence")
    lost = asyncio.ensure_future(questions.call_instance("0", fence, Fenced, 1.0, "Fence"))
    await asyncio.sleep(0)
    questions.lost("1", "another one")
    questions.lost("0", "instance 0 is lost")
    with pytest.raises(InstanceLost, match="instance 0 is lost"):
        await lost
    assert len(questions) == 0


def test_a_lost_run_is_known_by_its_id_no_more() -> None:
    table = RequestTable()
    entry = LiveRequest("r", "x", "x", StreamSplicer("a"), 1, 0, [b""], 0.0)
    table.add(entry)
    entry.moved_to, entry.destination = "b", "c"
    assert entry.holders == {"a", "b", "c"}

    table.next_run(entry, 5.0)

    assert (entry.run_id, entry.instance, entry.holders) == ("r+1", None, set())
    assert list(table.runs) == ["r+1"]
    assert table.find("r") is entry
    table.next_run(entry, 6.0)
    assert entry.unplaced_since == 5.0
    table.remove("r")
    assert not table.runs


# -- when a request may run on a further instance


def crashes(crashed: int, missing: int, since: float = 0.0) -> InstanceCrashes:
    names = [f"i{number}" for number in range(crashed + missing)]
    return InstanceCrashes(names[:crashed], dict.fromkeys(names[crashed:], since))


TABLE: dict[tuple[int, int], Verdict] = {
    (0, 0): "run", (0, 1): "run", (0, 2): "wait", (0, 3): "wait",
    (1, 0): "run", (1, 1): "wait", (1, 2): "wait",
    (2, 0): "poison", (2, 1): "poison",
}  # fmt: skip
"""With two crashes at most: (crashed, missing) -> verdict."""


@pytest.mark.parametrize(("seen", "verdict"), TABLE.items())
def test_the_verdict_by_what_a_request_has_seen(seen: tuple[int, int], verdict: Verdict) -> None:
    assert crashes(*seen).decide(1.0, 2) == verdict


@pytest.mark.parametrize(("crashed", "missing"), list(itertools.product(range(3), range(4))))
def test_nobody_waits_longer_than_the_patience(crashed: int, missing: int) -> None:
    late = crashes(crashed, missing).decide(PATIENCE_S, 2)
    assert late == ("poison" if crashed >= 2 else "run")


def test_patience_starts_with_the_last_that_went_missing() -> None:
    seen = InstanceCrashes(missing={"a": 0.0, "b": 10.0})
    assert seen.decide(PATIENCE_S + 5, 2) == "wait"
    assert seen.decide(PATIENCE_S + 10, 2) == "run"


def test_only_a_missing_instance_is_confirmed_to_have_crashed() -> None:
    seen = InstanceCrashes()
    seen.confirmed("never ran there")
    seen.missed("a", 1.0, 0)
    seen.missed("a", 2.0, 0)
    assert seen.missing == {"a": 1.0}
    seen.confirmed("a")
    seen.confirmed("a")
    assert (seen.crashed, seen.missing) == (["a"], {})


def test_an_instance_that_returned_does_not_count() -> None:
    seen = crashes(1, 1)
    seen.returned("i1")
    seen.returned("never missing")
    assert seen.decide(0.0, 2) == "run"


def test_a_restarted_instance_counts_each_time() -> None:
    seen = InstanceCrashes()
    for at in (0.0, 5.0):
        seen.missed("a", at, 0)
        seen.confirmed("a")
    assert seen.decide(9.0, 2) == "poison"


def test_a_hang_counts_as_a_crash_at_once_and_its_end_not_again() -> None:
    seen = InstanceCrashes()
    seen.missed("a", 0.0, 0)  # silent before
    seen.hung("a", 0, blamed=True)
    seen.hung("a", 0, blamed=True)
    seen.missed("a", 1.0, 0)
    seen.confirmed("a")
    assert (seen.crashed, seen.missing) == (["a"], {})
    seen.hung("a", 2, blamed=True)
    assert seen.decide(9.0, 2) == "poison"
    assert seen.sentence() == "instances a and a hung while they ran this request"


def test_who_came_during_a_hang_is_to_blame_neither_for_it_nor_for_the_end_of_the_instance() -> (
    None
):
    seen = InstanceCrashes()
    seen.hung("a", 0, blamed=False)
    seen.missed("a", 1.0, 0)
    seen.confirmed("a")
    assert (seen.crashed, seen.missing) == ([], {})
    seen.missed("a", 2.0, 1)
    seen.confirmed("a")
    assert seen.crashed == ["a"]


@pytest.mark.parametrize(
    ("hung", "crashed", "sentence"),
    [
        (["a"], [], "instance a hung while it ran this request"),
        ([], ["b"], "instance b crashed while it ran this request"),
        (["a"], ["b"], "instances a and b hung or crashed while they ran this request"),
    ],
)
def test_the_sentence_says_what_became_of_the_instances(
    hung: list[str], crashed: list[str], sentence: str
) -> None:
    seen = InstanceCrashes()
    for name in hung:
        seen.hung(name, 0, blamed=True)
    for name in crashed:
        seen.missed(name, 0.0, 1)
        seen.confirmed(name)
    assert seen.sentence() == sentence


async def test_an_answer_that_came_while_the_loop_stood_still_for_3_s_came_in_time() -> None:
    asked: list[int] = []
    questions = PendingCalls(lambda _, message, __: asked.append(getattr(message, "call_id", 0)))
    calling = asyncio.create_task(
        questions.call_instance("0", ListRequests, ListedRequests, 2.0, "ListRequests")
    )
    await asyncio.sleep(0)
    loop = asyncio.get_running_loop()
    loop.call_soon(time.sleep, 3.0)
    loop.call_later(3.2, lambda: questions.answer(asked[0], ListedRequests(asked[0], []), []))
    answer, _ = await calling
    assert answer == ListedRequests(asked[0], [])
