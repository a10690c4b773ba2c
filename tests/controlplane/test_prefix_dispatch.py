"""Dispatch by what instances hold of a prompt: kvmig.controlplane.dispatch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.dispatch import FewestWithRoom, NewRequest
from kvmig.controlplane.view import ClusterView, InstanceView
from kvmig.engines.base import EngineLoad


def view(*running: int, free: int = 1000) -> ClusterView:
    """Instances i0, i1, ... with so many running requests each."""
    rows = [
        InstanceView(
            instance=f"i{number}", endpoint="", state="serving", reported_at=0.0,
            load=EngineLoad(2000, 2000 - free, count, 0, 0, 0), virtual_blocks=2000.0 - free,
        )
        for number, count in enumerate(running)
    ]  # fmt: skip
    return ClusterView(0.5, rows)


def pick(cluster: ClusterView, **held: float) -> str:
    request = NewRequest(100, held_blocks=held)
    return FewestWithRoom(enough=15.0, prompt_weight=0.3).pick(cluster, request).instance


def test_a_request_goes_where_most_of_its_prompt_is() -> None:
    assert pick(view(2, 2, 2), i1=64.0) == "i1"
    assert pick(view(2, 2, 2), i1=64.0, i2=80.0) == "i2"


@pytest.mark.parametrize(("there", "elsewhere", "goes"), [
    (17, 0, "i1"), (18, 0, "i0"),  # a hot system prompt comes to an idle instance soon
    (40, 2, "i1"), (55, 2, "i0"),  # computing it would stop others
])  # fmt: skip
def test_unless_it_is_so_crowded_there_that_computing_it_elsewhere_costs_less(
    there: int, elsewhere: int, goes: str
) -> None:
    request = NewRequest(400, held_blocks={"i1": 380.0})
    policy = FewestWithRoom(enough=1.0, prompt_weight=0.3)
    assert policy.pick(view(elsewhere, there), request).instance == goes


def test_where_memory_is_short_it_goes_where_there_is_room() -> None:
    full = InstanceView(
        instance="full", endpoint="", state="serving", reported_at=0.0,
        load=EngineLoad(2000, 1990, 1, 0, 0, 0), virtual_blocks=1990.0,
    )  # fmt: skip
    cluster = ClusterView(0.5, [full, *view(30).instances])
    assert pick(cluster, full=100.0) == "i0"


def test_where_memory_is_short_everywhere_what_is_held_takes_no_room() -> None:
    cluster = view(30, 30, free=150)
    assert pick(cluster) == "i0"
    assert pick(cluster, i1=80.0) == "i1"


def test_what_is_held_makes_no_room_for_one_that_has_more_elsewhere() -> None:
    tight = InstanceView(
        instance="tight", endpoint="", state="serving", reported_at=0.0,
        load=EngineLoad(2000, 1880, 30, 0, 0, 0), virtual_blocks=1880.0,
    )  # fmt: skip
    cluster = ClusterView(0.5, [tight, *view(30, free=300).instances])
    assert pick(cluster, tight=80.0) == "i0"


def test_a_short_beginning_that_all_hold_leaves_the_choice_as_it_is() -> None:
    def busy(name: str, running: int, prompts: int) -> InstanceView:
        load = EngineLoad(2000, 1000, running, 0, 0, 0, prefill_blocks=prompts)
        return InstanceView(
            instance=name, endpoint="", state="serving", reported_at=0.0, load=load,
            virtual_blocks=1000.0,
        )  # fmt: skip

    cluster = ClusterView(0.5, [busy("i0", 3, 400), busy("i1", 4, 0)])
    held = {"i0": 8.0, "i1": 8.0}
    policy = FewestWithRoom(enough=15.0, prompt_weight=0.3)
    for request in (NewRequest(300), NewRequest(300, held_blocks=held)):
        assert policy.pick(cluster, request).instance == "i1"


def test_an_instance_that_is_gone_counts_for_nothing() -> None:
    assert pick(view(3, 2), gone=90.0) == "i1"


@given(
    st.dictionaries(st.sampled_from(("i0", "i1", "i2", "i3", "gone", "left")), st.floats(0, 120)),
    st.lists(st.integers(0, 20), min_size=4, max_size=4),
)
def test_neither_the_order_of_names_nor_those_that_are_gone_change_the_choice(
    held: dict[str, float], running: list[int]
) -> None:
    here = {name: blocks for name, blocks in reversed(held.items()) if name.startswith("i")}
    assert pick(view(*running), **held) == pick(view(*running), **here)
