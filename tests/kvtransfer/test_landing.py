"""Chunks at a destination: the copy of the next one waits in the engine while one is copied and
answered, and whatever ends a migration, no block is freed that a copy is still at."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple
from unittest import mock

import pytest

from kvmig.engines.base import CameBlocks
from kvmig.kvtransfer.measured import ChunkSizer
from kvmig.kvtransfer.messages import Abort, ChunkDone
from kvmig.kvtransfer.report import MigrationReport
from kvmig.rpc.messages import RpcMessage
from tests.support.copying_engine import CopyingEngine, HeldScatter, Kind, engine_of
from tests.support.fake_cluster import Cluster, cluster
from tests.support.fake_engine import BLOCK_BYTES, BLOCK_TOKENS
from tests.support.waiting import PATIENCE_S, until

Pair = tuple[CopyingEngine, CopyingEngine]
REST_S = 0.05
"""Long enough for what a session does by itself."""
LONG_S = 0.5
"""Much longer than a copy of one block."""


@pytest.fixture(params=["host", "gpu"])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    """A source and a destination, each chunk of one block."""
    kind: Kind = request.param
    if kind == "gpu":
        request.getfixturevalue("gpus")
    monkeypatch.setattr(ChunkSizer, "blocks", lambda sizer: 1)
    made = engine_of(kind, 0), engine_of(kind, 1)
    yield made
    for engine in made:
        engine.close()


def between(pair: Pair, **more: Any) -> AbstractAsyncContextManager[Cluster]:
    source, destination = pair
    return cluster(source=source, destination=destination, chunks=4, **more)


class HeldMove(NamedTuple):
    """A migration whose destination is in the midst of a copy."""

    them: Cluster
    held: HeldScatter
    moving: asyncio.Task[MigrationReport]


@asynccontextmanager
async def held_move(pair: Pair, number: int, asked: int = 0) -> AsyncIterator[HeldMove]:
    """number: of the copy that is held. asked: copies that the destination was asked for by then;
    0: any."""
    _, destination = pair
    held = destination.hold(number)
    async with between(pair) as them:
        moving = asyncio.create_task(them.move())
        await until(held.begun.is_set)
        await until(lambda: asked in (0, destination.asked))
        yield HeldMove(them, held, moving)


def transport_of(pair: Pair) -> str:
    return "shm" if pair[0].layout.gpu is None else "cuda-ipc"


async def test_the_next_chunks_copy_is_in_the_engine_when_a_chunk_is_answered(pair: Pair) -> None:
    _, destination = pair
    held, in_engine = destination.hold(1), list[int]()
    async with between(pair) as them:
        reply = them.b.reply

        def replied(sender: bytes, message: RpcMessage) -> None:
            if isinstance(message, ChunkDone):
                in_engine.append(destination.inside)
            reply(sender, message)

        them.b.reply = replied  # type: ignore[method-assign]
        moving = asyncio.create_task(them.move())
        await until(lambda: in_engine)
        await until(held.begun.is_set)
        held.go_on.set()
        report = await moving
    assert (report.state, report.transport) == ("committed", transport_of(pair))
    assert in_engine[0] == 1


async def test_copies_keep_the_order_of_the_chunks_and_two_of_a_migration_are_asked_for(
    pair: Pair,
) -> None:
    _, destination = pair
    async with held_move(pair, 3) as (_, held, moving):
        held.go_on.set()
        report = await moving
        request = destination.running["r"]
    assert report.state == "committed"
    copied = [block for ids in destination.watched.begun for block in ids]
    assert copied == request.blocks[: len(copied)]
    assert len(copied) >= 10
    assert destination.most == 2
    assert destination.watched.strayed == []


async def test_a_chunk_of_the_report_took_as_long_as_its_own_copy(pair: Pair) -> None:
    """Not the time in which its copy waited for the one before it."""
    async with held_move(pair, 1) as (_, held, moving):
        await asyncio.sleep(LONG_S)
        held.go_on.set()
        report = await moving
    _, second, third, *_ = report.stages[0].chunks
    assert second.scatter >= LONG_S * 1e3
    assert 0 < third.scatter < LONG_S / 2 * 1e3
    answers = [chunk.answered or 0.0 for chunk in report.stages[0].chunks]
    assert all(one <= following for one, following in pairwise(answers))


async def test_an_urgent_copy_goes_before_the_one_that_waits(pair: Pair) -> None:
    _, destination = pair
    other = destination.start("other")
    async with held_move(pair, 1, asked=3) as (_, held, moving):
        start = other.blocks[0] * BLOCK_BYTES
        same = memoryview(bytearray(destination.memory[start : start + BLOCK_BYTES]))
        copy = destination.scatter(other.blocks[:1], same, urgent=True)
        urgent = asyncio.create_task(copy)
        await until(lambda: destination.asked == 4)
        await asyncio.sleep(REST_S)
        held.go_on.set()
        await urgent
        assert (await moving).state == "committed"
        assert destination.watched.begun[2] == other.blocks[:1]
        destination.end("other")


async def test_a_chunk_of_the_pause_is_not_begun_behind_another_one(pair: Pair) -> None:
    """Two urgent copies of one migration would go before an urgent one of another."""
    source, destination = pair
    source.at_once = False
    async with between(pair, stages=0) as them:
        assert (await them.move()).state == "committed"
    assert set(destination.urgent) == {True}
    assert destination.most == 1


async def test_more_room_is_asked_for_only_while_no_copy_is_at_the_blocks(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its refusal frees them all."""
    _, destination = pair
    held, grow, inside = destination.hold(1), destination.grow, list[int]()

    async def grow_little(request_id: str, num_tokens: int) -> list[int]:
        inside.append(destination.inside)
        return await grow(request_id, num_tokens if len(inside) > 1 else BLOCK_TOKENS)

    monkeypatch.setattr(destination, "grow", grow_little)
    async with between(pair) as them:
        moving = asyncio.create_task(them.move())
        await until(held.begun.is_set)
        await asyncio.sleep(REST_S)
        held.go_on.set()
        assert (await moving).state == "committed"
    assert len(inside) > 2
    assert set(inside) == {0}


