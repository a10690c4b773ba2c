"""When a session's blocks are copied before its turn: kvmig.controlplane.carry_ahead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.carry_ahead import (
    LEAST_BLOCKS,
    LEAST_TOKENS,
    CarryRates,
    PrefillRate,
    carry_ratio,
    plan_carriage,
)
from kvmig.controlplane.dispatch import FewestWithRoom, NewRequest
from kvmig.controlplane.view import ClusterView, InstanceView
from kvmig.engines.base import EngineLoad

FAST = CarryRates(copy=12_000, prefill=2_300)
rates = st.floats(0, 1e6)


def test_a_copy_is_weighed_against_the_prefill_that_it_saves() -> None:
    assert carry_ratio(400, FAST) == pytest.approx(0.21, abs=0.01)
    assert carry_ratio(400, FAST._replace(copy=600)) == 1


def test_a_copy_that_takes_over_half_the_time_of_the_prefill_is_not_made() -> None:
    assert carry_ratio(400, FAST._replace(copy=6_000)) == pytest.approx(0.41, abs=0.01)
    slower = FAST._replace(copy=4_600)
    assert carry_ratio(400, slower) == 1
    assert plan_carriage({"i0": 400.0}, "i1", "i0", slower) is None


@pytest.mark.parametrize("lacking", ["copy", "prefill"])
def test_what_was_not_measured_is_not_relied_on(lacking: str) -> None:
    unknown = FAST._replace(**{lacking: 0.0})
    assert carry_ratio(400, unknown) == 1
    assert plan_carriage({"i0": 400.0}, "i1", "i0", unknown) is None


def test_the_turn_waits_no_longer_than_its_prefill_would_take() -> None:
    found = plan_carriage({"i0": 400.0, "i1": 170.0}, "i1", "i0", FAST)
    assert found is not None
    assert (found.destination, found.blocks) == ("i1", 230)
    assert found.compute_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("held", "chosen"),
    [
        ({"i0": 400.0}, "i0"),
        ({"i0": 400.0, "i1": 400.0}, "i1"),
        ({"i0": LEAST_BLOCKS - 1.0}, "i1"),
        ({"i1": 400.0}, "i1"),
    ],
    ids=["it runs there", "both hold it", "too little", "nothing is held there"],
)
def test_nothing_is_copied_where_it_gains_nothing(held: dict[str, float], chosen: str) -> None:
    assert plan_carriage(held, chosen, "i0", FAST) is None


@given(st.floats(0, 1e5), rates, rates)
def test_a_ratio_is_a_share(blocks: float, copy: float, prefill: float) -> None:
    assert 0 <= carry_ratio(blocks, CarryRates(copy, prefill)) <= 1


def test_prompts_rate_follows_what_was_measured_last() -> None:
    rate = PrefillRate()
    assert rate.tokens_s == 0
    rate.note_prompt(LEAST_TOKENS - 1, 0.1)
    rate.note_prompt(LEAST_TOKENS, 0.0)
    assert rate.tokens_s == 0
    rate.note_prompt(1000, 0.1)
    assert rate.tokens_s == pytest.approx(10_000)
    for _ in range(100):
        rate.note_prompt(1000, 0.2)
    assert rate.tokens_s == pytest.approx(5_000, rel=0.01)


def picked(ratio: float) -> str:
    """Where a turn of 400 blocks goes of which all but 20 are held where 10 requests run."""
    crowded = EngineLoad(10_000, 2_000, 10, 0, 0, 0, prefill_blocks=200)
    views = [
        InstanceView(instance=name, endpoint="", load=load, state="serving", reported_at=0.0)
        for name, load in {"i0": crowded, "i1": EngineLoad(10_000, 0, 0, 0, 0, 0)}.items()
    ]
    dispatch = FewestWithRoom(enough=15.0, prompt_weight=0.3)
    order = NewRequest(400, held_blocks={"i0": 380.0}, carry_ratio=ratio)
    return dispatch.pick(ClusterView(0.0, views), order).instance


def test_dispatch_leaves_a_crowded_instance_sooner_where_blocks_can_be_carried() -> None:
    assert (picked(1.0), picked(0.2)) == ("i0", "i1")
