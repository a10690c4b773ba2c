"""Drains, queues, de-fragmentation, priorities, and the paper's pairing."""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.policy import POLICIES
from kvmig.controlplane.rules import (
    balance,
    drain,
    gather,
    make_room,
    move_queues,
    pair_extremes,
    protect,
    relieve,
)
from kvmig.controlplane.scheduler import (
    MAX_DESTINATIONS,
    MAX_SOURCES,
    InstancePairing,
    RoundConfig,
    RoundPlan,
    rebalance,
)
from kvmig.controlplane.view import InstanceView
from kvmig.engines.base import ClassLoad
from tests.support.made_up_instances import cluster, instance, short


def only(*rules: Callable[[RoundPlan], None]) -> RoundConfig:
    """Destinations keep 6 blocks a request."""
    return RoundConfig(rules=rules, destination_above=6.0)


ALL = only(drain, relieve, protect, move_queues, make_room, gather, balance)
PAPER = RoundConfig(rules=(pair_extremes,), queued="head", destination_above=3.0)


def decide(*instances: InstanceView, rounds: RoundConfig = ALL) -> list[InstancePairing]:
    return rebalance(cluster(*instances), (), rounds)


# -- drain


def test_a_draining_instance_is_spread_over_several() -> None:
    others = [instance(name, 20, 2) for name in "bcd"]
    pairings = decide(instance("a", 60, 6, state="draining"), *others)
    assert short(pairings) == [("drain", "a", name, 20) for name in "bcd"]


def test_a_drain_goes_where_there_is_room_and_never_to_one_that_drains_too() -> None:
    full, roomy = instance("b", 95, 9), instance("c", 0, 0)
    both = instance("a", 40, 4, state="draining"), instance("d", 40, 4, state="draining")
    pairings = decide(both[0], full, roomy, both[1], rounds=only(drain))
    assert {one.source for one in pairings} == {"a", "d"}
    assert {one.destination for one in pairings} <= {"b", "c"}
    assert all(one.budget_blocks == 0 for one in pairings if one.destination == "b")
    assert sum(one.budget_blocks for one in pairings if one.destination == "c") >= 40


def seated(one: InstanceView, seats: int) -> InstanceView:
    """The instance, which runs so many requests at once."""
    return msgspec.structs.replace(one, load=msgspec.structs.replace(one.load, seats=seats))


@pytest.mark.parametrize(("seats", "budget"), [(5, 0), (7, 20), (99, 60)])
def test_no_more_leave_a_draining_instance_than_find_a_place_in_a_batch(
    seats: int, budget: float
) -> None:
    leaving, there = instance("a", 60, 6, state="draining"), instance("b", 20, 5)
    pairings = decide(leaving, seated(there, seats), rounds=only(drain))
    assert [one.budget_blocks for one in pairings] == ([budget] if budget else [])


def test_one_whose_batch_is_full_takes_nothing_for_balance() -> None:
    crowded, there = instance("a", 98, 9), instance("b", 10, 2)
    assert decide(crowded, seated(there, 9), rounds=only(balance))
    assert decide(crowded, seated(there, 2), rounds=only(balance)) == []


def test_what_waits_at_a_draining_instance_goes_even_where_nothing_is_free() -> None:
    pairings = decide(instance("a", 0, 0, (30,), state="draining"), instance("b", 100, 5))
    assert short(pairings) == [("drain", "a", "b", 0)]


def test_what_moves_out_of_a_draining_instance_already_is_not_asked_for_again() -> None:
    [pairing] = decide(instance("a", 60, 6, out=4, state="draining"), instance("b", 0, 0))
    assert pairing.budget_blocks == 20
    assert decide(instance("a", 60, 6, out=6, state="draining"), instance("b", 0, 0)) == []


def test_an_empty_draining_instance_needs_nothing() -> None:
    assert decide(instance("a", state="draining"), instance("b")) == []


# -- queues and de-fragmentation


def test_a_head_that_fits_elsewhere_changes_queue() -> None:
    pairings = decide(instance("a", 80, 4, (30,)), instance("b", 40, 4))
    assert short(pairings) == [("queue", "a", "b", 30)]


def test_no_more_of_a_queue_moves_than_can_start_there() -> None:
    [pairing] = decide(
        instance("a", 80, 4, (30, 30, 30)),
        instance("b", 30, 4),
        rounds=only(move_queues),
    )
    # 70 free, 6 for each of four and one more stay free.
    assert pairing.budget_blocks == 40


@pytest.mark.parametrize(
    "other",
    [
        instance("b", 60, 4),
        instance("b", 40, 4, (1,)),
        instance("b", 40, 4, state="draining"),
        instance("b", 40, 4, state="hung"),
    ],
    ids=["full", "has a queue", "draining", "hung"],
)
def test_a_queue_moves_only_where_it_starts_at_once(other: InstanceView) -> None:
    assert decide(instance("a", 80, 4, (30,)), other, rounds=only(move_queues)) == []


