"""Those that wait for a model: bounds, order, deadlines, counts. Pure, with made-up times."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvmig.proxy.activator import (
    BEAT_S,
    CountedRequest,
    ForwardCall,
    PendingRequest,
    PendingRequests,
    RequestCounts,
    WaitForRoute,
    decide,
)
from kvmig.proxy.messages import ModelRoute, RouteState
from kvmig.proxy.refusals import ProxyRefusal
from tests.support.examples import examples

STATES: tuple[RouteState, ...] = ("cold", "starting", "ready", "failed", "off")


def route(state: RouteState = "cold", **more: Any) -> ModelRoute:
    return ModelRoute(name="m", state=state, socket="/s", **more)


def waiter(**more: Any) -> PendingRequest:
    return PendingRequest(
        **{"model": "m", "priority": 0, "size": 1, "since": 0.0, "beats": False, **more}
    )


def refusal(found: object) -> ProxyRefusal:
    assert isinstance(found, ProxyRefusal)
    return found


def test_a_ready_route_is_taken() -> None:
    assert decide(route("ready"), waiter(), 0.0) == ForwardCall("/s")


def test_a_route_that_could_not_be_reached_is_tried_again_a_little_later() -> None:
    one = waiter(tried=1.0)
    found = decide(route("ready"), one, 1.0)
    assert isinstance(found, WaitForRoute)
    assert decide(route("ready"), one, 1.0 + found.seconds) == ForwardCall("/s")


def test_a_stream_hears_a_sign_of_life_when_it_is_due_and_each_ten_seconds() -> None:
    one = waiter(beats=True)
    assert decide(route(), one, 9.0) == WaitForRoute(1.0, beat=False)
    assert decide(route(), one, 10.0) == WaitForRoute(BEAT_S, beat=True)
    one.beaten = 10.0
    assert decide(route(), one, 15.0) == WaitForRoute(5.0, beat=False)


def test_a_model_that_is_off_is_not_to_be_tried_again() -> None:
    found = refusal(decide(route("off", why="turned off by ann"), waiter(), 0.0))
    assert (found.status, str(found), found.again_s) == (503, "turned off by ann", None)


@given(
    state=st.sampled_from(STATES),
    beats=st.booleans(),
    beaten=st.booleans(),
    now=st.floats(0, 700),
    start_timeout_s=st.floats(0.1, 600),
    heartbeat_after_s=st.floats(0, 60),
)
def test_nobody_waits_beyond_the_deadline_and_nobody_spins(
    state: RouteState,
    beats: bool,
    beaten: bool,
    now: float,
    start_timeout_s: float,
    heartbeat_after_s: float,
) -> None:
    here = route(state, start_timeout_s=start_timeout_s, heartbeat_after_s=heartbeat_after_s)
    one = waiter(beats=beats, beaten=now if beaten else None, tried=now)
    found = decide(here, one, now)
    if isinstance(found, WaitForRoute):
        assert found.seconds > 0
        assert now + found.seconds <= start_timeout_s + 1e-6
        assert not (found.beat and (not beats or beaten))
    else:
        refusal(found)


class Holding(RuleBasedStateMachine):
    """Calls come, wait, go on and leave, in any order."""

    MOST_BYTES, MAX_HELD = 20, 4

    def __init__(self) -> None:
        super().__init__()
        self.hold = PendingRequests(self.MOST_BYTES)
        self.counts = RequestCounts()
        self.inside: list[tuple[PendingRequest, CountedRequest]] = []
        self.now = 0.0
        self.request_s = 0.0
        self.told_s = 0.0
        self.arrived = self.told = 0

    @rule(
        model=st.sampled_from("ab"), priority=st.integers(-2, 2), size=st.integers(0, 9),
    )  # fmt: skip
    def come(self, model: str, priority: int, size: int) -> None:
        one = waiter(model=model, priority=priority, size=size, since=self.now)
        here = [held for held, _ in self.inside if held.model == model]
        taken = sum(held.size for held, _ in self.inside)
        refused = self.hold.enter(one, ModelRoute(name=model, state="cold", max_held=self.MAX_HELD))
        fits = len(here) < self.MAX_HELD and taken + size <= self.MOST_BYTES
        assert (refused is None) == fits
        counted = CountedRequest(self.counts, model)
        self.arrived += 1
        if refused is None:
            counted.set_state("held", self.now)
            self.inside.append((one, counted))
        else:
            counted.set_state("over", self.now)

    @precondition(lambda self: self.inside)
    @rule(which=st.integers(0, 50), runs=st.booleans())
    def leave(self, which: int, runs: bool) -> None:
        one, counted = self.inside.pop(which % len(self.inside))
        self.hold.remove_request(one)
        self.hold.remove_request(one)
        if runs:
            counted.set_state("running", self.now)
        counted.set_state("over", self.now)

    @rule(seconds=st.integers(0, 5))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds
        self.request_s += seconds * len(self.inside)

    @rule()
    def tell(self) -> None:
        demands = self.counts.demands(self.now)
        self.told_s += sum(one.request_s for one in demands)
        self.told += sum(one.arrivals for one in demands)
        assert self.told_s == self.request_s
        assert self.told == self.arrived
        assert sum(one.held for one in demands) == len(self.inside)

    @invariant()
    def those_that_wait_are_in_order(self) -> None:
        for model in "ab":
            order = [(one.priority, one.number) for one in self.hold.waiting(model)]
            assert order == sorted(order)
            assert len(order) == sum(one.model == model for one, _ in self.inside)
        assert set(self.hold.models()) == {one.model for one, _ in self.inside}


TestHolding = Holding.TestCase
TestHolding.settings = examples(30, stateful_step_count=30, deadline=None)


def test_a_refusal_says_when_to_try_again() -> None:
    hold = PendingRequests(10)
    hold.enter(waiter(), route(max_held=1))
    found = refusal(hold.enter(waiter(), route(max_held=1, start_s=12.0)))
    assert (found.status, found.again_s) == (429, 12.0)


@pytest.mark.parametrize("state", ["failed", "off"])
def test_what_will_not_start_is_refused_whatever_the_time(state: RouteState) -> None:
    assert refusal(decide(route(state), waiter(), 1e9)).status == 503


def test_one_account_that_waits_leaves_as_many_places_as_it_has() -> None:
    hold = PendingRequests(100)
    places = route(max_held=6)
    for _ in range(3):
        assert hold.enter(waiter(account="a"), places) is None
    refused = refusal(hold.enter(waiter(account="a"), places))
    assert (refused.status, "of yours" in str(refused)) == (429, True)
    assert hold.enter(waiter(account="b"), places) is None


def test_one_accounts_large_bodies_leave_room_for_those_of_others() -> None:
    hold = PendingRequests(100)
    assert hold.enter(waiter(account="a", size=50), route()) is None
    assert refusal(hold.enter(waiter(account="a", size=1), route())).status == 429
    other = waiter(account="b", size=20)
    assert hold.enter(other, route()) is None
    hold.remove_request(other)
    hold.remove_request(other)
    assert hold.enter(waiter(account="b", size=25), route()) is None
