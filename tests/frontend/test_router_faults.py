"""What the router does when instances go, on llumlets without engines."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec
import pytest

from kvmig.asgi.errors import InstanceLost
from kvmig.controlplane.dispatch import NewRequest
from kvmig.controlplane.messages import (
    AbortRequests,
    Discard,
    EngineCall,
    ListedRequests,
    ListRequests,
    Migrate,
    Migrated,
    Outputs,
    OutputSpan,
    Overrun,
    Resolve,
    Resolved,
    Submit,
)
from kvmig.controlplane.view import ClusterView, InstanceView
from kvmig.core.clock import monotonic
from kvmig.core.config import ClusterConfig, FaultConfig
from kvmig.core.errors import NoInstance
from kvmig.engines.base import RequestState
from kvmig.engines.client_request import ClientRequest
from kvmig.frontend import ownership, requests, router
from kvmig.frontend.ports import DispatchOrder, RouterObserver
from kvmig.frontend.splice import StreamSplicer
from tests.support.fake_llumlet import (
    LOAD,
    Cluster,
    FakeLlumlet,
    cluster,
    report,
)
from tests.support.inside import dispatch_by, table_of
from tests.support.waiting import PATIENCE_S, until

QUICK = ClusterConfig(faults=FaultConfig(heartbeat_timeout_s=0.3))
"""Their reports come every 0.05 s, on the same event loop."""


@dataclass
class Clock:
    """The clock, which a test puts on."""

    ahead_s: float = 0.0

    def __call__(self) -> float:
        return monotonic() + self.ahead_s

    async def pass_hang(self) -> None:
        """A step's longest time is over; reports come again."""
        self.ahead_s += ClusterConfig().faults.step_timeout_s
        await asyncio.sleep(0.2)


@dataclass
class Pick:
    """A policy that picks one instance."""

    instance: str

    def pick(self, view: ClusterView, request: NewRequest) -> InstanceView:
        return next(one for one in view.instances if one.instance == self.instance)


async def running(it: Cluster, *tokens: int) -> list[FakeLlumlet]:
    """Request r has got so many tokens; who runs it, then the others."""
    them = await it.submitted()
    them[0].step(("r", 0, 0, list(tokens)))
    await it.front.until(lambda: it.front.tokens.get("r") == list(tokens))
    return them


# -- lost


async def test_a_lost_instances_requests_run_again_from_the_tokens_that_are_known(
    it: Cluster,
) -> None:
    a, b = await running(it, 10, 11)
    await a.close()
    assert await b.hear() == Submit("r+1", (10, 11))
    assert b.payload == [b"payload"]
    b.step(("r+1", 0, 2, [12, 13]))
    b.step(("r+1", 0, 4, [14]), last=["r+1"])
    await it.front.until(lambda: it.front.tokens["r"] == [10, 11, 12, 13, 14])
    assert it.front.failed == {}
    assert it.router.live() == []


async def test_requests_of_an_instance_that_could_not_say_more_run_again(it: Cluster) -> None:
    a, b = await running(it, 10, 11)
    a.send(Overrun())
    assert await b.hear() == Submit("r+1", (10, 11))


async def test_one_without_a_token_is_submitted_anew(it: Cluster) -> None:
    a = await it.submit()
    await a.close()
    assert await it.others(a)[0].hear() == Submit("r+1")


async def test_a_lost_instance_gets_nothing_new_and_its_calls_fail(it: Cluster) -> None:
    a, b = await it.submitted()
    calling = asyncio.create_task(it.router.call("sleep", instances=[a.instance]))
    await a.hear_one(EngineCall)
    await a.close()
    with pytest.raises(InstanceLost):
        await calling
    assert it.state(a) == "lost"
    for n in range(3):
        assert await it.router.submit(ClientRequest(f"s{n}", "s", 20, 0, [b""])) == b.instance
    with pytest.raises(InstanceLost):
        await it.router.migrate("s0", a.instance)


async def test_it_may_be_lost_again_and_moves_like_any_other() -> None:
    async with cluster(instances=3) as it:
        a, *_ = await running(it, 10)
        await a.close()
        b = await it.addressed(a)
        (c,) = it.others(a, b)
        assert await b.hear() == Submit("r+1", (10,))
        moving = asyncio.create_task(it.router.migrate("r", c.instance))
        migrate = await b.hear_one(Migrate)
        assert migrate.request_id == "r+1"
        b.send(Migrated(migrate.call_id, report("r+1", b.instance, c.instance)))
        told = await moving
        assert (told.request_id, it.router.reports[0].request_id) == ("r", "r")
        c.step(("r+1", 1, 1, [11]))
        await it.front.until(lambda: it.front.tokens["r"] == [10, 11])


