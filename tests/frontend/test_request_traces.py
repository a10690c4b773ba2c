"""The spans of a front end: a call's, its sequences', their migrations and further runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from kvmig.asgi.call import HttpCall
from kvmig.asgi.route_table import ClientRoute, find_route
from kvmig.core.config import HttpConfig
from kvmig.frontend.call_spans import CallSpans, operation_of
from kvmig.frontend.request_traces import RequestTraces
from kvmig.frontend.requests import BeamSearch, LiveRequest, RequestTable
from kvmig.frontend.splice import StreamSplicer
from kvmig.kvtransfer.report import DowntimeParts, MigrationReport, StageReport
from tests.support.span_memory import SpanMemory, span_memory
from tests.support.stubbed_front import stubbed_front
from tests.support.waiting import until

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CHAT = ClientRoute("POST", "/v1/chat/completions", "openai", "body", "tokens", "generation")
SHIFT = 1_000_000.0
"""Unix time when the router's clock shows 0."""


def in_clock(nanoseconds: int | None) -> float:
    """A span's time in the router's clock."""
    return round((nanoseconds or 0) / 1e9 - SHIFT, 3)


class Front:
    """A table with traces, and a call of which it has one request. The clock is set by hand."""

    def __init__(self) -> None:
        self.now = 10.0
        clock: Callable[[], float] = lambda: self.now  # noqa: E731
        self.memory: SpanMemory = span_memory(clock=clock, wall=lambda: SHIFT + self.now)
        self.traces = RequestTraces()
        self.table = RequestTable(traces=self.traces)
        self.call = HttpCall("c")
        self.call.trace = CallSpans(self.memory.tracer, "m").begin(self.call, CHAT, [])
        self.request = LiveRequest(
            "r", "x", "c", StreamSplicer("i0"), 50, 0, [b""], arrived=10.0, placed=11.0,
            call=self.call,
        )  # fmt: skip
        self.table.add(self.request)

    def first_token(self) -> None:
        self.request.first_at, self.request.splicer.last_at = self.now, self.now
        self.request.splicer.next = 1

    def times(self, name: str) -> list[tuple[float, float]]:
        """When spans of this name began and ended, in the router's clock."""
        return [
            (in_clock(one.start_time), in_clock(one.end_time)) for one in self.memory.named(name)
        ]


@pytest.fixture
def front() -> Front:
    return Front()


def report(request_id: str = "r", **more: object) -> MigrationReport:
    known: dict[str, object] = {
        "id": "m1", "request_id": request_id, "source": "i0", "destination": "i1",
        "state": "committed", "total_ms": 1000.0, "ended_at": SHIFT + 20.0, "bytes": 4096,
        "stages": [
            StageReport(2, 2048, 300.0, began_ms=100.0), StageReport(1, 1024, 100.0, began_ms=500.0)
        ],
        "downtime_ms": DowntimeParts(10.0, 20.0, 30.0, 40.0, began_ms=900.0), "tail_blocks": 1,
    }  # fmt: skip
    return MigrationReport(**(known | more))  # type: ignore[arg-type]


def test_a_request_waits_in_queues_is_computed_and_decodes(front: Front) -> None:
    front.request.queued_s = 0.5
    front.now = 14.0
    front.first_token()
    front.now = 19.0
    front.request.splicer.last_at, front.request.splicer.next = 18.0, 40
    front.table.remove("r")
    assert front.memory.tree() == [["sequence", "queue", "prefill", "decode"]]
    assert [front.times(name) for name in ("queue", "prefill", "decode", "sequence")] == [
        [(10.0, 11.5)], [(11.5, 14.0)], [(14.0, 18.0)], [(10.0, 18.0)],
    ]  # fmt: skip
    told = front.memory.attributes_of("sequence")
    assert told["gen_ai.usage.input_tokens"] == 50
    assert told["gen_ai.usage.output_tokens"] == 40


def test_a_request_that_fails_in_the_queue_has_no_other_part(front: Front) -> None:
    front.now = 12.0
    front.table.remove("r", failed=True)
    assert front.memory.tree() == [["sequence", "queue"]]
    assert front.memory.attributes_of("sequence")["error.type"] == "failed"


def test_a_migration_has_its_stages_and_the_pause_in_its_parts(front: Front) -> None:
    front.traces.migrated(report())
    front.table.remove("r")
    assert front.memory.tree() == [
        [
            "sequence",
            "queue",
            ["migrate", "stage", "stage", ["pause", "drain", "tail copy", "commit", "first token"]],
        ]
    ]
    assert front.times("migrate") == [(19.0, 20.0)]
    assert front.times("stage") == [(19.1, 19.4), (19.5, 19.6)]
    assert front.times("pause") == [(19.9, 20.0)]
    assert front.times("first token") == [(19.96, 20.0)]


