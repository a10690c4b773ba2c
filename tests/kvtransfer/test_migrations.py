"""Whole migrations over real sockets and transports, and everything that can go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial

import pytest

from kvmig.core.config import Transport
from kvmig.core.errors import MigrationRefused, RequestGone
from kvmig.engines import base
from kvmig.engines.base import CopySums
from kvmig.kvtransfer import migrations
from kvmig.kvtransfer.messages import (
    Abort,
    Chunk,
    ChunkDone,
    Commit,
    Committed,
    FirstToken,
    Refused,
    Reserve,
    Reserved,
)
from kvmig.kvtransfer.source_machine import QUESTIONS
from kvmig.rpc.messages import RpcMessage
from tests.support.fake_cluster import Cluster, cluster, dropping, failing
from tests.support.fake_engine import BLOCK_BYTES, FakeEngine
from tests.support.waiting import PATIENCE_S, until


@pytest.fixture
async def them() -> AsyncIterator[Cluster]:
    """Two nodes, of which a has request r."""
    async with cluster() as made:
        yield made


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_request_moves_with_every_byte_of_its_cache(transport: Transport) -> None:
    async with cluster(transport=transport) as them:
        report = await them.move()
        assert them.owners() == "b"
        assert (report.state, report.reason, report.transport) == ("committed", "", transport)
        assert report.stages[0].blocks == 11
        assert report.stages[0].bytes == 11 * BLOCK_BYTES
        assert report.downtime_ms is not None
        assert report.downtime_ms.first_token is not None
        epoch, outputs, gateway = them.b.committing["r"]
        request = them.b.engine.running["r"]
        assert (epoch, outputs, gateway) == (1, len(request.tokens) - 41, "g")
        assert them.a.left == [("r", them.b.server.endpoint)]


async def test_the_report_says_when_each_chunk_of_a_stage_was_where(them: Cluster) -> None:
    (stage,) = (await them.move()).stages
    chunks = stage.chunks
    assert sum(chunk.bytes for chunk in chunks) == stage.bytes
    assert len(chunks) > 1
    for chunk in chunks:
        assert 0.0 <= chunk.turn <= chunk.gather <= chunk.push <= chunk.sent <= stage.ms
        assert chunk.answered is not None
        assert chunk.answered >= chunk.scatter >= 0.0
    assert [chunk.turn for chunk in chunks] == sorted(chunk.turn for chunk in chunks)


class MeasuredEngine(FakeEngine):
    """An engine that measures its device."""

    def __init__(self, gather_ms: float = 0.0, scatter_ms: float = 0.0) -> None:
        super().__init__()
        self.gather_ms, self.scatter_ms = gather_ms, scatter_ms

    def copy_out(self, block_ids: Sequence[int], out: memoryview) -> list[int]:
        return CopySums(super().copy_out(block_ids, out), self.gather_ms)

    def copy_in(self, block_ids: Sequence[int], fused: memoryview) -> list[int]:
        return CopySums(super().copy_in(block_ids, fused), self.scatter_ms)


async def test_the_report_has_each_devices_time_of_a_copy() -> None:
    a, b = MeasuredEngine(gather_ms=0.25), MeasuredEngine(scatter_ms=0.5)
    async with cluster(source=a, destination=b) as them:
        (stage,) = (await them.move()).stages
        chunks = stage.chunks
        assert {(one.gather_device, one.scatter_device) for one in chunks} == {(0.25, 0.5)}
        assert stage.parts.gather_device == 0.25 * len(chunks)
        assert stage.parts.scatter_device == 0.5 * len(chunks)


async def test_the_report_of_engines_without_a_device_has_no_device_times(them: Cluster) -> None:
    (stage,) = (await them.move()).stages
    assert {(one.gather_device, one.scatter_device) for one in stage.chunks} == {(None, None)}
    assert (stage.parts.gather_device, stage.parts.scatter_device) == (None, None)


async def test_the_times_of_a_stages_first_chunks_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvmig.kvtransfer.copying.MOST_CHUNKS", 2)
    async with cluster() as them:
        (stage,) = (await them.move()).stages
        assert len(stage.chunks) == 2


async def test_what_the_destination_has_cached_does_not_travel() -> None:
    async with cluster(destination=FakeEngine(hits=8)) as them:
        report = await them.move()
        assert (report.state, report.hit_blocks, report.stages[0].blocks) == ("committed", 8, 3)


async def test_a_request_moves_there_and_back_with_growing_epochs(them: Cluster) -> None:
    await them.move()
    back = await them.b.migrations.migrate("r", "a", them.a.server.endpoint, epoch=1)
    assert (back.state, them.owners()) == ("committed", "a")
    assert them.a.committing["r"][0] == 2


async def test_several_requests_move_at_once_in_both_directions() -> None:
    async with cluster(chunks=1) as them:
        names = [f"{way}{index}" for way in "ab" for index in range(4)]
        for name in names:
            (them.a if name[0] == "a" else them.b).engine.start(name)
        reports = await asyncio.gather(
            *(them.move(name) for name in names if name[0] == "a"),
            *(
                them.b.migrations.migrate(name, "a", them.a.server.endpoint)
                for name in names
                if name[0] == "b"
            ),
        )
        assert [report.state for report in reports] == ["committed"] * 8
        assert [them.owners(name) for name in names] == ["b"] * 4 + ["a"] * 4


async def test_copying_that_never_catches_up_ends_at_the_last_stage() -> None:
    async with cluster(source=FakeEngine(steps=9), stages=3) as them:
        report = await them.move()
        assert (report.state, len(report.stages)) == ("committed", 3)
        assert report.tail_blocks > 2


FAR_LONGER = 20 * PATIENCE_S * 1e3


def lose_first_token(them: Cluster, how: str) -> None:
    """a learns that no word of it will come."""
    if how == "aborted":
        them.a.migrations.cancel_request("r", "aborted_by_client")
    elif how == "peer lost":
        them.a.migrations.peer_lost(them.b.server.endpoint)


async def test_what_is_held_of_a_lost_peer_is_let_go_now_and_once_it_must_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(migrations, "END_S", 0.05)
    called: list[str] = []
    async with cluster() as them:
        for name, staging in them.a.stagings.items():
            monkeypatch.setattr(staging, "let_go", partial(called.append, name))
        names = list(them.a.stagings)
        them.a.migrations.peer_lost("tcp://nowhere")
        assert called == names
        await until(lambda: called == 2 * names)


@pytest.mark.parametrize("how", ["aborted", "peer lost", "not decoding"])
async def test_who_waits_for_no_first_token_gives_its_place_to_the_next(how: str) -> None:
    async with cluster(timeout_ms=FAR_LONGER, max_migrations=1) as them:
        them.b.engine.on_started = lambda request_id: None  # no token comes
        them.a.engine.decoding = how != "not decoding"
        moving = asyncio.create_task(them.move())
        await until(them.moved)
        lose_first_token(them, how)
        async with asyncio.timeout(PATIENCE_S):
            report = await moving
        assert report.state == "committed"
        assert report.downtime_ms is not None
        assert report.downtime_ms.first_token is None
        them.b.engine.on_started = lambda request_id: them.b.migrations.stepped(request_id, 1)
        them.a.engine.decoding = True
        them.a.engine.start("s")
        async with asyncio.timeout(PATIENCE_S):
            assert (await them.move("s")).state == "committed"


async def test_who_waits_for_a_first_token_keeps_nobody_from_going() -> None:
    async with cluster(timeout_ms=FAR_LONGER, max_migrations=1) as them:
        them.b.engine.on_started = lambda request_id: None  # no token comes
        moving = asyncio.create_task(them.move())
        await until(them.moved)
        them.b.engine.on_started = lambda request_id: them.b.migrations.stepped(request_id, 1)
        them.a.engine.start("s")
        async with asyncio.timeout(PATIENCE_S):
            assert (await them.move("s")).state == "committed"
        lose_first_token(them, "aborted")
        assert (await moving).state == "committed"


@pytest.mark.parametrize("how", ["aborted", "peer lost"])
async def test_who_learns_of_no_first_token_before_it_waits_does_not_wait(how: str) -> None:
    async with cluster(timeout_ms=FAR_LONGER) as them:
        them.b.engine.on_started = lambda request_id: None  # no token comes

        async def leave(method: str) -> None:
            if method == "release":
                lose_first_token(them, how)

        them.a.engine.before = leave
        async with asyncio.timeout(PATIENCE_S):
            report = await them.move()
        assert (report.state, them.owners()) == ("committed", "b")


async def test_without_live_stages_everything_goes_with_the_tail() -> None:
    async with cluster(stages=0) as them:
        report = await them.move()
        assert (report.state, report.stages) == ("committed", [])
        assert report.tail_blocks > 2
        assert report.output_tokens is not None


FAILURES = {
    "a": [
        ("export", 0), ("stage", 0), ("stage", 1), ("suspend", 0), ("gather", 0), ("gather", 2),
    ],
    "b": [
        ("reserve", 0), ("grow", 0), ("grow", 1), ("scatter", 0), ("scatter", 2), ("commit", 0),
    ],
}  # fmt: skip
"""Of each side's engine: a call, and how many of its kind went well before."""


