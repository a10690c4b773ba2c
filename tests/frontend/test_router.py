"""The router with real sockets, on llumlets without engines."""

from __future__ import annotations

import asyncio
import time
from math import inf

import pytest

from kvmig.asgi.call import HttpCall
from kvmig.asgi.errors import (
    AlreadyMigrating,
    AmbiguousRequest,
    CallFailed,
    CallTimeout,
    InstanceLost,
    MigrationDisabled,
    OrderFailed,
    RequestFinished,
    SameInstance,
    UnknownInstance,
    UnknownRequest,
)
from kvmig.controlplane.messages import (
    AbortRequests,
    CallDone,
    Discard,
    EngineCall,
    Fence,
    Fenced,
    ListedRequests,
    ListRequests,
    Migrate,
    Migrated,
    Resolve,
    Resolved,
    SetGuarantee,
    Submit,
)
from kvmig.core.config import ClusterConfig, SchedulerConfig
from kvmig.core.errors import NoInstance
from kvmig.engines.base import EngineLoad, RequestState
from kvmig.engines.client_request import ClientRequest
from kvmig.frontend.router import FrontendRouter
from kvmig.rpc.messages import RpcMessage
from tests.support.fake_llumlet import (
    SECRET,
    Cluster,
    FakeLlumlet,
    Front,
    cluster,
    decode,
    report,
)
from tests.support.http_calls import in_call
from tests.support.waiting import until

# -- instances and calls


async def test_an_instance_is_described_when_it_is_added(it: Cluster) -> None:
    assert [row.id for row in it.router.fleet.rows()] == ["0", "1"]
    assert it.router.fleet.engine_indexes() == {0: "0", 1: "1"}
    with pytest.raises(ValueError, match="0 was added before"):
        await it.router.add_instance("0", it.llumlets[0].endpoint)


async def test_an_instance_that_does_not_answer_is_not_added() -> None:
    router = FrontendRouter("front", SECRET, ClusterConfig(), Front(), decode)
    with pytest.raises(InstanceLost, match=r"instance 7 at tcp://127\.0\.0\.1:9 did not answer"):
        await router.add_instance("7", "tcp://127.0.0.1:9", timeout_s=0.1)
    assert router.fleet.rows() == []
    with pytest.raises(NoInstance):
        await router.submit(ClientRequest("r", "r", 1, 0, [b""]))
    await router.close()


async def test_instances_tell_their_load(it: Cluster) -> None:
    it.llumlets[0].report(EngineLoad(100, 60, 2, 3, 4, 12), state="draining")
    await until(lambda: it.state(it.llumlets[0]) == "draining")
    row = it.router.fleet.rows()[0]
    assert (row.blocks_total, row.blocks_used, row.running, row.waiting) == (100, 60, 2, 3)
    assert row.freeness == -inf


async def test_instances_tell_any_front_end_that_they_are_parked_and_who_waits_hears_it(
    it: Cluster,
) -> None:
    assert not it.router.fleet.parked
    it.llumlets[1].parked = True
    async with asyncio.timeout(5):
        await it.router.fleet.parking.wait()
    assert it.router.fleet.parked
    later = FrontendRouter("later", SECRET, ClusterConfig(), Front(), decode)
    try:
        await later.add_instance("1", it.llumlets[1].endpoint)
        await until(lambda: later.fleet.parked)
    finally:
        await later.close()


async def test_a_call_goes_to_all_instances_and_brings_all_answers(it: Cluster) -> None:
    for llumlet in it.llumlets:
        llumlet.on[EngineCall] = lambda call: CallDone(getattr(call, "call_id", 0))
    answers = await it.router.call("sleep", [b"arguments"])
    assert {name: [bytes(part) for part in parts] for name, parts in answers.items()} == {
        "0": [b"arguments"],
        "1": [b"arguments"],
    }


