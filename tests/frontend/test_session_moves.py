"""Sessions that the admin API moves, over llumlets without engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import pytest

from kvmig.asgi.call import HttpCall
from kvmig.asgi.errors import LauncherGone, UnknownSession
from kvmig.controlplane.front_messages import (
    FindSession,
    FoundSessionMoved,
    FrontAsked,
    FrontReply,
    KnownSession,
    MoveFoundSession,
    SessionsFound,
)
from kvmig.controlplane.messages import Migrated, MoveSession
from kvmig.controlplane.session_hints import SessionHints
from kvmig.core.background import cancel_tasks
from kvmig.core.clock import monotonic
from kvmig.core.config import ClusterConfig, SchedulerConfig
from kvmig.core.prefix_marks import MARK_TOKENS
from kvmig.engines.base import EngineLoad
from kvmig.engines.client_request import ClientRequest
from kvmig.engines.held_marks import MARK_METHOD, PrefixNews, pack_marks
from kvmig.frontend import instances, session_moves
from kvmig.frontend.session_memory import SessionMemory
from kvmig.rpc.messages import RpcMessage
from tests.support.admin_site import admin_client, name_session, problem
from tests.support.fake_llumlet import Cluster, FakeLlumlet, cluster, report
from tests.support.http_calls import in_call
from tests.support.waiting import PATIENCE_S, until


@contextmanager
def of_session(session: str, account: str = "") -> Iterator[None]:
    """Inside the block requests are those of a call that names a session."""
    call = HttpCall("c")
    call.session, call.session_name = name_session(session, account), name_session(session, "")
    call.payer = account
    with in_call(call):
        yield


async def said(it: Cluster, session: str, request_id: str, account: str = "") -> FakeLlumlet:
    """A session's request that has ended; the instance where it ran."""
    with of_session(session, account):
        where = it.llumlets[
            int(await it.router.submit(ClientRequest(request_id, "x", 600, 0, [b"payload"])))
        ]
    await where.hear()
    where.step((request_id, 0, 0, [7, 8]), last=[request_id])
    await until(lambda: request_id not in it.router.live())
    await until(lambda: not any(one.pending_requests for one in it.router.fleet.views()))
    return where


def key_of(session: str) -> int:
    key = name_session(session, "")
    assert key is not None
    return key


async def move(client: httpx.AsyncClient, session: str = "s", **body: object) -> httpx.Response:
    return await client.post("/sessions/move", json={"session": session, **body})


def end_move(where: FakeLlumlet, order: MoveSession, reason: str = "") -> None:
    """The instance reports that the move is committed, or why not."""
    done = report(order.request_id, where.instance, order.destination, reason)
    where.send(Migrated(order.call_id, done))


Answer = Callable[[RpcMessage], RpcMessage | None]


def answering(reason: str = "") -> tuple[list[MoveSession], Answer]:
    """What a llumlet was asked, and how it answers."""
    asked: list[MoveSession] = []

    def answer(message: RpcMessage) -> RpcMessage:
        assert isinstance(message, MoveSession)
        asked.append(message)
        done = report(message.request_id, "?", message.destination, reason)
        return Migrated(message.call_id, done)

    return asked, answer


