"""Queues that can't start gather, and what waits behind a stuck head passes it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.rules import OPEN_BLOCKS, gather, make_room, move_queues
from kvmig.controlplane.scheduler import InstancePairing, RoundConfig, rebalance
from kvmig.controlplane.view import InstanceView
from tests.support.made_up_instances import cluster, instance, short

GATHER = RoundConfig(rules=(gather,))
BOTH = RoundConfig(rules=(move_queues, gather), destination_above=3.0)


def decide(*instances: InstanceView, rounds: RoundConfig = GATHER) -> list[InstancePairing]:
    return rebalance(cluster(*instances), (), rounds)


def stuck(name: str, free: int, *queue: int, state: str = "serving") -> InstanceView:
    """Its first in the queue was preempted, and wants more than is free."""
    return instance(name, 100 - free, 4, queue or (90,), state=state, preempted=1)


def test_where_every_head_is_stuck_half_of_the_instances_give_their_queues_away() -> None:
    pairings = decide(*(stuck(name, 30) for name in "abcd"))
    assert len(pairings) == 2
    assert all(one.why == "queue" and one.budget_blocks == 90 for one in pairings)
    assert {one.source for one in pairings} == {"a", "b"}
    assert {one.destination for one in pairings} == {"c", "d"}


def test_those_with_the_fewest_waiting_and_then_with_the_most_free_become_open() -> None:
    many, few, roomy = stuck("a", 40, 90, 5, 5), stuck("b", 21), stuck("c", 50)
    assert short(decide(many, few, roomy)) == [("queue", "c", "a", 90)]


def test_a_queue_goes_where_the_least_is_in_front_of_it() -> None:
    full, shorter = stuck("b", 0, 90, 80), stuck("c", 10, 90)
    assert short(decide(stuck("a", 60), full, shorter)) == [("queue", "a", "c", 90)]


def test_a_whole_queue_goes_and_each_giver_has_a_keeper_of_its_own_while_there_are_some() -> None:
    givers = [stuck(name, 30, 80, 40) for name in "ab"]
    keepers = [stuck(name, 0, 90, 60, 60) for name in "cd"]
    pairings = decide(*givers, *keepers)
    assert short(pairings) == [("queue", "a", "c", 120), ("queue", "b", "d", 120)]


def test_nobody_gives_while_half_of_them_can_start_a_prompt_at_once() -> None:
    open_ones = instance("a", 50, 4), instance("b", 100 - int(OPEN_BLOCKS), 4)
    assert decide(*open_ones, stuck("c", 30), stuck("d", 30)) == []
    too_full = instance("b", 101 - int(OPEN_BLOCKS), 4)
    assert len(decide(open_ones[0], too_full, stuck("c", 30), stuck("d", 30))) == 1


def test_an_instance_with_hardly_a_block_free_would_not_be_open_and_keeps_its_queue() -> None:
    assert decide(*(stuck(name, 19) for name in "abcd")) == []


def test_queues_of_prompts_that_never_ran_stay_where_they_are() -> None:
    assert decide(*(instance(name, 70, 4, (90,)) for name in "abcd")) == []


def test_a_head_that_room_is_being_made_for_stays() -> None:
    rounds = RoundConfig(rules=(make_room, gather), destination_above=3.0)
    roomy, full = instance("c", 60, 4), instance("d", 85, 4)
    pairings = decide(stuck("a", 30, 50), stuck("b", 25), roomy, full, rounds=rounds)
    assert short(pairings) == [("defragment", "a", "c", 20)]


def test_one_that_is_stuck_alone_and_one_that_can_start_its_head_keep_their_queues() -> None:
    able = instance("b", 60, 4, (30,))
    assert decide(stuck("a", 30), able) == []
    assert decide(stuck("a", 30), stuck("b", 30, state="draining")) == []
    assert decide(stuck("a", 30), stuck("b", 30, state="hung")) == []


def test_those_behind_a_head_that_fits_nowhere_go_where_there_is_room_for_some_of_them() -> None:
    some = decide(stuck("a", 30, 90, 8, 8), instance("b", 50, 4), rounds=BOTH)
    assert short(some) == [("queue", "a", "b", 16)]
    # 50 are free there, and 3 for each of four and one more stay free.
    many = decide(stuck("a", 30, 90, 30, 30), instance("b", 50, 4), rounds=BOTH)
    assert short(many) == [("queue", "a", "b", 35)]


def test_a_head_that_waits_alone_lets_nobody_pass() -> None:
    assert (
        decide(stuck("a", 30), instance("b", 50, 4), rounds=RoundConfig(rules=(move_queues,))) == []
    )


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 100), st.lists(st.integers(1, 120), max_size=4)), max_size=9
    )
)
def test_a_round_leaves_as_many_open_as_it_says_or_has_no_queue_left_to_move(
    rows: list[tuple[int, list[int]]],
) -> None:
    instances = [
        instance(str(at), 100 - free, 4, queue, preempted=min(len(queue), 1))
        for at, (free, queue) in enumerate(rows)
    ]
    pairings = decide(*instances)
    givers, keepers = {one.source for one in pairings}, {one.destination for one in pairings}
    assert len(givers) == len(pairings)
    assert not givers & keepers

    def roomy(one: InstanceView) -> bool:
        return one.load.total_blocks - one.load.used_blocks >= OPEN_BLOCKS

    was_open = [one for one in instances if roomy(one) and not one.load.waiting]
    assert len(was_open) + len(givers) <= max(len(was_open), len(instances) // 2)
    for one in instances:
        if one.instance in givers | keepers:
            free = one.load.total_blocks - one.load.used_blocks
            assert one.load.head_blocks > free
        if one.instance in givers:
            assert roomy(one)
