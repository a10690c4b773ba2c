"""What bench.tracing calls the cost of traces."""

from __future__ import annotations

from typing import cast

import pytest

from bench import tracing
from bench.otlp_collector import OtlpCollector
from bench.tracing import SHARE, Round, summarise


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Microseconds that are made up: nothing is measured."""
    monkeypatch.setattr(tracing, "call_us", lambda ratio: 100.0 if ratio else 10.0)
    monkeypatch.setattr(tracing, "export_us", lambda collector: 200.0)
    monkeypatch.setattr(tracing, "queue_us", lambda: 25.6)


def rounds(**cpu_us: tuple[float, ...]) -> list[Round]:
    return [
        Round(server, number, us)
        for server, values in cpu_us.items()
        for number, us in enumerate(values)
    ]


def test_the_cost_is_that_of_the_parts_over_a_call_with_traces_off() -> None:
    found = rounds(off=(10.0, 12.0, 11.0), on=(11.0, 12.0, 22.0))
    summary = summarise(found, 256, cast("OtlpCollector", None))
    assert summary["off_cpu_us"] == 11.0
    assert summary["server_on_ratio"] == pytest.approx(1.1)
    assert summary["off_us"] == pytest.approx(0.1)
    more = SHARE * (100 + 200) + (1 - SHARE) * 10
    assert summary["on_ratio"] == pytest.approx(1 + more / (256 * 11))
    assert "server_off_us" not in summary


def test_a_checkout_without_traces_is_compared_round_by_round() -> None:
    found = rounds(before=(9.0, 11.5, 10.0), off=(10.0, 12.0, 11.0), on=(1.0, 1.0, 1.0))
    assert summarise(found, 256, cast("OtlpCollector", None))["server_off_us"] == 1.0
