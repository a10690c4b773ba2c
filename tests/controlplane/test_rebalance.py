"""Load balance: which instance shall move requests where, and that it never comes back."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.freeness import batch_size, free_blocks, slack
from kvmig.controlplane.messages import PairedDestination, Pairs
from kvmig.controlplane.policy import policy_of
from kvmig.controlplane.rules import balance
from kvmig.controlplane.scheduler import (
    UNPAIR,
    InstancePairing,
    RoundConfig,
    RoundScheduler,
    rebalance,
)
from kvmig.controlplane.view import ClusterView, InstanceView
from kvmig.core.config import SchedulerConfig
from tests.support.examples import examples
from tests.support.made_up_instances import cluster, instance

CONFIG = RoundConfig(rules=(balance,), source_below=3, destination_above=6, min_gain=1)


def decide(
    *instances: InstanceView, last: tuple[InstancePairing, ...] = ()
) -> list[tuple[str, str]]:
    pairings = rebalance(cluster(*instances), last, CONFIG)
    return [(one.source, one.destination) for one in pairings]


def test_the_worked_example() -> None:
    # a: 10 free blocks for 9 requests of 10. b: 90 for one of 10. Moving k leaves
    # (10 + 10k) / (9 - k) at a and (90 - 10k) / (1 + k) at b: equal at k = 4.
    [pairing] = rebalance(cluster(instance("a", 90, 9), instance("b", 10, 1)), (), CONFIG)
    assert pairing == InstancePairing(
        "a", "b", budget_blocks=40, room_blocks=90 - 6 * 2, endpoint="tcp://b"
    )


def test_the_lowest_is_paired_with_the_highest_again_and_again() -> None:
    lows = instance("low", 95, 9), instance("lower", 99, 9)
    highs = instance("high", 40, 4), instance("higher", 10, 1)
    middle = instance("middle", 60, 10)
    assert decide(*lows, *highs, middle) == [("lower", "higher"), ("low", "high")]


def test_a_source_that_one_destination_cannot_relieve_gets_several() -> None:
    crowded = instance("a", 96, 12, queue=(30, 30))
    assert decide(crowded, instance("b", 40, 4), instance("c", 10, 1)) == [("a", "c"), ("a", "b")]


def test_a_destination_with_much_room_relieves_several() -> None:
    lows = instance("a", 98, 9), instance("b", 99, 9)
    assert decide(*lows, instance("c", total=1000)) == [("b", "c"), ("a", "c")]


def test_a_source_whose_requests_would_be_on_their_way_too_long_keeps_them() -> None:
    slow = msgspec.structs.replace(instance("a", 90, 9), bandwidth=1.0)
    assert decide(slow, instance("b", 10, 1)) == []
    assert decide(msgspec.structs.replace(slow, bandwidth=10.0), instance("b", 10, 1))


@pytest.mark.parametrize(
    "others",
    [
        (instance("b", 90, 9),),
        (instance("b", 60, 9),),
        (instance("b", 30, 3, queue=(60, 60)),),
        (instance("b", 30, 3, state="draining"),),
        (instance("b", 30, 3, state="starting"),),
        (instance("b", 30, 3, reported_at=-9),),
        (instance("b", reported_at=None),),
        (),
    ],
    ids=["full", "between", "queue", "draining", "starting", "stale", "unheard", "alone"],
)
def test_without_a_destination_nothing_moves(others: tuple[InstanceView, ...]) -> None:
    assert decide(instance("a", 95, 9), *others) == []


@pytest.mark.parametrize(
    "source",
    [
        instance("a", 70, 10),
        instance("a", 99, 9, reported_at=-9),
        instance("a", 99, 9, state="hung"),
        instance("a", 99, 9, state="failed"),
        instance("a", 99, 1),
        instance("a", 0, 0, queue=(200,)),
        instance("a", 99, 9, out=9),
    ],
    ids=["inside", "stale", "hung", "failed", "one request", "only a queue", "all move already"],
)
def test_who_is_not_a_source(source: InstanceView) -> None:
    assert decide(source, instance("b", 10, 1)) == []


def test_a_move_that_gains_too_little_is_not_made() -> None:
    # 2 free blocks for 49 requests of 2, and 20 for one: the destination can take 3.
    full, small = instance("a", 98, 49), instance("b", 1, 1, total=21)
    assert decide(full, small) == []
    view = cluster(full, small)
    assert rebalance(view, (), msgspec.structs.replace(CONFIG, min_gain=0.01))


def test_a_deeply_overloaded_source_is_relieved_though_it_stays_overloaded() -> None:
    assert decide(instance("a", 90, 9, queue=(300, 300, 300)), instance("b", 10, 1)) == [("a", "b")]


def test_what_moves_already_uses_the_budget_up() -> None:
    for out, budget in ((0, 40), (1, 30), (4, 0), (5, 0)):
        view = cluster(instance("a", 90, 9, out=out), instance("b", 10, 1))
        [pairing] = rebalance(view, (), CONFIG)
        assert pairing.budget_blocks == budget


def test_the_reverse_of_the_last_pair_is_never_made() -> None:
    last = (InstancePairing("b", "a", 10, 10),)
    assert decide(instance("a", 90, 9), instance("b", 10, 1), last=last) == []


def some(
    used: tuple[int, int], running: tuple[int, int], queued: int
) -> st.SearchStrategy[InstanceView]:
    """Instances of 100 blocks, `used` percent of them used, by `running` requests."""
    return st.builds(
        lambda total, share, running, queue, out, state, reported_at: instance(
            "",
            total * share // 100 if running else 0,
            running,
            tuple(queue),
            out=min(out, running),
            state=state,
            reported_at=reported_at,
            total=total,
        ),
        st.sampled_from([100, 100, 100, 20, 300]),
        st.integers(*used),
        st.integers(*running),
        st.lists(st.integers(1, 90), max_size=queued),
        st.sampled_from([0, 0, 0, 1, 3]),
        st.sampled_from(["serving"] * 8 + ["draining", "starting"]),
        st.sampled_from([0.0] * 8 + [-9.0, None]),
    )


CROWDED = some((80, 100), (1, 25), 3)
ROOMY = some((0, 50), (0, 6), 0)
INSTANCES = st.lists(CROWDED | ROOMY, min_size=2, max_size=7).map(
    lambda those: [
        msgspec.structs.replace(one, instance=str(place)) for place, one in enumerate(those)
    ]
)
CONFIGS = st.builds(
    lambda below, above, gain: RoundConfig(
        rules=(balance,), source_below=below, destination_above=below + above, min_gain=gain
    ),
    st.sampled_from([3.0, 3.0, 10.0, 0.0, -2.0]),
    st.sampled_from([0.0, 0.0, 3.0]),
    st.sampled_from([0.0, 1.0, 5.0]),
)


def moved(one: InstanceView, blocks: float, requests: int) -> InstanceView:
    """The instance after `requests` of it, `blocks` in all, have gone (came, if negative)."""
    load = msgspec.structs.replace(
        one.load,
        used_blocks=one.load.used_blocks - blocks,
        running=one.load.running - requests,
    )
    return msgspec.structs.replace(
        one, load=load, virtual_blocks=one.virtual_blocks - blocks, migrations_out=0
    )


def after(view: ClusterView, pairings: list[InstancePairing]) -> ClusterView:
    before = {one.instance: one for one in view.instances}
    later = dict(before)
    for pairing in pairings:
        load = before[pairing.source].load
        average = max(load.used_blocks / load.running, 1.0)
        requests = round(pairing.budget_blocks / average)
        for name, sign in ((pairing.source, 1), (pairing.destination, -1)):
            later[name] = moved(later[name], sign * pairing.budget_blocks, sign * requests)
    return ClusterView(view.now, tuple(later.values()), view.stale_after_s)


@given(INSTANCES, CONFIGS)
def test_an_instance_gives_or_takes_and_never_both(
    instances: list[InstanceView], config: RoundConfig
) -> None:
    pairings = rebalance(cluster(*instances), (), config)
    assert not {one.source for one in pairings} & {one.destination for one in pairings}
    pairs = [(one.source, one.destination) for one in pairings]
    assert len(pairs) == len(set(pairs))


@examples(300)
@given(INSTANCES, CONFIGS)
def test_a_round_never_calls_for_the_way_back(
    instances: list[InstanceView], config: RoundConfig
) -> None:
    view = cluster(*instances)
    went: set[tuple[str, str]] = set()
    for _ in range(4):
        pairings = rebalance(view, (), config)  # even without the memory of the last round
        for one in pairings:
            assert (one.destination, one.source) not in went
            went.add((one.source, one.destination))
        view = after(view, pairings)


@examples(300)
@given(INSTANCES, CONFIGS)
def test_a_pair_helps_and_leaves_the_destination_above_its_threshold(
    instances: list[InstanceView], config: RoundConfig
) -> None:
    # Those that move already are part of the plan; without them the effect is whole.
    view = cluster(*(msgspec.structs.replace(one, migrations_out=0) for one in instances))
    pairings = rebalance(view, (), config)

    def slacks(of: ClusterView) -> dict[str, float]:
        return {
            one.instance: slack(free_blocks(one, "all"), batch_size(one, "all"))
            for one in of.instances
        }

    states = {one.instance: one.state for one in view.instances}
    before, later = slacks(view), slacks(after(view, pairings))
    for one in pairings:
        assert later[one.destination] >= max(config.destination_above, 0) - 1e-6
        if states[one.source] == "serving":
            low = min(later[one.source], later[one.destination])
            assert low >= before[one.source] + config.min_gain - 1e-6


# -- the scheduler


def test_a_pair_is_renewed_every_round_and_undone_once() -> None:
    scheduler = RoundScheduler(policy_of(SchedulerConfig()).rounds)
    uneven = cluster(instance("a", 90, 9), instance("b", 10, 1))
    pair = ("a", Pairs((PairedDestination("b", "tcp://b", 40, 84),)))
    assert scheduler.round(uneven) == [pair]
    assert scheduler.round(uneven) == [pair]
    even = cluster(instance("a", 60, 6), instance("b", 40, 4))
    assert scheduler.round(even) == [("a", UNPAIR)]
    assert scheduler.round(even) == []


def test_an_instance_that_left_is_told_nothing() -> None:
    scheduler = RoundScheduler(policy_of(SchedulerConfig()).rounds)
    scheduler.round(cluster(instance("a", 90, 9), instance("b", 10, 1)))
    assert scheduler.round(cluster(instance("b", 10, 1))) == []


@pytest.mark.parametrize(
    "config",
    [
        SchedulerConfig(migration=False),
        SchedulerConfig(policy="round-robin"),
        SchedulerConfig(policy="least-loaded"),
    ],
)
def test_without_migration_and_under_other_policies_nothing_is_paired(
    config: SchedulerConfig,
) -> None:
    view = cluster(instance("a", 90, 9), instance("b", 10, 1))
    assert RoundScheduler(policy_of(config).rounds).round(view) == []


@given(st.lists(INSTANCES, max_size=4))
def test_the_same_views_give_the_same_orders(rounds: list[list[InstanceView]]) -> None:
    one, two = (
        RoundScheduler(policy_of(SchedulerConfig()).rounds),
        RoundScheduler(policy_of(SchedulerConfig()).rounds),
    )
    for instances in rounds:
        assert one.round(cluster(*instances)) == two.round(cluster(*instances))
