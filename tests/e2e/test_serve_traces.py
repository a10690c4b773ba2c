"""One trace through a whole server: a client's, the front end's, the engine's, and a move."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.otlp_collector import CollectedSpan, OtlpCollector, otlp_collector
from kvmig_tools.patience import SERVER_PATIENCE_S
from kvmig_tools.served import SMALL, Served

pytestmark = [pytest.mark.server, pytest.mark.long]

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CALL = "traced-call"
TOKENS, MOVED_AFTER = 400, 40


async def moved_call(served: Served) -> dict[str, Any]:
    """A streamed completion of a client with a trace, moved on its way; the report."""
    body = {
        "model": served.model, "prompt": "Count: 0017 0018", "max_tokens": TOKENS,
        "ignore_eos": True, "temperature": 0, "stream": True,
    }  # fmt: skip
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "x-request-id": CALL}
    report: dict[str, Any] = {}
    async with (
        httpx.AsyncClient(timeout=SERVER_PATIENCE_S, verify=False) as client,
        client.stream(
            "POST", f"{served.url}/v1/completions", json=body, headers=headers
        ) as response,
    ):
        assert response.status_code == 200
        events = 0
        async for line in response.aiter_lines():
            events += line.startswith("data: {")
            if events == MOVED_AFTER and not report:
                answer = await client.post(
                    f"{served.url}/kvmig/v1/migrations", json={"request_id": CALL}
                )
                report = answer.json()
    return report


def within(inner: CollectedSpan, outer: CollectedSpan) -> bool:
    return outer.began <= inner.began + 0.05 and inner.ended <= outer.ended + 0.05


async def test_a_moved_call_is_one_trace_from_the_client_to_the_engine(tmp_path: Path) -> None:
    with otlp_collector() as collector:
        environment = {
            **collector.environment,
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_SERVICE_NAME": "counting",
        }
        engines = f"http://127.0.0.1:{collector.port}/v1/traces"
        flags = [*SMALL, "--instances=2", f"--otlp-traces-endpoint={engines}"]
        with Served(flags, environment=environment, log=tmp_path / "log") as served:
            report = await moved_call(served)
            assert report["state"] == "committed", report
            await collector.wait_for("migrate")
            (call,) = await collector.wait_for(f"text_completion {served.model}")
            (sequence,) = await collector.wait_for("sequence")
            (engine,) = await collector.wait_for("llm_request")
            async with httpx.AsyncClient(timeout=30, verify=False) as client:
                await client.post(f"{served.url}/kvmig/v1/instances/i1/drain")
            (drain,) = await collector.wait_for("drain instance")
            assert drain.attributes["kvmig.instance"] == "i1"
        check_call(collector, call, sequence, engine)
        starts = collector.named("start instance")
        assert {one.attributes["kvmig.instance"] for one in starts} == {"i0", "i1"}


def check_call(
    collector: OtlpCollector, call: CollectedSpan, sequence: CollectedSpan, engine: CollectedSpan
) -> None:
    """What one collector says of the moved call."""
    assert (call.trace_id, call.parent_id, call.service) == (TRACE, SPAN, "counting")
    assert call.attributes["kvmig.call.id"] == CALL
    assert call.attributes["http.response.status_code"] == 200
    assert sequence.parent_id == call.span_id
    assert sequence.attributes["gen_ai.usage.output_tokens"] == TOKENS
    parts = [one.name for one in collector.under(sequence)]
    assert sorted(parts) == ["decode", "migrate", "prefill", "queue"]
    (migrate,) = collector.named("migrate")
    assert within(migrate, sequence)
    assert migrate.attributes["kvmig.state"] == "committed"
    (pause,) = [one for one in collector.under(migrate) if one.name == "pause"]
    assert [one.name for one in collector.under(pause)] == [
        "drain", "tail copy", "commit", "first token",
    ]  # fmt: skip
    assert all(within(one, migrate) for one in collector.under(migrate))
    # vLLM's own span: its parent travelled to the instance, and from there to the next one.
    assert (engine.trace_id, engine.parent_id) == (TRACE, call.span_id)
    words = json.dumps([one.attributes for one in collector.spans])
    assert "Count:" not in words