async def test_a_call_to_all_instances_goes_on_without_one_that_is_removed_meanwhile(
    it: Cluster,
) -> None:
    asked: list[RpcMessage] = []
    it.llumlets[0].on[EngineCall] = asked.append
    it.llumlets[1].on[EngineCall] = lambda call: CallDone(getattr(call, "call_id", 0))
    everywhere = asyncio.create_task(it.router.call("reset_prefix_cache"))
    parking = asyncio.create_task(it.router.park())
    named = asyncio.create_task(it.router.call("sleep", instances=["0"]))
    async with asyncio.timeout(5):
        await until(lambda: len(asked) == 3)
        await it.router.remove_instance("0")
        assert list(await everywhere) == ["1"]
        await parking
        with pytest.raises(InstanceLost, match="instance 0 was removed"):
            await named


async def test_a_guarantee_of_an_instance_that_is_removed_meanwhile_is_of_no_instance(
    it: Cluster,
) -> None:
    asked: list[RpcMessage] = []
    it.llumlets[0].on[SetGuarantee] = asked.append
    order = asyncio.create_task(it.router.set_guarantee("0", 1 << 20))
    await until(lambda: len(asked) == 1)
    await it.router.remove_instance("0")
    with pytest.raises(OrderFailed, match="instance 0 was removed") as refused:
        await order
    assert refused.value.status == 404


async def test_an_instance_whose_connection_is_lost_fails_a_call_to_all(it: Cluster) -> None:
    asked: list[RpcMessage] = []
    it.llumlets[0].on[EngineCall] = asked.append
    it.llumlets[1].on[EngineCall] = lambda call: CallDone(getattr(call, "call_id", 0))
    everywhere = asyncio.create_task(it.router.park())
    await until(lambda: len(asked) == 1)
    await it.llumlets[0].close()
    with pytest.raises(InstanceLost, match="instance 0 is lost"):
        async with asyncio.timeout(15):
            await everywhere


async def test_a_call_that_fails_or_is_not_answered_is_an_error_that_names_the_instance(
    it: Cluster,
) -> None:
    it.llumlets[0].on[EngineCall] = lambda call: CallDone(getattr(call, "call_id", 0), "no such")
    with pytest.raises(CallFailed, match="sleep failed on instance 0: no such"):
        await it.router.call("sleep", instances=["0"])
    with pytest.raises(CallTimeout, match=r"instance 1 did not answer sleep within 0\.05 s"):
        await it.router.call("sleep", instances=["1"], timeout_s=0.05)
    with pytest.raises(InstanceLost):
        await it.router.call("sleep", instances=["2"])


async def test_a_loop_that_stood_still_for_3_s_makes_no_instance_look_dead(it: Cluster) -> None:
    for llumlet in it.llumlets:
        llumlet.report(EngineLoad(100, 0, 0, 0, 0, 0))
    await until(lambda: all(it.router.fleet.is_healthy(name) for name in "01"))
    for _ in range(2):
        time.sleep(3.0)  # noqa: ASYNC251 - as work that holds the loop
        await asyncio.sleep(0.3)
        assert it.router.fleet.unhealthy_instances() == {}


# -- dispatch, outputs, aborts


async def test_a_request_goes_to_one_instance_and_its_tokens_come_back(it: Cluster) -> None:
    place = await it.router.submit(ClientRequest("r", "cmpl-x-0", 20, 0, [b"one", b"two"]))
    llumlet = it.llumlets[int(place)]
    assert await llumlet.hear() == Submit("r")
    assert llumlet.payload == [b"one", b"two"]
    llumlet.step(("r", 0, 0, [5, 6]))
    llumlet.step(("r", 0, 2, [7]), last=["r"])
    await it.front.until(lambda: it.front.tokens.get("r") == [5, 6, 7])
    assert it.front.metas == [f"step of {place}".encode()] * 2
    assert await it.router.requests() == []


async def test_requests_that_no_report_counts_yet_are_spread(it: Cluster) -> None:
    places = [
        await it.router.submit(ClientRequest(f"r{n}", f"r{n}", 20, 0, [b""])) for n in range(4)
    ]
    assert sorted(places) == ["0", "0", "1", "1"]


