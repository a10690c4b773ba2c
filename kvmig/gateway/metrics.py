"""Prometheus: `kvmig_*`, and the label `instance` on vLLM's own `vllm:*`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from kvmig.gateway.class_metrics import ClassMetrics
from kvmig.gateway.fault_metrics import FaultMetrics
from kvmig.gateway.inventory import InstanceRow
from kvmig.ground.priorities import PriorityClass
from kvmig.kvtransfer.report import Downtime, MigrationReport

BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip


def downtime_s(downtime: Downtime) -> float:
    """The whole pause, in seconds."""
    parts = (getattr(downtime, part) for part in downtime.__struct_fields__)
    return sum(part or 0.0 for part in parts) / 1000


class Metrics:
    """What happened: an `Observer` for the router."""

    def __init__(self, registry: CollectorRegistry, classes: Sequence[PriorityClass]) -> None:
        self._by_class = ClassMetrics(registry, classes)
        self.began, self.ended = self._by_class.began, self._by_class.ended
        faults = FaultMetrics(registry)
        self.missing, self.ran_again = faults.missing, faults.ran_again
        self.poisoned, self.unread = faults.poisoned, faults.unread
        self.messages_refused = faults.messages_refused
        self.refused = self._by_class.refused
        self._migrations = Counter(
            "kvmig_migrations_total",
            "Migrations that ended: outcome (committed, aborted), reason, what they were for.",
            ("outcome", "reason", "why", "source", "destination"),
            registry=registry,
        )
        self._downtime = Histogram(
            "kvmig_migration_downtime_seconds",
            "Time from asking for the suspension to the destination's first token.",
            buckets=BUCKETS_S,
            registry=registry,
        )
        self._bytes = Counter(
            "kvmig_migration_bytes_total", "KV cache sent by migrations.", registry=registry
        )
        self._gap = Histogram(
            "kvmig_client_gap_seconds",
            "Time between the last token of the old instance and the first of the new, "
            "as they came to the front end; a client sees less of it (--spread).",
            buckets=BUCKETS_S,
            registry=registry,
        )

    def migrated(self, report: MigrationReport, priority: int | None) -> None:
        """A migration ended."""
        if priority is not None:
            self._by_class.migrated(report, priority)
        self._migrations.labels(
            report.state, report.reason, report.why, report.source, report.destination
        ).inc()
        self._bytes.inc(report.bytes)
        if report.state == "committed" and report.downtime_ms is not None:
            self._downtime.observe(downtime_s(report.downtime_ms))

    def switched(self, gap_s: float | None) -> None:
        """A stream went over to a new owner."""
        if gap_s is not None:
            self._gap.observe(gap_s)


_GAUGES = {
    "freeness": "Blocks by which each request of the instance can grow; +Inf when it is idle.",
    "blocks_used": "KV blocks in use.",
    "blocks_total": "KV blocks.",
    "running": "Requests in the batch.",
    "waiting": "Requests in the queue.",
    "staging_used": "Staging buffers held by migrations out of the instance.",
}
assert _GAUGES.keys() <= {field.name for field in fields(InstanceRow)}


class InstanceCollector(Collector):
    """The instances' load, read when somebody scrapes."""

    def __init__(self, rows: Callable[[], Iterable[InstanceRow]]) -> None:
        self._rows = rows

    def collect(self) -> Iterable[Metric]:
        """One gauge a column, one sample an instance."""
        rows = list(self._rows())
        for column, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"kvmig_instance_{column}", text, labels=("instance",))
            for row in rows:
                gauge.add_metric((row.id,), getattr(row, column))
            yield gauge


class _Labelled(Collector):
    """All of `source`, with `instance` beside vLLM's label `engine`.

    vLLM's samples of engines that never were (it wants to know them all at its start) are
    left out.
    """

    def __init__(
        self, source: CollectorRegistry, instances: Callable[[], Mapping[int, str]]
    ) -> None:
        self._source = source
        self._instances = instances

    def collect(self) -> Iterable[Metric]:
        names = {str(index): name for index, name in self._instances().items()}
        for metric in self._source.collect():
            if metric.name.startswith("vllm:"):
                metric.samples = [
                    sample._replace(labels={**sample.labels, "instance": names[engine]})
                    if (engine := sample.labels.get("engine")) is not None
                    else sample
                    for sample in metric.samples
                    if sample.labels.get("engine") in (None, *names)
                ]
            yield metric


def of_all_front_ends(own: CollectorRegistry) -> CollectorRegistry:
    """What to read on a scrape: `own`, or the sums over all front ends where there are several.

    Those write their values to files in the folder that PROMETHEUS_MULTIPROC_DIR names.
    """
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if folder is None:
        return own
    every = CollectorRegistry()
    MultiProcessCollector(every, folder)  # type: ignore[no-untyped-call]
    return every


def with_instances(
    source: CollectorRegistry, instances: Callable[[], Mapping[int, str]]
) -> CollectorRegistry:
    """A registry to expose on /metrics in place of `source`.

    instances: gives the instance's id by vLLM's engine index (`Router.engine_indexes`), of
    all that ever were.
    """
    registry = CollectorRegistry()
    registry.register(_Labelled(source, instances))
    return registry