@pytest.mark.parametrize(
    ("side", "method", "after"),
    [(side, *failure) for side, those in FAILURES.items() for failure in those],
)
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RequestGone("preempted"), "preempted"),
        (MigrationRefused("no_blocks"), "no_blocks"),
        (RuntimeError("a bug"), "error"),
    ],
)
async def test_a_call_that_fails_leaves_the_request_at_the_source(
    side: str, method: str, after: int, error: Exception, reason: str
) -> None:
    async with cluster(source=FakeEngine(at_once=False)) as them:
        at = them.a if side == "a" else them.b
        at.engine.before = failing(method, error, after)
        report = await them.move()
        assert (report.state, report.reason, them.owners()) == ("aborted", reason, "a")
        assert them.b.committing == {}


@pytest.mark.parametrize("side", ["a", "b"])
async def test_a_migration_that_runs_out_of_memory_is_told_at_once(side: str) -> None:
    async with cluster(source=FakeEngine(at_once=False)) as them:
        node = them.a if side == "a" else them.b
        node.engine.before = failing("gather" if side == "a" else "grow", MemoryError("none"))
        moving = asyncio.ensure_future(them.move())
        await until(lambda: bool(node.no_memory))
        them.skip_answer()
        await asyncio.wait([moving])
        assert isinstance(moving.exception(), MemoryError) == (side == "a")
        assert them.owners() == "a"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_tail_that_is_small_goes_with_the_commit(transport: Transport) -> None:
    async with cluster(transport=transport) as them:
        report = await them.move()
        assert (report.state, them.owners()) == ("committed", "b")
        assert report.tail_blocks > 0
        calls = them.a.engine.calls
        assert "gather" not in calls[calls.index("suspend") :]
        assert them.b.engine.calls.count("scatter") == calls.count("gather")


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_a_corrupt_block_that_comes_with_the_commit_leaves_the_request_at_the_source(
    transport: Transport,
) -> None:
    async with cluster(transport=transport) as them:

        async def corrupt(method: str) -> None:
            them.a.engine.corrupt = method == "suspend"

        them.a.engine.before = corrupt
        report = await them.move()
        assert (report.state, report.reason, them.owners()) == ("aborted", "corrupt", "a")
        assert them.b.committing == {}