async def test_an_abort_names_the_run(it: Cluster) -> None:
    a, b = await running(it, 10)
    await a.close()
    await b.hear_one(Submit)
    await it.router.abort(["r"])
    assert await b.hear() == AbortRequests(["r+1"])


async def test_requests_are_listed_under_their_own_ids(it: Cluster) -> None:
    a, b = await running(it, 10)
    await a.close()
    await b.hear_one(Submit)
    states = [RequestState("r+1", "running", 21, 1, 2, 0)]
    b.on[ListRequests] = lambda asked: ListedRequests(getattr(asked, "call_id", 0), states)
    (row,) = await it.router.requests()
    assert (row.id, row.instance, row.state, row.blocks) == ("r", b.instance, "running", 2)


async def test_outputs_that_do_not_match_their_spans_cost_the_connection(it: Cluster) -> None:
    a, b = await it.submitted()
    a.send(Outputs([OutputSpan("r", 0, 0)]), [msgspec.msgpack.encode([]), b""])
    assert await b.hear() == Submit("r+1")
    await until(lambda: it.state(a) == "serving")


# -- silent, hung, failed


async def test_a_silent_instances_requests_run_elsewhere_and_its_copies_are_fenced_off() -> None:
    async with cluster(QUICK) as it:
        a, b = await running(it, 10)
        a.silent = True
        assert await b.hear() == Submit("r+1", (10,))
        assert it.state(a) == "silent"
        assert await a.hear() == AbortRequests(["r"]), "its connection is kept"
        a.step(("r", 0, 1, [99]))
        assert await a.hear() == Discard("r", 0)
        b.step(("r+1", 0, 1, [11]))
        await it.front.until(lambda: it.front.tokens["r"] == [10, 11])
        a.silent = False
        await until(lambda: it.state(a) == "serving")


@pytest.mark.parametrize("state", ["hung", "failed"])
async def test_an_instance_that_says_that_it_ails_is_left_at_once(it: Cluster, state: str) -> None:
    a, b = await running(it, 10)
    a.report(LOAD, state)
    assert await b.hear() == Submit("r+1", (10,))
    assert it.state(a) == state
    assert await it.router.submit(ClientRequest("s", "s", 20, 0, [b""])) == b.instance
    a.report(LOAD, "serving")
    await until(lambda: it.state(a) == "serving")


@pytest.mark.parametrize("state", ["hung", "draining"])
async def test_a_late_drain_is_none_while_no_other_instance_serves(it: Cluster, state: str) -> None:
    a, b = await running(it, 10)
    a.report(LOAD, "draining")
    b.report(LOAD, state)
    await until(lambda: (it.state(a), it.state(b)) == ("draining", state))
    it.router.evacuate(a.instance)
    a.step(("r", 0, 1, [11]))
    await it.front.until(lambda: it.front.tokens["r"] == [10, 11])
    assert a.heard.empty()
    assert b.heard.empty()
    b.report(LOAD, "serving")
    await until(lambda: it.state(b) == "serving")
    it.router.evacuate(a.instance)
    assert await b.hear() == Submit("r+1", (10, 11))


