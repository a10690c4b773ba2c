"""Requests move between engines of different block and tensor-parallel sizes, token for token."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from tests.support.vllm_pair import LONG, PROMPT, SAMPLING, Pair
from tests.support.vllm_side import Configuration, Output

pytestmark = pytest.mark.engine

UNIT = 32
"""The smallest block of vLLM's CPU attention."""
OTHER_SHAPES = {
    "blocks of 64": ("--block-size=64",),
    "two workers and blocks of 96": ("--tensor-parallel-size=2", "--block-size=96"),
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(flags, id=name, marks=pytest.mark.long if "workers" in name else ())
        for name, flags in OTHER_SHAPES.items()
    ],
)
def configurations(request: pytest.FixtureRequest) -> tuple[Configuration, Configuration]:
    exact = Configuration(flags=("--dtype=float32",), unit_tokens=UNIT)
    return exact, replace(exact, flags=(*exact.flags, *request.param))


def same(moved: Output, unmoved: Output) -> None:
    assert moved.tokens == unmoved.tokens
    assert moved.finish_reason == unmoved.finish_reason
    # Sums in another order: the last digits of a 32-bit float.
    np.testing.assert_allclose(moved.logprobs, unmoved.logprobs, atol=1e-3)


@pytest.mark.parametrize("name", ["greedy", "seeded", "penalties"])
async def test_a_request_moved_there_and_back_equals_one_left_alone(pair: Pair, name: str) -> None:
    unmoved = await pair.unmoved(PROMPT, **SAMPLING[name])
    same(await pair.there_and_back(PROMPT, **SAMPLING[name]), unmoved)


async def test_a_request_moves_in_the_middle_of_its_prefill(pair: Pair) -> None:
    unmoved = await pair.unmoved(LONG)
    pair.submit(pair.b, "moved", LONG)
    pair.b.step()
    pair.b.step()
    await pair.settle()
    assert "moved" not in pair.outputs

    await pair.move(pair.b, pair.a, "moved", steps=1)

    same(await pair.finish("moved"), unmoved)


async def test_a_prefix_that_ends_inside_the_sources_block_need_not_travel(pair: Pair) -> None:
    prompt = LONG[:560]
    unmoved = await pair.unmoved(prompt)
    pair.submit(pair.a, "before", prompt, max_tokens=1)
    await pair.finish("before")
    await pair.run(pair.b, "moved", prompt, until=10)

    hit = await pair.move(pair.b, pair.a, "moved")

    assert hit == 560 // UNIT  # 17: an odd half of blocks of 64, two thirds of one of 96
    same(await pair.finish("moved"), unmoved)


async def test_a_prefix_is_found_in_larger_blocks(pair: Pair) -> None:
    unmoved = await pair.unmoved(LONG)
    pair.submit(pair.b, "before", LONG, max_tokens=1)
    await pair.finish("before")
    await pair.run(pair.a, "moved", LONG, until=10)

    hit = await pair.move(pair.a, pair.b, "moved")

    assert hit == 576 // UNIT  # whole blocks of 32, 64 and 96
    same(await pair.finish("moved"), unmoved)


async def test_both_count_what_they_hold_in_units(pair: Pair) -> None:
    for side in (pair.a, pair.b):
        pair.submit(side, f"at {side.used_blocks}", PROMPT, max_tokens=4)
        side.step()
        await asyncio.sleep(0.02)  # the snapshot is renewed with the next call
        (row,) = await pair.done(side.engine.requests())
        blocks = row.blocks
        assert blocks >= len(PROMPT) / UNIT
        assert side.engine.load().used_blocks == blocks
        await pair.finish(row.request_id)
        pair.outputs.clear()


async def test_with_other_bytes_in_the_units_the_answer_would_differ(pair: Pair) -> None:
    """So the other tests can fail: the output does depend on what is copied."""
    unmoved = await pair.unmoved(LONG)
    export = await pair.exported("moved", LONG, until=10)
    await pair.done(pair.b.engine.reserve(export))
    tail = await pair.suspend(pair.a, "moved", 0)

    units = await pair.done(pair.b.engine.grow("moved", tail.num_tokens))
    nothing = memoryview(bytearray(len(units) * pair.b.engine.layout.block_bytes))
    await pair.done(pair.b.engine.scatter(units, nothing))
    pair.b.engine.assign("moved", 1)
    await pair.done(pair.b.engine.commit("moved", tail))
    await pair.done(pair.a.engine.release("moved"))

    moved = await pair.finish("moved")
    assert not np.allclose(moved.logprobs, unmoved.logprobs, atol=1e-3)
