"""Virtual usage and freeness: the paper's section 4.4 with numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from math import inf
from typing import Literal, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.freeness import (
    batch_size,
    free_blocks,
    freeness,
    instance_freeness,
    slack,
)
from kvmig.controlplane.view import Headroom, InstanceView, usage
from kvmig.engines.base import ClassLoad, EngineLoad, GroupLoad

Place = Literal["running", "head", "behind", "terminating"]
"""Where a request stands; `terminating` is the fake one that empties an instance."""


class Holding(NamedTuple):
    """A request's weight: blocks that it holds when running, blocks that it wants when queued."""

    place: Place
    blocks: float = 0.0
    priority: int = 0


def virtual_usage(holdings: Iterable[Holding], headroom: Headroom | None = None) -> list[float]:
    """The virtual usage of each request of one instance, in the order given."""
    held = list(holdings)
    headroom = headroom or {}
    running = Counter(one.priority for one in held if one.place == "running")

    def weigh(one: Holding) -> float:
        match one.place:
            case "running":
                return one.blocks + headroom.get(one.priority, 0.0) / running[one.priority]
            case "head":
                return one.blocks
            case "behind":
                return 0.0
            case "terminating":
                return math.inf

    return [weigh(one) for one in held]


def test_each_rule_weighs_its_request() -> None:
    held = [
        Holding("running", 10),
        Holding("running", 20, priority=-1),
        Holding("running", 30, priority=-1),
        Holding("head", 8),
        Holding("behind", 5),
        Holding("terminating"),
    ]
    assert virtual_usage(held) == [10, 20, 30, 8, 0, inf]
    assert virtual_usage(held, {-1: 100.0}) == [10, 70, 80, 8, 0, inf]


@given(
    running=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 2)), max_size=8),
    queue=st.lists(st.integers(1, 500), max_size=5),
    headroom=st.dictionaries(st.integers(0, 2), st.integers(0, 999).map(float)),
    terminating=st.booleans(),
)
def test_the_sum_over_requests_is_the_sum_from_the_engines_totals(
    running: list[tuple[int, int]],
    queue: list[int],
    headroom: dict[int, float],
    terminating: bool,
) -> None:
    held = [Holding("running", blocks, priority) for blocks, priority in running]
    held += [Holding("behind" if place else "head", blocks) for place, blocks in enumerate(queue)]
    held += [Holding("terminating")] * terminating
    used = sum(blocks for blocks, _ in running)
    head = queue[0] if queue else 0
    classes = tuple(
        ClassLoad(priority, len(those), 0, sum(those))
        for priority in range(3)
        for those in [[blocks for blocks, its in running if its == priority]]
    )
    load = EngineLoad(1000, used, len(running), len(queue), head, sum(queue), classes)
    weight = usage(load, headroom, terminating=terminating)
    assert weight.virtual == pytest.approx(sum(virtual_usage(held, headroom)))
    assert weight.behind == sum(queue) - head
    owners = [p for _, p in running if headroom.get(p)]
    lower = sum(blocks for blocks, p in running if owners and p > min(owners))
    assert weight.lower == lower


def test_an_engine_that_tells_of_no_classes_runs_normal_requests() -> None:
    headroom = {0: 30.0, 1: 500.0}
    assert usage(EngineLoad(100, 10, 1, 0, 0, 0), headroom).virtual == 40
    assert usage(EngineLoad(100, 0, 0, 1, 7, 7), headroom).virtual == 7


def test_of_several_pools_the_scarcest_counts_by_its_share() -> None:
    load = EngineLoad(1000, 100, 4, 2, 10, 30, groups=(GroupLoad(50, 20, 5, 10),))
    assert usage(load)[:2] == (500, 100)
    roomy = EngineLoad(1000, 700, 4, 2, 10, 30, groups=(GroupLoad(50, 20, 5, 10),))
    assert usage(roomy)[:2] == (710, 20)


@pytest.mark.parametrize(
    ("free", "batch", "expected"),
    [(851, 0, inf), (200, 40, 5), (0, 40, 0), (-80, 40, -2), (-inf, 0, -inf), (-inf, 3, -inf)],
)
def test_freeness_is_free_blocks_a_request(free: float, batch: int, expected: float) -> None:
    assert freeness(free, batch) == expected


def view(load: EngineLoad, **more: float) -> InstanceView:
    return InstanceView(
        instance="a",
        endpoint="tcp://a",
        load=load,
        virtual_blocks=usage(load).virtual,
        behind_blocks=usage(load).behind,
        state="serving",
        pending_blocks=more.get("pending_blocks", 0.0),
        pending_requests=int(more.get("pending_requests", 0)),
    )


def test_the_queue_counts_by_its_head_or_whole() -> None:
    one = view(EngineLoad(100, 60, 4, 3, 8, 20))
    assert (free_blocks(one, "head"), batch_size(one, "head")) == (32, 4)
    assert (free_blocks(one, "all"), batch_size(one, "all")) == (20, 7)


def test_what_is_on_its_way_counts() -> None:
    one = view(EngineLoad(100, 60, 4, 0, 0, 0), pending_blocks=16, pending_requests=2)
    assert (free_blocks(one), batch_size(one, "all")) == (24, 6)


def test_an_idle_instance_is_infinitely_free_and_one_with_only_a_queue_is_not() -> None:
    assert instance_freeness(view(EngineLoad(100, 0, 0, 0, 0, 0))) == inf
    assert instance_freeness(view(EngineLoad(100, 0, 0, 2, 30, 50))) == 70


@given(free=st.integers(-1000, 1000), batch=st.integers(1, 100), moved=st.integers(0, 100))
def test_moving_a_request_away_never_lowers_slack(free: int, batch: int, moved: int) -> None:
    assert slack(free + moved, batch - 1) >= slack(free, batch)
    assert slack(free - moved, batch + 1) <= slack(free, batch)


def test_of_two_overloaded_instances_the_one_missing_fewer_blocks_has_more_slack() -> None:
    assert freeness(-3000, 500) > freeness(-300, 10)
    assert slack(-3000, 500) < slack(-300, 10)