@pytest.mark.parametrize("able", ["0", "1"])
async def test_what_runs_again_goes_to_any_instance_that_is_fit(
    it: Cluster, able: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = it.router.fleet
    monkeypatch.setattr(fleet, "is_healthy", lambda instance: instance == able)
    order = DispatchOrder(3, 0, Submit("r"), [b"payload"], fit=True)
    assert fleet.dispatch(order) == able
    monkeypatch.setattr(fleet, "is_healthy", lambda instance: False)
    with pytest.raises(NoInstance):
        fleet.dispatch(order)


async def test_without_a_better_instance_requests_stay_with_a_silent_one() -> None:
    async with cluster(QUICK, instances=1) as it:
        a, *_ = await running(it, 10)
        a.silent = True
        await until(lambda: it.state(a) == "silent")
        assert await it.router.submit(ClientRequest("s", "s", 20, 0, [b""])) == a.instance
        assert await a.hear() == Submit("s")
        a.step(("r", 0, 1, [11]))
        await it.front.until(lambda: it.front.tokens["r"] == [10, 11])
        assert a.heard.empty()


async def test_a_connection_over_which_nothing_comes_is_made_again() -> None:
    async with cluster(QUICK, instances=1, lost_after_s=0.6) as it:
        a, *_ = await running(it, 10)
        a.silent = True
        # Hello is answered, and with it comes a report: it may run there again.
        assert await a.hear() == Submit("r+1", (10,))


async def test_a_front_end_that_stood_still_takes_nobody_for_silent() -> None:
    async with cluster(QUICK) as it:
        await running(it, 10)
        time.sleep(1.0)  # noqa: ASYNC251 - the loop, and all that it should hear
        await asyncio.sleep(0.2)
        assert all(one.heard.empty() for one in it.llumlets)


# -- migrations with a lost end


async def test_a_moved_request_stays_when_its_old_instance_is_lost(it: Cluster) -> None:
    a, b = await it.submitted()
    a.moves()
    await it.router.migrate("r", b.instance)
    await a.close()
    await until(lambda: it.state(a) == "lost")
    b.step(("r", 1, 0, [10]))
    await it.front.until(lambda: it.front.tokens.get("r") == [10])
    assert b.heard.empty()


async def test_a_moved_request_runs_again_when_its_new_instance_is_lost(it: Cluster) -> None:
    a, b = await it.submitted()
    a.moves()
    await it.router.migrate("r", b.instance)
    await a.hear_one(Migrate)
    await b.close()
    assert await a.hear() == AbortRequests(["r"])
    assert await a.hear() == Submit("r+1")


async def test_it_runs_again_when_the_report_comes_after_the_destination_was_lost(
    it: Cluster,
) -> None:
    a, b = await it.submitted()
    await b.close()
    await until(lambda: it.state(b) == "lost")
    a.send(Migrated(0, report("r", a.instance, b.instance)))
    assert await a.hear() == AbortRequests(["r"])
    assert await a.hear() == Submit("r+1")


async def runs_again(instances: list[FakeLlumlet], *tokens: int) -> FakeLlumlet:
    """One of them, told to drop the lost run or not, gets the next one; which."""
    submit = Submit("r+1", tokens)
    async with asyncio.timeout(PATIENCE_S):
        heard = {asyncio.create_task(_submitted(one)): one for one in instances}
        try:
            done, _ = await asyncio.wait(heard, return_when=asyncio.FIRST_COMPLETED)
            (first,) = done
            assert first.result() == submit
            return heard[first]
        finally:
            for one in heard:
                one.cancel()


async def _submitted(llumlet: FakeLlumlet) -> Submit:
    while not isinstance(message := await llumlet.heard.get(), Submit):
        pass
    return message


@pytest.mark.parametrize("late", [False, True])
async def test_a_request_that_moved_on_and_on_runs_again_when_its_last_instance_is_lost(
    late: bool,
) -> None:
    async with cluster(instances=3) as it:
        a, b, c = await it.submitted()  # it waits in queues: no token comes
        moves = [(a, b, 0), (b, c, 1)]
        for known, (source, to, epoch) in enumerate(moves[::-1] if late else moves):
            told = report("r", source.instance, to.instance)
            source.send(Migrated(0, told, epoch=epoch))
            await until(lambda known=known: len(it.router.reports) == known + 1)  # type: ignore[misc]
        await c.close()
        await runs_again([a, b])


async def test_tokens_of_one_that_it_has_left_since_do_not_hide_where_it_runs() -> None:
    async with cluster(instances=3) as it:
        a, b, c = await running(it, 10)
        b.step(("r", 1, 2, [12]))  # held: a's last token is still to come
        b.send(Migrated(0, report("r", b.instance, c.instance), epoch=1))
        await until(lambda: len(it.router.reports) == 1)
        a.step(("r", 0, 1, [11]))
        await it.front.until(lambda: it.front.tokens["r"] == [10, 11, 12])
        await c.close()
        await runs_again([a, b], 10, 11, 12)


async def test_a_stream_that_goes_over_to_an_instance_lost_meanwhile_runs_again() -> None:
    async with cluster(instances=3) as it:
        a, b, c = await running(it, 10)
        b.step(("r", 1, 2, [12]))  # held: a's last token is still to come
        await until(lambda: table_of(it.router).live["r"].splicer.waits_since(1e12))
        await b.close()
        await until(lambda: it.state(b) == "lost")
        taker = await runs_again([a, c], 10)
        a.step(("r", 0, 1, [11]))  # too late: the next run computes it, too
        taker.step(("r+1", 0, 1, [11, 12, 13]))
        await it.front.until(lambda: it.front.tokens["r"] == [10, 11, 12, 13])


async def test_a_request_that_nobody_runs_any_more_runs_again(it: Cluster) -> None:
    a, b = await running(it, 10)
    # The source has asked us about its commit for long, and we didn't answer.
    a.send(Migrated(0, report("r", a.instance, b.instance, "orphaned")))
    await runs_again([a, b], 10)


async def test_who_holds_a_lost_run_is_told_to_drop_it() -> None:
    async with cluster(instances=3) as it:
        a, b, c = await running(it, 10)
        await a.close()  # it has just handed the request on to c, which nobody knows
        await until(lambda: not (b.heard.empty() and c.heard.empty()))
        taker, stale = (b, c) if c.heard.empty() else (c, b)
        await taker.hear_one(Submit)
        stale.step(("r", 1, 1, [11]))
        assert await stale.hear() == Discard("r", 1)
        stale.send(Resolve("m", "r", 2, taker.instance))
        assert await stale.hear() == Resolved("m", moved=True)
        taker.step(("r+1", 0, 1, [21]))
        await it.front.until(lambda: it.front.tokens["r"] == [10, 21])


async def test_a_source_need_not_wait_for_the_word_of_an_instance_that_ails() -> None:
    async with cluster(fence_timeout_s=60.0) as it:
        a, b = await running(it, 10)
        b.report(LOAD, "hung")
        await until(lambda: it.state(b) == "hung")
        a.send(Resolve("m", "r", 1, b.instance))
        assert await a.hear() == Resolved("m", moved=False)
        assert await b.hear() == Discard("r", 1)
        b.step(("r", 1, 1, [99]))
        a.step(("r", 0, 1, [11]))
        await it.front.until(lambda: it.front.tokens["r"] == [10, 11])


async def test_lost_tokens_make_a_request_run_again() -> None:
    async with cluster(instances=1) as it:
        a, *_ = await running(it, 10)
        a.step(("r", 0, 3, [13]))
        assert await a.hear() == AbortRequests(["r"])
        assert await a.hear() == Submit("r+1", (10,))


async def test_tokens_that_never_come_make_a_request_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router, "HOLD_S", 0.2)
    async with cluster() as it:
        a, b = await running(it, 10)
        b.step(("r", 1, 5, [15]))
        assert await a.hear() == AbortRequests(["r"])
        await until(lambda: not (a.heard.empty() and b.heard.empty()))
        taker = a if b.heard.empty() else b
        assert await taker.hear() == Submit("r+1", (10,))