async def test_only_the_copies_of_the_pause_are_urgent() -> None:
    async with cluster(source=FakeEngine(at_once=False)) as them:
        report = await them.move()
        for engine in (them.a.engine, them.b.engine):
            live = engine.urgent.index(True)
            assert live >= len(report.stages)
            assert all(engine.urgent[live:])


async def test_a_destination_prepares_before_the_pause_and_not_before_its_stages(
    them: Cluster,
) -> None:
    await them.move()
    calls = them.b.engine.calls
    assert calls.count("prepare") == 1
    assert calls.index("prepare") > max(i for i, one in enumerate(calls) if one == "scatter")


async def test_a_full_destination_refuses() -> None:
    async with cluster(destination=FakeEngine(num_blocks=4)) as them:
        report = await them.move()
        assert (report.reason, report.downtime_ms, them.owners()) == ("no_blocks", None, "a")


async def test_another_model_is_refused(them: Cluster) -> None:
    layout = them.b.engine.layout
    them.b.engine.layout = type(layout)(layout.regions, layout.num_blocks, 4, "another")
    assert (await them.move()).reason == "incompatible"


async def test_a_commit_without_its_front_end_is_refused(them: Cluster) -> None:
    them.b.refuse_commit = True
    report = await them.move()
    assert (report.reason, them.owners()) == ("incompatible", "a")
    assert report.downtime_ms is not None


