"""Following: a destination computes along with a request that another engine decodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kvmig.engines.base import EngineLoad
from kvmig.ground.errors import MigrationRefused, RequestGone
from tests.vllm_pair import Output, Pair, Side

pytestmark = pytest.mark.engine

PROMPT = [40 + number * number % 90 for number in range(100)]


@pytest.fixture(scope="module", params=["sync", "async"])
def engines(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(async_scheduling=request.param == "async")
    yield pair
    pair.close()


@pytest.fixture
async def pair(engines: Pair) -> AsyncIterator[Pair]:
    engines.begin()
    yield engines
    await engines.assert_empty()


def same(moved: Output, unmoved: Output) -> None:
    assert moved.tokens == unmoved.tokens
    assert moved.logprobs == unmoved.logprobs
    assert moved.finish_reason == unmoved.finish_reason


async def lead(pair: Pair, steps: int, *sides: Side) -> None:
    """Step the sides, the source among them."""
    for _ in range(steps):
        for side in sides:
            side.step()
        await pair.settle()


async def follow(pair: Pair, request_id: str, pace: list[tuple[int, int]]) -> None:
    """Move from a to b: by turns, so many steps of the source and then of the destination."""
    said = await pair.fork(pair.a, pair.b, request_id)
    for at_source, at_destination in pace:
        await lead(pair, at_source, pair.a)
        await pair.extend(pair.b, request_id, said)
        await lead(pair, at_destination, pair.b)
    await pair.switch(pair.a, pair.b, request_id)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.9, "seed": 7, "top_p": 0.9},
        {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"temperature": 1.5, "seed": 5, "min_tokens": 40, "stop_token_ids": [60, 61, 62]},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "pace",
    [[(1, 1)] * 4, [(3, 1), (1, 1), (2, 1)], [(1, 0)] * 3, [(2, 5)], []],
    ids=["in step", "slow destination", "destination stands", "fast destination", "at once"],
)
async def test_a_request_switched_to_its_follower_equals_one_left_alone(
    pair: Pair, params: dict[str, Any], pace: list[tuple[int, int]]
) -> None:
    unmoved = await pair.unmoved(PROMPT, **params)
    pair.submit(pair.a, "moved", PROMPT, **params)
    await pair.step(pair.a, until=("moved", 10))

    await follow(pair, "moved", pace)

    same(await pair.finish("moved"), unmoved)


async def test_it_follows_over_the_end_of_a_block(pair: Pair) -> None:
    unmoved = await pair.unmoved(PROMPT)
    pair.submit(pair.a, "moved", PROMPT)
    await pair.step(pair.a, until=("moved", 10))

    await follow(pair, "moved", [(1, 1)] * 36)

    same(await pair.finish("moved"), unmoved)


async def test_among_others_at_the_destination_all_get_the_same(pair: Pair) -> None:
    alone = await pair.unmoved(PROMPT[3:])
    unmoved = await pair.unmoved(PROMPT)
    pair.submit(pair.b, "other", PROMPT[3:])
    await pair.step(pair.b, until=("other", 5))
    pair.submit(pair.a, "moved", PROMPT)
    await pair.step(pair.a, until=("moved", 10))

    await follow(pair, "moved", [(2, 1), (0, 2), (1, 1)])

    assert (await pair.finish("moved")).tokens == unmoved.tokens
    assert (await pair.finish("other")).tokens == alone.tokens


async def test_a_step_that_expects_a_commit_waits_for_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmoved = await pair.unmoved(PROMPT)
    pair.submit(pair.b, "other", PROMPT[3:])
    await pair.step(pair.b, until=("other", 5))
    pair.submit(pair.a, "moved", PROMPT)
    await pair.step(pair.a, until=("moved", 10))
    await pair.fork(pair.a, pair.b, "moved")
    tail = await pair.suspend(pair.a, "moved", 10**6)
    for module in ("step_hold", "vllm.core"):  # nothing but the commit may end the wait
        monkeypatch.setattr(f"kvmig.engines.{module}.limit_s", lambda step_s: 60.0)
    engine = pair.b.engine
    engine.expect("moved", 0.0)
    engine.assign("moved", 1)
    commit = asyncio.ensure_future(engine.commit("moved", tail))
    await pair.settle()

    pair.b.core._process_engine_step()

    assert not engine._destination.is_arriving("moved")
    await pair.done(commit)
    await pair.done(pair.a.engine.release("moved"))
    assert (await pair.finish("moved")).tokens == unmoved.tokens
    await pair.finish("other")


async def test_a_follower_puts_nothing_out_and_is_no_request_of_the_destination(
    pair: Pair,
) -> None:
    pair.submit(pair.a, "kept", PROMPT)
    await pair.step(pair.a, until=("kept", 10))
    said = await pair.fork(pair.a, pair.b, "kept")
    await lead(pair, 2, pair.a)
    await pair.extend(pair.b, "kept", said)

    await lead(pair, 3, pair.b)

    assert len(pair.outputs["kept"].tokens) == 12
    assert await pair.done(pair.b.engine.requests()) == []
    with pytest.raises(MigrationRefused, match="not here"):
        await pair.done(pair.b.engine.export("kept"))
    assert not pair.b.core.has_work()
    load: EngineLoad = pair.b.engine.load()
    assert (load.running, load.waiting) == (0, 0)
    await pair.done(pair.b.engine.cancel("kept"))
    await pair.done(pair.a.engine.resume("kept"))
    await pair.finish("kept")


async def test_a_cancelled_follower_leaves_the_source_as_it_was(pair: Pair) -> None:
    unmoved = await pair.unmoved(PROMPT, temperature=0.9, seed=2)
    pair.submit(pair.a, "kept", PROMPT, temperature=0.9, seed=2)
    await pair.step(pair.a, until=("kept", 10))
    said = await pair.fork(pair.a, pair.b, "kept")
    await lead(pair, 2, pair.a)
    await pair.extend(pair.b, "kept", said)
    pair.b.step()

    await pair.done(pair.b.engine.cancel("kept"))
    await pair.done(pair.a.engine.resume("kept"))

    same(await pair.finish("kept"), unmoved)


async def test_tokens_that_were_left_out_are_noticed(pair: Pair) -> None:
    pair.submit(pair.a, "kept", PROMPT)
    await pair.step(pair.a, until=("kept", 10))
    await pair.fork(pair.a, pair.b, "kept")

    with pytest.raises(MigrationRefused, match="token 12 after 10"):
        await pair.done(pair.b.engine.extend("kept", 12, [50]))

    await pair.done(pair.b.engine.cancel("kept"))
    await pair.done(pair.a.engine.resume("kept"))
    await pair.finish("kept")


async def test_tokens_said_twice_count_once(pair: Pair) -> None:
    unmoved = await pair.unmoved(PROMPT)
    pair.submit(pair.a, "moved", PROMPT)
    await pair.step(pair.a, until=("moved", 10))
    said = await pair.fork(pair.a, pair.b, "moved")
    await lead(pair, 2, pair.a)
    again = list(said)
    await pair.extend(pair.b, "moved", said)

    await pair.done(pair.b.engine.extend("moved", 10, again))
    await pair.switch(pair.a, pair.b, "moved")

    same(await pair.finish("moved"), unmoved)


async def test_a_source_that_contradicts_itself_is_refused(pair: Pair) -> None:
    pair.submit(pair.a, "kept", PROMPT)
    await pair.step(pair.a, until=("kept", 10))
    await pair.fork(pair.a, pair.b, "kept")
    await pair.done(pair.b.engine.extend("kept", 10, [1]))
    await lead(pair, 2, pair.a)
    tail = await pair.suspend(pair.a, "kept", 10**6)

    with pytest.raises(MigrationRefused, match="other tokens"):
        await pair.done(pair.b.engine.commit("kept", tail))

    await pair.done(pair.a.engine.resume("kept"))
    await pair.finish("kept")


async def test_a_follower_that_is_preempted_is_lost_and_the_source_goes_on(pair: Pair) -> None:
    unmoved = await pair.unmoved(PROMPT)
    pair.submit(pair.a, "kept", PROMPT)
    await pair.step(pair.a, until=("kept", 10))
    said = await pair.fork(pair.a, pair.b, "kept")
    await lead(pair, 2, pair.a)
    await pair.extend(pair.b, "kept", said)
    scheduler = pair.b.engine._scheduler
    request = scheduler.requests["kept"]
    scheduler.running.remove(request)
    scheduler._preempt_request(request, 0.0)
    pair.b.engine.between_steps()

    with pytest.raises(MigrationRefused, match="does not follow"):
        await pair.extend(pair.b, "kept", said)

    await pair.done(pair.b.engine.cancel("kept"))
    await pair.done(pair.a.engine.resume("kept"))
    same(await pair.finish("kept"), unmoved)


async def test_a_request_that_ends_while_it_is_followed_is_gone(pair: Pair) -> None:
    pair.submit(pair.a, "short", PROMPT, max_tokens=12)
    await pair.step(pair.a, until=("short", 10))
    await pair.fork(pair.a, pair.b, "short")
    await pair.finish("short")

    with pytest.raises(RequestGone):
        await pair.done(pair.a.engine.suspend("short", 10**6))

    await pair.done(pair.b.engine.cancel("short"))