def test_a_queue_uses_a_headroom_only_when_it_can_start_nowhere_else() -> None:
    stuck, protected = instance("a", 80, 4, (30,)), mixed("b", 1, 0)
    rounds = only(move_queues)
    assert short(decide(stuck, protected, rounds=rounds))[0][:3] == ("queue", "a", "b")
    [pairing] = decide(stuck, protected, instance("c", 40, 4), rounds=rounds)
    assert pairing.destination == "c"


def test_a_head_that_can_start_where_it_is_stays() -> None:
    rounds = RoundConfig(rules=(move_queues, make_room))
    assert decide(instance("a", 60, 4, (30,)), instance("b"), rounds=rounds) == []


def test_room_is_made_for_a_head_that_fits_nowhere() -> None:
    # It wants 45, its own instance has 20 free, the others 40 and 35 less what they keep.
    others = instance("b", 60, 2), instance("c", 65, 2)
    pairings = decide(instance("a", 80, 4, (45,)), *others)
    assert short(pairings) == [("defragment", "a", "b", 22), ("defragment", "a", "c", 3)]


def test_no_request_moves_for_a_head_that_would_not_fit_all_the_same() -> None:
    others = instance("b", 75, 2), instance("c", 80, 2)
    assert decide(instance("a", 80, 4, (45,)), *others, rounds=only(make_room)) == []
    larger_than_all = instance("a", 80, 4, (200,))
    assert decide(larger_than_all, instance("b"), rounds=only(make_room)) == []


def test_what_is_moving_already_counts_as_room_made() -> None:
    others = instance("b", 60, 2), instance("c", 65, 2)
    pairings = decide(instance("a", 80, 4, (45,), out=1), *others)
    assert sum(one.budget_blocks for one in pairings) == 5


# -- relieve


def test_an_instance_that_holds_more_than_its_quota_gives_the_rest_away() -> None:
    pairings = decide(instance("a", 60, 6, total=40), instance("b", 40, 4))
    assert short(pairings)[0] == ("relieve", "a", "b", 20)


def test_it_gives_what_there_is_room_for() -> None:
    pairings = decide(instance("a", 60, 6, total=40), instance("b", 80, 2), rounds=only(relieve))
    assert short(pairings) == [("relieve", "a", "b", 2)]
    full = instance("b", 99, 2)
    assert decide(instance("a", 60, 6, total=40), full, rounds=only(relieve)) == []


def test_what_moves_out_already_relieves_it() -> None:
    [pairing] = decide(
        instance("a", 60, 6, total=40, out=1), instance("b", 40, 4), rounds=only(relieve)
    )
    assert pairing.budget_blocks == 10


def test_nobody_is_relieved_by_one_that_holds_too_much_itself_or_has_a_queue() -> None:
    both = instance("a", 60, 6, total=40), instance("b", 60, 6, total=40)
    assert decide(*both, instance("c", 10, 1, (50,)), rounds=only(relieve)) == []


# -- priority

HEADROOM = {-1: 60.0}


def mixed(name: str, high: int, normal: int) -> InstanceView:
    """Requests of 10 blocks, so many of each class."""
    classes = (ClassLoad(-1, high, 0, 10 * high), ClassLoad(0, normal, 0, 10 * normal))
    running = high + normal
    return instance(name, 10 * running, running, classes=classes, headroom=HEADROOM)


def test_normal_requests_make_way_for_a_protected_one() -> None:
    # 10 + 60 blocks belong to the high one, so 3 of 6 normal ones go.
    pairings = decide(mixed("a", 1, 6), mixed("b", 0, 1))
    assert short(pairings) == [("priority", "a", "b", 30)]
    assert pairings[0].priority == -1


def test_without_one_or_with_headroom_left_nobody_makes_way() -> None:
    assert decide(mixed("a", 0, 7), mixed("b", 0, 1)) == []
    assert decide(mixed("a", 1, 3), mixed("b", 0, 1), rounds=only(protect)) == []


def test_nobody_makes_way_towards_another_protected_request() -> None:
    assert decide(mixed("a", 1, 6), mixed("b", 1, 0), rounds=only(protect)) == []


# -- the paper's


def test_the_paper_pairs_lowest_with_highest_each_once_and_without_a_budget() -> None:
    lows = instance("a", 95, 9), instance("b", 99, 9), instance("c", 98, 9)
    highs = instance("d", 40, 4), instance("e", 10, 1)
    pairings = decide(*lows, *highs, rounds=PAPER)
    assert short(pairings) == [("balance", "b", "e", inf), ("balance", "c", "d", inf)]


def test_in_the_paper_a_draining_instance_is_the_lowest_of_all() -> None:
    pairings = decide(
        instance("a", 99, 9), instance("b", 5, 1, state="draining"), instance("c"), rounds=PAPER
    )
    assert short(pairings) == [("drain", "b", "c", inf)]


def test_headroom_makes_a_source_in_the_paper() -> None:
    pairings = decide(mixed("a", 1, 5), mixed("b", 0, 1), rounds=PAPER)
    assert short(pairings) == [("balance", "a", "b", inf)]


