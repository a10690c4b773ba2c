"""Spans of calls: whose trace they join, who decides that they are sampled, what goes on."""

from __future__ import annotations

import logging

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, DEFAULT_ON, Sampler

from kvmig.tracing.calls import CallTracer
from kvmig.tracing.logs import show_trace_ids
from kvmig.tracing.parents import read_parent
from tests.support.span_memory import SpanMemory, span_memory

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SENT = [
    (b"host", b"here"),
    (b"traceparent", f"00-{TRACE}-{SPAN}-01".encode()),
    (b"tracestate", b"vendor=1"),
    (b"baggage", b"user=alice"),
]


def memory_of(sampler: Sampler = DEFAULT_ON) -> SpanMemory:
    return span_memory(sampler, lambda: 100.0, lambda: 1_000_100.0)


def test_a_trusted_parent_goes_on() -> None:
    memory = memory_of()
    trace = CallTracer(memory.tracer, trusts=True).begin("call", SENT, {})
    headers = list(SENT)
    trace.replace_headers(headers)
    trace.end(200, {})
    (span,) = memory.spans
    assert span.parent is not None
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (TRACE, SPAN)
    sent = dict(headers)
    found = read_parent(sent[b"traceparent"])
    assert found is not None
    assert (found.span_id, found.sampled) == (span.context.span_id, True)
    assert (sent[b"tracestate"], sent.get(b"baggage")) == (b"vendor=1", None)


def test_a_strangers_parent_is_linked_and_its_state_goes_no_further() -> None:
    memory = memory_of()
    trace = CallTracer(memory.tracer, trusts=False).begin("call", SENT, {})
    headers = list(SENT)
    trace.replace_headers(headers)
    trace.end(200, {})
    (span,) = memory.spans
    assert span.parent is None
    assert f"{span.context.trace_id:032x}" != TRACE
    assert [f"{one.context.trace_id:032x}" for one in span.links] == [TRACE]
    assert [name for name, _ in headers] == [b"host", b"traceparent"]


def test_a_stranger_does_not_choose_to_be_sampled() -> None:
    memory = memory_of(ALWAYS_OFF)
    trace = CallTracer(memory.tracer, trusts=False).begin("call", SENT, {})
    headers = list(SENT)
    trace.replace_headers(headers)
    trace.end(200, {})
    assert not trace.recorded
    assert dict(headers)[b"traceparent"].endswith(b"-00")
    assert memory.spans == []


def test_a_span_that_is_over_stands_at_its_own_times() -> None:
    memory = memory_of()
    span = memory.tracer.begin("whole", memory.tracer.unix(99.0))
    span.add("part", memory.tracer.unix(99.25), memory.tracer.unix(99.5), {"kvmig.blocks": 3})
    span.end(memory.tracer.unix(100.0), "failed")
    part, whole = memory.spans
    assert part.start_time == 1_000_099_250_000_000
    assert part.end_time == 1_000_099_500_000_000
    assert part.parent is not None
    assert part.parent.span_id == whole.context.span_id
    assert not part.parent.is_remote
    assert whole.attributes is not None
    assert whole.attributes["error.type"] == "failed"


def test_log_lines_of_a_sampled_call_end_with_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    ids = iter(["", "4bf9"])
    end = show_trace_ids(lambda: next(ids))
    try:
        logging.getLogger("test").warning("before %d", 1)
        logging.getLogger("test").warning("of %s", "it")
    finally:
        end()
    logging.getLogger("test").warning("after")
    assert caplog.messages == ["before 1", "of it trace_id=4bf9", "after"]
