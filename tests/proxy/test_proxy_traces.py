"""Traces at a fleet's door: whose a call's is, what its deployment gets, how long it waited."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvmig.proxy.messages import ModelRoute
from kvmig.tracing.calls import CallTracer
from kvmig.tracing.parents import read_parent
from tests.support.proxy_site import Deployment, site
from tests.support.span_memory import span_memory
from tests.support.waiting import until

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CLIENTS = {
    "traceparent": f"00-{TRACE}-{SPAN}-01",
    "tracestate": "vendor=1",
    "baggage": "user=alice",
}


async def test_a_client_joins_no_trace_at_the_door_but_is_linked_to_its_own(
    tmp_path: Path,
) -> None:
    memory = span_memory()
    traces = CallTracer(memory.tracer, trusts=False)
    async with site(tmp_path, traces=traces) as door, door.deployment() as there:
        await door.ask(headers=CLIENTS)
        await until(lambda: memory.spans)
    (span,) = memory.spans
    assert span.name == "POST /v1/chat/completions"
    assert span.parent is None
    assert [f"{one.context.trace_id:032x}" for one in span.links] == [TRACE]
    assert span.attributes is not None
    assert span.attributes["gen_ai.request.model"] == "count"
    assert span.attributes["http.response.status_code"] == 200
    got = there.got[0].headers
    parent = read_parent(got["traceparent"].encode())
    assert parent is not None
    assert (parent.trace_id, parent.span_id) == (span.context.trace_id, span.context.span_id)
    assert "tracestate" not in got
    assert "baggage" not in got


async def test_a_door_that_trusts_goes_on_with_the_clients_trace(tmp_path: Path) -> None:
    memory = span_memory()
    traces = CallTracer(memory.tracer, trusts=True)
    async with site(tmp_path, traces=traces) as door, door.deployment() as there:
        await door.ask(headers=CLIENTS)
        await until(lambda: memory.spans)
    assert f"{memory.spans[0].context.trace_id:032x}" == TRACE
    assert there.got[0].headers["traceparent"].split("-")[1] == TRACE


async def test_a_call_without_a_key_makes_no_span(tmp_path: Path) -> None:
    memory = span_memory()
    async with site(tmp_path, traces=CallTracer(memory.tracer, trusts=False)) as door:
        answer = await door.ask(given="-", headers=CLIENTS)
    assert answer.status_code == 401
    assert memory.spans == []


@pytest.mark.parametrize("value", ["t", "00-" + "0" * 32 + f"-{SPAN}-01", "x" * 8000])
async def test_a_hostile_traceparent_costs_no_answer_and_no_link(
    tmp_path: Path, value: str
) -> None:
    memory = span_memory()
    traces = CallTracer(memory.tracer, trusts=True)
    async with site(tmp_path, traces=traces) as door, door.deployment():
        answer = await door.ask(headers={"traceparent": value, "tracestate": value})
        await until(lambda: memory.spans)
    assert answer.status_code == 200
    assert memory.spans[0].parent is None
    assert not memory.spans[0].links


async def test_a_call_that_waits_for_its_model_shows_for_what(tmp_path: Path) -> None:
    memory = span_memory()
    async with site(tmp_path, traces=CallTracer(memory.tracer, trusts=False)) as door:
        there = Deployment(f"{tmp_path}/count")
        await there.open()
        door.tell(ModelRoute(name="count", state="cold"))
        asking = asyncio.create_task(door.ask())
        await until(lambda: door.wanted)
        door.tell(ModelRoute(name="count", state="starting"))
        await asyncio.sleep(0.05)
        door.ready()
        assert (await asking).status_code == 200
        await there.close()
        await until(lambda: memory.named("POST /v1/chat/completions"))
    assert memory.tree() == [["POST /v1/chat/completions", ["hold", "cold", "starting"]]]


async def test_a_refusal_after_the_key_is_in_the_trace(tmp_path: Path) -> None:
    memory = span_memory()
    async with site(tmp_path, traces=CallTracer(memory.tracer, trusts=False)) as door:
        answer = await door.ask({"model": "unknown"})
    assert answer.status_code == 404
    (span,) = memory.spans
    assert span.attributes is not None
    assert span.attributes["http.response.status_code"] == 404
