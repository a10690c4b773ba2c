"""How far a worker's drain is, and its forecast."""

from __future__ import annotations

from typing import Any

from kvmig.fleet.worker_drain import DrainForecast, InstanceOnWorker, drain_view, forecast
from kvmig.fleet.workers import FleetWorker


def instance(name: str = "i0", **more: Any) -> InstanceOnWorker:
    return InstanceOnWorker(model="a", instance=name, state="serving", **more)


def drained(until: float | None = None) -> FleetWorker:
    return FleetWorker("w", drained_at=1000.0, drain_until=until)


def test_the_forecast_adds_up_what_has_to_move() -> None:
    both = [
        instance(streams=3, kv_bytes=3000, bytes_per_s=1000.0),
        instance("i1", streams=1, kv_bytes=500, bytes_per_s=250.0),
        instance("i2"),
    ]
    assert forecast(both) == DrainForecast(streams=4, kv_bytes=3500, seconds=5.0)


def test_nobody_knows_how_long_it_takes_where_no_stream_has_moved() -> None:
    found = forecast([instance(streams=3, kv_bytes=3000)])
    assert (found.kv_bytes, found.seconds) == (3000, None)


def test_an_empty_worker_takes_no_time() -> None:
    assert forecast([]) == DrainForecast(seconds=0)


def test_a_worker_without_instances_is_drained() -> None:
    view = drain_view(drained(), [], 1001.0)
    assert view is not None
    assert view.state == "drained"


def test_a_worker_of_which_nothing_is_seen_is_not_called_drained() -> None:
    unseen = FleetWorker("w", state="unknown", drained_at=1000.0)
    view = drain_view(unseen, [], 1001.0)
    assert view is not None
    assert view.state == "draining"


def test_a_drain_names_the_models_that_block_it_and_is_late_after_its_deadline() -> None:
    blocked = [instance(stays="other instances start first")]
    on_time, late = (drain_view(drained(1030.0), blocked, now) for now in (1030.0, 1031.0))
    assert on_time is not None
    assert late is not None
    assert (on_time.state, late.state) == ("draining", "late")
    assert late.blocked == {"a": "other instances start first"}


def test_a_worker_that_nobody_drains_has_no_drain() -> None:
    assert drain_view(FleetWorker("w"), [], 0.0) is None
