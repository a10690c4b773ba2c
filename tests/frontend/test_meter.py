"""The meter: what a call uses, however many sequences, moves and runs it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import pytest

from kvmig.accounts.usage import UsageRecord
from kvmig.asgi.answer_usage import CallUsage
from kvmig.asgi.call import HttpCall
from kvmig.controlplane.messages import Outputs, OutputSpan
from kvmig.frontend.meter import UsageMeter
from kvmig.frontend.ports import NOT_BEGUN, OutputBatch, RouterObserver
from kvmig.frontend.requests import BeamSearch, LiveRequest, RequestTable
from kvmig.frontend.splice import StreamSplicer
from kvmig.frontend.streams import RequestStreams
from tests.support.fake_llumlet import Tokens

if TYPE_CHECKING:
    from kvmig.frontend.ports import InstancePort, OutputSink


class Front:
    """A meter and its table."""

    def __init__(self) -> None:
        self.meter = UsageMeter("a", lambda: 100.0)
        self.table = RequestTable(self.meter)
        self.call = HttpCall("c", "k")

    def add(self, request_id: str, prompt_id: str = "x") -> LiveRequest:
        """A sequence of the call, whose prompt has 50 tokens."""
        request = LiveRequest(
            request_id, prompt_id, "c", StreamSplicer("i"), 50, 0, [b""], 0.0, call=self.call
        )
        self.table.add(request)
        return request

    def begin(self, request: LiveRequest, cached: int) -> None:
        """Its first token comes."""
        request.first_at, request.cached_tokens = 1.0, cached
        request.splicer.next = 1

    def end_call(self, status: int) -> UsageRecord:
        """The call is over; its record."""
        self.call.status = status
        self.call.end_answer()
        self.call.end_call()
        return self.record()

    def record(self) -> UsageRecord:
        """Of the call."""
        (found,) = self.meter.take_records()
        return found


@pytest.fixture
def front() -> Front:
    return Front()


def test_moves_of_sequences_that_run_and_that_have_ended_add_up(front: Front) -> None:
    one, two = front.add("1"), front.add("2")
    for request, epoch in ((one, 1), (one, 2), (two, 1)):
        request.note_switch(epoch)
    assert front.record().moves == 3
    front.table.remove("1")
    assert front.record().moves == 3


def test_a_prompt_of_several_answers_was_cached_as_it_was_for_the_first_of_them(
    front: Front,
) -> None:
    one, two, other = front.add("1"), front.add("2"), front.add("3", "y")
    front.begin(one, 16)
    front.meter.take_records()
    front.begin(two, 48)  # the first one's blocks
    front.begin(other, 32)
    for request in (one, two, other):
        front.table.remove(request.request_id)
    record = front.record()
    assert (record.prompt, record.cached) == (100, 48)


def test_a_call_without_a_first_token_had_nothing_of_a_cache(front: Front) -> None:
    front.add("1").cached_tokens = 16
    front.table.remove("1", failed=True)
    assert front.record().cached == 0


class Nobody:
    """Takes all tokens, and is the one instance."""

    def __init__(self) -> None:
        self.prompts: list[tuple[int, float]] = []
        """What was measured: tokens that were computed, and seconds."""

    def deliver(self, index: int, items: Sequence[object], meta: object) -> None:
        pass

    def index(self, instance: str) -> int:
        return 0

    def arithmetic(self, instance: str) -> object:
        return NOT_BEGUN

    def note_prompt(self, tokens: int, seconds: float) -> None:
        self.prompts.append((tokens, seconds))


def test_what_was_cached_is_what_the_first_run_said_with_its_first_token() -> None:
    front, nobody, said = Front(), Nobody(), [32, 48]
    request = front.add("1")
    streams = RequestStreams(
        front.table,
        cast("OutputSink", nobody),
        lambda _: OutputBatch([Tokens(request.run_id, [7])], None, {request.run_id: said.pop(0)}),
        cast("InstancePort", nobody),
        RouterObserver(),
        lambda: 2.0,
    )
    streams.deliver_outputs("i", Outputs([OutputSpan("1", 0, 0)]), [memoryview(b"")])
    front.table.next_run(request, 2.0)  # whose prompt has the first token, too
    request.splicer.restart("i")
    streams.deliver_outputs("i", Outputs([OutputSpan("1+1", 0, 1)]), [memoryview(b"")])
    front.table.remove("1")
    record = front.record()
    assert (record.output, record.reruns, record.cached) == (2, 1, 32)
    assert nobody.prompts == [(50 - 32, 2.0)]


def search_of(front: Front, width: int, steps: int) -> BeamSearch:
    """A search that has done so many steps: each beam's step is a request of its own."""
    search = BeamSearch(width)
    for step in range(steps):
        for beam in range(width if step else 1):
            name = f"{step}-{beam}"
            request = LiveRequest(
                name, f"x-{name}", "c", StreamSplicer("i"), 50 + step, 0, [b""], 0.0,
                call=front.call, search=search,
            )  # fmt: skip
            front.table.add(request)
            front.begin(request, 16 + step)
            front.table.remove(name)
    return search


def test_steps_of_a_beam_search_are_one_prompt_and_its_answers(front: Front) -> None:
    search = search_of(front, width=2, steps=3)
    running = front.record()
    assert (running.prompt, running.cached) == (50, 16)
    assert (running.output, running.sequences) == (1 + 2 + 2, 2)

    search.finish(50, 2 * 3)
    over = front.end_call(200)
    assert (over.prompt, over.output, over.status) == (50, 6, "finished")


def begun() -> Front:
    """A call whose first token has come."""
    front = Front()
    front.begin(front.add("1"), 16)
    return front


def test_a_call_that_is_answered_with_an_error_has_used_nothing() -> None:
    front = begun()
    front.table.remove("1")
    record = front.end_call(429)
    assert (record.prompt, record.cached, record.output, record.status) == (0, 0, 0, "cut")


def test_a_call_has_used_what_its_answer_says() -> None:
    front = begun()
    front.table.remove("1")
    front.call.told = CallUsage(70, 3)
    record = front.end_call(200)
    assert (record.prompt, record.output, record.status) == (70, 3, "finished")


def test_a_call_whose_client_leaves_has_used_what_was_computed_and_is_cut() -> None:
    front = begun()
    front.add("2", "y")
    front.call.lose_client()
    for request_id in ("1", "2"):
        front.table.remove(request_id)
    record = front.end_call(499)
    assert (record.prompt, record.output, record.status) == (100, 1, "cut")


def test_a_stream_that_fails_has_used_the_prompts_whose_answers_had_begun() -> None:
    front = begun()
    front.add("2", "y")
    for request_id in ("1", "2"):
        front.table.remove(request_id, failed=True)
    record = front.end_call(200)
    assert (record.prompt, record.output, record.status) == (50, 1, "cut")


def test_a_call_counts_the_seconds_of_its_recordings_beside_its_tokens(front: Front) -> None:
    request = front.add("1")
    front.call.seconds = 8
    front.begin(request, 0)
    running = front.record()
    assert (running.seconds, running.status) == (8, "running")
    front.table.remove("1")
    ended = front.end_call(200)
    assert (ended.seconds, ended.prompt, ended.output) == (8, 50, 1)


def test_a_recording_that_was_answered_with_an_error_counts_nothing(front: Front) -> None:
    front.add("1")
    front.call.seconds = 8
    front.table.remove("1", failed=True)
    assert (front.end_call(500).seconds, front.call.seconds) == (0, 8)
