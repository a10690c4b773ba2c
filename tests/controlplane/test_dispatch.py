"""Where new requests go."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.dispatch import (
    DispatchPolicy,
    FewestWithRoom,
    FreestInstance,
    LeastLoaded,
    NewRequest,
    RoomiestAfter,
    RoundRobin,
)
from kvmig.controlplane.messages import ClusterMember, LoadReport
from kvmig.controlplane.policy import POLICIES
from kvmig.controlplane.view import ClusterView, InstanceView, ViewBuilder, usage
from kvmig.core.config import PolicyName
from kvmig.core.errors import NoInstance
from kvmig.engines.base import ClassLoad, EngineLoad
from tests.support.made_up_instances import instance as made_up


def policy(name: str) -> DispatchPolicy:
    return POLICIES[cast("PolicyName", name)].dispatcher()


def instance(
    name: str,
    used: int = 0,
    running: int = 0,
    waiting: int = 0,
    head: int = 0,
    queued: int = 0,
    *,
    total: int = 100,
    state: str = "serving",
    reported_at: float | None = 0.0,
) -> InstanceView:
    load = EngineLoad(total, used, running, waiting, head, queued)
    weight = usage(load, terminating=state == "draining")
    return InstanceView(
        instance=name,
        endpoint=f"tcp://{name}",
        load=load,
        virtual_blocks=weight.virtual,
        behind_blocks=weight.behind,
        state=state,
        reported_at=reported_at,
    )


def cluster(*instances: InstanceView) -> ClusterView:
    return ClusterView(0.5, instances)


def picks(by: DispatchPolicy, view: ClusterView, times: int, demand: float = 5) -> str:
    return "".join(by.pick(view, NewRequest(demand)).instance for _ in range(times))


def test_round_robin_takes_turns_whatever_the_load() -> None:
    view = cluster(instance("a", 90, 9), instance("b"), instance("c", 50, 5))
    assert picks(RoundRobin(), view, 7) == "abcabca"


def test_least_loaded_counts_memory_in_use_and_queued_for() -> None:
    view = cluster(instance("a", 40, 9), instance("b", 20, 1, 1, 25, 25), instance("c", 41, 1))
    assert picks(LeastLoaded(), view, 1) == "a"


def test_freeness_takes_the_instance_whose_batch_can_grow_longest() -> None:
    view = cluster(instance("a", 50, 10), instance("b", 60, 2), instance("c", 55, 10))
    for by in (FreestInstance("head"), FreestInstance("all"), RoomiestAfter()):
        assert picks(by, view, 1) == "b"


def test_an_idle_instance_is_freest() -> None:
    view = cluster(instance("a", 1, 1, total=1000), instance("b", total=20))
    for by in (FreestInstance("head"), FreestInstance("all"), RoomiestAfter()):
        assert picks(by, view, 1) == "b"


def test_with_the_head_only_a_long_queue_hides_and_with_all_of_it_it_counts() -> None:
    view = cluster(instance("a", 60, 6, 50, 5, 900), instance("b", 70, 6, 2, 5, 10))
    assert picks(FreestInstance("head"), view, 1) == "a"
    for by in (FreestInstance("all"), RoomiestAfter()):
        assert picks(by, view, 1) == "b"


def test_a_request_goes_where_it_fits_now_rather_than_where_others_may_grow_more() -> None:
    view = cluster(instance("a", 60, 20), instance("b", 80, 4))
    assert picks(RoomiestAfter(), view, 1, demand=30) == "a"
    assert picks(FreestInstance("head"), view, 1, demand=30) == "b"


def test_when_all_are_overloaded_the_one_missing_the_fewest_blocks_is_taken() -> None:
    view = cluster(instance("a", 100, 4, 400, 5, 3000), instance("b", 100, 4, 10, 30, 300))
    assert picks(RoomiestAfter(), view, 1) == "b"


def test_ties_go_to_the_fewest_requests_and_then_round() -> None:
    view = cluster(instance("a", 40, 4), instance("b", 40, 2), instance("c", 40, 2))
    assert picks(LeastLoaded(), view, 4) == "bcbc"
    idle = cluster(*(instance(name) for name in "abc"))
    assert picks(RoomiestAfter(), idle, 5) == "abcab"


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    "other",
    [
        instance("a", state="draining"),
        instance("a", state="starting"),
        instance("a", reported_at=-9.0),
        instance("a", reported_at=None),
        instance("a", total=4),
    ],
)
def test_an_instance_that_serves_goes_before_one_that_does_not(
    name: str, other: InstanceView
) -> None:
    view = cluster(other, instance("b", 99, 50, 9, 50, 400))
    assert picks(policy(name), view, 3) == "bbb"


@pytest.mark.parametrize("name", POLICIES)
def test_one_that_does_not_serve_is_better_than_none(name: str) -> None:
    draining, silent = instance("a", state="draining"), instance("b", reported_at=None)
    assert picks(policy(name), cluster(draining, silent), 2) == "aa"
    assert picks(policy(name), cluster(silent), 1) == "b"


@pytest.mark.parametrize("name", POLICIES)
def test_an_empty_cluster_is_an_error_that_says_so(name: str) -> None:
    with pytest.raises(NoInstance, match="the cluster has none"):
        policy(name).pick(cluster(), NewRequest(1))


@pytest.mark.parametrize("name", POLICIES)
def test_a_burst_between_two_reports_spreads_out(name: str) -> None:
    views = ViewBuilder()
    views.members(ClusterMember(name, f"tcp://{name}") for name in "abcd")
    for seq, member in enumerate("abcd"):
        views.report(LoadReport(member, seq, EngineLoad(100, 0, 0, 0, 0, 0), 0, 0), 0.0)
    by, went = policy(name), Counter[str]()
    for _ in range(40):
        chosen = by.pick(views.view(0.01), NewRequest(9)).instance
        views.dispatched(chosen, 9, 0.01)
        went[chosen] += 1
    assert went == {"a": 10, "b": 10, "c": 10, "d": 10}


@given(used=st.lists(st.integers(0, 100), min_size=1, max_size=6), demand=st.integers(1, 200))
def test_the_freest_is_never_one_with_more_usage_and_more_requests_than_another(
    used: list[int], demand: int
) -> None:
    view = cluster(*(instance(str(i), u, u // 5) for i, u in enumerate(used)))
    chosen = RoomiestAfter().pick(view, NewRequest(demand))
    assert chosen.load.used_blocks <= min(used) + 4
    assert chosen.virtual_blocks < inf


# -- kvmig's


def test_of_instances_with_room_enough_the_one_with_the_fewest_requests_is_taken() -> None:
    view = cluster(instance("a", 10, 5), instance("b", 40, 3), instance("c", 85, 1))
    assert picks(FewestWithRoom(10, 0.3), view, 1) == "b"


def test_a_block_of_prompt_to_be_computed_weighs_as_a_part_of_a_request() -> None:
    view = cluster(instance("a", 10, 2, 1, 10, 10), instance("b", 10, 5))
    assert picks(FewestWithRoom(10, 0.3), view, 1) == "b"
    assert picks(FewestWithRoom(10, 0.1), view, 1) == "a"


def test_a_prompt_that_is_being_computed_counts_as_one_that_waits() -> None:
    busy = instance("a", 12, 2)
    load = msgspec.structs.replace(busy.load, prefill_blocks=10)
    view = cluster(msgspec.structs.replace(busy, load=load), instance("b", 10, 4))
    assert picks(FewestWithRoom(10, 0.3), view, 1) == "b"
    assert picks(FewestWithRoom(10, 0.1), view, 1) == "a"


def test_of_as_many_requests_the_one_with_the_most_room_is_taken_and_of_equals_each() -> None:
    view = cluster(instance("a", 20, 3), instance("b", 10, 3), instance("c", 10, 3))
    assert picks(FewestWithRoom(10, 0.3), view, 4) == "bcbc"


def test_without_room_enough_anywhere_the_roomiest_is_taken() -> None:
    view = cluster(instance("a", 90, 1), instance("b", 70, 4), instance("c", 100, 1, 1, 9, 9))
    assert picks(FewestWithRoom(10, 0.3), view, 1) == "b"


def protecting(name: str, high: int, normal: int) -> InstanceView:
    """Requests of 10 blocks; the high ones have a headroom of 60 of the 100."""
    classes = (ClassLoad(-1, high, 0, 10 * high), ClassLoad(0, normal, 0, 10 * normal))
    running = high + normal
    return made_up(name, 10 * running, running, classes=classes, headroom={-1: 60.0})


def to(view: ClusterView, priority: int, demand: float = 5) -> str:
    return FewestWithRoom(10, 0.3).pick(view, NewRequest(demand, priority)).instance


def test_a_protected_request_joins_its_like_as_long_as_they_fit_beside_each_other() -> None:
    view = cluster(protecting("a", 0, 1), protecting("b", 3, 2), protecting("c", 0, 0))
    assert to(view, -1) == "b"
    assert to(view, -1, demand=20) == "c"
    assert to(cluster(protecting("a", 0, 3), protecting("b", 0, 1)), -1) == "b"


def test_a_normal_request_keeps_away_from_protected_ones() -> None:
    view = cluster(protecting("a", 0, 3), protecting("b", 2, 0))
    assert to(view, 0) == "a"
    everywhere = cluster(protecting("a", 1, 5), protecting("b", 1, 0))
    assert to(everywhere, 0) == "b"


def test_a_normal_request_uses_a_headroom_rather_than_wait() -> None:
    view = cluster(protecting("a", 0, 10), protecting("b", 2, 0))
    assert to(view, 0) == "b"
    assert to(cluster(protecting("a", 0, 10), protecting("b", 3, 7)), 0) == "a"


def test_a_priority_without_headroom_is_placed_like_a_normal_one() -> None:
    assert to(cluster(protecting("a", 0, 3), protecting("b", 2, 0)), -7) == "a"
