"""What /metrics says."""

from __future__ import annotations

import math

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvmig.gateway.inventory import InstanceRow
from kvmig.gateway.metrics import InstanceCollector, Metrics, with_instances
from kvmig.ground.priorities import NORMAL
from tests.fake_llumlet import report


def test_migrations_are_counted_by_outcome_and_reason() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, [NORMAL])
    metrics.migrated(report(), 0)
    metrics.migrated(report(reason="no_blocks"), None)
    for outcome, reason in (("committed", ""), ("aborted", "no_blocks")):
        labels = {"outcome": outcome, "reason": reason, "why": "by-hand"}
        labels |= {"source": "0", "destination": "1"}
        assert registry.get_sample_value("kvmig_migrations_total", labels) == 1
    assert registry.get_sample_value("kvmig_migration_bytes_total") == 8000
    assert registry.get_sample_value("kvmig_migration_downtime_seconds_count") == 1
    assert registry.get_sample_value("kvmig_migration_downtime_seconds_sum") == 0.01


def test_refused_messages_are_those_since_the_start_of_their_process() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, [NORMAL])

    def shown(reason: str) -> float | None:
        labels = {"process": "scheduler", "reason": reason}
        return registry.get_sample_value("kvmig_messages_refused", labels)

    metrics.messages_refused("scheduler", {"early": 2, "version": 1})
    assert (shown("early"), shown("version")) == (2, 1)
    metrics.messages_refused("scheduler", {"early": 1})  # another one
    assert (shown("early"), shown("version")) == (1, 0)


def test_only_gaps_between_two_tokens_are_observed() -> None:
    registry = CollectorRegistry()
    metrics = Metrics(registry, [NORMAL])
    metrics.switched(None)
    metrics.switched(0.25)
    assert registry.get_sample_value("kvmig_client_gap_seconds_count") == 1
    assert registry.get_sample_value("kvmig_client_gap_seconds_sum") == 0.25


def test_instances_are_read_when_scraped() -> None:
    row = InstanceRow("a", 0, "serving", "tcp://x", 100, 60, 2, 3, math.inf, 0, 1, 2)
    rows: list[InstanceRow] = []
    registry = CollectorRegistry()
    registry.register(InstanceCollector(lambda: rows))
    rows.append(row)
    for name, value in (
        ("freeness", math.inf), ("blocks_used", 60), ("blocks_total", 100),
        ("running", 2), ("waiting", 3), ("staging_used", 2),
    ):  # fmt: skip
        assert registry.get_sample_value(f"kvmig_instance_{name}", {"instance": "a"}) == value


def test_vllms_metrics_get_the_instance_and_others_stay_as_they_are() -> None:
    source = CollectorRegistry()
    labels = ("model_name", "engine")
    Gauge("vllm:running", "", labels, registry=source).labels("m", "1").set(5)
    Gauge("vllm:never", "", labels, registry=source).labels("m", "9").set(5)
    Gauge("vllm:all", "", ("model_name",), registry=source).labels("m").set(3)
    Counter("vllm:tokens", "", labels, registry=source).labels("m", "0").inc(7)
    Histogram("vllm:ttft", "", labels, registry=source, buckets=(1,)).labels("m", "0").observe(0.5)
    Gauge("other", "", ("engine",), registry=source).labels("0").set(1)
    shown = generate_latest(with_instances(source, lambda: {0: "a", 1: "b"})).decode()
    for line in (
        'vllm:running{engine="1",instance="b",model_name="m"} 5.0',
        'vllm:all{model_name="m"} 3.0',
        'vllm:tokens_total{engine="0",instance="a",model_name="m"} 7.0',
        'vllm:ttft_bucket{engine="0",instance="a",le="1.0",model_name="m"} 1.0',
        'other{engine="0"} 1.0',
    ):
        assert line in shown
    assert 'engine="9"' not in shown
