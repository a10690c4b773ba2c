"""Prometheus: `kvmig_*`, and the label `instance` on vLLM's own `vllm:*`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from kvmig.controlplane.view import InstanceView
from kvmig.core.api_records import InstanceRow
from kvmig.core.priorities import PriorityClass, class_of
from kvmig.engines.base import PreemptionCount
from kvmig.frontend.ports import RouterObserver
from kvmig.kvtransfer.report import DowntimeParts, MigrationReport
from kvmig.sharing.messages import InUnit

BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0,
)  # fmt: skip
TTFT_BUCKETS_S = (
    0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0,
)  # fmt: skip
TPOT_BUCKETS_S = (
    0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0,
)  # fmt: skip
REQUEST_BUCKETS_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
LABEL = "priority_class"
SCRAPED = 0.1
"""Most of the time that goes into the text of /metrics, for any number of readers."""


def downtime_s(downtime: DowntimeParts) -> float:
    """The whole pause, in seconds."""
    return downtime.whole_ms / 1000


class FrontendMetrics(RouterObserver):
    """Counts what happens to requests, migrations and instances: an `RouterObserver` for the
    router."""

    def __init__(self, registry: CollectorRegistry, classes: Sequence[PriorityClass]) -> None:
        def counter(name: str, text: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(name, text, labels, registry=registry)

        def histogram(
            name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()
        ) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=registry)

        self._classes = classes
        self._ttft = histogram(
            "kvmig_request_ttft_seconds",
            "From a request's arrival to its first token.",
            TTFT_BUCKETS_S,
            (LABEL,),
        )
        self._tpot = histogram(
            "kvmig_request_tpot_seconds",
            "Mean time of a request's output tokens after the first.",
            TPOT_BUCKETS_S,
            (LABEL,),
        )
        self._whole = histogram(
            "kvmig_request_seconds",
            "From a request's arrival to its last token.",
            REQUEST_BUCKETS_S,
            (LABEL,),
        )
        self._moved = counter(
            "kvmig_moved_for_priority_total",
            "Requests that were moved away from one of a class above, by their own class.",
            (LABEL,),
        )
        self._refused = counter(
            "kvmig_requests_refused_total",
            "Requests that were answered 429: too many waited (--max-waiting).",
            (LABEL,),
        )
        for one in classes:  # a class that has had no request yet is there with 0
            for metric in (self._ttft, self._tpot, self._whole, self._moved, self._refused):
                metric.labels(one.name)
        self._missing = counter(
            "kvmig_instances_missing_total",
            "Instances that could not be relied on any more: silent, hung, failed or lost.",
            ("instance", "ailment"),
        )
        self._again = counter(
            "kvmig_requests_run_again_total",
            "Requests that were run again because their instance was missing.",
        )
        self._tokens = counter(
            "kvmig_recomputed_tokens_total",
            "Tokens of those requests, prompt and output; the prefix cache may hold some.",
        )
        self._poisoned = counter(
            "kvmig_requests_poisoned_total",
            "Requests that were failed because instances crashed or hung while they ran them.",
        )
        self._unread = counter(
            "kvmig_requests_unread_total",
            "Requests that were failed because their client didn't read (--max-unread).",
        )
        self._messages_refused = Gauge(
            "kvmig_messages_refused",
            "Messages that a process has refused since its start, by reason.",
            ("process", "reason"),
            registry=registry,
            multiprocess_mode="max",  # all front ends hear the same of a process
        )
        self._refused_before: dict[str, Mapping[str, int]] = {}
        self._migrations = counter(
            "kvmig_migrations_total",
            "Migrations that ended: outcome (committed, aborted), reason, what they were for.",
            ("outcome", "reason", "why", "source", "destination"),
        )
        self._downtime = histogram(
            "kvmig_migration_downtime_seconds",
            "Time from asking for the suspension to the destination's first token.",
            BUCKETS_S,
        )
        self._bytes = counter("kvmig_migration_bytes_total", "KV cache sent by migrations.")
        self._gap = histogram(
            "kvmig_client_gap_seconds",
            "Time between the last token of the old instance and the first of the new, "
            "as they came to the front end; a client sees less of it (--pause-spread).",
            BUCKETS_S,
        )

    # -- requests

    def refused(self, priority: int) -> None:
        """A request was answered 429."""
        self._refused.labels(self._name(priority)).inc()

    def began(self, priority: int, ttft_s: float) -> None:
        self._ttft.labels(self._name(priority)).observe(ttft_s)

    def ended(self, priority: int, whole_s: float, decode_s: float, tokens: int) -> None:
        name = self._name(priority)
        self._whole.labels(name).observe(whole_s)
        if tokens > 1:
            self._tpot.labels(name).observe(decode_s / (tokens - 1))

    def ran_again(self, tokens: int) -> None:
        self._again.inc()
        self._tokens.inc(tokens)

    def poisoned(self) -> None:
        self._poisoned.inc()

    def unread(self) -> None:
        self._unread.inc()

    # -- migrations

    def migrated(self, report: MigrationReport, priority: int | None) -> None:
        committed = report.state == "committed"
        if priority is not None and committed and report.why == "priority":
            self._moved.labels(self._name(priority)).inc()
        self._migrations.labels(
            report.state, report.reason, report.why, report.source, report.destination
        ).inc()
        self._bytes.inc(report.bytes)
        if committed and report.downtime_ms is not None:
            self._downtime.observe(downtime_s(report.downtime_ms))

    def switched(self, gap_s: float | None) -> None:
        if gap_s is not None:
            self._gap.observe(gap_s)

    # -- instances

    def missing(self, instance: str, ailment: str) -> None:
        self._missing.labels(instance, ailment).inc()

    def messages_refused(self, process: str, counts: Mapping[str, int]) -> None:
        before = self._refused_before.get(process, {})
        if counts == before:
            return
        for reason in before.keys() | counts.keys():  # none of a reason: it has started again
            self._messages_refused.labels(process, reason).set(counts.get(reason, 0))
        self._refused_before[process] = counts

    def gone(self, instance: str) -> None:
        # What it has refused since its start is nothing once it is there no more.
        self.messages_refused(instance, {})
        self._refused_before.pop(instance, None)

    def _name(self, priority: int) -> str:
        return class_of(self._classes, priority).name


_GAUGES = {
    "freeness": "Blocks by which each request of the instance can grow; +Inf when it is idle.",
    "blocks_used": "KV blocks in use.",
    "blocks_total": "KV blocks; of an instance in a unit, its quota.",
    "blocks_limit": "KV blocks that it could have if all others of its unit gave.",
    "running": "Requests in the batch.",
    "waiting": "Requests in the queue.",
    "staging_used": "Staging buffers held by migrations out of the instance.",
}
_OF_UNIT = {
    "lease": ("kvmig_unit_lease_bytes", "KV cache that it has not given back to its unit."),
    "wanted": ("kvmig_unit_wanted_bytes", "KV cache of all its requests, the waiting ones, too."),
    "guarantee": (
        "kvmig_unit_guarantee_bytes",
        "KV cache that it gets back from its unit whenever it wants it.",
    ),
    "waited_s": (
        "kvmig_unit_turn_wait_seconds_total",
        "Seconds that its steps have waited for their turn (--unit-shares).",
    ),
    "used": ("kvmig_unit_used_bytes", "KV cache of its unit that running requests hold."),
    "connected": ("kvmig_unit_connected", "1 while its unit's agent is there, else 0."),
}
assert {*_OF_UNIT, "asked", "decode_parts"} == set(InUnit.__struct_fields__)
assert _GAUGES.keys() <= set(InstanceRow.__struct_fields__)


INSTANCE_STATES = ("starting", "serving", "draining", "silent", "hung", "failed", "lost")


class InstanceCollector(Collector):
    """The instances' load, read at each scrape."""

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
        state = GaugeMetricFamily(
            "kvmig_instance_state", "1 for the state that it is in.", labels=("instance", "state")
        )
        for row in rows:
            for each in INSTANCE_STATES:
                state.add_metric((row.id, each), row.state == each)
        yield state
        info = InfoMetricFamily(
            "kvmig_instance", "What and where it is: always 1.", labels=("instance",)
        )
        for row in rows:
            where = {"host": row.host, "pid": str(row.pid), "gpus": ",".join(row.gpus)}
            info.add_metric((row.id,), {"model": row.model, **where})
        yield info


