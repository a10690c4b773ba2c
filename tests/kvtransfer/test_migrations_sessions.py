"""An idle session's move over real sockets: nothing runs, nobody is asked, no loss loses it."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from kvmig.core.errors import MigrationRefused
from kvmig.engines.base import RequestExport
from kvmig.kvtransfer.messages import Chunk, Commit, Committed, FirstToken, Reserve, Reserved
from kvmig.kvtransfer.report import MigrationReport
from kvmig.rpc.messages import RpcMessage
from tests.support.fake_cluster import Cluster, cluster, dropping, failing
from tests.support.fake_engine import FakeEngine


class SessionEngine(FakeEngine):
    """What it holds is a session's: its export says so, and nothing of it decodes."""

    def __init__(self) -> None:
        super().__init__(steps=0)
        self.decoding = False

    async def export(self, request_id: str) -> RequestExport:
        return replace(await super().export(request_id), idle=True)


async def moved(them: Cluster) -> MigrationReport:
    return await them.a.migrations.migrate("r", "b", them.b.server.endpoint, gateway="g", idle=True)


async def test_a_session_moves_and_no_front_end_hears_of_it() -> None:
    async with cluster(source=SessionEngine()) as them:
        report = await moved(them)
        assert (report.state, report.reason) == ("committed", "")
        assert them.owners() == "b"
        assert (them.b.committing, them.a.left, them.a.asked) == ({}, [], [])
        assert FirstToken not in [type(message) for message in them.a.heard]


@pytest.mark.parametrize("kind", [Reserve, Reserved, Chunk])
async def test_a_session_of_which_a_message_is_lost_stays(kind: type[RpcMessage]) -> None:
    async with cluster(source=SessionEngine()) as them:
        them.a.drop = them.b.drop = them.in_vain(dropping(kind))
        report = await them.run_out(asyncio.create_task(moved(them)))
        assert (report.state, them.owners()) == ("aborted", "a")


@pytest.mark.parametrize("kind", [Commit, Committed])
async def test_a_session_whose_commit_or_its_answer_is_lost_once_has_gone(
    kind: type[RpcMessage],
) -> None:
    async with cluster(source=SessionEngine()) as them:
        them.a.drop = them.b.drop = them.in_vain(dropping(kind))
        report = await moved(them)
        assert (report.state, them.owners()) == ("committed", "b")


async def test_where_no_word_of_the_commit_comes_the_source_keeps_its_copy() -> None:
    async with cluster(source=SessionEngine()) as them:
        them.a.drop = them.b.drop = them.in_vain(dropping(Committed, 99))
        report = await moved(them)
        assert (report.state, report.reason, them.a.asked) == ("aborted", "timeout", [])
        assert them.owners() == "ab"


@pytest.mark.parametrize("method", ["reserve", "grow", "scatter", "commit"])
async def test_a_destination_that_refuses_holds_nothing_and_the_source_all(method: str) -> None:
    async with cluster(source=SessionEngine()) as them:
        them.b.engine.before = failing(method, MigrationRefused("no_blocks"))
        report = await moved(them)
        assert (report.state, report.reason, them.owners()) == ("aborted", "no_blocks", "a")