async def test_a_request_whose_tokens_get_lost_again_and_again_is_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ownership, "MAX_RUNS", 1)
    async with cluster(instances=1) as it:
        a, *_ = await running(it, 10)
        a.step(("r", 0, 3, [13]))
        await a.hear()
        await a.hear_one(Submit)
        a.step(("r+1", 0, 3, [13]))
        await it.front.until(lambda: "r" in it.front.failed)
        assert it.front.failed["r"] == f"tokens 1 to 2 of {a.instance} were lost"


# -- poison


async def test_a_request_that_two_instances_died_of_is_failed() -> None:
    async with cluster(instances=3) as it:
        names = []
        for run in range(2):
            if run == 0:
                a, *_ = await running(it, 10)
            else:
                a = await it.addressed()
                await a.hear_one(Submit)
            names.append(a.instance)
            await a.close()
            await it.router.remove_instance(a.instance, crashed=True)
        await it.front.until(lambda: "r" in it.front.failed)
        assert it.front.failed["r"].startswith(
            f"instances {names[0]} and {names[1]} crashed while they ran this request"
        )
        assert it.front.final == ["r"]
        (last,) = [one for one in it.llumlets if one.instance not in names]
        assert last.heard.empty()


async def test_instances_that_come_back_were_not_poisoned() -> None:
    async with cluster(QUICK, instances=3) as it:
        a, *_ = await running(it, 10)
        for run in range(1, 5):
            a.silent = True
            b = await it.addressed(a)
            assert (await b.hear_one(Submit)).request_id == f"r+{run}"
            a.silent = False
            await until(lambda a=a: it.state(a) == "serving")  # type: ignore[misc]
            await asyncio.sleep(0.2)
            while not a.heard.empty():
                a.heard.get_nowait()
            a = b
        assert it.front.failed == {}


