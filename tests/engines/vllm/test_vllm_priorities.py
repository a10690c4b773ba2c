"""Migration among requests that vLLM orders, and preempts, by priority."""

from __future__ import annotations

import pytest

from kvmig.core.errors import RequestGone
from kvmig.engines.base import PreemptionCount
from tests.support.vllm_pair import SEEDED, Pair
from tests.support.vllm_side import BY_PRIORITY, Configuration, Output, Side

pytestmark = pytest.mark.engine

HIGH = -1
# Of 39 blocks of 32 tokens: together they fit when they start, and not when they have grown.
LONG = [40 + number * number % 90 for number in range(590)]
OTHER = [50 + number * number % 70 for number in range(600)]


@pytest.fixture(scope="module")
def configurations() -> tuple[Configuration, Configuration]:
    return BY_PRIORITY, BY_PRIORITY


def preempted(side: Side) -> dict[int, PreemptionCount]:
    """Counts by priority until now."""
    side.look_at_load()
    return {one.priority: one for one in side.engine.load().preempted}


async def until_preempted(pair: Pair, side: Side, priority: int) -> None:
    """Step that side until a request of this priority was preempted there."""
    before = preempted(side).get(priority, PreemptionCount(priority, 0, 0))
    for _ in range(300):
        side.step()
        await pair.settle()
        now = preempted(side).get(priority, before)
        if now.times > before.times:
            assert now.below > before.below
            return
    raise AssertionError("nothing was preempted")


def as_if_alone(beside: Output, alone: Output) -> None:
    """The same tokens; their log-probabilities to the sixth digit: kernels of a CPU round otherwise
    with a neighbour in the batch, in the last digit of a 32-bit float."""
    assert beside.tokens == alone.tokens
    for one, other in zip(beside.logprobs, alone.logprobs, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


async def test_a_request_that_moves_is_preempted_by_one_that_came_later(pair: Pair) -> None:
    unmoved = await pair.unmoved(LONG, **SEEDED)
    first = await pair.unmoved(OTHER)
    await pair.run(pair.a, "normal", LONG, **SEEDED, until=2)
    await pair.run(pair.a, "high", OTHER, priority=HIGH, until=2)
    export = await pair.done(pair.a.engine.export("normal"))
    await pair.done(pair.b.engine.reserve(export))

    await until_preempted(pair, pair.a, 0)

    with pytest.raises(RequestGone, match="preempted"):
        await pair.done(pair.a.engine.stage("normal", 0))
    await pair.done(pair.b.engine.cancel("normal"))
    as_if_alone(await pair.finish("high"), first)
    assert (await pair.finish("normal")).tokens == unmoved.tokens


async def test_one_that_moves_in_preempts_those_of_a_class_below(pair: Pair) -> None:
    unmoved = await pair.unmoved(LONG, **SEEDED)
    first = await pair.unmoved(OTHER)
    pair.submit(pair.a, "high", OTHER, priority=HIGH)
    pair.submit(pair.b, "normal", LONG, **SEEDED)
    await pair.step(pair.a, pair.b, until=("high", 3))

    await pair.move(pair.a, pair.b, "high")
    await until_preempted(pair, pair.b, 0)

    as_if_alone(await pair.finish("high"), first)
    assert (await pair.finish("normal")).tokens == unmoved.tokens


async def test_a_moved_request_is_preempted_at_its_destination_and_ends_exactly(
    pair: Pair,
) -> None:
    unmoved = await pair.unmoved(LONG, max_tokens=60, **SEEDED)
    pair.submit(pair.b, "high", OTHER, max_tokens=60, priority=HIGH)
    pair.submit(pair.a, "moved", LONG, max_tokens=60, **SEEDED)
    await pair.step(pair.a, pair.b, until=("moved", 3))

    await pair.move(pair.a, pair.b, "moved")
    await until_preempted(pair, pair.b, 0)

    await pair.finish("high")
    assert (await pair.finish("moved")).tokens == unmoved.tokens


async def test_a_queue_keeps_its_order_when_one_leaves_it_and_returns(pair: Pair) -> None:
    for number in range(4):
        pair.submit(pair.a, f"runs {number}", LONG[:50], max_tokens=12)
    await pair.step(pair.a, until=("runs 3", 2))
    for name, priority in (("low", 5), ("normal", 0), ("high", HIGH)):
        pair.submit(pair.a, name, LONG[:60], priority=priority, max_tokens=5)
    pair.a.take_calls()
    await pair.done(pair.a.engine.export("high"))
    await pair.suspend(pair.a, "high", 0)

    await pair.done(pair.a.engine.resume("high"))

    waiting = [one.request_id for one in pair.a.scheduler.waiting]
    assert waiting == ["high", "normal", "low"]
    await pair.finish("low")
    assert list(pair.outputs)[4:] == ["high", "normal", "low"]
