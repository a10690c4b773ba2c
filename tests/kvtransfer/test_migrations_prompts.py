"""A prompt that is computed at one end and decoded at the other: its chunks travel meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from kvmig.core.errors import MigrationRefused
from kvmig.kvtransfer.messages import Chunk, Commit, Committed, Reserve, Reserved
from kvmig.kvtransfer.report import MigrationReport
from kvmig.rpc.messages import RpcMessage
from tests.support.fake_cluster import Cluster, cluster, dropping
from tests.support.fake_engine import FakeEngine

PROMPT = 41
"""Tokens: 10 blocks and one token."""


def prefilling() -> FakeEngine:
    """An engine that has just begun r's prompt."""
    engine = FakeEngine()
    engine.start("r", PROMPT, output=0)
    engine.computed = 0
    return engine


async def hand_over(them: Cluster) -> MigrationReport:
    """Let r go to b when its prompt is computed."""
    return await them.a.migrations.migrate(
        "r", "b", them.b.server.endpoint, gateway="g", after_prompt=True
    )


async def test_chunks_travel_while_later_ones_are_computed() -> None:
    async with cluster(source=prefilling()) as them:
        report = await hand_over(them)
        assert (report.state, report.reason, them.owners()) == ("committed", "", "b")
        assert [stage.blocks for stage in report.stages] == [0, 2, 2, 2, 2, 2]
        assert report.tail_blocks == 1
        assert report.output_tokens == 1
        assert "suspend" not in them.a.engine.calls  # nothing decodes it between the two


async def test_no_number_of_chunks_is_too_large() -> None:
    async with cluster(source=prefilling(), stages=1) as them:
        report = await hand_over(them)
        assert (report.state, len(report.stages), report.tail_blocks) == ("committed", 6, 1)


async def test_one_that_has_decoded_on_goes_as_any_other() -> None:
    async with cluster(source=prefilling()) as them:
        engine = them.a.engine

        async def decode_on(method: str) -> None:
            if method == "follow_prompt" and engine.computed is not None:
                engine.computed = None
                engine.decode(engine.running["r"], 5)

        engine.before = decode_on
        report = await hand_over(them)
        assert (report.state, them.owners()) == ("committed", "b")
        assert engine.calls.count("follow_prompt") == 1
        assert "suspend" in engine.calls


async def test_one_whose_prompt_is_computed_already_goes_as_any_other() -> None:
    async with cluster() as them:
        report = await hand_over(them)
        assert (report.state, them.owners()) == ("committed", "b")
        assert "follow_prompt" not in them.a.engine.calls


async def test_without_room_it_stays_where_its_prompt_is() -> None:
    async with cluster(source=prefilling()) as them:

        async def full(method: str) -> None:
            if method == "grow":
                raise MigrationRefused("no_blocks", "full")

        them.b.engine.before = full
        report = await hand_over(them)
        assert (report.state, report.reason, them.owners()) == ("aborted", "no_blocks", "a")


@pytest.mark.parametrize("lost", [Reserve, Reserved, Chunk, Commit, Committed])
@pytest.mark.parametrize("earlier", [0, 1])
async def test_any_lost_message_leaves_it_at_one_of_the_two(lost: type, earlier: int) -> None:
    async with cluster(source=prefilling()) as them:
        left = [earlier]

        def late(message: RpcMessage) -> bool:
            left[0] -= isinstance(message, lost)
            return left[0] < 0 and once(message)

        once = dropping(lost)
        for node in (them.a, them.b):
            node.drop = late
        report = await them.run_out(asyncio.create_task(hand_over(them)))
        assert (report.state, them.owners()) in (("committed", "b"), ("aborted", "a"))


async def test_a_destination_that_is_gone_leaves_it_where_its_prompt_is() -> None:
    async with cluster(source=prefilling()) as them:

        async def die(method: str) -> None:
            if method == "follow_prompt":
                them.b.die()

        them.a.engine.before = die
        report = await hand_over(them)
        assert (report.state, them.owners()) == ("aborted", "a")


async def test_a_prompt_that_takes_long_keeps_its_place_at_the_destination() -> None:
    async with cluster(source=prefilling(), timeout_ms=1e4) as them:
        slow = [12]

        async def wait(method: str) -> None:
            if method == "follow_prompt" and slow[0]:
                slow[0] -= 1
                them.a.engine.computed = -2
                them.skip(6.0)  # of 10 for an answer, and a lease of 40
                await asyncio.sleep(0.02)

        them.a.engine.before = wait
        report = await hand_over(them)
        ended = (report.state, report.reason, report.detail, them.owners(), slow)
        assert ended == ("committed", "", "", "b", [0])
