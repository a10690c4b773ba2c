"""Migrations to a destination that follows: whole ones, and everything that can go wrong."""

from __future__ import annotations

import asyncio

import pytest

from kvmig.engines.base import Cadence
from kvmig.ground.config import Rest
from kvmig.ground.errors import MigrationRefused, RequestGone
from kvmig.kvtransfer import messages
from kvmig.kvtransfer.messages import Follow, Message, Tokens
from tests.fake_cluster import cluster, dropping, failing, until
from tests.fake_engine import FakeEngine


def followed(destination: FakeEngine | None = None) -> FakeEngine:
    """Both ends of these migrations can follow."""
    engine = destination or FakeEngine(num_blocks=1000)
    engine.can_follow = True
    return engine


async def test_a_request_is_switched_to_the_destination_that_followed_it() -> None:
    async with cluster(source=followed(), destination=followed(), rest="follow") as them:
        report = await them.move()
        assert (report.state, them.owners()) == ("committed", "b")
        assert report.followed is not None
        assert report.tail_blocks == 0
        assert [stage.blocks for stage in report.stages] == [11, 1]
        assert report.downtime_ms is not None
        assert "follow" in them.b.engine.calls


@pytest.mark.parametrize("end", ["source", "destination"])
async def test_an_engine_that_can_not_follow_gets_the_tail(end: str) -> None:
    source, destination = followed(), followed()
    (source if end == "source" else destination).can_follow = False
    async with cluster(source=source, destination=destination, rest="follow") as them:
        report = await them.move()
        assert (report.state, report.followed) == ("committed", None)
        assert report.tail_blocks > 0


async def test_following_can_be_turned_off() -> None:
    async with cluster(source=followed(), destination=followed(), rest="copy") as them:
        assert (await them.move()).followed is None


@pytest.mark.parametrize(
    ("token_ms", "rest", "way"),
    [
        (1e-9, "auto", "follow"),
        (100.0, "auto", "copy"),
        (None, "auto", "copy"),
        (100.0, "follow", "follow"),
        (100.0, "recompute", "recompute"),
        (1e-9, "copy", "copy"),
    ],
)
async def test_the_way_that_costs_less_is_taken_unless_one_is_asked_for(
    token_ms: float | None, rest: Rest, way: str
) -> None:
    source, destination = followed(), followed()
    destination.now, destination.can_recompute = Cadence(0.0, 0.0, token_ms), True
    async with cluster(source=source, destination=destination, rest=rest) as them:
        report = await them.move()
        assert report.state == "committed"
        assert report.pause_cost is not None
        assert (report.pause_cost.way, report.pause_cost.follow_ms) == (way, token_ms)
        assert report.pause_cost.copy_ms is not None
        assert (report.followed is not None) == (way == "follow")
        assert (report.tail_blocks > 0) == (way == "copy")


def able() -> FakeEngine:
    """To compute a rest again."""
    return FakeEngine(num_blocks=1000, can_recompute=True)


@pytest.mark.parametrize("can", [True, False])
async def test_without_following_the_rest_is_computed_again_where_that_costs_less(
    can: bool,
) -> None:
    destination = FakeEngine(num_blocks=1000, can_recompute=can)
    destination.now = Cadence(0.0, 0.0, 1e-9)
    async with cluster(destination=destination) as them:
        report = await them.move()
        assert report.pause_cost is not None
        assert (report.state, them.owners()) == ("committed", "b")
        assert report.pause_cost.way == ("recompute" if can else "copy")
        assert report.pause_cost.recompute_ms == pytest.approx(5e-9, abs=4e-9)
        assert (report.tail_blocks > 0, report.followed) == (not can, None)


async def test_a_request_whose_blocks_are_all_left_is_copied() -> None:
    async with cluster(destination=able(), rest="recompute", stages=0) as them:
        report = await them.move()
        assert report.pause_cost is not None
        assert (report.state, report.pause_cost.way) == ("committed", "copy")


async def test_an_engine_that_can_not_compute_the_rest_leaves_the_request_at_the_source() -> None:
    async with cluster(destination=able(), rest="recompute") as them:
        them.b.engine.before = failing("commit", MigrationRefused("no_blocks"))
        report = await them.move()
        assert (report.state, report.reason, them.owners()) == ("aborted", "no_blocks", "a")