@pytest.mark.parametrize("by_prefixes", [True, False])
async def test_a_sessions_next_request_goes_where_its_last_one_was(by_prefixes: bool) -> None:
    config = ClusterConfig(scheduler=SchedulerConfig(prefix_dispatch=by_prefixes))
    async with cluster(config=config) as it:
        places = []
        with in_call(HttpCall()) as call:
            call.session = 7
            for turn in range(3):
                total = 10_000 + turn
                for llumlet in it.llumlets:
                    llumlet.report(EngineLoad(total, 0, 0, 0, 0, 0))
                rows = it.router.fleet.rows
                await until(lambda: {row.blocks_total for row in rows()} == {total})  # noqa: B023 - it ends before the next turn
                places.append(
                    await it.router.submit(ClientRequest(f"r{turn}", f"r{turn}", 2000, 0, [b""]))
                )
                await asyncio.sleep(0.15)  # its report counts a dispatch after a while
        assert (len(set(places)) == 1) == by_prefixes


async def test_the_marks_of_a_sessions_prompt_are_computed_once(it: Cluster) -> None:
    """For dispatch and for the memory of sessions: of a long prompt they are most of the work."""
    asked: list[str] = []

    def marks() -> list[int]:
        asked.append("")
        return [1, 2]

    with in_call(HttpCall()) as call:
        call.session = 7
        await it.router.submit(ClientRequest("r", "r", 300, 0, [b""], marks=marks))
    assert len(asked) == 1


async def test_a_stream_goes_on_across_two_moves(it: Cluster) -> None:
    a, b = await it.submitted()
    b.step(("r", 1, 2, [12, 13]))
    await it.front.until(lambda: len(it.front.metas) == 1)
    assert it.front.tokens == {}
    a.step(("r", 0, 0, [10, 11]))
    await it.front.until(lambda: it.front.tokens.get("r") == [10, 11, 12, 13])
    a.step(("r", 2, 4, [14]), last=["r"])
    await it.front.until(lambda: it.front.tokens["r"][4:] == [14])
    here, there = int(a.instance), int(b.instance)
    assert it.front.places["r"] == [here, here, there, there, here]


async def test_of_a_batch_only_what_is_out_of_turn_waits(it: Cluster) -> None:
    a, b = await it.submitted("r")
    await it.router.submit(ClientRequest("s", "s", 20, 0, [b""]))
    b.step(("r", 1, 1, [11]), ("s", 0, 0, [20]))
    await it.front.until(lambda: it.front.tokens.get("s") == [20])
    a.step(("r", 0, 0, [10]))
    await it.front.until(lambda: it.front.tokens.get("r") == [10, 11])


async def test_an_abort_goes_to_the_instance_that_runs_the_request_now(it: Cluster) -> None:
    a, b = await it.submitted()
    b.step(("r", 1, 0, [10]))
    await it.front.until(lambda: it.front.tokens.get("r") == [10])
    await it.router.abort(["r", "unknown"])
    assert await b.hear() == AbortRequests(["r"])
    assert a.heard.empty()


async def test_an_abort_during_a_migration_goes_to_both_sides(it: Cluster) -> None:
    a, b = await it.submitted()
    moving = asyncio.create_task(it.router.migrate("r", b.instance))
    migrate = await a.hear_one(Migrate)
    await it.router.abort(["r"])
    assert await a.hear() == AbortRequests(["r"])
    assert await b.hear() == AbortRequests(["r"])
    told = report("r", a.instance, b.instance, "aborted_by_client")
    a.send(Migrated(migrate.call_id, told))
    assert await moving == told


async def test_giving_up_ends_every_request_with_an_error_and_frees_it(it: Cluster) -> None:
    a = await it.submit()
    it.router.give_up("the server stops")
    assert it.front.failed == {"r": "the server stops"}
    assert await a.hear() == AbortRequests(["r"])
    assert it.router.live() == []


