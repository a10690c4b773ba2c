"""Which request moves next."""

from __future__ import annotations

from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmig.controlplane.messages import PairedDestination, Why
from kvmig.controlplane.policy import POLICIES
from kvmig.controlplane.victims import VictimRule, next_victim
from kvmig.engines.base import RequestState


def request(
    name: str,
    blocks: int = 4,
    *,
    priority: int = 0,
    output: int = 50,
    state: str = "running",
    unmovable: str = "",
) -> RequestState:
    return RequestState(name, state, blocks * 16, output, blocks, priority, unmovable)


def pair(budget: float, room: float = 1000) -> PairedDestination:
    return PairedDestination("b", "tcp://b", budget, room)


def choose(
    requests: list[RequestState],
    order: PairedDestination,
    spent: float = 0,
    migrating: tuple[str, ...] = (),
    arrived: dict[str, float] | None = None,
) -> str | None:
    victim = next_victim(requests, order, spent, migrating, arrived or {}, now=100.0)
    return None if victim is None else victim.request_id


def test_lower_priority_moves_first_then_the_shorter_sequence() -> None:
    held = [request("long", 9), request("short", 2), request("low", 5, priority=3)]
    assert choose(held, pair(10)) == "low"
    assert choose(held[:2], pair(10)) == "short"


def test_in_the_artifact_the_last_to_arrive_moves_first_among_the_lowest_priority() -> None:
    held = [
        msgspec.structs.replace(request(name, blocks, priority=priority), arrived_s=arrived)
        for name, blocks, priority, arrived in (
            ("early", 2, 0, 1.0), ("late", 9, 0, 5.0), ("urgent", 1, -1, 9.0),
        )
    ]  # fmt: skip
    latest = POLICIES["llumnix-artifact"].victims

    def first(requests: list[RequestState]) -> str | None:
        victim = next_victim(requests, pair(inf), 0, (), {}, now=100.0, rule=latest)
        return None if victim is None else victim.request_id

    assert first(held) == "late"
    unknown = [msgspec.structs.replace(one, arrived_s=0.0) for one in held[:2]]
    assert first(unknown) == "late"
    assert choose(held, pair(inf)) == "early"


def test_what_does_not_fit_the_rest_of_the_budget_stays() -> None:
    held = [request("a", 4), request("low", 8, priority=1)]
    assert choose(held, pair(10), spent=5) == "a"
    assert choose(held, pair(10), spent=7) is None


def test_a_large_request_moves_when_nothing_fits_the_budget() -> None:
    held = [request("huge", 90), request("large", 40)]
    assert choose(held, pair(10)) == "large"
    assert choose(held, pair(10), spent=4) is None
    assert choose(held, pair(10, room=39)) is None


def test_a_request_that_cannot_be_moved_is_never_chosen() -> None:
    held = [request("pooling", 1, priority=9, unmovable="pooling request"), request("other", 9)]
    assert choose(held, pair(10)) == "other"
    assert choose(held[:1], pair(10)) is None
    assert choose(held[:1], pair(0.5)) is None


def test_no_budget_moves_nothing() -> None:
    assert choose([request("a")], pair(0)) is None


def test_a_request_that_moves_already_or_just_came_stays() -> None:
    held = [request("a"), request("b"), request("c")]
    assert choose(held, pair(10), migrating=("a",), arrived={"b": 99.0}) == "c"
    assert choose(held, pair(10), arrived={"a": 98.0, "b": 99.0}) == "a"


def test_a_request_in_prefill_or_in_the_queue_stays() -> None:
    held = [
        request("prefill", output=0),
        request("queued", state="waiting"),
        request("leaving", state="suspended"),
        request("empty", 0),
    ]
    assert choose(held, pair(10)) is None
    held.append(request("young", output=15))
    assert choose(held, pair(10)) == "young"
    rule = VictimRule(min_output_tokens=16)
    assert next_victim(held, pair(10), 0, (), {}, 0.0, rule) is None
    rule = VictimRule(min_output_tokens=0)
    assert next_victim(held, pair(10), 0, (), {}, 0.0, rule) == held[0]