async def test_a_destination_that_is_never_in_step_is_switched_to_all_the_same() -> None:
    async with cluster(source=followed(), destination=followed(), rest="follow") as them:

        async def slow(method: str) -> None:
            if method == "extend":
                await asyncio.sleep(0.005)

        them.b.engine.before = slow
        report = await them.move()
        assert (report.state, them.owners()) == ("committed", "b")


@pytest.mark.parametrize(
    ("error", "reason"),
    [(RequestGone("preempted"), "preempted"), (RuntimeError("a bug"), "error")],
)
async def test_a_source_that_fails_to_fork_keeps_the_request(error: Exception, reason: str) -> None:
    async with cluster(source=followed(), destination=followed(), rest="follow") as them:
        them.a.engine.before = failing("fork", error)
        report = await them.move()
        assert (report.state, report.reason, them.owners()) == ("aborted", reason, "a")


@pytest.mark.parametrize("method", ["follow", "extend", "commit"])
@pytest.mark.parametrize(
    ("error", "reason"),
    [(MigrationRefused("preempted"), "preempted"), (OSError("a bug"), "error")],
)
async def test_a_follower_that_fails_leaves_the_request_at_the_source(
    method: str, error: Exception, reason: str
) -> None:
    async with cluster(source=followed(), destination=followed(), rest="follow") as them:
        them.b.engine.before = failing(method, error)
        report = await them.move()
        assert (report.state, report.reason, them.owners()) == ("aborted", reason, "a")
        assert them.b.committing == {}


@pytest.mark.parametrize("kind", [Follow, Tokens, messages.Following])
async def test_a_lost_message_leaves_the_request_in_one_place(kind: type[Message]) -> None:
    async with cluster(rest="follow", source=followed(), destination=followed()) as them:
        them.a.drop, them.b.drop = dropping(kind), dropping(kind)
        moving = asyncio.create_task(them.move())
        if kind is Follow:  # no answer comes; the others are made up for by the next one
            await until(lambda: any(isinstance(one, Follow) for one in them.b.heard))
            await them.run_out(moving)
        report = await moving
        assert them.owners() == ("b" if report.state == "committed" else "a")
        them.skip_lease()  # of what the source could not take back
        await until(lambda: not them.b.engine.reserved and not them.b.engine.following)


@pytest.mark.parametrize("method", ["fork", "follow", "extend"])
async def test_a_client_that_leaves_leaves_nothing(method: str) -> None:
    async with cluster(source=followed(), destination=followed(), rest="follow") as them:
        engine = them.a.engine if method == "fork" else them.b.engine

        async def leave(called: str) -> None:
            if called == method:
                engine.before = engine._nothing
                them.a.engine.end("r")
                them.a.migrations.cancel_request("r", "aborted_by_client")

        engine.before = leave
        assert (await them.move()).state == "aborted"
        assert them.owners() == ""


@pytest.mark.parametrize("method", ["fork", "follow", "extend"])
@pytest.mark.parametrize("side", ["a", "b"])
async def test_shutdown_gives_the_migration_up(method: str, side: str) -> None:
    async with cluster(rest="follow", source=followed(), destination=followed()) as them:
        at = them.a if method == "fork" else them.b
        closing = them.stop_in(method, at, them.a if side == "a" else them.b)
        report = await them.move()
        await asyncio.gather(*closing)
        assert (report.state, report.reason, them.owners()) == ("aborted", "shutdown", "a")


@pytest.mark.parametrize("method", ["fork", "follow", "extend"])
async def test_an_engine_that_hangs_is_given_up_and_frees_everything(method: str) -> None:
    async with cluster(rest="follow", source=followed(), destination=followed()) as them:
        them.hang_in(method, them.a if method == "fork" else them.b)
        report = await them.move()
        assert (report.state, report.reason, them.owners()) == ("aborted", "timeout", "a")


async def test_a_follower_that_dies_is_noticed_and_the_request_stays() -> None:
    async with cluster(rest="follow", source=followed(), destination=followed()) as them:
        dead = asyncio.Event()

        async def until_it_dies(method: str) -> None:
            if method == "extend":
                await dead.wait()

        them.b.engine.before = until_it_dies
        moving = asyncio.create_task(them.move())
        await until(lambda: "extend" in them.b.engine.calls)
        them.b.die()
        report = await moving
        assert (report.reason, them.owners()) == ("peer_lost", "a")
        dead.set()