async def test_who_still_runs_an_aborted_request_is_told_once(it: Cluster) -> None:
    _, b = await it.submitted()
    await it.router.abort(["r"])
    b.step(("r", 1, 0, [10]))
    b.step(("r", 1, 1, [11]))
    assert await b.hear() == Discard("r", 1)
    await it.front.until(lambda: len(it.front.metas) == 2)
    assert b.heard.empty()
    assert it.front.tokens == {}


async def test_outputs_that_were_aborted_before_they_came_out_are_dropped_in_silence(
    it: Cluster,
) -> None:
    a = await it.submit()
    a.step(("r", -1, 0, [10]))
    a.step(("r", 0, 0, [11]))
    await it.front.until(lambda: it.front.tokens.get("r") == [11])
    assert a.heard.empty()


async def test_an_instance_that_does_not_list_its_requests_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvmig.frontend.router.LIST_TIMEOUT_S", 0.05)
    async with cluster() as it:
        a = await it.submit()
        del a.on[ListRequests]
        (row,) = await it.router.requests()
        assert (row.state, row.instance) == ("submitted", a.instance)


# -- migrations


async def test_a_migration_is_asked_of_the_source_and_its_report_comes_back(it: Cluster) -> None:
    a, b = await it.submitted("cmpl-x-0-12345678", "cmpl-x-0")
    a.moves()
    told = await it.router.migrate("x", b.instance)
    asked = await a.hear_one(Migrate)
    assert (asked.request_id, asked.destination, asked.endpoint) == (
        "cmpl-x-0-12345678", b.instance, b.endpoint,
    )  # fmt: skip
    assert told == report("cmpl-x-0-12345678", a.instance, b.instance)
    assert list(it.router.reports) == [told]


async def test_an_aborted_migration_is_a_report_not_an_error(it: Cluster) -> None:
    a = await it.submit()
    a.moves("no_blocks")
    assert (await it.router.migrate("r", it.others(a)[0].instance)).reason == "no_blocks"


async def test_a_migration_that_cannot_begin_is_an_error_and_touches_nothing(it: Cluster) -> None:
    a = await it.submit("r", "cmpl-x-0")
    b = it.others(a)[0].instance
    for wrong, destination, error in (
        ("nobody", b, UnknownRequest),
        ("r", "9", UnknownInstance),
        ("r", a.instance, SameInstance),
    ):
        with pytest.raises(error):
            await it.router.migrate(wrong, destination)
    a.moves("already_migrating")
    with pytest.raises(AlreadyMigrating):
        await it.router.migrate("r", b)
    await a.hear_one(ListRequests)  # another front end's, perhaps
    await a.hear_one(Migrate)
    a.step(("r", 0, 0, [10]), last=["r"])
    await it.front.until(lambda: "r" in it.front.tokens)
    for name in ("r", "x", "cmpl-x-0"):
        with pytest.raises(RequestFinished):
            await it.router.migrate(name, b)
    assert a.heard.empty()
    assert not it.router.reports


async def test_a_request_is_moved_once_at_a_time(it: Cluster) -> None:
    a = await it.submit()
    b = it.others(a)[0].instance
    moving = asyncio.create_task(it.router.migrate("r", b))
    await a.hear()
    with pytest.raises(AlreadyMigrating, match=f"is being moved to {b}"):
        await it.router.migrate("r", b)
    moving.cancel()


async def test_the_id_of_a_call_with_several_sequences_is_ambiguous(it: Cluster) -> None:
    a = await it.submit("0_cmpl-x-0-11111111", "cmpl-x-0")
    await it.submit("1_cmpl-x-0-11111111", "cmpl-x-0")
    with pytest.raises(AmbiguousRequest, match="0_cmpl-x-0-11111111, 1_cmpl-x-0-11111111"):
        await it.router.migrate("x", "0")
    a.moves()
    await it.router.migrate("0_cmpl-x-0-11111111", it.others(a)[0].instance)


