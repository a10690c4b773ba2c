"""What /metrics says."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvmig.controlplane.view import InstanceView
from kvmig.core.api_records import InstanceRow
from kvmig.core.live_records import PAUSE_PARTS, MoveRecord
from kvmig.core.priorities import NORMAL, PriorityClass, with_normal
from kvmig.engines.base import EngineLoad, PreemptionCount
from kvmig.engines.client_request import ClientRequest
from kvmig.frontend.metrics import (
    INSTANCE_STATES,
    ClassCollector,
    FrontendMetrics,
    InstanceCollector,
    MetricsExposition,
    UnitCollector,
    downtime_s,
    with_instances,
)
from kvmig.kvtransfer.report import DowntimeParts
from kvmig.launcher.front_ends import forget_gauges
from kvmig.sharing.messages import InUnit
from tests.support.fake_llumlet import cluster, report
from tests.support.inside import makes_text_for_all
from tests.support.waiting import until


def test_migrations_are_counted_by_outcome_and_reason() -> None:
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry, [NORMAL])
    metrics.migrated(report(), 0)
    metrics.migrated(report(reason="no_blocks"), None)
    for outcome, reason in (("committed", ""), ("aborted", "no_blocks")):
        labels = {"outcome": outcome, "reason": reason, "why": "by-hand"}
        labels |= {"source": "0", "destination": "1"}
        assert registry.get_sample_value("kvmig_migrations_total", labels) == 1
    assert registry.get_sample_value("kvmig_migration_bytes_total") == 8000
    assert registry.get_sample_value("kvmig_migration_downtime_seconds_count") == 1
    assert registry.get_sample_value("kvmig_migration_downtime_seconds_sum") == 0.01


def test_a_pause_is_its_parts_and_not_its_beginning() -> None:
    pause = DowntimeParts(1.0, 2.0, 3.0, 4.0, began_ms=900.0)
    assert downtime_s(pause) == 0.01
    shown = MoveRecord(downtime_ms=msgspec.to_builtins(pause))
    assert shown.pause_ms == 10.0
    assert {*PAUSE_PARTS, "began_ms"} == {*DowntimeParts.__struct_fields__}


def test_refused_messages_are_those_since_the_start_of_their_process() -> None:
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry, [NORMAL])

    def shown(reason: str) -> float | None:
        labels = {"process": "scheduler", "reason": reason}
        return registry.get_sample_value("kvmig_messages_refused", labels)

    metrics.messages_refused("scheduler", {"early": 2, "version": 1})
    assert (shown("early"), shown("version")) == (2, 1)
    metrics.messages_refused("scheduler", {"early": 1})  # another one
    assert (shown("early"), shown("version")) == (1, 0)


async def test_of_an_instance_that_was_removed_no_refused_messages_are_shown() -> None:
    registry = CollectorRegistry()

    def shown() -> float | None:
        labels = {"process": "0", "reason": "early"}
        return registry.get_sample_value("kvmig_messages_refused", labels)

    async with cluster(observer=FrontendMetrics(registry, [NORMAL])) as it:
        it.router.messages_refused("0", {"early": 2})
        assert shown() == 2
        await it.router.remove_instance("0")
    assert not shown()


def test_only_gaps_between_two_tokens_are_observed() -> None:
    registry = CollectorRegistry()
    metrics = FrontendMetrics(registry, [NORMAL])
    metrics.switched(None)
    metrics.switched(0.25)
    assert registry.get_sample_value("kvmig_client_gap_seconds_count") == 1
    assert registry.get_sample_value("kvmig_client_gap_seconds_sum") == 0.25


def test_instances_are_read_when_scraped() -> None:
    row = replace(A, blocks_limit=100)
    rows: list[InstanceRow] = []
    registry = CollectorRegistry()
    registry.register(InstanceCollector(lambda: rows))
    rows.append(row)
    for name, value in (
        ("freeness", math.inf), ("blocks_used", 60), ("blocks_total", 100), ("blocks_limit", 100),
        ("running", 2), ("waiting", 3), ("staging_used", 2),
    ):  # fmt: skip
        assert registry.get_sample_value(f"kvmig_instance_{name}", {"instance": "a"}) == value


def test_an_instance_is_in_one_state_of_those_that_there_are() -> None:
    registry = CollectorRegistry()
    registry.register(InstanceCollector(lambda: [replace(A, state="hung")]))
    (found,) = [one for one in registry.collect() if one.name == "kvmig_instance_state"]
    assert [one.labels["state"] for one in found.samples if one.value] == ["hung"]
    assert {one.labels["state"] for one in found.samples} == set(INSTANCE_STATES)


def test_instances_of_a_unit_say_what_they_have_of_it() -> None:
    alone = InstanceView(instance="a", endpoint="tcp://x")
    shared = InUnit(300, 500, 400, waited_s=1.5, connected=False, used=200)
    registry = CollectorRegistry()
    registry.register(UnitCollector(lambda: [alone, replace(alone, instance="b", shared=shared)]))
    for name, value in (
        ("lease_bytes", 300), ("wanted_bytes", 500), ("guarantee_bytes", 400),
        ("turn_wait_seconds_total", 1.5), ("connected", 0), ("used_bytes", 200),
    ):  # fmt: skip
        assert registry.get_sample_value(f"kvmig_unit_{name}", {"instance": "b"}) == value
        assert registry.get_sample_value(f"kvmig_unit_{name}", {"instance": "a"}) is None


def test_vllms_metrics_get_the_instance_and_others_stay_as_they_are() -> None:
    source = CollectorRegistry()
    labels = ("model_name", "engine")
    Gauge("vllm:running", "", labels, registry=source).labels("m", "1").set(5)
    Gauge("vllm:never", "", labels, registry=source).labels("m", "9").set(5)
    Gauge("vllm:all", "", ("model_name",), registry=source).labels("m").set(3)
    Counter("vllm:tokens", "", labels, registry=source).labels("m", "0").inc(7)
    Histogram("vllm:ttft", "", labels, registry=source, buckets=(1,)).labels("m", "0").observe(0.5)
    Gauge("other", "", ("engine",), registry=source).labels("0").set(1)
    shown = generate_latest(
        with_instances(source, lambda: {0: "a", 1: "b"}, lambda: [A, B])
    ).decode()
    for line in (
        'vllm:running{engine="1",instance="b",model_name="m"} 5.0',
        'vllm:all{model_name="m"} 3.0',
        'vllm:tokens_total{engine="0",instance="a",model_name="m"} 7.0',
        'vllm:ttft_bucket{engine="0",instance="a",le="1.0",model_name="m"} 1.0',
        'other{engine="0"} 1.0',
    ):
        assert line in shown
    assert 'engine="9"' not in shown


A = InstanceRow(
    id="a", index=0, state="serving", blocks_total=100, blocks_used=60, running=2, waiting=3,
    freeness=math.inf, staging_used=2,
)  # fmt: skip
B = replace(A, id="b", index=1)


@pytest.mark.parametrize(
    ("rows", "running", "usage"),
    [
        ([A, B], (5, 5), (0.5, 0.5)),
        ([A], (5, None), (0.5, None)),
        ([A, replace(B, running=0, waiting=0)], (5, 0), (0.5, 0)),
        ([A, replace(B, state="lost")], (5, 0), (0.5, 0)),
        ([A, replace(B, state="starting", running=0, waiting=0)], (5, 0), (0.5, 0)),
        ([], (None, None), (None, None)),
    ],
)
def test_gauges_of_instances_that_are_gone_or_empty_are_gone_or_zero(
    rows: list[InstanceRow], running: tuple[float | None, ...], usage: tuple[float | None, ...]
) -> None:
    source, labels = CollectorRegistry(), ("model_name", "engine")
    names = ("vllm:num_requests_running", "vllm:kv_cache_usage_perc")
    for name, value in zip(names, (5, 0.5), strict=True):
        gauge = Gauge(name, "", labels, registry=source)
        for engine in ("0", "1"):
            gauge.labels("m", engine).set(value)
    counted = Counter("vllm:tokens", "", labels, registry=source)
    counted.labels("m", "1").inc(7)
    shown = with_instances(source, lambda: {0: "a", 1: "b"}, lambda: rows)

    def read(name: str, engine: str, instance: str) -> float | None:
        own = {"model_name": "m", "engine": engine, "instance": instance}
        return shown.get_sample_value(name, own)

    for name, expected in zip(names, (running, usage), strict=True):
        assert (read(name, "0", "a"), read(name, "1", "b")) == expected
    assert read("vllm:tokens_total", "1", "b") == 7


@pytest.mark.parametrize(
    ("rows", "shown"), [([A], ["new"]), ([replace(A, running=0, waiting=0)], []), ([], [])]
)
def test_of_the_adapters_in_use_only_the_last_word_counts(
    rows: list[InstanceRow], shown: list[str]
) -> None:
    source = CollectorRegistry()
    gauge = Gauge("vllm:lora_requests_info", "", ("running_lora_adapters",), registry=source)
    for name, at in (("old", 1), ("new", 2)):
        gauge.labels(name).set(at)
    (metric,) = with_instances(source, lambda: {0: "a"}, lambda: rows).collect()
    assert [one.labels["running_lora_adapters"] for one in metric.samples] == shown


def test_what_a_front_end_has_set_goes_with_it_and_what_it_has_counted_stays(
    tmp_path: Path,
) -> None:
    for name in ("gauge_mostrecent_7.db", "gauge_max_7.db", "gauge_max_77.db", "counter_7.db"):
        (tmp_path / name).touch()
    forget_gauges(tmp_path, 7)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["counter_7.db", "gauge_max_77.db"]


# -- each priority class


CLASSES = with_normal([PriorityClass("high", -1)])


class Registry(CollectorRegistry):
    """Samples by name and class."""

    def of(self, name: str, priority_class: str, **labels: str) -> float | None:
        return self.get_sample_value(name, {"priority_class": priority_class, **labels})


def test_each_class_has_its_own_latencies() -> None:
    registry = Registry()
    metrics = FrontendMetrics(registry, CLASSES)
    metrics.began(-1, 0.5)
    metrics.ended(-1, whole_s=2.5, decode_s=2.0, tokens=5)
    metrics.ended(0, whole_s=1.0, decode_s=0.0, tokens=1)
    assert registry.of("kvmig_request_ttft_seconds_sum", "high") == 0.5
    assert registry.of("kvmig_request_tpot_seconds_sum", "high") == 0.5
    assert registry.of("kvmig_request_seconds_sum", "high") == 2.5
    assert registry.of("kvmig_request_seconds_count", "normal") == 1
    assert registry.of("kvmig_request_tpot_seconds_count", "normal") == 0


def test_only_committed_moves_for_a_priority_count_as_such() -> None:
    registry = Registry()
    metrics = FrontendMetrics(registry, CLASSES)
    for_priority = replace(report(), why="priority")
    metrics.migrated(for_priority, 0)
    metrics.migrated(replace(report(reason="no_blocks"), why="priority"), 0)
    metrics.migrated(report(), 0)
    metrics.migrated(for_priority, None)
    assert registry.of("kvmig_moved_for_priority_total", "normal") == 1
    assert registry.of("kvmig_moved_for_priority_total", "high") == 0


async def test_preemptions_come_from_the_instances() -> None:
    registry = Registry()
    async with cluster() as it:
        registry.register(ClassCollector(it.router.fleet.views, CLASSES))
        counts = (PreemptionCount(0, 5, 2), PreemptionCount(-1, 1, 0))
        it.llumlets[0].report(EngineLoad(100, 0, 0, 0, 0, 0, preempted=counts))
        await until(lambda: registry.of("kvmig_preemptions_total", "normal", instance="0") == 5)
        assert registry.of("kvmig_preempted_for_priority_total", "normal", instance="0") == 2
        assert registry.of("kvmig_preemptions_total", "high", instance="0") == 1
        assert registry.of("kvmig_preemptions_total", "high", instance="1") == 0


class Hands:
    """A clock that goes when told to."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("moved", [False, True])