class UnitCollector(Collector):
    """What instances have of the units that they are in, read at each scrape."""

    def __init__(self, views: Callable[[], Iterable[InstanceView]]) -> None:
        self._views = views

    def collect(self) -> Iterable[Metric]:
        """One sample an instance that shares its KV cache, of each of `_OF_UNIT`."""
        rows = [(one.instance, one.shared) for one in self._views() if one.shared is not None]
        for field, (name, text) in _OF_UNIT.items():
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            metric = kind(name, text, labels=("instance",))
            for instance, shared in rows:
                metric.add_metric((instance,), getattr(shared, field))
            yield metric


OF_REQUESTS = {
    "vllm:num_requests_running", "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason", "vllm:kv_cache_usage_perc",
}  # fmt: skip
"""vLLM's gauges that are 0 where an instance has no request."""
LORA = "vllm:lora_requests_info"
"""vLLM's gauge whose value is the time and whose labels are the adapters in use then."""


@dataclass(eq=False)
class _Labelled(Collector):
    """The samples of `source`, with `instance` next to vLLM's label `engine`.

    vLLM's samples of engines that never were (it wants to know them all at its start) are
    left out. vLLM sets its gauges with an engine's steps: one that makes none, or is gone, would
    keep its last ones without end, so that what instances report is asked.
    """

    source: CollectorRegistry
    instances: Callable[[], Mapping[int, str]]
    rows: Callable[[], Iterable[InstanceRow]]

    def collect(self) -> Iterable[Metric]:
        names = {str(index): name for index, name in self.instances().items()}
        rows = {row.id: row for row in self.rows()}
        for metric in self.source.collect():
            if metric.name.startswith("vllm:"):
                if metric.type == "gauge":
                    _forget_what_was(metric, names, rows)
                metric.samples = [
                    sample._replace(labels={**sample.labels, "instance": names[engine]})
                    if (engine := sample.labels.get("engine")) is not None
                    else sample
                    for sample in metric.samples
                    if sample.labels.get("engine") in (None, *names)
                ]
            yield metric


