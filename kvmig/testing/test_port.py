"""What the port says of single methods."""

from __future__ import annotations

import pytest

from kvmig.core.errors import MigrationRefused
from kvmig.testing.suite import ConformanceSuite, scenario


@scenario
async def test_unknown_requests_are_ignored_where_the_port_says_so(suite: ConformanceSuite) -> None:
    engine = suite.engines["a"]
    await engine.resume("nobody")
    await engine.release("nobody")
    await engine.cancel("nobody")
    engine.abort(["nobody"])


@scenario
async def test_a_suspended_request_keeps_still_and_goes_on_when_resumed(
    suite: ConformanceSuite,
) -> None:
    engine, prompt = suite.engines["a"], suite.prompt(suite.blocks(2.5))
    expected = await suite.undisturbed(prompt, suite.blocks(8))
    kept = await suite.begin(prompt, suite.blocks(8), 3)
    await engine.export(kept)
    tail = await engine.suspend(kept, 0)
    states = {one.request_id: one for one in await engine.requests()}
    assert states[kept].state == "suspended"
    assert states[kept].tokens == tail.num_tokens == len(prompt) + tail.num_output_tokens
    other = suite.submit("a", suite.prompt(suite.blocks(1.5)), 5)
    await suite.finish(other)
    assert len(suite.came_from(kept)) == tail.num_output_tokens
    await engine.resume(kept)
    assert await suite.finish(kept) == expected


@scenario
async def test_a_request_is_reserved_once_and_holds_what_it_grew_to(
    suite: ConformanceSuite,
) -> None:
    a, b = suite.engines["a"], suite.engines["b"]
    prompt = suite.prompt(suite.blocks(4.5))
    moved = await suite.begin(prompt, suite.blocks(20), 2)
    export = await a.export(moved)
    before = b.load().used_blocks
    assert await b.reserve(export) == 0
    with pytest.raises(MigrationRefused):
        await b.reserve(export)
    first = await b.grow(moved, len(prompt))
    more = await b.grow(moved, len(prompt) + suite.blocks(3))
    assert more[: len(first)] == first
    assert len(more) > len(first)
    await suite.until(lambda: b.load().used_blocks >= before + len(more))
    await b.cancel(moved)
    await a.resume(moved)
    suite.abort(moved)


@scenario
async def test_blocks_come_out_as_they_went_in(suite: ConformanceSuite) -> None:
    a, b = suite.engines["a"], suite.engines["b"]
    moved = await suite.begin(suite.prompt(suite.blocks(4.5)), suite.blocks(20), 2)
    export, stage = await a.export(moved), await a.stage(moved, 0)
    size = len(stage.block_ids) * a.layout.block_bytes
    sent, back = memoryview(bytearray(size)), memoryview(bytearray(size))
    checksums = await a.gather(stage.block_ids, sent)
    await b.reserve(export)
    block_ids = (await b.grow(moved, stage.num_tokens))[: len(stage.block_ids)]
    assert await b.scatter(block_ids, sent) == checksums
    assert await b.gather(block_ids, back) == checksums
    assert back == sent
    await b.cancel(moved)
    await a.resume(moved)
    suite.abort(moved)


@scenario
async def test_an_export_of_another_kind_is_refused(suite: ConformanceSuite) -> None:
    export = suite.engines["a"].export
    moved = await suite.begin(suite.prompt(suite.blocks(1.5)), suite.blocks(20), 1)
    foreign = await export(moved)
    foreign.payload[:] = [b"\xc1 nothing that anybody has encoded"]
    with pytest.raises(MigrationRefused):
        await suite.engines["b"].reserve(foreign)
    await suite.engines["a"].resume(moved)
    suite.abort(moved)


@scenario
async def test_a_request_goes_on_after_tokens_that_it_has_from_elsewhere(
    suite: ConformanceSuite,
) -> None:
    prompt = suite.prompt(suite.blocks(1.5))
    expected = await suite.undisturbed(prompt, suite.blocks(2))
    again = suite.submit("b", prompt, suite.blocks(2), known=expected[:5])
    assert await suite.finish(again) == expected[5:]