async def test_the_request_itself_travels_beside_the_message(them: Cluster) -> None:
    assert (await them.move()).state == "committed"
    (opening, *_) = [one for one in them.b.heard if isinstance(one, Reserve)]
    assert opening.export is not None
    assert opening.export.payload == []


async def test_a_request_of_a_hundred_megabytes_moves(them: Cluster) -> None:
    them.a.engine.ballast = [bytes(100 << 20)]
    assert (await them.move()).state == "committed"


@pytest.mark.parametrize(
    ("most", "ballast", "sentence"),
    [
        ("MOST_BYTES", [bytes(5000)], "bytes with its images, allowed are 4096"),
        ("MOST_FRAMES", [b""] * 4096, "a request in 4097 pieces, allowed are 4096"),
    ],
)
async def test_a_request_too_large_to_move_is_refused_by_name_at_once(
    most: str, ballast: list[bytes], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, most, 4096)
    async with cluster() as them:
        them.a.engine.ballast = ballast
        report = await them.move()
        assert (report.reason, them.owners()) == ("unsupported", "a")
        assert sentence in report.detail
        assert not them.b.heard


async def test_a_destination_without_the_front_end_refuses_before_anything_is_copied(
    them: Cluster,
) -> None:
    them.b.fronts.remove("g")
    report = await them.move()
    assert (report.reason, them.owners()) == ("incompatible", "a")
    assert (report.stages, report.downtime_ms) == ([], None)
    assert "suspend" not in them.a.engine.calls
    assert "reserve" not in them.b.engine.calls


async def test_a_changed_block_is_noticed_and_the_request_stays(them: Cluster) -> None:
    them.a.engine.corrupt = True
    report = await them.move()
    assert (report.reason, them.owners()) == ("corrupt", "a")


@pytest.mark.parametrize("kind", [Reserve, Reserved, Commit, Committed, FirstToken])
@pytest.mark.parametrize("times", [1, 2, 3, 99])
async def test_lost_messages_leave_the_request_in_one_place(
    them: Cluster, kind: type[RpcMessage], times: int
) -> None:
    for node in (them.a, them.b):
        node.drop = them.in_vain(dropping(kind, times))
    moving = asyncio.create_task(them.move())
    if kind is FirstToken:
        await until(them.moved)
        them.skip_answer()
    report = await moving
    moved = {
        Reserve: False, Reserved: False, Commit: times < 3, Committed: True, FirstToken: True,
    }[kind]  # fmt: skip
    assert (report.state == "committed") == moved
    assert them.owners() == ("b" if moved else "a")
    assert bool(them.a.asked) == (times >= 3 and kind in (Commit, Committed))
    them.skip_lease()  # of what the source could not take back
    await until(lambda: not them.b.engine.reserved)


@pytest.mark.parametrize("kind", [Chunk, ChunkDone])
@pytest.mark.parametrize("times", [1, 99])
async def test_a_lost_chunk_is_noticed_and_a_lost_receipt_costs_a_slot_only(
    them: Cluster, kind: type[RpcMessage], times: int
) -> None:
    them.a.drop, them.b.drop = dropping(kind, times), dropping(kind, times)
    moving = asyncio.create_task(them.move())
    if times == 99:
        hears = them.b if kind is Chunk else them.a
        await until(lambda: sum(isinstance(one, kind) for one in hears.heard) == 2)
        await them.run_out(moving)  # those were all slots
    report = await moving
    stays = kind is Chunk or times == 99
    assert (report.state == "aborted") == stays
    assert them.owners() == ("a" if stays else "b")