async def test_a_session_goes_with_what_its_last_request_was_and_gave(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    where = await said(it, "s", "r")
    there = it.others(where)[0]
    asked, where.on[MoveSession] = answering()
    done = await move(client, destination=there.instance)
    assert (done.status_code, done.json()["state"]) == (200, "committed"), done.text
    (order,) = asked
    assert (order.output_token_ids, order.endpoint) == ((7, 8), there.endpoint)
    assert where.payload == [b"payload"]
    back, there.on[MoveSession] = answering()
    assert (await move(client)).status_code == 200
    assert [one.destination for one in back] == [where.instance]


async def test_a_session_whose_move_is_given_up_stays_where_it_was(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    where = await said(it, "s", "r")
    for _ in range(2):
        asked, where.on[MoveSession] = answering("no_blocks")
        done = await move(client)
        assert (done.status_code, done.json()["reason"]) == (200, "no_blocks")
        assert len(asked) == 1


async def test_orders_that_can_not_begin_are_named(it: Cluster, client: httpx.AsyncClient) -> None:

    async def refused(**body: object) -> tuple[int, str]:
        status, error = problem(await client.post("/sessions/move", json=body))
        return status, error["message"]

    assert (await refused(session="s"))[0] == 404
    assert "session is missing" in (await refused())[1]
    assert "session is 'xxx" in (await refused(session="x" * 257))[1]
    where = await said(it, "s", "r")
    assert await refused(session="s", destination=where.instance) == (
        409, f"the session is on instance {where.instance} already",
    )  # fmt: skip
    assert (await refused(session="s", destination="9"))[0] == 404
    with of_session("s"):
        await it.submit("r2")
    status, words = await refused(session="s")
    assert (status, "a request of the session runs" in words) == (409, True)


async def test_two_accounts_with_one_id_are_two_sessions(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    await said(it, "s", "r", "alice")
    bobs = await said(it, "s", "r2", "bob")
    status, error = problem(await move(client))
    assert (status, error["param"]) == (409, "account")
    asked, bobs.on[MoveSession] = answering()
    done = await move(client, account="bob")
    assert (done.status_code, len(asked), bobs.payload) == (200, 1, [b"payload"])


async def test_one_users_flood_of_sessions_leaves_another_ones_hint_and_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(instances, "SessionHints", lambda: SessionHints(2))
    async with cluster() as it:
        monkeypatch.setattr(it.router.sessions, "memory", SessionMemory(monotonic, 2))
        where = await said(it, "s", "r", "ours")
        for number in range(4):
            await said(it, f"t{number}", f"t{number}", "theirs")
        assert {one.tenant for one in it.router.sessions.memory.find_all()} == {"ours", "theirs"}
        assert await said(it, "s", "q", "ours") is where


async def test_a_session_that_is_moved_is_not_moved_twice_at_once(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    where = await said(it, "s", "r")
    first = asyncio.create_task(move(client))
    order = await where.hear_one(MoveSession)
    status, error = problem(await move(client))
    assert (status, error["message"]) == (409, "the session is being moved already")
    end_move(where, order)
    assert (await first).json()["state"] == "committed"


async def test_a_move_whose_caller_has_left_is_known_when_it_has_ended(it: Cluster) -> None:
    where = await said(it, "s", "r")
    there = it.others(where)[0]
    moving = asyncio.create_task(it.router.sessions.move(key_of("s"), None, there.instance))
    order = await where.hear_one(MoveSession)
    await cancel_tasks(moving)
    end_move(where, order)
    await until(lambda: it.router.sessions.memory.find(key_of("s")).instance == there.instance)


async def timed_out(
    it: Cluster, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> tuple[FakeLlumlet, MoveSession]:
    """A session's instance, and the order of a move that it hasn't answered in time."""
    monkeypatch.setattr(session_moves, "TIMEOUT_S", 0.05)
    where = await said(it, "s", "r")
    status, _ = problem(await move(client))
    assert status == 504
    order = await where.hear_one(MoveSession)
    return where, order


async def place_of(client: httpx.AsyncClient) -> tuple[int, str]:
    """The answer to one more move to an instance that there isn't: it names the session's state."""
    status, error = problem(await move(client, destination="9"))
    return status, error["message"]


@pytest.mark.parametrize("reason", ["", "no_blocks"])
async def test_the_report_of_a_move_that_took_too_long_says_where_the_session_is(
    it: Cluster, client: httpx.AsyncClient, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, order = await timed_out(it, client, monkeypatch)
    status, words = await place_of(client)
    assert (status, words) == (409, "the session is being moved already")
    there = it.others(where)[0]
    end_move(where, order, reason)
    place = where if reason else there
    await until(lambda: it.router.reported == 1)
    assert it.router.sessions.memory.find(key_of("s")).instance == place.instance
    assert (await place_of(client))[0] == 404  # of the destination
    _, place.on[MoveSession] = answering()
    done_again = await move(client)
    assert done_again.json()["state"] == "committed"


async def test_a_session_whose_moves_report_is_lost_is_nowhere(
    it: Cluster, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, _ = await timed_out(it, client, monkeypatch)
    await where.close()
    await until(lambda: it.state(where) == "lost")
    status, words = await place_of(client)
    assert (status, "no request of such a session" in words) == (404, True)


async def test_a_caller_whose_sessions_instance_is_lost_meanwhile_gets_an_error(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    where = await said(it, "s", "r")
    moving = asyncio.create_task(move(client))
    await where.hear()
    await where.close()
    assert problem(await moving)[0] == 503
    assert (await place_of(client))[0] == 404


async def test_nobody_follows_a_session_whose_place_is_unknown(
    it: Cluster, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, _ = await timed_out(it, client, monkeypatch)
    with of_session("s"):
        place = await it.router.submit(ClientRequest("r2", "cmpl-y-0", 600, 0, [b"payload"]))
    assert place == it.others(where)[0].instance


async def test_a_turn_that_ended_during_a_move_is_where_its_beginning_went(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    where = await said(it, "s", "r")
    there = it.others(where)[0]
    moving = asyncio.create_task(move(client, destination=there.instance))
    order = await where.hear_one(MoveSession)
    with of_session("s"):
        place = await it.router.submit(ClientRequest("r2", "cmpl-y-0", 600, 0, [b"longer"]))
    assert place == where.instance, "the hint leads there"
    where.step(("r2", 0, 0, [7]), last=["r2"])
    await until(lambda: it.router.live() == [])
    end_move(where, order)
    await moving
    session = it.router.sessions.memory.find(key_of("s"))
    assert (session.instance, session.payload) == (there.instance, [b"longer"])


class OtherFront:
    """The router of another front end, which knows what it is given."""

    def __init__(self, *sessions: KnownSession, gone: bool = False) -> None:
        self.known = SessionsFound(sessions)
        self.gone = gone
        self.moved = FoundSessionMoved(report("session-1"))
        self.asked: list[tuple[FrontAsked, str]] = []

    async def ask_fronts(
        self, asked: FrontAsked, front: str = "", timeout_s: float = 2.0
    ) -> dict[str, FrontReply]:
        self.asked.append((asked, front))
        if self.gone:
            raise LauncherGone("the launcher is not connected")
        return {"b": self.known if isinstance(asked, FindSession) else self.moved}


async def test_a_session_whose_last_call_another_front_end_served_is_moved_by_that_one(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    where = await said(it, "s", "r")
    other = it.router.sessions.others = OtherFront(KnownSession(key_of("s"), monotonic() + 9))
    done = await move(client, destination="1")
    assert (done.status_code, done.json()["state"]) == (200, "committed")
    assert other.asked == [
        (FindSession(key_of("s")), ""), (MoveFoundSession(key_of("s"), "1"), "b"),
    ]  # fmt: skip
    assert where.heard.empty()
    other.moved = FoundSessionMoved(None, "SameInstance", "it is there already")
    status, error = problem(await move(client))
    assert (status, error["message"]) == (409, "it is there already")
    other.moved = FoundSessionMoved(None, "PeerError", "odd")
    assert problem(await move(client))[0] == 500


async def test_a_session_whose_last_call_came_here_is_moved_here(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    where = await said(it, "s", "r")
    it.router.sessions.others = OtherFront(KnownSession(key_of("s"), 0.0))
    asked, where.on[MoveSession] = answering()
    done = await move(client)
    assert (done.status_code, len(asked)) == (200, 1)


async def test_without_the_launcher_a_front_end_moves_what_it_knows(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    where = await said(it, "s", "r")
    it.router.sessions.others = OtherFront(gone=True)
    asked, where.on[MoveSession] = answering()
    assert (await move(client)).status_code == 200
    assert len(asked) == 1
    assert problem(await move(client, "t"))[0] == 503


async def test_another_front_end_is_told_what_is_known_here(it: Cluster) -> None:
    where = await said(it, "s", "r")
    with of_session("t"):
        await it.submit("r2")
    sessions = it.router.sessions
    everything = await sessions.reply(FindSession())
    assert isinstance(everything, SessionsFound)
    assert [one.owner for one in everything.sessions] == [key_of("s")]
    assert everything.running == (key_of("t"),)
    assert await sessions.reply(FindSession(key_of("u"))) == SessionsFound()
    asked, where.on[MoveSession] = answering()
    moved = await sessions.reply(MoveFoundSession(key_of("s")))
    assert isinstance(moved, FoundSessionMoved)
    assert moved.report is not None
    assert (moved.report.state, len(asked)) == ("committed", 1)
    refused = await sessions.reply(MoveFoundSession(key_of("u")))
    assert isinstance(refused, FoundSessionMoved)
    assert (refused.report, refused.error) == (None, "UnknownSession")


async def test_a_session_whose_destination_is_lost_after_its_commit_is_remembered_nowhere(
    it: Cluster,
) -> None:
    where = await said(it, "s", "r")
    there = it.others(where)[0]
    moving = asyncio.create_task(it.router.sessions.move(key_of("s"), None, there.instance))
    order = await where.hear_one(MoveSession)
    await it.router.remove_instance(there.instance, crashed=True)
    end_move(where, order)
    assert (await moving).state == "committed"
    with pytest.raises(UnknownSession):
        it.router.sessions.memory.find(key_of("s"))


async def test_a_request_whose_client_leaves_before_its_first_token_takes_no_session_along(
    it: Cluster,
) -> None:
    where = await said(it, "s", "r")
    elsewhere = ""
    for number in range(9):
        with of_session("s"):
            elsewhere = (await it.submit(f"q{number}")).instance
        await it.router.abort([f"q{number}"])
        if elsewhere != where.instance:
            break
    assert elsewhere != where.instance, "no request went elsewhere"
    assert it.router.sessions.memory.find(key_of("s")).instance == where.instance


async def test_an_instance_that_is_removed_takes_its_sessions_along(
    it: Cluster, client: httpx.AsyncClient
) -> None:
    where = await said(it, "s", "r")
    await it.router.remove_instance(where.instance)
    status, _ = problem(await move(client))
    assert status == 404


async def test_without_migration_no_session_moves() -> None:
    config = ClusterConfig(scheduler=SchedulerConfig(migration=False))
    async with cluster(config) as it, admin_client(it) as client:
        await said(it, "s", "r")
        status, error = problem(await move(client))
        assert (status, "--no-migration" in error["message"]) == (409, True)


@pytest.mark.parametrize("field", ["session", "account", "destination", "inexact"])
async def test_a_field_of_another_type_is_named(client: httpx.AsyncClient, field: str) -> None:
    body = {"session": "s", field: 7}
    status, error = problem(await client.post("/sessions/move", json=body))
    assert (status, field in error["message"]) == (400, True)


# -- ahead of a turn

MARKS = list(range(1, 21))
FAST, SLOW = 12_000.0, 600.0
"""KV blocks a second that migrations have sent; prompts are computed at 2,083."""


async def crowded(it: Cluster, bandwidth: float) -> tuple[FakeLlumlet, FakeLlumlet]:
    """The instance of session s, where prompts wait, and one where nothing runs."""
    tokens = MARK_TOKENS * len(MARKS)
    with of_session("s"):
        place = await it.router.submit(
            ClientRequest("r", "x", tokens, 0, [b"payload"], marks=lambda: MARKS)
        )
    where = it.llumlets[int(place)]
    await where.hear()
    where.step(("r", 0, 0, [7]), last=["r"])
    await until(lambda: "r" not in it.router.live())
    there = it.others(where)[0]
    where.bandwidth = bandwidth
    where.prefixes = PrefixNews(1, True, pack_marks(MARKS), method=MARK_METHOD)
    there.prefixes = PrefixNews(1, True, b"", method=MARK_METHOD)
    where.report(EngineLoad(10_000, 2_000, 10, 0, 0, 0, prefill_blocks=150))
    there.report(EngineLoad(10_001, 0, 0, 0, 0, 0))
    await until(lambda: sum(row.blocks_total for row in it.router.fleet.rows()) == 20_001)
    await until(lambda: not any(one.pending_requests for one in it.router.fleet.views()))
    it.router.fleet.note_prompt(10_000, 0.3)
    return where, there


async def next_turn(it: Cluster) -> str:
    with of_session("s"):
        tokens = MARK_TOKENS * len(MARKS) + 40
        return await it.router.submit(
            ClientRequest("r2", "x", tokens, 0, [b"more"], marks=lambda: MARKS)
        )


async def test_a_turn_leaves_a_crowded_instance_after_its_sessions_blocks(it: Cluster) -> None:
    where, there = await crowded(it, FAST)
    asked, where.on[MoveSession] = answering()
    assert await next_turn(it) == there.instance
    assert [(one.destination, one.endpoint) for one in asked] == [(there.instance, there.endpoint)]


async def test_over_a_slow_link_a_turn_goes_where_it_would_go_and_nothing_moves(
    it: Cluster,
) -> None:
    where, _ = await crowded(it, SLOW)
    asked, where.on[MoveSession] = answering()
    assert (await next_turn(it), asked) == (where.instance, [])


@pytest.mark.parametrize(
    "off",
    [SchedulerConfig(migration=False), SchedulerConfig(prefix_dispatch=False)],
    ids=["migration", "dispatch by prefixes"],
)
async def test_what_is_turned_off_moves_no_session_ahead_of_a_turn(off: SchedulerConfig) -> None:
    async with cluster(ClusterConfig(scheduler=off)) as it:
        where, _ = await crowded(it, FAST)
        asked, where.on[MoveSession] = answering()
        await next_turn(it)
        assert asked == []


async def test_no_request_that_moves_waits_for_a_sessions_blocks(it: Cluster) -> None:
    where, _ = await crowded(it, FAST)
    where.migrations_out = 1
    await until(lambda: any(one.migrations_out for one in it.router.fleet.views()))
    asked, where.on[MoveSession] = answering()
    assert (await next_turn(it), asked) == (where.instance, [])


async def test_a_turn_whose_sessions_move_is_given_up_runs_where_it_would_have_run(
    it: Cluster,
) -> None:
    where, _ = await crowded(it, FAST)
    asked, where.on[MoveSession] = answering("no_blocks")
    assert await next_turn(it) == where.instance
    assert len(asked) == 1


async def test_a_turn_waits_no_longer_for_a_move_than_its_prefill_takes(it: Cluster) -> None:
    where, there = await crowded(it, FAST)
    assert await next_turn(it) == where.instance
    order = await where.hear_one(MoveSession)
    end_move(where, order)
    (known,) = it.router.sessions.memory.find_all()
    await until(lambda: known.instance == there.instance)


async def test_a_turn_stays_where_the_other_instance_has_no_room_for_its_session(
    it: Cluster,
) -> None:
    where, there = await crowded(it, FAST)
    there.report(EngineLoad(10_001, 9_990, 1, 0, 0, 0))
    await until(lambda: any(one.load.used_blocks == 9_990 for one in it.router.fleet.views()))
    asked, where.on[MoveSession] = answering()
    assert (await next_turn(it), asked) == (where.instance, [])


async def test_a_turn_whose_instance_is_lost_during_the_copy_runs_at_the_other_one(
    it: Cluster,
) -> None:
    where, there = await crowded(it, FAST)
    it.router.fleet.note_prompt(10_000, 100.0)  # it waits for long, then
    waiting = asyncio.create_task(next_turn(it))
    assert isinstance(await where.hear(), MoveSession)
    await where.close()
    async with asyncio.timeout(PATIENCE_S):
        assert await waiting == there.instance
    assert it.router.sessions.memory.find_all() == []