# -- what ends a migration


def ends(them: Cluster) -> list[Callable[[], object]]:
    """What may happen at any moment."""
    return [
        lambda: them.a.migrations.cancel_request("r", "aborted_by_client"),
        lambda: them.b.migrations.cancel_request("r", "aborted_by_client"),
        them.skip_answer,
        them.skip_lease,
        them.b.die,
        lambda: asyncio.ensure_future(them.b.migrations.close(0.0)),
    ]


@pytest.mark.parametrize("seed", range(24))
async def test_no_copy_is_at_a_block_that_was_freed_whatever_happens_and_when(seed: int) -> None:
    random = Random(seed)
    source, destination = CopyingEngine(), CopyingEngine()
    destination.watched.before = lambda number: time.sleep(random.random() / 500)
    corrupt = random.randrange(20)
    destination.watched.change = lambda number, sums: [0] if number == corrupt else sums
    with mock.patch.object(ChunkSizer, "blocks", return_value=1):
        async with between((source, destination)) as them:
            moving = asyncio.create_task(them.move())
            await asyncio.sleep(random.random() / 20)
            for end in random.sample(ends(them), 2):
                end()
                await asyncio.sleep(random.random() / 200)
            report = await them.run_out(moving)
            assert them.owners() in ("a", "b", "")
            assert (report.state == "committed") >= (them.owners() == "b")
            source.end("r")
    for engine in (source, destination):
        engine.close()
    assert destination.watched.strayed == []