async def test_a_suspect_takes_no_third_instance_along_but_goes_on_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "PATIENCE_S", 1.0)
    async with cluster(instances=3) as it:
        a, *_ = await running(it, 10)
        await a.close()
        b = await it.addressed()
        (c,) = it.others(a, b)
        await b.close()
        await until(lambda: it.state(b) == "lost")
        assert c.heard.empty()
        assert (await c.hear_one(Submit)).request_id == "r+2"


async def test_a_request_that_two_instances_hung_of_is_failed_and_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    async with cluster(clock=clock, instances=3) as it:
        a, *_ = await running(it, 10)
        await clock.pass_hang()
        a.report(LOAD, "hung")
        b = await it.addressed(a)
        assert (await b.hear_one(Submit)).request_id == "r+1"
        dispatch_by(it.router, Pick(b.instance))
        await it.router.submit(ClientRequest("beside", "cmpl-y-0", 20, 0, [b"payload"]))
        assert await b.hear() == Submit("beside")
        await clock.pass_hang()
        await it.router.submit(ClientRequest("came during it", "cmpl-z-0", 20, 0, [b"payload"]))
        assert await b.hear() == Submit("came during it")
        (c,) = it.others(a, b)
        dispatch_by(it.router, Pick(c.instance))
        b.report(LOAD, "hung")
        await it.front.until(lambda: "r" in it.front.failed)
        assert it.front.failed["r"] == (
            f"instances {a.instance} and {b.instance} hung while they ran this request: "
            "it isn't run again"
        )
        assert it.front.final == ["r"]
        assert {(await c.hear_one(Submit)).request_id for _ in range(2)} == {
            "beside+1", "came during it+1",
        }  # fmt: skip
        assert it.front.failed.keys() == {"r"}
        seen = {one.request_id: one.crashes.crashed for one in table_of(it.router)}
        assert seen == {"beside": [b.instance], "came during it": []}


async def test_an_instance_that_hung_and_is_ended_for_it_counts_once() -> None:
    clock = Clock()
    async with cluster(clock=clock, instances=3) as it:
        a, *_ = await running(it, 10)
        await clock.pass_hang()
        a.report(LOAD, "hung")
        b = await it.addressed(a)
        await b.hear_one(Submit)
        await a.close()
        await it.router.remove_instance(a.instance, crashed=True)
        b.step(("r+1", 0, 1, [11]))
        await it.front.until(lambda: it.front.tokens["r"] == [10, 11])
        assert it.front.failed == {}


async def test_a_request_that_hung_the_last_two_instances_ends_without_a_third() -> None:
    clock = Clock()
    async with cluster(clock=clock) as it:
        a, b = await running(it, 10)
        await clock.pass_hang()
        a.report(LOAD, "hung")
        await b.hear_one(Submit)
        await clock.pass_hang()
        b.report(LOAD, "hung")
        await it.front.until(lambda: "r" in it.front.failed)
        assert await b.hear() == AbortRequests(["r+1"])


async def test_a_hang_of_the_only_instance_ends_nobody_however_often_it_comes_back() -> None:
    clock = Clock()
    async with cluster(clock=clock, instances=1) as it:
        a, *_ = await running(it, 10)
        await clock.pass_hang()
        for token in (11, 12, 13):
            a.report(LOAD, "hung")
            await until(lambda: it.state(a) == "hung")
            await asyncio.sleep(0.1)
            a.report(LOAD, "serving")
            await until(lambda: it.state(a) == "serving")
            await asyncio.sleep(0.1)
            a.step(("r", 0, token - 10, [token]))
            await it.front.until(lambda token=token: token in it.front.tokens["r"])  # type: ignore[misc]
        assert it.front.failed == {}


async def test_removed_instances_are_no_crashes() -> None:
    async with cluster(instances=3) as it:
        a, *_ = await running(it, 10)
        await it.router.remove_instance(a.instance)
        b = await it.addressed(a)
        await it.router.remove_instance(b.instance)
        (c,) = it.others(a, b)
        assert (await c.hear_one(Submit)).request_id == "r+2"
        assert [row.id for row in it.router.fleet.rows()] == [c.instance]


# -- nobody there