def test_in_the_artifact_an_instance_where_a_preempted_request_waits_gives_and_never_takes() -> (
    None
):
    roomy = instance("a", 40, 4)
    load = msgspec.structs.replace(roomy.load, waiting=1, preempted_waiting=1)
    short_of = msgspec.structs.replace(roomy, load=load)
    artifact = POLICIES["llumnix-artifact"].rounds
    assert artifact is not None
    pairings = decide(short_of, instance("b", 95, 9), instance("c", 10, 1), rounds=artifact)
    assert short(pairings) == [("balance", "b", "c", inf)]
    pairings = decide(short_of, instance("c", 10, 1), rounds=artifact)
    assert short(pairings) == [("balance", "a", "c", inf)]
    assert decide(short_of, instance("c", 10, 1), rounds=PAPER) == []


# -- all together

CLUSTERS = st.lists(
    st.builds(
        lambda used, running, queue, out, state, high: (
            used if running else 0,
            running,
            queue,
            min(out, running),
            state,
            min(high, running),
        ),
        st.integers(0, 100),
        st.integers(0, 12),
        st.lists(st.integers(1, 120), max_size=3),
        st.sampled_from([0, 0, 0, 1, 2]),
        st.sampled_from(["serving"] * 6 + ["draining", "starting", "hung"]),
        st.sampled_from([0, 0, 0, 1]),
    ),
    min_size=1,
    max_size=7,
)


def made(rows: list[tuple[int, int, list[int], int, str, int]]) -> list[InstanceView]:
    return [
        instance(
            str(place),
            used,
            running,
            queue,
            out=out,
            state=state,
            classes=(
                ClassLoad(-1, high, 0, used * high // max(running, 1)),
                ClassLoad(0, running - high, len(queue), used - used * high // max(running, 1)),
            ),
            headroom=HEADROOM,
            preempted=min(len(queue), place % 3),
        )
        for place, (used, running, queue, out, state, high) in enumerate(rows)
    ]


@pytest.mark.parametrize("rounds", [ALL, PAPER], ids=["kvmig", "llumnix"])
@given(rows=CLUSTERS)
def test_every_pair_makes_sense(
    rounds: RoundConfig, rows: list[tuple[int, int, list[int], int, str, int]]
) -> None:
    instances = {one.instance: one for one in made(rows)}
    pairings = decide(*instances.values(), rounds=rounds)
    pairs = [(one.source, one.destination) for one in pairings]
    assert len(pairs) == len(set(pairs))
    assert not {one.source for one in pairings} & {one.destination for one in pairings}
    for one in pairings:
        assert instances[one.destination].state == "serving"
        assert instances[one.source].state in ("serving", "draining")
        assert (one.why == "drain") == (instances[one.source].state == "draining")
        assert one.budget_blocks >= 0
        assert sum(source == one.source for source, _ in pairs) <= MAX_DESTINATIONS


@given(rows=CLUSTERS)
def test_what_a_destination_is_asked_to_take_fits_but_for_queues_that_gather_to_wait(
    rows: list[tuple[int, int, list[int], int, str, int]],
) -> None:
    instances = {one.instance: one for one in made(rows)}
    asked: dict[str, float] = {}
    borrowed: dict[str, float] = {}
    for one in decide(*instances.values()):
        if one.why == "queue" and instances[one.destination].load.waiting:
            continue
        asked[one.destination] = asked.get(one.destination, 0.0) + one.budget_blocks
        if one.why == "queue":  # a headroom is room for them where there is nothing else
            there = instances[one.destination]
            room = there.load.total_blocks - there.virtual_blocks + there.kept_blocks
            borrowed[one.destination] = room
    for name, blocks in asked.items():
        there = instances[name]
        free = there.load.total_blocks - there.virtual_blocks - there.behind_blocks
        assert blocks <= max(free, borrowed.get(name, 0.0)) + 1e-6


def test_a_round_looks_at_the_worst_when_everybody_is_overloaded() -> None:
    crowded = [instance(f"s{n}", 90 + n % 10, 9) for n in range(2 * MAX_SOURCES)]
    roomy = [instance(f"d{n}", 10, 1) for n in range(2 * MAX_SOURCES)]
    pairings = decide(*crowded, *roomy)
    worst = {one.source for one in pairings}
    assert MAX_SOURCES / 2 < len(worst) <= MAX_SOURCES
    assert all(int(name[1:]) % 10 >= 4 for name in worst)


@pytest.mark.parametrize("unmovable", ["a", "b"])
@pytest.mark.parametrize("state", ["serving", "draining"])
@pytest.mark.parametrize("rounds", [one.rounds for one in POLICIES.values() if one.rounds])
def test_no_policy_pairs_an_instance_whose_requests_can_not_be_moved(
    rounds: RoundConfig, state: str, unmovable: str
) -> None:
    pair = instance("a", 95, 9, (40,), state=state), instance("b")
    assert decide(*pair, rounds=rounds) != []
    stuck = [
        msgspec.structs.replace(one, unmovable="x" if one.instance == unmovable else "")
        for one in pair
    ]
    assert decide(*stuck, rounds=rounds) == []