async def test_a_destination_that_dies_is_noticed_and_the_request_stays(them: Cluster) -> None:
    blocked, dead = asyncio.Event(), asyncio.Event()

    async def wait(method: str) -> None:
        if method == "grow":
            blocked.set()
            await dead.wait()

    them.b.engine.before = wait
    moving = asyncio.create_task(them.move())
    await blocked.wait()
    them.b.die()
    report = await moving
    assert (report.reason, them.owners()) == ("peer_lost", "a")
    dead.set()


@pytest.mark.parametrize("committed", [True, False])
async def test_after_the_connection_broke_in_a_commit_the_arbiter_decides(
    them: Cluster, committed: bool
) -> None:
    if not committed:
        them.b.drop = dropping(Commit, 99)
    else:
        them.a.drop = dropping(Committed, 99)
    moving = asyncio.create_task(them.move())
    seen = (them.b, Commit) if not committed else (them.a, Committed)
    await until(lambda: any(isinstance(message, seen[1]) for message in seen[0].heard))
    them.b.die()
    report = await moving
    assert them.a.asked == ["r"]
    assert (report.state, them.owners()) == (("committed", "b") if committed else ("aborted", "a"))


async def test_without_a_front_end_the_request_runs_nowhere(them: Cluster) -> None:
    them.a.front_end_is_gone = True
    them.b.drop = them.in_vain(dropping(Commit, 99))
    report = await them.move()
    assert (report.state, report.reason, them.owners()) == ("aborted", "orphaned", "")
    assert "r" not in them.a.engine.running


async def test_a_request_whose_front_end_never_answers_is_dropped_and_frees_everything(
    them: Cluster,
) -> None:
    them.a.front_end_is_stuck = True
    them.a.drop = dropping(Refused, 99)  # when the lease ends
    them.b.drop = them.in_vain(dropping(Commit, 99))
    moving = asyncio.create_task(them.move())
    await until(lambda: them.a.asked)
    report = await them.run_out(moving)
    assert (report.state, report.reason, them.owners()) == ("aborted", "orphaned", "")
    assert them.a.asked == ["r"] * QUESTIONS


METHODS_A = ["export", "stage", "gather", "suspend", "resume"]
METHODS_B = ["reserve", "grow", "scatter", "commit"]


@pytest.mark.parametrize("method", [*METHODS_A, *METHODS_B])
@pytest.mark.parametrize("how", ["client", "gone"])
async def test_a_client_that_leaves_at_any_moment_leaves_nothing(
    them: Cluster, method: str, how: str
) -> None:
    engine = them.a.engine if method in METHODS_A else them.b.engine
    if method == "resume":
        them.b.engine.before = failing("grow", MigrationRefused("no_blocks"))

    async def leave(called: str) -> None:
        if called != method:
            return
        engine.before = engine._nothing
        if how == "client":
            them.a.engine.end("r")
        them.a.migrations.cancel_request("r", "aborted_by_client")
        if how == "gone":
            them.b.migrations.cancel_request("r", "aborted_by_client")
            them.a.engine.end("r")

    engine.before = leave
    moving = asyncio.create_task(them.move())
    if (method, how) == ("commit", "gone"):
        await until(them.moved)
        await them.run_out(moving)  # nobody tells of a first token
    report = await moving
    if method == "commit":
        assert (report.state, them.owners()) == ("committed", "b")
    else:
        assert report.state == "aborted"
        assert them.owners() == ""


@pytest.mark.parametrize("method", [*METHODS_A[:-1], *METHODS_B[:-1]])
@pytest.mark.parametrize("side", ["a", "b"])
async def test_shutdown_in_any_state_gives_the_migration_up(
    them: Cluster, method: str, side: str
) -> None:
    at = them.a if method in METHODS_A else them.b
    closing = them.stop_in(method, at, them.a if side == "a" else them.b)
    report = await them.move()
    await asyncio.gather(*closing)
    assert (report.state, report.reason, them.owners()) == ("aborted", "shutdown", "a")


