"""One trace through a fleet: its proxy, and the front end of the model that the call waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.otlp_collector import otlp_collector
from tests.support.fleets import ToyFleet, answer, ask

pytestmark = [pytest.mark.server, pytest.mark.long]

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


async def test_a_call_that_starts_its_model_is_one_trace_of_the_fleets_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with otlp_collector() as collector:
        for name, value in collector.environment.items():
            monkeypatch.setenv(name, value)
        with ToyFleet(tmp_path) as fleet:
            fleet.add_toy("a")
            async with fleet.client() as client:
                client.headers["traceparent"] = f"00-{TRACE}-{SPAN}-01"
                await answer(client, ask("a", 10))
            (sequence,) = await collector.wait_for("sequence")
            (call,) = await collector.wait_for("text_completion a")
            (door,) = await collector.wait_for("POST /v1/completions")
            (hold,) = await collector.wait_for("hold")
            (start,) = await collector.wait_for("start instance")
    assert (door.parent_id, door.links) == ("", (TRACE,))
    assert door.trace_id != TRACE
    assert door.attributes["gen_ai.request.model"] == "a"
    assert (hold.trace_id, hold.parent_id) == (door.trace_id, door.span_id)
    assert "starting" in {one.name for one in collector.under(hold)}
    assert (call.trace_id, call.parent_id) == (door.trace_id, door.span_id)
    assert sequence.parent_id == call.span_id
    assert start.attributes["gen_ai.request.model"] == "a"
