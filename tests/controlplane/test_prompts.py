"""Prompts at instances set apart for them: dispatch, pairs and victims."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.dispatch import NewRequest
from kvmig.controlplane.messages import PairedDestination
from kvmig.controlplane.policy import policy_of
from kvmig.controlplane.prompts import PATIENCE_BLOCKS, SHORT_BLOCKS
from kvmig.controlplane.scheduler import InstancePairing, rebalance
from kvmig.controlplane.victims import next_victim
from kvmig.controlplane.view import InstanceView
from kvmig.core.config import ClusterConfig, SchedulerConfig, check
from kvmig.core.errors import ConfigError
from kvmig.engines.base import RequestState
from tests.support.examples import examples
from tests.support.made_up_instances import cluster, instance

APART = SchedulerConfig(prompt_instances=("p", "q"))


def ample(name: str, running: int = 0, prompts: int = 0, state: str = "serving") -> InstanceView:
    """10,000 blocks, of which each request holds 20, and so many are prompts to be computed."""
    one = instance(name, 20 * running, running, total=10_000, state=state)
    return msgspec.structs.replace(
        one, load=msgspec.structs.replace(one.load, prefill_blocks=prompts)
    )


def place(*instances: InstanceView, blocks: float = 300.0, **held: float) -> str:
    request = NewRequest(blocks, held_blocks=held)
    return policy_of(APART).dispatcher().pick(cluster(*instances), request).instance


def decide(*instances: InstanceView, last: tuple[InstancePairing, ...] = ()) -> list[str]:
    """Pairs as "why source>destination"."""
    rounds = policy_of(APART).rounds
    assert rounds is not None
    pairings = rebalance(cluster(*instances), last, rounds)
    return [f"{one.why} {one.source}>{one.destination}" for one in pairings]


# -- dispatch


def test_a_prompt_goes_where_the_fewest_are_before_it() -> None:
    assert place(ample("a"), ample("p", 2, 700), ample("q", 9, 100)) == "q"


def test_a_short_prompt_is_computed_where_it_is_decoded() -> None:
    assert place(ample("a", 9), ample("p"), blocks=SHORT_BLOCKS) == "a"
    assert place(ample("a", 9), ample("p"), blocks=SHORT_BLOCKS + 1) == "p"


def test_so_is_one_whose_beginning_is_held_there() -> None:
    assert place(ample("a"), ample("p"), a=290.0) == "a"
    assert place(ample("a"), ample("p"), a=100.0) == "p"


@pytest.mark.parametrize(("more", "goes"), [(0, "p"), (1, "a")])
def test_a_prompt_does_not_wait_for_long(more: int, goes: str) -> None:
    assert place(ample("a"), ample("p", 1, int(PATIENCE_BLOCKS) - 1 + more)) == goes


def test_without_those_set_apart_the_others_compute_prompts() -> None:
    assert place(ample("a", 5), ample("b", 3), ample("p", state="draining")) == "b"
    assert place(ample("a", 5), ample("b", 3)) == "b"


def test_without_others_those_set_apart_do_all() -> None:
    assert place(ample("p", 5), ample("q", 3)) == "q"
    assert place(ample("p", 5), ample("q", 3), ample("a", state="draining")) == "q"


# -- rounds


def test_those_set_apart_hand_over_to_the_roomiest_and_not_all_to_the_same() -> None:
    others = [ample(name, 10) for name in "abcdefgh"]
    pairs = decide(ample("p", 8), ample("q", 8), *others)
    assert all(pair.startswith("prompt ") for pair in pairs)
    assert {pair[-1] for pair in pairs} == set("abcdefgh")


def test_what_decodes_never_goes_to_those_set_apart() -> None:
    crowded = instance("a", 95, 9)
    assert decide(crowded, instance("p", 0, 0)) == []
    assert decide(crowded, instance("p", 0, 0), instance("b", 10, 1)) == [
        "balance a>b", "prompt p>b",
    ]  # fmt: skip


def test_a_drain_goes_to_those_set_apart_where_no_other_serves() -> None:
    assert decide(instance("a", 40, 4, state="draining"), instance("p", 0, 0)) == ["drain a>p"]


def test_without_room_elsewhere_requests_stay() -> None:
    assert decide(instance("a", 100, 9), instance("p", 50, 3)) == []


INSTANCES = st.lists(
    st.tuples(
        st.integers(0, 100),
        st.integers(0, 12),
        st.lists(st.integers(1, 60), max_size=3),
        st.sampled_from(["serving", "serving", "draining", "starting"]),
    ),
    min_size=1,
    max_size=8,
)


@given(INSTANCES, st.sets(st.integers(0, 7)))
@examples(200)
def test_no_round_moves_to_those_set_apart_while_others_serve(
    rows: list[tuple[int, int, list[int], str]], apart: set[int]
) -> None:
    views = [
        instance(f"i{number}", used if running else 0, running, tuple(queue), state=state)
        for number, (used, running, queue, state) in enumerate(rows)
    ]
    names = tuple(f"i{number}" for number in sorted(apart))
    rounds = policy_of(SchedulerConfig(prompt_instances=names)).rounds
    assert rounds is not None
    pairings = rebalance(cluster(*views), (), rounds)
    decode = {one.instance for one in views if one.state == "serving"} - set(names)
    for one in pairings:
        assert one.destination not in names or not decode
        assert one.why != "prompt" or (one.source in names and one.destination in decode)
    assert not {one.source for one in pairings} & {one.destination for one in pairings}


@given(INSTANCES, st.sets(st.integers(0, 7)), st.integers(1, 90))
@examples(200)
def test_every_request_finds_an_instance_that_serves(
    rows: list[tuple[int, int, list[int], str]], apart: set[int], blocks: int
) -> None:
    views = [
        instance(f"i{number}", used if running else 0, running, tuple(queue), state=state)
        for number, (used, running, queue, state) in enumerate(rows)
    ]
    names = tuple(f"i{number}" for number in sorted(apart))
    dispatch = policy_of(SchedulerConfig(prompt_instances=names)).dispatcher()
    chosen = dispatch.pick(cluster(*views), NewRequest(blocks))
    serving = {one.instance for one in views if one.state == "serving"}
    assert chosen.instance in (serving or {one.instance for one in views})


# -- victims


def victims(*requests: RequestState, blocks: float = 100.0) -> list[str]:
    """Which go, one after the other."""
    gone: list[str] = []
    pair = PairedDestination("b", "", blocks, blocks, "prompt")
    while (one := next_victim(requests, pair, 0.0, gone, {}, 0.0)) is not None:
        gone.append(one.request_id)
    return gone


def state(name: str, how: str, output: int = 0, blocks: int = 10) -> RequestState:
    return RequestState(name, how, 100 + output, output, blocks, 0, wanted_blocks=blocks)


def test_prompts_go_in_the_order_in_which_they_are_computed_then_what_decodes() -> None:
    here = [state("old", "running", 9), state("first", "running"), state("next", "waiting")]
    assert victims(*here) == ["first", "next", "old"]


def test_one_without_room_there_stays_and_others_go() -> None:
    here = [state("large", "running", blocks=200), state("small", "waiting")]
    assert victims(*here) == ["small"]


# -- the flag


def refused(names: str, **more: object) -> str:
    scheduler = SchedulerConfig(prompt_instances=tuple(names.split(",")), **more)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as error:
        check(ClusterConfig(instances=2, scheduler=scheduler))
    return str(error.value)


def test_names_that_can_not_be_are_refused_at_the_door() -> None:
    assert "--prompt-instances is x, must be names of instances, such as i0, i1" in refused("x")
    assert "must be fewer than all instances (--instances 2)" in refused("i0,i1")
    assert "must be left out with --no-migration" in refused("i0", migration=False)


def test_by_default_nothing_is_set_apart() -> None:
    assert policy_of(SchedulerConfig()) == policy_of(SchedulerConfig(prompt_instances=()))
