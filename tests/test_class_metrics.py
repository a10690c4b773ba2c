"""What /metrics says of each priority class."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from kvmig.engines.base import EngineLoad, Preempted
from kvmig.gateway.metrics import ClassCollector, Metrics
from kvmig.gateway.router import Router
from kvmig.ground.config import ClusterConfig
from kvmig.ground.priorities import PriorityClass, with_normal
from tests.fake_llumlet import SECRET, FakeLlumlet, Front, cluster, decode, eventually, report

CLASSES = with_normal([PriorityClass("high", -1)])


class Registry(CollectorRegistry):
    """Samples by name and class."""

    def of(self, name: str, priority_class: str, **labels: str) -> float | None:
        return self.get_sample_value(name, {"priority_class": priority_class, **labels})


def test_each_class_has_its_own_latencies() -> None:
    registry = Registry()
    metrics = Metrics(registry, CLASSES)
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
    metrics = Metrics(registry, CLASSES)
    for_priority = msgspec.structs.replace(report(), why="priority")
    metrics.migrated(for_priority, 0)
    metrics.migrated(msgspec.structs.replace(report(reason="no_blocks"), why="priority"), 0)
    metrics.migrated(report(), 0)
    metrics.migrated(for_priority, None)
    assert registry.of("kvmig_moved_for_priority_total", "normal") == 1
    assert registry.of("kvmig_moved_for_priority_total", "high") == 0


async def test_preemptions_come_from_the_instances() -> None:
    registry = Registry()
    async with cluster() as it:
        registry.register(ClassCollector(it.router.fleet.rows, CLASSES))
        counts = (Preempted(0, 5, 2), Preempted(-1, 1, 0))
        it.llumlets[0].report(EngineLoad(100, 0, 0, 0, 0, 0, preempted=counts))
        await eventually(
            lambda: registry.of("kvmig_preemptions_total", "normal", instance="0") == 5
        )
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
    registry, front, clock = Registry(), Front(), Hands()
    llumlets = [FakeLlumlet("0"), FakeLlumlet("1")]
    router = Router(
        "front", SECRET, ClusterConfig(), front, decode,
        observer=Metrics(registry, CLASSES), clock=clock, lost_after_s=1e6,
    )  # fmt: skip
    try:
        for llumlet in llumlets:
            await router.add_instance(llumlet.instance, llumlet.endpoint)
        await eventually(lambda: all(row.blocks_total for row in router.fleet.rows()))
        owner = llumlets[int(await router.submit("r", "x", 20, -1, [b""]))]
        await owner.hear()
        clock.now += 2
        owner.step(("r", 0, 0, [1]))
        await front.until(lambda: front.tokens.get("r") == [1])
        clock.now += 3
        last = next(one for one in llumlets if one is not owner) if moved else owner
        last.step(("r", int(moved), 1, [2, 3]), last=["r"])
        await front.until(lambda: front.tokens["r"] == [1, 2, 3])
    finally:
        await router.close()
        for llumlet in llumlets:
            await llumlet.close()
    assert registry.of("kvmig_request_ttft_seconds_sum", "high") == 2
    assert registry.of("kvmig_request_seconds_sum", "high") == 5
    assert registry.of("kvmig_request_tpot_seconds_sum", "high") == 1.5
    assert registry.of("kvmig_request_seconds_count", "normal") == 0


@pytest.mark.parametrize(("complete", "ends"), [(True, 1), (False, 0)])
async def test_a_stop_string_ends_a_request_and_a_client_that_leaves_does_not(
    complete: bool, ends: int
) -> None:
    registry, front = Registry(), Front()
    llumlet = FakeLlumlet("0")
    router = Router(
        "front", SECRET, ClusterConfig(), front, decode, observer=Metrics(registry, CLASSES)
    )
    try:
        await router.add_instance("0", llumlet.endpoint)
        await router.submit("r", "x", 20, 0, [b""])
        await llumlet.hear()
        llumlet.step(("r", 0, 0, [1]))
        await front.until(lambda: front.tokens.get("r") == [1])
        await router.abort(["r"], complete=complete)
        assert router.live() == []
    finally:
        await router.close()
        await llumlet.close()
    assert registry.of("kvmig_request_seconds_count", "normal") == ends
