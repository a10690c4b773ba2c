"""Records of calls at another engine: one each, which says all of it."""

from __future__ import annotations

from kvmig.asgi.call import HttpCall
from kvmig.asgi.route_table import find_route
from kvmig.command.answer_count import AnswerCount
from kvmig.command.call_meter import CallMeter
from kvmig.command.call_plan import CallPlan


def metered() -> tuple[CallMeter, HttpCall, AnswerCount]:
    meter, call = CallMeter("a", lambda: 100.0, lambda: 1.0), HttpCall("c", "k")
    found = find_route("POST", "/v1/completions")
    assert found is not None
    count = meter.enter(call).count = AnswerCount(found.route, CallPlan(b"", prompt=10), 1)
    return meter, call, count


def test_a_call_that_runs_is_in_every_record_and_the_ended_one_in_one_more() -> None:
    meter, call, count = metered()
    assert [one.status for one in meter.take_records()] == ["running"]
    count.take_event(b'data: {"choices": [{"text": "a"}]}\n\n')
    (running,) = meter.take_records()
    assert (running.prompt, running.output, running.ended) == (10, 1, None)
    call.end_answer()
    call.end_call()
    (ended,) = meter.take_records()
    assert (ended.seq, ended.status, ended.ended) == (running.seq, "finished", 100.0)
    assert meter.take_records() == []


def test_a_client_that_leaves_pays_for_what_it_got() -> None:
    meter, call, count = metered()
    count.take_event(b'data: {"choices": [{"text": "a"}]}\n\n')
    call.lose_client()
    call.end_call()
    (ended,) = meter.take_records()
    assert (ended.status, ended.prompt, ended.output) == ("cut", 10, 1)


def test_an_error_costs_nothing() -> None:
    meter, call, _ = metered()
    call.status = 400
    call.end_answer()
    call.end_call()
    (ended,) = meter.take_records()
    assert (ended.status, ended.prompt, ended.output) == ("cut", 0, 0)


def test_a_stream_that_breaks_off_is_cut_and_costs_what_came() -> None:
    meter, call, count = metered()
    count.take_event(b'data: {"choices": [{"text": "a"}]}\n\n')
    meter.enter(call).failed = True
    call.status = 200
    call.end_answer()
    call.end_call()
    (ended,) = meter.take_records()
    assert (ended.status, ended.output) == ("cut", 1)
