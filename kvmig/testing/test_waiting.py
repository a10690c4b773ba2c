"""A request that waits moves without room, and only as long as it waits."""

from __future__ import annotations

import asyncio

from kvmig.testing.fullness import empty, fill
from kvmig.testing.suite import ConformanceSuite, scenario


async def _waits(suite: ConformanceSuite, name: str, request_id: str) -> None:
    """Wait until the engine has queued the request."""
    while True:
        states = {one.request_id: one.state for one in await suite.engines[name].requests()}
        if request_id in states:
            assert states[request_id] == "waiting"
            return
        await asyncio.sleep(0.01)


@scenario
async def test_a_request_that_waits_moves_to_an_engine_without_room_and_runs_once_there_is_some(
    suite: ConformanceSuite,
) -> None:
    prompt, b = suite.prompt(suite.blocks(5.5)), suite.engines["b"]
    expected = await suite.undisturbed(prompt, suite.blocks(1))
    hogs = await fill(suite, "b", "a")
    moved = suite.submit("a", prompt, suite.blocks(1))
    await _waits(suite, "a", moved)
    used = b.load().used_blocks
    report = await suite.move(moved)
    assert report.state == "committed", (report.reason, report.detail)
    assert (report.stages, report.tail_blocks) == ([], 0)
    await _waits(suite, "b", moved)
    assert b.load().used_blocks == used
    await empty(suite, "b", hogs)
    assert await suite.finish(moved) == expected
    assert set(suite.came_from(moved)) == {"b"}
    await empty(suite, "a", hogs)


@scenario
async def test_a_request_that_begins_to_run_while_it_moves_without_room_stays(
    suite: ConformanceSuite,
) -> None:
    prompt, a = suite.prompt(suite.blocks(5.5)), suite.engines["a"]
    expected = await suite.undisturbed(prompt, suite.blocks(6))
    hogs = await fill(suite, "b", "a")
    moved = suite.submit("a", prompt, suite.blocks(6))
    await _waits(suite, "a", moved)

    async def starts(method: str) -> None:
        if method == "suspend":
            await empty(suite, "a", hogs)
            await suite.reach(moved, 1)

    a.before = starts
    report = await suite.move(moved)
    assert (report.state, report.reason in ("started", "finished")) == ("aborted", True)
    assert await suite.finish(moved) == expected
    assert set(suite.came_from(moved)) == {"a"}
    await empty(suite, "b", hogs)