async def test_requests_wait_for_an_instance_in_the_order_of_dispatch() -> None:
    async with cluster(instances=1) as it:
        a, *_ = await running(it, 10)
        await it.router.submit(ClientRequest("urgent", "u", 20, -1, [b"payload"]))
        await it.router.remove_instance(a.instance, crashed=True)
        assert it.router.fleet.vacant()
        with pytest.raises(NoInstance):
            await it.router.submit(ClientRequest("new", "n", 20, 0, [b""]))
        again = await it.come_back(a)
        assert [await again.hear(), await again.hear()] == [
            Submit("urgent+1"), Submit("r+1", (10,)),
        ]  # fmt: skip
        assert it.router.fleet.engine_indexes() == {0: a.instance}
        again.step(("r+1", 0, 1, [11]))
        await it.front.until(lambda: it.front.tokens["r"] == [10, 11])


async def test_a_request_that_can_not_be_sent_again_ends_and_those_behind_it_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(instances=1) as it:
        a, *_ = await running(it, 10)
        await it.router.submit(ClientRequest("behind", "b", 20, 0, [b"payload"]))
        await it.router.remove_instance(a.instance, crashed=True)
        dispatch = it.router.fleet.dispatch

        def broken(order: DispatchOrder) -> str:
            if order.submit.request_id == "r+1":
                raise ValueError("a mistake of ours")
            return dispatch(order)

        monkeypatch.setattr(it.router.fleet, "dispatch", broken)
        again = await it.come_back(a)
        assert await again.hear() == Submit("behind+1")
        assert it.front.failed["r"].endswith("and it could not be run again")
        assert it.front.final == ["r"]
        assert "a mistake of ours" in caplog.text


async def test_a_look_that_fails_in_one_part_does_all_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = ClusterConfig(faults=FaultConfig(failover_timeout_s=0.3))
    async with cluster(config, instances=1) as it:
        a, *_ = await running(it, 10)

        def broken(_: StreamSplicer, __: float) -> bool:
            raise ValueError("a mistake of ours")

        monkeypatch.setattr(StreamSplicer, "waits_since", broken)
        await it.router.remove_instance(a.instance, crashed=True)
        await it.front.until(lambda: "r" in it.front.failed)
        assert "a mistake of ours" in caplog.text


async def test_who_waits_too_long_is_failed_and_may_try_again() -> None:
    config = ClusterConfig(faults=FaultConfig(failover_timeout_s=0.3))
    async with cluster(config, instances=1) as it:
        a, *_ = await running(it, 10)
        await it.router.remove_instance(a.instance, crashed=True)
        await it.front.until(lambda: "r" in it.front.failed)
        reason = f"instance {a.instance} has died, and no other one was there for "
        assert it.front.failed["r"].startswith(reason)
        assert it.front.final == []
        assert it.router.live() == []


async def test_one_that_is_not_wanted_any_more_does_not_wait() -> None:
    async with cluster(instances=1) as it:
        a, *_ = await running(it, 10)
        await it.router.remove_instance(a.instance, crashed=True)
        await it.router.abort(["r"])
        again = await it.come_back(a)
        await asyncio.sleep(0.5)
        assert again.heard.empty()


async def test_a_waiting_request_is_in_the_list_and_can_not_be_moved() -> None:
    async with cluster(instances=2) as it:
        a, b = await running(it, 10)
        b.report(LOAD, "failed")
        await until(lambda: it.state(b) == "failed")
        await it.router.remove_instance(a.instance, crashed=True)
        (row,) = await it.router.requests()
        assert (row.id, row.state) == ("r", "submitted")
        with pytest.raises(InstanceLost, match="request r has no instance now"):
            await it.router.migrate("r", b.instance)


# -- what is counted


@dataclass
class Counted(RouterObserver):
    """An `RouterObserver` that keeps what it hears."""

    heard: list[tuple[object, ...]] = field(default_factory=list)

    def missing(self, instance: str, ailment: str) -> None:
        self.heard.append((instance, ailment))

    def ran_again(self, tokens: int) -> None:
        self.heard.append(("again", tokens))


async def test_what_happened_is_counted() -> None:
    counted = Counted()
    async with cluster(observer=counted) as it:
        place = await it.router.submit(ClientRequest("r", "x", 20, 0, [b""]))
        await it.llumlets[int(place)].close()
        await until(lambda: len(counted.heard) == 2)
        assert counted.heard == [(place, "lost"), ("again", 20)]
        await it.router.remove_instance(place, crashed=True)
        assert len(counted.heard) == 2