async def test_a_requests_latencies_are_what_its_client_sees(moved: bool) -> None:
    registry, clock = Registry(), Hands()
    async with cluster(
        observer=FrontendMetrics(registry, CLASSES), clock=clock, lost_after_s=1e6
    ) as it:
        owner = it.llumlets[int(await it.router.submit(ClientRequest("r", "x", 20, -1, [b""])))]
        await owner.hear()
        clock.now += 2
        owner.step(("r", 0, 0, [1]))
        await it.front.until(lambda: it.front.tokens.get("r") == [1])
        clock.now += 3
        last = it.others(owner)[0] if moved else owner
        last.step(("r", int(moved), 1, [2, 3]), last=["r"])
        await it.front.until(lambda: it.front.tokens["r"] == [1, 2, 3])
    assert registry.of("kvmig_request_ttft_seconds_sum", "high") == 2
    assert registry.of("kvmig_request_seconds_sum", "high") == 5
    assert registry.of("kvmig_request_tpot_seconds_sum", "high") == 1.5
    assert registry.of("kvmig_request_seconds_count", "normal") == 0


@pytest.mark.parametrize(("complete", "ends"), [(True, 1), (False, 0)])
async def test_a_stop_string_ends_a_request_and_a_client_that_leaves_does_not(
    complete: bool, ends: int
) -> None:
    registry = Registry()
    async with cluster(observer=FrontendMetrics(registry, CLASSES), instances=1) as it:
        llumlet = await it.submit()
        llumlet.step(("r", 0, 0, [1]))
        await it.front.until(lambda: it.front.tokens.get("r") == [1])
        await it.router.abort(["r"], complete=complete)
        assert it.router.live() == []
    assert registry.of("kvmig_request_seconds_count", "normal") == ends


class Slow(Collector):
    """Takes half a second to tell; a number a text."""

    def __init__(self) -> None:
        self.texts = 0

    def collect(self) -> Iterable[Metric]:
        time.sleep(0.5)
        self.texts += 1
        return ()


def slow() -> tuple[Slow, MetricsExposition]:
    registry = CollectorRegistry(auto_describe=False)
    collector = Slow()
    exposition = MetricsExposition(registry, CLASSES, tuple, tuple, dict)
    registry.register(collector)
    collector.texts = 0  # a registry looks at what it gets
    return collector, exposition


async def test_streams_go_on_while_metrics_are_told() -> None:
    _, exposition = slow()
    told, ticks = asyncio.create_task(exposition.text()), 0
    while not told.done():
        await asyncio.sleep(0.01)
        ticks += 1
    assert b"kvmig_instance" in await told
    assert ticks > 5


async def test_whoever_asks_while_metrics_are_told_shares_the_next_text() -> None:
    collector, exposition = slow()
    first = asyncio.create_task(exposition.text())
    await until(lambda: makes_text_for_all(exposition))
    await asyncio.gather(first, *(exposition.text() for _ in range(20)))
    assert collector.texts == 2