async def test_the_http_calls_own_id_names_its_requests(it: Cluster) -> None:
    with in_call(HttpCall("what the client sent")):
        await it.submit("r", "resp_123")
    assert [row.call_id for row in await it.router.requests()] == ["what the client sent"]


async def test_with_migration_off_none_begins() -> None:
    async with cluster(ClusterConfig(scheduler=SchedulerConfig(migration=False))) as it:
        a = await it.submit()
        with pytest.raises(MigrationDisabled, match="--no-migration"):
            await it.router.migrate("r", it.others(a)[0].instance)


async def test_requests_are_listed_with_what_their_owner_tells(it: Cluster) -> None:
    a, b = await it.submitted("r", "cmpl-x-0")

    def told(blocks: int, *names: str) -> object:
        return lambda asked: ListedRequests(
            asked.call_id,
            [RequestState(name, "running", 30, 10, blocks, 0) for name in names],
        )

    a.on[ListRequests] = told(2, "r")  # type: ignore[assignment]
    b.on[ListRequests] = told(9, "r", "somebody else's")  # type: ignore[assignment]
    (row,) = await it.router.requests()
    assert (row.id, row.call_id, row.instance, row.state) == ("r", "x", a.instance, "running")
    assert (row.tokens, row.output_tokens, row.blocks) == (30, 10, 2)


# -- who runs it?


async def resolve(it: Cluster, a: FakeLlumlet, epoch: int = 1) -> RpcMessage:
    a.send(Resolve("m", "r", epoch, it.others(a)[0].instance))
    return await a.hear()


@pytest.mark.parametrize("committed", [True, False])
async def test_the_destinations_word_decides_and_stays(it: Cluster, committed: bool) -> None:
    a, b = await it.submitted()
    b.on[Fence] = lambda fence: Fenced(getattr(fence, "call_id", 0), committed)
    assert await resolve(it, a) == Resolved("m", moved=committed)
    b.on[Fence] = lambda fence: Fenced(getattr(fence, "call_id", 0), not committed)
    assert await resolve(it, a) == Resolved("m", moved=committed)
    b.step(("r", 1, 0, [10]))
    await it.front.until(lambda: bool(it.front.metas))
    assert it.front.tokens == ({"r": [10]} if committed else {})


async def test_an_unreachable_destination_is_fenced_and_told_when_it_is_back(it: Cluster) -> None:
    a, b = await it.submitted()
    assert await resolve(it, a) == Resolved("m", moved=False)
    await b.hear_one(Fence)
    assert await b.hear() == Discard("r", 1)
    b.step(("r", 1, 0, [10]))
    assert await b.hear() == Discard("r", 1)
    a.step(("r", 0, 0, [20]))
    await it.front.until(lambda: it.front.tokens.get("r") == [20])


async def test_tokens_seen_from_the_destination_decide_without_asking(it: Cluster) -> None:
    a, b = await it.submitted()
    b.step(("r", 1, 0, [10]))
    await it.front.until(lambda: bool(it.front.tokens))
    assert await resolve(it, a) == Resolved("m", moved=True)
    assert b.heard.empty()


async def test_tokens_that_come_while_the_destination_is_asked_decide() -> None:
    async with cluster(fence_timeout_s=5.0) as it:
        a, b = await it.submitted()
        a.send(Resolve("m", "r", 1, b.instance))
        fence = await b.hear_one(Fence)
        b.step(("r", 1, 0, [10]))
        b.send(Fenced(fence.call_id, committed=False))
        assert await a.hear() == Resolved("m", moved=True)


async def test_of_a_request_that_ended_neither_side_keeps_anything(it: Cluster) -> None:
    a, b = await it.submitted()
    await it.router.abort(["r"])
    await a.hear()
    assert await resolve(it, a) == Resolved("m", moved=True)
    assert await b.hear() == Discard("r", 1)
