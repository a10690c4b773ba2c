"""An aborted migration leaves the request running where it was, and nothing anywhere else."""

from __future__ import annotations

import asyncio

import pytest

from kvmig.core.errors import MigrationRefused, RequestGone
from kvmig.testing.fullness import empty, fill
from kvmig.testing.interposed import DESTINATION, SOURCE, failing, once
from kvmig.testing.suite import QUICKER, ConformanceSuite, scenario


@pytest.mark.parametrize("method", [*SOURCE, *DESTINATION])
@pytest.mark.parametrize("after", [0, 1])
@scenario
async def test_whatever_fails_the_request_goes_on(
    suite: ConformanceSuite, method: str, after: int
) -> None:
    prompt = suite.prompt(suite.blocks(5.5))
    expected = await suite.undisturbed(prompt, suite.blocks(3))
    moved = await suite.begin(prompt, suite.blocks(3), 3)
    engine = suite.engines["a" if method in SOURCE else "b"]
    engine.before = failing(method, MigrationRefused("error", "for a test"), after)
    report = await suite.move(moved)
    if after == 0:
        assert report.state == "aborted"
        assert report.reason in ("error", *QUICKER)
    assert await suite.finish(moved) == expected
    if report.state == "aborted":
        assert set(suite.came_from(moved)) == {"a"}


@pytest.mark.parametrize("method", [*SOURCE, *DESTINATION[:-1]])
@scenario
async def test_a_client_that_leaves_at_any_moment_leaves_nothing(
    suite: ConformanceSuite, method: str
) -> None:
    moved = await suite.begin(suite.prompt(suite.blocks(5.5)), suite.blocks(20), 3)
    engine = suite.engines["a" if method in SOURCE else "b"]
    engine.before = once(method, lambda: suite.abort(moved))
    assert (await suite.move(moved)).state == "aborted"


@scenario
async def test_a_client_that_leaves_at_the_commit_leaves_nothing(suite: ConformanceSuite) -> None:
    moved = await suite.begin(suite.prompt(suite.blocks(5.5)), suite.blocks(20), 3)
    committing = asyncio.Event()

    def leave() -> None:
        suite.abort(moved)
        committing.set()

    suite.engines["b"].before = once("commit", leave)
    moving = asyncio.create_task(suite.move(moved))
    await committing.wait()
    # The report would wait for a first token that nobody waits for any more.
    await asyncio.sleep(0.1)
    moving.cancel()
    suite.abort(moved)


@scenario
async def test_a_moved_request_can_be_aborted(suite: ConformanceSuite) -> None:
    moved = await suite.begin(suite.prompt(suite.blocks(2)), suite.blocks(20), 2)
    assert (await suite.move(moved)).state == "committed"
    suite.abort(moved)


@scenario
async def test_a_full_destination_refuses_and_the_request_goes_on(suite: ConformanceSuite) -> None:
    prompt = suite.prompt(suite.blocks(5.5))
    expected = await suite.undisturbed(prompt, suite.blocks(3))
    hogs = await fill(suite, "b")
    moved = await suite.begin(prompt, suite.blocks(3), 2)
    report = await suite.move(moved)
    assert report.state == "aborted"
    assert report.reason in ("no_blocks", "no_batch_slot", *QUICKER)
    assert await suite.finish(moved) == expected
    await empty(suite, "b", hogs)


@scenario
async def test_changed_bytes_are_noticed_and_the_request_goes_on(suite: ConformanceSuite) -> None:
    source, prompt = suite.under_test["a"], suite.prompt(suite.blocks(5.5))
    expected = await suite.undisturbed(prompt, suite.blocks(8))
    moved = await suite.begin(prompt, suite.blocks(8), 2)
    export = await source.export(moved)
    stage = await source.stage(moved, 0)
    fused = memoryview(bytearray(len(stage.block_ids) * source.layout.block_bytes))
    sent = await source.gather(stage.block_ids, fused)
    fused[len(fused) // 2] ^= 1
    destination = suite.engines["b"]
    await destination.reserve(export)
    block_ids = await destination.grow(moved, stage.num_tokens)
    came = await destination.scatter(block_ids[: len(sent)], fused)
    assert sum(one != other for one, other in zip(sent, came, strict=True)) == 1
    await destination.cancel(moved)
    await source.resume(moved)
    assert await suite.finish(moved) == expected


@scenario
async def test_a_request_that_is_gone_can_not_be_moved(suite: ConformanceSuite) -> None:
    with pytest.raises(MigrationRefused):
        await suite.engines["a"].export("never was")
    ended = suite.submit("a", suite.prompt(suite.blocks(1.5)), 3)
    await suite.finish(ended)
    assert (await suite.move(ended)).state == "aborted"
    aborted = await suite.begin(suite.prompt(suite.blocks(1.5)), suite.blocks(20), 2)
    await suite.engines["a"].export(aborted)
    suite.abort(aborted)
    await asyncio.sleep(0.05)
    with pytest.raises(RequestGone):
        await suite.engines["a"].suspend(aborted, 0)