def _forget_what_was(
    metric: Metric, names: Mapping[str, str], rows: Mapping[str, InstanceRow]
) -> None:
    """Leave of a gauge what is so now."""
    gone = {engine for engine, name in names.items() if name not in rows}
    idle = {engine for engine, name in names.items() if name in rows and not _works(rows[name])}
    metric.samples = [one for one in metric.samples if one.labels.get("engine") not in gone]
    if metric.name in OF_REQUESTS:
        metric.samples = [
            one._replace(value=0.0) if one.labels.get("engine") in idle else one
            for one in metric.samples
        ]
    if metric.name == LORA:
        newest = sorted(metric.samples, key=lambda one: one.value)[-1:]
        metric.samples = newest if any(map(_works, rows.values())) else []


def _works(row: InstanceRow) -> bool:
    """Whether the instance has requests, and still reports."""
    return row.state not in ("lost", "failed") and row.running + row.waiting > 0


class MetricsExposition:
    """The text of /metrics, made on a thread: it takes as long as several steps, and streams go on.

    Calls may overlap: one that comes while a text is made shares the next one, which is as new as
    the call.
    """

    def __init__(
        self,
        own: CollectorRegistry,
        classes: Sequence[PriorityClass],
        rows: Callable[[], Iterable[InstanceRow]],
        views: Callable[[], Iterable[InstanceView]],
        instances: Callable[[], Mapping[int, str]],
    ) -> None:
        """own: the front end's. instances: as for `with_instances`."""
        self._read_rows, self._read_views = rows, views
        self._read_instances = instances
        self._rows: Sequence[InstanceRow] = ()
        self._views: Sequence[InstanceView] = ()
        self._instances: Mapping[int, str] = {}
        source = of_all_front_ends(own)
        source.register(InstanceCollector(lambda: self._rows))
        source.register(UnitCollector(lambda: self._views))
        source.register(ClassCollector(lambda: self._views, classes))
        self._registry = with_instances(source, lambda: self._instances, lambda: self._rows)
        self._making = asyncio.Lock()
        self._next: asyncio.Task[bytes] | None = None
        self._rests_until = 0.0

    async def text(self) -> bytes:
        """The text of the metrics, as of now, or of soon."""
        if self._next is None:
            self._next = asyncio.create_task(self._make(), name="metrics")
        return await asyncio.shield(self._next)

    async def _make(self) -> bytes:
        now = asyncio.get_running_loop().time
        async with self._making:
            await asyncio.sleep(self._rests_until - now())
            self._next = None
            # The thread reads copies: the event loop changes what they are made of.
            self._rows, self._views = tuple(self._read_rows()), tuple(self._read_views())
            self._instances = self._read_instances()
            began = now()
            try:
                return await asyncio.to_thread(generate_latest, self._registry)
            finally:
                self._rests_until = now() + (now() - began) * (1 / SCRAPED - 1)


def of_all_front_ends(own: CollectorRegistry) -> CollectorRegistry:
    """The registry to read on a scrape: `own`, or sums over all front ends where there are several.

    Those write their values to files in the folder that PROMETHEUS_MULTIPROC_DIR names.
    """
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if folder is None:
        return own
    every = CollectorRegistry()
    MultiProcessCollector(every, folder)  # type: ignore[no-untyped-call]
    return every


def with_instances(
    source: CollectorRegistry,
    instances: Callable[[], Mapping[int, str]],
    rows: Callable[[], Iterable[InstanceRow]],
) -> CollectorRegistry:
    """A registry to expose on /metrics in place of `source`.

    instances: gives the instance's id by vLLM's engine index (`FrontendRouter.engine_indexes`), of
    all that ever were. rows: of those that are there.
    """
    registry = CollectorRegistry()
    registry.register(_Labelled(source, instances, rows))
    return registry


class ClassCollector(Collector):
    """Preemptions and headroom by priority class, read at each scrape."""

    def __init__(
        self, views: Callable[[], Iterable[InstanceView]], classes: Sequence[PriorityClass]
    ) -> None:
        self._views = views
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
        for view in self._views():
            for one in self._classes:
                kept = view.headroom.get(one.priority, 0.0)
                headroom.add_metric((view.instance, one.name), kept)
            for name, (every, below) in self._by_class(view.load.preempted).items():
                whole.add_metric((view.instance, name), every)
                beside.add_metric((view.instance, name), below)
        return (whole, beside, headroom)

    def _by_class(self, told: Iterable[PreemptionCount]) -> dict[str, tuple[int, int]]:
        counts = {one.name: (0, 0) for one in self._classes}
        for one in told:
            name = class_of(self._classes, one.priority).name
            every, below = counts[name]
            counts[name] = every + one.times, below + one.below
        return counts
