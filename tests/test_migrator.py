"""`Migrator` over engines in memory: what it hears of them through its taps."""

from __future__ import annotations

import pytest

import kvmig
from kvmig.engines.base import Emitted
from kvmig.ground.config import MigrationConfig
from tests.fake_engine import FakeEngine

CONFIG = MigrationConfig(transport="tcp", rest="follow", reply_timeout_ms=2000)


@pytest.mark.parametrize("method", ["reserve", "follow", "extend"])
async def test_a_request_that_ends_while_it_moves_is_given_up_at_once(method: str) -> None:
    engines = {name: FakeEngine(num_blocks=1000, can_follow=True) for name in "ab"}
    engines["a"].start("r")
    async with kvmig.Migrator(engines, CONFIG) as migrator:
        heard = migrator.tap("a", lambda client, emitted, frames: None)

        async def end(called: str) -> None:
            if called == method:
                engines["a"].end("r")
                heard(1, [Emitted("r", 1, finished=True)], [])

        engines["b"].before = end
        report = await migrator.migrate("r", "a", "b")
    assert (report.state, report.reason) == ("aborted", "finished")
    assert all(engine.is_clean() for engine in engines.values())
