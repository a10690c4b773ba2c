"""Calls to a model with two deployments: each goes to one of them, by its share."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvmig.proxy.activator import (
    STAYS,
    TRY_S,
    CountedRequest,
    ForwardCall,
    PendingRequest,
    RequestCounts,
    decide,
    drawn,
)
from kvmig.proxy.messages import ModelRoute
from tests.support.proxy_site import Deployment, Site


def route(percent: int) -> ModelRoute:
    return ModelRoute(
        name="a", state="ready", socket="old", next_socket="new", next_percent=percent
    )


def goes_to(percent: int, draw: int) -> str:
    waiter = PendingRequest("a", 0, 10, 0.0, beats=False, draw=draw)
    found = decide(route(percent), waiter, 0.0)
    assert isinstance(found, ForwardCall)
    return found.socket


@given(st.integers(0, 100), st.integers(0, 99))
def test_a_call_that_went_to_the_new_one_goes_there_at_every_larger_share(
    percent: int, draw: int
) -> None:
    assert goes_to(percent, draw) == ("new" if draw < percent else "old")


def test_a_call_that_must_stay_never_goes_to_the_new_one() -> None:
    assert goes_to(100, STAYS) == "old"


def test_a_call_that_did_not_reach_the_new_one_goes_to_the_old_one() -> None:
    waiter = PendingRequest("a", 0, 10, 0.0, beats=False, draw=0, tried=0.0)
    assert decide(route(99), waiter, TRY_S) == ForwardCall("old")


def test_the_same_call_draws_the_same_again_and_calls_draw_evenly() -> None:
    draws = Counter(drawn(f"call-{number}") // 10 for number in range(10_000))
    assert drawn("call-1") == drawn("call-1")
    assert set(draws) == set(range(10))
    assert min(draws.values()) > 850


def test_requests_are_counted_where_they_run() -> None:
    counts = RequestCounts()
    first, second, third = (CountedRequest(counts, "a") for _ in range(3))
    first.set_state("running", 0.0, "old")
    second.set_state("held", 0.0)
    second.set_state("running", 2.0, "new")
    third.set_state("over", 2.0)
    found = {one.socket: one for one in counts.demands(3.0)}
    assert {where: one.running for where, one in found.items()} == {"": 0, "old": 1, "new": 1}
    assert {where: one.request_s for where, one in found.items()} == {"": 2, "old": 3, "new": 1}
    assert {where: one.arrivals for where, one in found.items()} == {"": 2, "old": 1, "new": 0}
    assert counts.states() == {"a": (2, 0)}
    first.set_state("over", 4.0)
    second.set_state("over", 4.0)
    assert sum(one.running for one in counts.demands(5.0)) == 0
    assert counts.demands(6.0) == ()


async def test_a_share_of_the_calls_goes_to_the_deployment_beside(
    door: Site, tmp_path: Path
) -> None:
    async with door.deployment() as old:
        new = Deployment(f"{tmp_path}/new")
        await new.open()
        door.ready(next_socket=new.path, next_percent=30)
        for number in range(60):
            await door.ask(headers={"x-request-id": f"call-{number}"})
        await new.close()
        wanted = sum(drawn(f"call-{number}") < 30 for number in range(60))
        assert 0 < wanted < 60
        assert (len(new.got), len(old.got)) == (wanted, 60 - wanted)


async def test_calls_go_to_the_old_deployment_if_the_new_one_has_died_and_no_server_says_so(
    door: Site, tmp_path: Path
) -> None:
    async with door.deployment() as old:
        door.ready(next_socket=f"{tmp_path}/nobody", next_percent=99)
        for number in range(3):
            await door.ask(headers={"x-request-id": f"call-{number}"})
        assert len(old.got) == 3


async def test_a_response_that_is_stored_stays_at_the_old_deployment(
    door: Site, tmp_path: Path
) -> None:
    async with door.deployment() as old:
        door.ready(next_socket=f"{tmp_path}/nobody", next_percent=99)
        for number in range(5):
            await door.ask(path="/v1/responses", headers={"x-request-id": f"call-{number}"})
        assert len(old.got) == 5
