"""Prometheus by priority class: latencies, and who gave way to a class above."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvmig.engines.base import Preempted
from kvmig.gateway.inventory import InstanceRow
from kvmig.ground.priorities import PriorityClass, class_of
from kvmig.kvtransfer.report import MigrationReport

TTFT_BUCKETS_S = (
    0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0,
)  # fmt: skip
TPOT_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0,
)  # fmt: skip
REQUEST_BUCKETS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
LABEL = "priority_class"


class ClassMetrics:
    """Told by the router, in numbers of priority."""

    def __init__(self, registry: CollectorRegistry, classes: Sequence[PriorityClass]) -> None:
        self._classes = classes
        self._ttft = Histogram(
            "kvmig_request_ttft_seconds",
            "From a request's arrival to its first token.",
            (LABEL,),
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self._tpot = Histogram(
            "kvmig_request_tpot_seconds",
            "Mean time of a request's output tokens after the first.",
            (LABEL,),
            buckets=TPOT_BUCKETS_S,
            registry=registry,
        )
        self._whole = Histogram(
            "kvmig_request_seconds",
            "From a request's arrival to its last token.",
            (LABEL,),
            buckets=REQUEST_BUCKETS_S,
            registry=registry,
        )
        self._moved = Counter(
            "kvmig_moved_for_priority_total",
            "Requests that were moved away from one of a class above, by their own class.",
            (LABEL,),
            registry=registry,
        )
        self._refused = Counter(
            "kvmig_requests_refused_total",
            "Requests that were answered 429: too many waited (--max-waiting).",
            (LABEL,),
            registry=registry,
        )
        for one in classes:  # a class that has had no request yet is there with 0
            for metric in (self._ttft, self._tpot, self._whole, self._moved, self._refused):
                metric.labels(one.name)

    def began(self, priority: int, ttft_s: float) -> None:
        """A request's first token came."""
        self._ttft.labels(self._name(priority)).observe(ttft_s)

    def ended(self, priority: int, whole_s: float, decode_s: float, tokens: int) -> None:
        """A request's last token came, the `tokens`th, `decode_s` after the first."""
        name = self._name(priority)
        self._whole.labels(name).observe(whole_s)
        if tokens > 1:
            self._tpot.labels(name).observe(decode_s / (tokens - 1))

    def migrated(self, report: MigrationReport, priority: int) -> None:
        """A migration of a request ended."""
        if report.state == "committed" and report.why == "priority":
            self._moved.labels(self._name(priority)).inc()

    def refused(self, priority: int) -> None:
        """A request wasn't taken: too many waited."""
        self._refused.labels(self._name(priority)).inc()

    def _name(self, priority: int) -> str:
        return class_of(self._classes, priority).name


class ClassCollector(Collector):
    """What the instances tell of each class, read when somebody scrapes."""

    def __init__(
        self, rows: Callable[[], Iterable[InstanceRow]], classes: Sequence[PriorityClass]
    ) -> None:
        self._rows = rows
        self._classes = classes

    def collect(self) -> Iterable[Metric]:
        """One sample an instance and class."""
        labels = ("instance", LABEL)
        whole = CounterMetricFamily("kvmig_preemptions", "Requests preempted.", labels=labels)
        beside = CounterMetricFamily(
            "kvmig_preempted_for_priority",
            "Those of them that were preempted while a request of a class above was in the batch.",
            labels=labels,
        )
        headroom = GaugeMetricFamily(
            "kvmig_instance_headroom_blocks",
            "KV blocks kept free while a request of the class runs.",
            labels=labels,
        )
        for row in self._rows():
            for one in self._classes:
                headroom.add_metric((row.id, one.name), row.headroom.get(one.priority, 0.0))
            for name, (every, below) in self._by_class(row.preempted).items():
                whole.add_metric((row.id, name), every)
                beside.add_metric((row.id, name), below)
        return (whole, beside, headroom)

    def _by_class(self, told: Iterable[Preempted]) -> dict[str, tuple[int, int]]:
        counts = {one.name: (0, 0) for one in self._classes}
        for one in told:
            name = class_of(self._classes, one.priority).name
            every, below = counts[name]
            counts[name] = every + one.times, below + one.below
        return counts