async def test_a_chunk_behind_a_corrupt_one_has_left_its_blocks_before_they_are_freed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, destination = pair
    held, check = destination.hold(2), CameBlocks.check
    destination.watched.change = lambda number, sums: [0] if number == 1 else sums

    def check_later(came: CameBlocks, sums: Sequence[int]) -> None:
        assert sums != [0] or held.begun.wait(PATIENCE_S)
        check(came, sums)

    monkeypatch.setattr(CameBlocks, "check", check_later)
    async with between(pair) as them:
        moving = asyncio.create_task(them.move())
        await until(held.begun.is_set)
        await asyncio.sleep(REST_S)
        assert "cancel" not in destination.calls
        held.go_on.set()
        report = await moving
        assert (report.reason, them.owners()) == ("corrupt", "a")
        assert report.detail == "block 1 came changed"
    assert destination.watched.strayed == []


async def test_a_corrupt_chunk_whose_copy_had_begun_is_refused_in_its_turn(pair: Pair) -> None:
    _, destination = pair
    destination.watched.change = lambda number, sums: [0] if number == 2 else sums
    async with held_move(pair, 2) as (them, held, moving):
        held.go_on.set()
        report = await moving
        assert (report.reason, them.owners()) == ("corrupt", "a")
        assert report.detail == "block 2 came changed"
    assert destination.watched.strayed == []


async def test_a_client_that_leaves_while_two_chunks_are_in_the_engine_leaves_nothing(
    pair: Pair,
) -> None:
    _, destination = pair
    async with held_move(pair, 1, asked=3) as (them, held, moving):
        them.a.migrations.cancel_request("r", "aborted_by_client")
        await until(lambda: any(isinstance(message, Abort) for message in them.b.heard))
        await asyncio.sleep(REST_S)
        assert "cancel" not in destination.calls
        held.go_on.set()
        assert (await moving).reason == "aborted_by_client"
    assert destination.watched.strayed == []


async def test_a_client_that_leaves_the_destination_ends_the_migration_after_the_chunks_that_came(
    pair: Pair,
) -> None:
    _, destination = pair
    async with held_move(pair, 1, asked=3) as (them, held, moving):
        them.b.migrations.cancel_request("r", "aborted_by_client")
        held.go_on.set()
        assert (await moving).reason == "aborted_by_client"
    assert destination.watched.strayed == []


async def test_a_copy_that_takes_too_long_ends_the_migration_and_the_one_behind_it_never_runs(
    pair: Pair,
) -> None:
    _, destination = pair
    async with held_move(pair, 1, asked=3) as (them, held, moving):
        them.skip_answer()
        await until(lambda: destination.inside == 1)
        await asyncio.sleep(REST_S)
        assert "cancel" not in destination.calls
        held.go_on.set()
        assert (await moving).reason == "timeout"
        await until(lambda: them.b.migrations.incoming == 0)
    assert len(destination.watched.begun) == 2
    assert destination.watched.strayed == []


@pytest.mark.parametrize("late", [False, True], ids=["in time", "after a time-out"])
async def test_a_destination_that_stops_frees_no_block_that_a_copy_is_still_at(
    pair: Pair, late: bool
) -> None:
    _, destination = pair
    async with held_move(pair, 1, asked=3) as (them, held, moving):
        if late:
            them.skip_answer()
            await until(lambda: destination.inside == 1)
        closing = asyncio.create_task(them.b.migrations.close(0.0))
        await asyncio.sleep(REST_S)
        assert "cancel" not in destination.calls
        held.go_on.set()
        await closing
        assert (await them.run_out(moving)).state == "aborted"
        assert destination.is_clean()
    assert len(destination.watched.begun) == 2
    assert destination.watched.strayed == []


async def test_a_session_that_is_cancelled_while_it_frees_its_blocks_frees_them() -> None:
    """An engine may be cancelled before it has begun with the call."""
    async with cluster() as them:
        destination, frees = them.b.engine, asyncio.Event()

        async def before(method: str) -> None:
            if method == "scatter":
                them.b.migrations.cancel_request("r", "aborted_by_client")
            elif method == "cancel" and not frees.is_set():
                frees.set()
                await asyncio.sleep(PATIENCE_S)

        destination.before = before
        moving = asyncio.create_task(them.move())
        await until(frees.is_set)
        await them.b.migrations.close(0.0)
        assert destination.is_clean()
        assert (await them.run_out(moving)).state == "aborted"