def test_a_migration_ends_no_earlier_than_its_pause(front: Front) -> None:
    front.traces.migrated(
        report(downtime_ms=DowntimeParts(10.0, 20.0, 30.0, 140.0, began_ms=900.0))
    )
    assert front.times("migrate") == [(19.0, 20.1)]


def test_stages_of_an_older_instance_follow_each_other(front: Front) -> None:
    stages = [StageReport(2, 2048, 300.0), StageReport(1, 1024, 100.0)]
    front.traces.migrated(report(stages=stages, downtime_ms=DowntimeParts(10.0, 20.0, 30.0)))
    assert front.times("stage") == [(19.0, 19.3), (19.3, 19.4)]
    assert front.times("pause") == [(19.4, 19.46)]


def test_a_report_that_comes_after_the_end_is_in_the_trace(front: Front) -> None:
    front.table.remove("r")
    front.traces.migrated(report(state="aborted", reason="finished", downtime_ms=None))
    (migrate,) = front.memory.named("migrate")
    (sequence,) = front.memory.named("sequence")
    assert migrate.parent is not None
    assert migrate.parent.span_id == sequence.context.span_id
    assert front.memory.attributes_of("migrate")["error.type"] == "finished"


def test_a_migration_of_nobodys_request_makes_no_span(front: Front) -> None:
    front.traces.migrated(report("other"))
    assert front.memory.spans == []


def test_a_further_run_is_shown_from_the_loss_until_it_is_sent(front: Front) -> None:
    front.now = 15.0
    front.table.next_run(front.request, 15.0)
    front.traces.ran_again(front.request, "i1", 70, 17.0)
    front.traces.migrated(report("r+1"))
    front.now = 20.0
    front.table.remove("r")
    assert front.times("re-run") == [(15.0, 17.0)]
    assert len(front.memory.named("migrate")) == 1


def test_steps_of_a_beam_search_make_no_spans(front: Front) -> None:
    step = LiveRequest(
        "b", "x", "c", StreamSplicer("i0"), 5, 0, [b""], 10.0, call=front.call, search=BeamSearch(4)
    )
    front.table.add(step)
    front.table.remove("b")
    assert front.memory.spans == []


def test_traces_of_many_ended_requests_are_let_go(front: Front) -> None:
    front.table.remove("r")
    for number in range(1100):
        request = LiveRequest(
            f"r{number}", "x", "c", StreamSplicer("i0"), 1, 0, [b""], 10.0, call=front.call
        )
        front.table.add(request)
        front.table.remove(request.request_id)
    front.memory.exporter.clear()
    front.traces.migrated(report("r"))
    front.traces.migrated(report("r1099"))
    assert len(front.memory.named("migrate")) == 1


async def call_of(port: int, *headers: str) -> bytes:
    """The answer to a completion with one token."""
    body = json.dumps({"prompt": "secret words", "max_tokens": 3, "stream": True})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = ["POST /v1/completions HTTP/1.1", "host: here", f"content-length: {len(body)}"]
    lines += ["content-type: application/json", "connection: close", *headers]
    writer.write(("\r\n".join(lines) + f"\r\n\r\n{body}").encode())
    answer = await reader.read()
    writer.close()
    return answer


async def test_a_call_of_a_client_with_a_trace_is_in_that_trace_without_its_words() -> None:
    memory = span_memory()
    async with stubbed_front(HttpConfig(), tracer=memory.tracer) as front:
        front.metronome.set(1000.0)
        await call_of(front.port, f"traceparent: 00-{TRACE}-{SPAN}-01")
        await until(lambda: memory.named("text_completion bytes"))
    assert memory.tree() == [["text_completion bytes", ["sequence", "queue", "prefill", "decode"]]]
    (call,) = memory.named("text_completion bytes")
    assert f"{call.context.trace_id:032x}" == TRACE
    told = memory.attributes_of("text_completion bytes")
    assert told == told | {
        "gen_ai.request.model": "bytes",
        "http.response.status_code": 200,
        "gen_ai.usage.input_tokens": len("secret words"),
        "gen_ai.usage.output_tokens": 3,
    }
    assert not any("secret" in one.to_json() for one in memory.spans)


async def test_a_call_that_is_not_sampled_makes_no_span() -> None:
    memory = span_memory(ALWAYS_OFF)
    async with stubbed_front(HttpConfig(), tracer=memory.tracer) as front:
        front.metronome.set(1000.0)
        assert b"[DONE]" in await call_of(front.port)
    assert memory.spans == []


def test_operations_have_opentelemetrys_names() -> None:
    named = {
        path: operation_of(found.route)
        for path in (
            "/v1/chat/completions", "/v1/messages", "/v1/completions", "/v1/embeddings", "/score"
        )
        if (found := find_route("POST", path)) is not None
    }  # fmt: skip
    assert list(named.values()) == ["chat", "chat", "text_completion", "embeddings", "score"]
