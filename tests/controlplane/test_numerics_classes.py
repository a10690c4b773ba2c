"""Numerics classes: what they are, and that nothing moves between two without somebody's word."""

from __future__ import annotations

import msgspec
import pytest

from kvmig.controlplane.policy import POLICIES, policy_of
from kvmig.controlplane.scheduler import RoundConfig, rebalance
from kvmig.controlplane.view import InstanceView
from kvmig.core.config import PolicyName, SchedulerConfig
from kvmig.engines.identity import difference, numerics_class
from tests.support.fake_cluster import cluster as nodes
from tests.support.fake_engine import FakeEngine
from tests.support.made_up_instances import cluster, instance

MOVING: tuple[PolicyName, ...] = tuple(POLICIES)


def of(one: InstanceView, weights: str, numerics: str = "n") -> InstanceView:
    return msgspec.structs.replace(one, weights=weights, numerics=numerics)


def pairs(rounds: RoundConfig, *instances: InstanceView) -> set[tuple[str, str]]:
    found = rebalance(cluster(*instances), (), rounds)
    return {(pair.source, pair.destination) for pair in found}


def rounds_of(policy: PolicyName, inexact: bool = False) -> RoundConfig:
    rounds = policy_of(SchedulerConfig(policy=policy, inexact_moves=inexact)).rounds
    assert rounds is not None
    return rounds


def test_a_class_is_equal_words_in_one_order() -> None:
    one = numerics_class(workers=2, dtype="bfloat16", device="NVIDIA H200")

    assert one == "device=NVIDIA-H200 dtype=bfloat16 workers=2"
    assert one == numerics_class(device="NVIDIA H200", dtype="bfloat16", workers=2)
    assert difference(one, one.replace("2", "1", 1)) == (
        "device=NVIDIA-H100 there, device=NVIDIA-H200 here"
    )


async def test_within_a_class_a_move_is_exact_and_says_so() -> None:
    async with nodes() as them:
        assert (await them.move()).exact is True


async def test_to_another_class_a_request_moves_only_if_somebody_has_said_so() -> None:
    destination = FakeEngine()
    destination.numerics = "threads=2"
    async with nodes(destination=destination) as them:
        refused = await them.move()
        assert (refused.state, refused.reason, refused.exact) == ("aborted", "incompatible", None)
        assert refused.detail == "its logits round differently: n there, threads=2 here"
        assert them.owners() == "a"
        moved = await them.a.migrations.migrate("r", "b", them.b.server.endpoint, inexact=True)
        assert (moved.state, moved.exact, them.owners()) == ("committed", False, "b")


async def test_to_other_weights_a_request_never_moves() -> None:
    source, destination = FakeEngine(weights="old"), FakeEngine(weights="new")
    async with nodes(source=source, destination=destination) as them:
        refused = await them.a.migrations.migrate("r", "b", them.b.server.endpoint, inexact=True)
        assert (refused.state, refused.reason) == ("aborted", "incompatible")
        assert "weights old" in refused.detail
        assert "weights new" in refused.detail
        assert them.owners() == "a"


@pytest.mark.parametrize("policy", MOVING)
def test_a_drain_goes_to_instances_of_its_own_class_however_many_others_are_roomier(
    policy: PolicyName,
) -> None:
    full = of(instance("old", 60, 4, state="draining"), "v1")
    newer = [of(instance(f"new{n}"), "v2") for n in range(9)]
    others = [of(instance(f"other{n}"), "v1", "other") for n in range(9)]
    alike = of(instance("alike", 40, 3), "v1")

    assert pairs(rounds_of(policy), full, *newer, *others, alike) == {("old", "alike")}
    assert pairs(rounds_of(policy), full, *newer, *others) == set()


@pytest.mark.parametrize("policy", MOVING)
def test_with_the_operators_word_only_weights_must_agree(policy: PolicyName) -> None:
    full = of(instance("old", 60, 4, state="draining"), "v1")
    newer, other = of(instance("new"), "v2"), of(instance("other"), "v1", "other")

    assert pairs(rounds_of(policy, inexact=True), full, newer, other) == {("old", "other")}


def test_balance_queues_and_gathering_stay_within_a_class() -> None:
    crowded = [of(instance(f"a{n}", 98, 9, (9, 9), preempted=1), "v1") for n in range(2)]
    idle = [of(instance(f"b{n}"), "v2") for n in range(2)]

    moved = pairs(rounds_of("kvmig"), *crowded, *idle)

    assert all(source[0] == destination[0] for source, destination in moved)
    assert any(
        destination.startswith("b")
        for _, destination in pairs(rounds_of("kvmig"), *crowded, *(of(one, "v1") for one in idle))
    )
