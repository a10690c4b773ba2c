"""`Migrator` over engines in memory: what it hears of them through its taps."""

from __future__ import annotations

import threading
from dataclasses import replace

import msgspec
import pytest

import kvmig
from kvmig import migrator as migrator_module
from kvmig.core.config import MigrationConfig, Transport
from kvmig.core.errors import KvmigError
from kvmig.core.layout import KVLayout
from kvmig.engines.base import EmittedTokens
from kvmig.testing.interposed import failing
from tests.support.fake_engine import BLOCK_BYTES, FakeEngine
from tests.support.inside import end_loop, loop_of

CONFIG = MigrationConfig(transport="tcp", reply_timeout_ms=20_000, lease_ms=60_000)


@pytest.mark.parametrize("method", ["reserve", "grow", "scatter"])
async def test_a_request_that_ends_while_it_moves_is_given_up_at_once(method: str) -> None:
    engines = {name: FakeEngine(num_blocks=1000) for name in "ab"}
    engines["a"].start("r")
    async with kvmig.Migrator(engines, CONFIG) as migrator:
        heard = migrator.tap("a", lambda client, emitted, frames: None)

        async def end(called: str) -> None:
            if called == method:
                engines["a"].end("r")
                heard(1, [EmittedTokens("r", 1, finished=True)], [])

        engines["b"].before = end
        report = await migrator.migrate("r", "a", "b")
    assert (report.state, report.reason) == ("aborted", "finished")
    assert all(engine.is_clean() for engine in engines.values())


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_blocks_larger_than_chunk_bytes_move(transport: Transport) -> None:
    engines = {name: FakeEngine() for name in "ab"}
    engines["a"].start("r")
    config = msgspec.structs.replace(CONFIG, transport=transport, chunk_bytes=BLOCK_BYTES // 2)
    async with kvmig.Migrator(engines, config) as migrator:
        report = await migrator.migrate("r", "a", "b")
    assert (report.state, report.reason) == ("committed", "")
    assert "r" in engines["b"].running


async def test_a_request_moves_on_and_back_between_any_engines() -> None:
    engines = {name: FakeEngine() for name in "abc"}
    engines["a"].start("r")
    async with kvmig.Migrator(engines, CONFIG) as migrator:
        for source, destination in ("ab", "bc", "cb", "ba", "ac", "cb"):
            report = await migrator.migrate("r", source, destination)
            assert (report.state, report.reason) == ("committed", "")
    assert "r" in engines["b"].running


async def test_a_later_request_of_the_same_id_moves_as_the_first_one_did() -> None:
    engines = {name: FakeEngine() for name in "abc"}
    async with kvmig.Migrator(engines, CONFIG) as migrator:
        for source in "ac":
            engines[source].start("r")
            assert (await migrator.migrate("r", source, "b")).reason == ""
            engines["b"].end("r")


@pytest.mark.parametrize("unmovable", ["a", "b"])
async def test_an_engine_whose_requests_can_not_be_moved_neither_gives_nor_takes_any(
    unmovable: str,
) -> None:
    engines = {name: FakeEngine() for name in "ab"}
    engines["a"].start("r")
    engines[unmovable].unmovable = "7 kinds of cache"
    engines[unmovable].layout = replace(engines[unmovable].layout, gpu=0)
    async with kvmig.Migrator(engines, CONFIG) as migrator:
        report = await migrator.migrate("r", "a", "b")
    assert (report.state, report.reason) == ("aborted", "unsupported")
    assert "7 kinds of cache" in report.detail
    assert engines[unmovable].calls == []
    assert "r" in engines["a"].running


@pytest.mark.parametrize(("transport", "arrives"), [("shm", ["scatter"]), ("tcp", [])])
async def test_a_gpu_gets_ready_for_memory_before_a_request_waits_for_that(
    transport: Transport, arrives: list[str]
) -> None:
    """A12: by copies of no blocks at all."""
    engines = {name: FakeEngine() for name in "ab"}
    for engine in engines.values():
        engine.layout = replace(engine.layout, gpu=0)
    engines["a"].start("r")
    config = msgspec.structs.replace(CONFIG, transport=transport)
    async with kvmig.Migrator(engines, config) as migrator:
        assert [engine.calls for engine in engines.values()] == [["gather"], ["gather"]]
        assert (await migrator.migrate("r", "a", "b")).state == "committed"
    assert engines["a"].calls[1] == "export"
    assert engines["b"].calls[1 : 2 + len(arrives)] == [*arrives, "reserve"]


async def test_a_gpu_that_can_not_get_ready_leaves_nothing_of_a_migrator() -> None:
    engines = {name: FakeEngine() for name in "ab"}
    engines["b"].layout = replace(engines["b"].layout, gpu=0)
    engines["b"].before = failing("gather", KvmigError("cuMemHostRegister: unknown error"))
    migrator = kvmig.Migrator(engines, msgspec.structs.replace(CONFIG, transport="shm"))
    with pytest.raises(KvmigError, match="cuMemHostRegister"):
        await migrator.__aenter__()
    assert not migrator.held()
    assert (await migrator.migrate("r", "a", "b")).reason == "shutdown"


async def test_an_engine_without_any_blocks_to_move_is_one_of_a_migrator_too() -> None:
    engines = {name: FakeEngine() for name in "ab"}
    engines["b"].layout, engines["b"].unmovable = KVLayout((), 200, 4), "7 kinds of cache"
    async with kvmig.Migrator(engines, CONFIG) as migrator:
        report = await migrator.migrate("r", "b", "a")
    assert (report.reason, report.detail) == ("unsupported", "7 kinds of cache")


def test_a_callback_that_holds_the_loop_does_not_hold_who_closes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(migrator_module, "END_S", 0.05)
    held = threading.Event()
    migrator = migrator_module.SyncMigrator({})
    migrator.run(migrator.migrator.close())
    loop_of(migrator).call_soon_threadsafe(held.wait)
    with pytest.raises(TimeoutError, match=r"has held the migrator's event loop for 0.05 s"):
        end_loop(migrator)
    held.set()
    end_loop(migrator)
