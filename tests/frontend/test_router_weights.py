"""A stream goes on under the weights that it began with, whatever becomes of its instance."""

from __future__ import annotations

import asyncio

import pytest

from kvmig.controlplane.messages import AbortRequests, Submit
from kvmig.core.config import ClusterConfig, FaultConfig, SchedulerConfig
from kvmig.engines.base import EngineLoad
from kvmig.engines.client_request import ClientRequest
from tests.support.fake_llumlet import LOAD, Cluster, FakeLlumlet, cluster
from tests.support.waiting import until

SOON = ClusterConfig(faults=FaultConfig(failover_timeout_s=0.3))
FULL = EngineLoad(100, 100, 9, 3, 5, 9)


async def begin(it: Cluster, at: FakeLlumlet, *tokens: int) -> None:
    """Request r runs there, and has got these."""
    for other in it.llumlets:
        if other is not at:
            other.report(LOAD, "draining")
    await until(lambda: all(it.state(one) == "draining" for one in it.llumlets if one != at))
    assert await it.submit() is at
    if tokens:
        at.step(("r", 0, 0, list(tokens)))
        await it.front.until(lambda: it.front.tokens.get("r") == list(tokens))
    for other in it.llumlets:
        other.report(LOAD, "serving")
    await until(lambda: all(it.state(one) == "serving" for one in it.llumlets))


async def test_it_runs_again_where_its_weights_are() -> None:
    async with cluster(weights=["new", "old", "new", "old", "new"]) as it:
        await begin(it, it.llumlets[1], 10, 11)
        await it.llumlets[1].close()
        assert await it.llumlets[3].hear() == Submit("r+1", (10, 11))


async def test_it_runs_again_even_where_nothing_new_would_begin() -> None:
    async with cluster(weights=["old", "new", "old"]) as it:
        await begin(it, it.llumlets[0], 10)
        it.llumlets[2].report(FULL, "draining")
        await until(lambda: it.state(it.llumlets[2]) == "draining")
        await it.llumlets[0].close()
        assert await it.llumlets[2].hear() == Submit("r+1", (10,))


async def test_of_those_with_its_weights_one_of_its_class_comes_first() -> None:
    async with cluster(weights=["w"] * 4) as it:
        for one in it.llumlets[:2]:
            one.numerics = "other"
        await begin(it, it.llumlets[3], 10)
        it.llumlets[2].report(FULL)
        await until(lambda: it.router.fleet.rows()[2].waiting == 3)
        await it.llumlets[3].close()
        assert await it.llumlets[2].hear() == Submit("r+1", (10,))


async def test_without_a_token_it_runs_under_any() -> None:
    async with cluster(weights=["old", "new"]) as it:
        await begin(it, it.llumlets[0])
        await it.llumlets[0].close()
        assert await it.llumlets[1].hear() == Submit("r+1")


async def test_without_its_weights_anywhere_it_ends_with_a_clear_error() -> None:
    async with cluster(SOON, weights=["old", "new"]) as it:
        await begin(it, it.llumlets[0], 10)
        await it.llumlets[0].close()
        await it.front.until(lambda: "r" in it.front.failed)
        assert it.front.failed["r"] == (
            "instance 0 is lost, and no instance with the weights that the request began with"
            " (old) was there for 0 s"
        )
        assert it.llumlets[1].heard.empty()
        assert it.front.final == [], "sent again it would begin anew, under others"


async def test_it_waits_for_an_instance_that_comes_back_with_its_weights() -> None:
    async with cluster(weights=["old", "new"]) as it:
        await begin(it, it.llumlets[0], 10)
        await it.router.remove_instance("0", crashed=True)
        back = FakeLlumlet("0", "old")
        try:
            await it.router.add_instance("0", back.endpoint)
            assert await back.hear() == Submit("r+1", (10,))
        finally:
            await back.close()


async def test_a_stream_that_begins_after_an_update_begins_with_the_new_weights() -> None:
    async with cluster(SOON, weights=["old", "old"]) as it:
        a, b = it.llumlets
        a.weights = "new"
        a.report()
        await begin(it, a, 10)
        await a.close()
        await it.front.until(lambda: "r" in it.front.failed)
        assert "(new)" in it.front.failed["r"]
        assert b.heard.empty()


# -- drains


async def begin_and_drain(it: Cluster, llumlet: FakeLlumlet) -> None:
    """A request with one token, on an instance that drains since."""
    await begin(it, llumlet, 10)
    llumlet.report(LOAD, "draining")
    await until(lambda: it.state(llumlet) == "draining")


async def test_a_late_drain_displaces_only_what_can_go_on_elsewhere() -> None:
    async with cluster(weights=["old", "new"]) as it:
        a, b = it.llumlets
        await begin_and_drain(it, a)
        it.router.evacuate("0")
        a.step(("r", 0, 1, [11]))
        await it.front.until(lambda: it.front.tokens["r"] == [10, 11])
        assert a.heard.empty()
        assert b.heard.empty()


async def test_at_a_drains_deadline_it_ends_with_an_error_that_says_so() -> None:
    async with cluster(weights=["old", "new"]) as it:
        a, b = it.llumlets
        await begin_and_drain(it, a)
        it.router.evacuate("0", ends=True)
        assert it.front.failed["r"] == (
            "instance 0 had to be empty by now (deadline_s), and no other one has the weights that"
            " the request began with (old)"
        )
        assert await a.hear() == AbortRequests(["r"])
        assert b.heard.empty()


async def test_at_a_drains_deadline_it_goes_on_where_its_weights_are() -> None:
    async with cluster(weights=["old", "new", "old"]) as it:
        a, _, c = it.llumlets
        await begin_and_drain(it, a)
        it.router.evacuate("0", ends=True)
        assert await c.hear() == Submit("r+1", (10,))
        assert it.front.failed == {}


@pytest.mark.parametrize(("inexact", "ends"), [(False, False), (True, False), (False, True)])
async def test_a_late_drain_crosses_classes_only_by_somebodys_word(
    inexact: bool, ends: bool
) -> None:
    config = ClusterConfig(scheduler=SchedulerConfig(inexact_moves=inexact))
    async with cluster(config, weights=["w", "w"]) as it:
        a, b = it.llumlets
        b.numerics = "other"
        await begin_and_drain(it, a)
        it.router.evacuate("0", ends=ends)
        if inexact or ends:
            assert await b.hear() == Submit("r+1", (10,))
        else:
            a.step(("r", 0, 1, [11]))
            await it.front.until(lambda: it.front.tokens["r"] == [10, 11])
            assert b.heard.empty()
        assert it.front.failed == {}


# -- new requests


@pytest.mark.parametrize("busy", [False, True])
async def test_new_requests_begin_under_the_preferred_weights_while_there_is_room(
    busy: bool,
) -> None:
    async with cluster(weights=["old", "new", "old"]) as it:
        if busy:
            it.llumlets[1].report(FULL)
            await until(lambda: it.router.fleet.rows()[1].waiting == 3)
        it.router.fleet.preferred = "new"
        places = set()
        for number in range(4):
            places.add(await it.router.submit(ClientRequest(f"r{number}", "x", 20, 0, [b""])))
            await asyncio.sleep(0)
        assert places == ({"0", "2"} if busy else {"1"})