@given(
    sizes=st.lists(st.integers(1, 60), max_size=12),
    budget=st.floats(0, 200),
    room=st.floats(0, 100),
)
def test_a_round_moves_no_more_than_its_budget_or_one_large_request(
    sizes: list[int], budget: float, room: float
) -> None:
    held = {str(i): request(str(i), size) for i, size in enumerate(sizes)}
    order, moved = pair(budget, room), list[str]()
    spent = 0.0
    while victim := choose(list(held.values()), order, spent, tuple(moved)):
        moved.append(victim)
        spent += held[victim].blocks
    assert len(set(moved)) == len(moved)
    assert spent <= budget or (len(moved) == 1 and spent <= room)


# -- what else than balance a move may be for


def waiting(name: str, wanted: int) -> RequestState:
    return RequestState(name, "waiting", wanted * 16, 0, 0, 0, wanted_blocks=wanted)


def for_(
    why: Why, budget: float, room: float = 1000, above: int | None = None
) -> PairedDestination:
    return PairedDestination("b", "tcp://b", budget, room, why, above)


def test_a_queue_moves_in_its_order_as_far_as_it_fits() -> None:
    queue = [request("runs"), waiting("large", 30), waiting("first", 8), waiting("second", 5)]
    assert choose(queue, for_("queue", 40)) == "large"
    assert choose(queue, for_("queue", 20)) == "first"
    assert choose(queue, for_("queue", 20), spent=13) == "second"
    assert choose(queue, for_("queue", 4)) is None


def test_room_is_made_by_the_smallest_that_suffices_or_else_by_the_largest() -> None:
    held = [request("a", 5), request("b", 12), request("c", 20, output=0)]
    assert choose(held, for_("defragment", 10)) == "b"
    assert choose(held, for_("defragment", 15)) == "c"
    assert choose(held, for_("defragment", 30)) == "c"
    assert choose(held, for_("defragment", 30, room=15)) == "b"
    assert choose(held, for_("defragment", 30), spent=30) is None


def test_only_those_that_come_after_a_protected_request_make_way() -> None:
    held = [request("high", 1, priority=-1), request("normal", 9), request("low", 8, priority=2)]
    assert choose(held, for_("priority", 20, above=-1)) == "low"
    assert choose(held[:2], for_("priority", 20, above=-1)) == "normal"
    assert choose(held[:1], for_("priority", 20, above=-1)) is None


def test_a_drain_takes_whatever_there_is_and_what_waits_first() -> None:
    held = [request("prefill", 3, output=0), request("came", 2), waiting("waits", 50)]
    just_now = {"came": 99.9}
    assert choose(held, for_("drain", 0), arrived=just_now) == "waits"
    assert choose(held[:2], for_("drain", 10), arrived=just_now) == "came"
    assert choose(held[:1], for_("drain", 10)) == "prefill"
    assert choose([request("a", unmovable="pooling request")], for_("drain", 10)) is None


def test_who_is_relieved_of_blocks_moves_few_requests_and_those_that_just_came() -> None:
    held = [request("small", 4), request("large", 12), request("enough", 9)]
    assert choose(held, for_("relieve", 8)) == "enough"
    assert choose(held, for_("relieve", 20)) == "large"
    assert choose(held, for_("relieve", 8), arrived={"enough": 99.9}) == "enough"


@pytest.mark.parametrize("why", ["balance", "queue", "defragment", "priority"])
def test_only_a_drain_moves_a_request_again_at_once(why: Why) -> None:
    held = [request("a"), waiting("b", 4)]
    came = {"a": 99.0, "b": 99.0}
    assert choose(held, for_(why, 100), arrived=came) is None
    assert choose(held, for_("drain", 100), arrived=came) == "b"
