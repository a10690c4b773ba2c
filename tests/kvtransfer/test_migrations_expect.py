"""A source tells when its request comes, so that a step of the destination may wait for it."""

from __future__ import annotations

import pytest

from kvmig.engines.base import StepCadence
from kvmig.kvtransfer.messages import Commit, Expect
from tests.support.fake_cluster import cluster, dropping
from tests.support.fake_engine import FakeEngine


async def test_the_destination_hears_when_the_commit_comes() -> None:
    source = FakeEngine(num_blocks=1000)
    source.now = StepCadence(4.0, 10.0)
    destination = FakeEngine(num_blocks=1000)
    async with cluster(source=source, destination=destination) as them:
        assert (await them.move()).state == "committed"
        ((request_id, due_ms),) = destination.expected
        assert request_id == "r"
        assert 6.0 < due_ms < 20.0
        kinds = [type(message) for message in them.b.heard]
        assert kinds.index(Expect) < kinds.index(Commit)


@pytest.mark.parametrize("end", ["source", "destination"])
async def test_nothing_is_said_to_one_that_can_not_wait_or_of_a_request_that_does_not_decode(
    end: str,
) -> None:
    source, destination = FakeEngine(), FakeEngine()
    destination.can_hold = end == "source"
    source.decoding = end == "destination"
    async with cluster(source=source, destination=destination) as them:
        assert (await them.move()).state == "committed"
        assert not any(isinstance(message, Expect) for message in them.b.heard)


async def test_the_migration_goes_on_if_the_word_is_lost() -> None:
    async with cluster() as them:
        them.a.drop = them.b.drop = dropping(Expect, 99)
        assert ((await them.move()).state, them.owners()) == ("committed", "b")
        assert not them.b.engine.expected


async def test_a_word_of_a_migration_that_is_not_known_is_ignored() -> None:
    async with cluster() as them:
        them.b.migrations.receive(b"", Expect("nobody's", 5.0), [])
        assert ((await them.move()).state, them.owners()) == ("committed", "b")
