"""Whole migrations over the transports that push into the destination's buffers."""

from __future__ import annotations

import asyncio

import pytest

from kvmig.core.config import Transport
from kvmig.kvtransfer.messages import Chunk
from tests.kvtransfer.test_transports_processes import needs_nixl
from tests.support.fake_cluster import Drop, cluster
from tests.support.waiting import until

pytestmark = pytest.mark.parametrize("transport", [pytest.param("nixl", marks=needs_nixl)])


def losing(kind: type[Chunk]) -> Drop:
    """The second chunk never comes."""
    seen: list[Chunk] = []

    def drop(message: object) -> bool:
        if isinstance(message, kind):
            seen.append(message)
            return len(seen) == 2
        return False

    return drop


async def test_requests_move_with_every_byte_and_say_by_what(transport: Transport) -> None:
    async with cluster(transport=transport) as them:
        them.a.engine.start("s")
        reports = await asyncio.gather(them.move(), them.move("s"))
        assert {(one.state, one.transport) for one in reports} == {("committed", transport)}
        assert (them.owners(), them.owners("s")) == ("b", "b")
        back = await them.b.migrations.migrate("r", "a", them.a.server.endpoint, epoch=1)
        assert (back.state, them.owners()) == ("committed", "a")
        assert all(stage.parts.push > 0 for stage in reports[0].stages if stage.blocks)


async def test_a_changed_block_is_noticed_and_the_request_stays(transport: Transport) -> None:
    async with cluster(transport=transport) as them:
        them.a.engine.corrupt = True
        report = await them.move()
        assert (report.reason, them.owners()) == ("corrupt", "a")
        them.a.engine.corrupt = False
        assert (await them.move(epoch=1)).state == "committed"


async def test_a_lost_chunk_ends_the_migration_and_not_the_next(transport: Transport) -> None:
    async with cluster(transport=transport, chunks=1) as them:
        them.b.drop = losing(Chunk)
        moving = asyncio.create_task(them.move())
        await until(lambda: sum(isinstance(one, Chunk) for one in them.b.heard) == 2)
        assert ((await them.run_out(moving)).state, them.owners()) == ("aborted", "a")
        assert ((await them.move(epoch=1)).state, them.owners()) == ("committed", "b")


async def test_a_destination_that_dies_leaves_the_request_where_it_is(
    transport: Transport,
) -> None:
    async with cluster(transport=transport) as them:

        async def die(method: str) -> None:
            if method == "scatter":
                them.b.die()

        them.b.engine.before = die
        assert ((await them.move()).state, them.owners()) == ("aborted", "a")