@pytest.mark.parametrize("method", [*METHODS_A[:-1], *METHODS_B])
async def test_an_engine_that_hangs_is_given_up_and_frees_everything(
    them: Cluster, method: str
) -> None:
    them.hang_in(method, them.a if method in METHODS_A else them.b)
    report = await them.move()
    if method == "commit":  # resent, then the arbiter waited for the commit's end
        assert (report.state, them.owners()) == ("committed", "b")
    else:
        assert (report.state, report.reason, them.owners()) == ("aborted", "timeout", "a")


async def test_closing_frees_everything_even_from_a_session_that_hangs(them: Cluster) -> None:
    hanging = asyncio.Event()

    async def hang(called: str) -> None:
        if called in ("suspend", "grow"):
            hanging.set()
            await asyncio.sleep(3600)

    them.a.engine.before = hang
    moving = asyncio.create_task(them.move())
    await hanging.wait()
    await them.a.migrations.close(0.05)
    with pytest.raises(asyncio.CancelledError):
        await moving
    assert them.owners() == "a"
    assert them.a.engine.is_clean()


async def test_a_request_moves_once_at_a_time(them: Cluster) -> None:
    first = asyncio.create_task(them.move())
    await asyncio.sleep(0)
    second = await them.move()
    assert (second.state, second.reason) == ("aborted", "already_migrating")
    assert (await first).state == "committed"


async def test_after_close_no_migration_starts_in_either_direction(them: Cluster) -> None:
    await them.b.migrations.close(0.1)
    assert (await them.move()).reason == "shutdown"
    await them.a.migrations.close(0.1)
    assert (await them.move()).reason == "shutdown"


async def test_a_fenced_attempt_can_not_begin_and_the_next_one_can(them: Cluster) -> None:
    assert await them.b.migrations.fence("r", 1) is False
    assert (await them.move()).reason == "superseded"
    assert (await them.move()).state == "committed"
    assert await them.b.migrations.fence("r", 2) is True


async def test_a_reservation_that_hears_nothing_is_freed_when_its_lease_ends(them: Cluster) -> None:
    unheard = them.in_vain(lambda message: isinstance(message, Reserve) and message.stage > 0)
    them.b.drop = lambda message: unheard(message) or not isinstance(message, Reserve)
    assert (await them.move()).reason == "timeout"
    assert them.b.engine.reserved
    them.skip_lease()
    await until(lambda: not them.b.engine.reserved)
    assert them.b.migrations.incoming == 0


async def test_a_newer_attempt_replaces_a_reservation_left_by_an_older_one(them: Cluster) -> None:
    lost = dropping(Abort)
    unheard = them.in_vain(
        lambda message: isinstance(message, Reserve) and message.stage == 1 and message.epoch == 1
    )
    them.b.drop = lambda message: lost(message) or unheard(message)
    assert (await them.move()).reason == "timeout"
    assert them.b.engine.reserved
    assert (await them.move()).state == "committed"
    assert them.owners() == "b"


async def test_counts_go_back_to_zero(them: Cluster) -> None:
    moving = asyncio.create_task(them.move())
    await asyncio.sleep(0)
    assert (them.a.migrations.outgoing, them.a.migrations.moving()) == (1, {"r"})
    await moving
    for node in (them.a, them.b):
        assert (node.migrations.incoming, node.migrations.outgoing) == (0, 0)
        assert node.migrations.moving() == set()


async def test_a_session_cancelled_while_it_cleans_up_cleans_up_again(them: Cluster) -> None:
    resuming = asyncio.Event()

    async def hang_once(called: str) -> None:
        if called == "resume" and not resuming.is_set():
            resuming.set()
            await asyncio.sleep(3600)

    them.a.engine.before = hang_once
    them.b.refuse_commit = True
    moving = asyncio.create_task(them.move())
    await resuming.wait()
    await them.a.migrations.close(0.05)
    with pytest.raises(asyncio.CancelledError):
        await moving
    assert them.owners() == "a"
