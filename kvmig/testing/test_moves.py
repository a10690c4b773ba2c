"""A request that moves gets exactly the tokens of one that stays."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvmig.kvtransfer.report import MigrationReport
from kvmig.testing.suite import QUICKER, ConformanceSuite, scenario, until_moved


@pytest.mark.parametrize("blocks", [0.3, 1, 4.5])
@pytest.mark.parametrize("after", [1, 7])
@scenario
@until_moved
async def test_a_decoding_request_moves_token_for_token(
    suite: ConformanceSuite, blocks: float, after: int
) -> MigrationReport:
    prompt = suite.prompt(suite.blocks(blocks))
    expected = await suite.undisturbed(prompt, suite.blocks(3))
    moved = await suite.begin(prompt, suite.blocks(3), after)
    report = await suite.move(moved)
    assert await suite.finish(moved) == expected
    engines = suite.came_from(moved)
    assert engines == sorted(engines)
    if report.state == "committed":
        assert engines.count("a") == (report.output_tokens or 0) >= after
    return report


@pytest.mark.parametrize("blocks", [0.5, 6, 24])
@scenario
async def test_a_request_moves_before_its_first_token(
    suite: ConformanceSuite, blocks: float
) -> None:
    prompt = suite.prompt(suite.blocks(blocks))
    expected = await suite.undisturbed(prompt, suite.blocks(1))
    prompt_again = suite.submit("a", prompt, suite.blocks(1))
    report = await suite.move(prompt_again)
    assert report.state == "committed" or report.reason in QUICKER
    assert await suite.finish(prompt_again) == expected


@scenario
async def test_a_request_moves_in_its_prefill(suite: ConformanceSuite) -> None:
    """The move begins before an engine has computed the prompt, while other requests run."""
    prompt = suite.prompt(suite.blocks(24))
    others = [suite.submit("a", suite.prompt(suite.blocks(2)), 20) for _ in range(3)]
    moved = suite.submit("a", prompt, suite.blocks(1))
    report = await suite.move(moved)
    assert report.state == "committed" or report.reason in QUICKER
    tokens = await suite.finish(moved)
    await asyncio.gather(*(suite.finish(other) for other in others))
    assert tokens == await suite.undisturbed(prompt, suite.blocks(1))


@pytest.mark.parametrize("blocks", [0.5, 6, 24])
@scenario
@until_moved
async def test_a_prompt_is_computed_at_one_engine_and_decoded_at_the_other(
    suite: ConformanceSuite, blocks: float
) -> MigrationReport:
    """The chunks travel while other requests run, and later chunks are computed."""
    prompt = suite.prompt(suite.blocks(blocks))
    expected = await suite.undisturbed(prompt, suite.blocks(3))
    others = [suite.submit("a", suite.prompt(suite.blocks(2)), 20) for _ in range(2)]
    moved = suite.submit("a", prompt, suite.blocks(3))
    await suite.begun(moved)
    report = await suite.move(moved, after_prompt=True)
    assert await suite.finish(moved) == expected
    await asyncio.gather(*(suite.finish(other) for other in others))
    if report.state == "committed":
        assert suite.came_from(moved)[:1] == ["a"]
    return report


@scenario
@until_moved
async def test_a_request_that_samples_moves_token_for_token(
    suite: ConformanceSuite,
) -> MigrationReport:
    prompt = suite.prompt(suite.blocks(2.5))
    try:
        expected = await suite.undisturbed(prompt, suite.blocks(3), seed=11)
    except NotImplementedError:
        pytest.skip("the engine can't sample with a seed")
    moved = await suite.begin(prompt, suite.blocks(3), 5, seed=11)
    report = await suite.move(moved)
    assert await suite.finish(moved) == expected
    return report


@scenario
@until_moved
async def test_a_request_moves_there_and_back_again(suite: ConformanceSuite) -> MigrationReport:
    prompt = suite.prompt(suite.blocks(2.5))
    expected = await suite.undisturbed(prompt, suite.blocks(6))
    moved = suite.submit("a", prompt, suite.blocks(6))
    for turn, (source, to) in enumerate([("a", "b"), ("b", "a"), ("a", "b")]):
        await suite.reach(moved, 3 + 5 * turn)
        report = await suite.move(moved, source, to)
    assert await suite.finish(moved) == expected
    return report


@scenario
@until_moved
async def test_a_destination_with_its_prefix_goes_on_as_well(
    suite: ConformanceSuite,
) -> MigrationReport:
    prompt = suite.prompt(suite.blocks(4.5))
    expected = await suite.undisturbed(prompt, suite.blocks(3))
    assert await suite.finish(suite.submit("b", prompt, suite.blocks(3))) == expected
    moved = await suite.begin(prompt, suite.blocks(3), 5)
    report = await suite.move(moved)
    assert await suite.finish(moved) == expected
    return report


@scenario
async def test_several_move_at_once_both_ways_beside_others_that_stay(
    suite: ConformanceSuite,
) -> None:
    prompts = [suite.prompt(suite.blocks(0.7 + index)) for index in range(6)]
    length = suite.blocks(3)
    expected = [await suite.undisturbed(prompt, length) for prompt in prompts]
    homes = ["a", "b", "a", "b", "a", "b"]
    ids = [suite.submit(home, prompt, length) for home, prompt in zip(homes, prompts, strict=True)]
    await asyncio.gather(*(suite.reach(request_id, 2) for request_id in ids))
    reports = await asyncio.gather(
        *(
            suite.move(request_id, home, "b" if home == "a" else "a")
            for request_id, home in list(zip(ids, homes, strict=True))[:4]
        )
    )
    full = {"no_batch_slot", "no_blocks"}
    assert {r.reason for r in reports if r.state != "committed"} <= {*QUICKER, *full}
    assert [await suite.finish(request_id) for request_id in ids] == expected


@scenario
async def test_a_request_that_ends_while_it_moves_ends_once(suite: ConformanceSuite) -> None:
    prompt = suite.prompt(suite.blocks(3))
    for length in range(1, 6):
        expected = await suite.undisturbed(prompt, length)
        moved = suite.submit("a", prompt, length)
        report = await suite.move(moved)
        assert report.state == "committed" or report.reason in QUICKER
        assert await suite.finish(moved) == expected


@pytest.mark.parametrize("seed", [1, 2])
@scenario
async def test_requests_that_move_all_the_time_get_their_tokens(
    suite: ConformanceSuite, seed: int
) -> None:
    """Moves come in any order: some are refused, and some requests have ended."""
    draw = random.Random(seed)  # noqa: S311
    prompts = [suite.prompt(draw.randint(1, suite.blocks(6))) for _ in range(8)]
    lengths = [draw.randint(1, suite.blocks(4)) for _ in prompts]
    requests = list(zip(prompts, lengths, strict=True))
    expected = [await suite.undisturbed(*request) for request in requests]
    ids = [suite.submit(draw.choice("ab"), *request) for request in requests]
    dropped = {suite.submit("a", prompts[0], suite.blocks(20)) for _ in range(2)}

    async def wander(request_id: str) -> None:
        while not suite.has_ended(request_id):
            source = draw.choice("ab")
            await suite.move(request_id, source, "b" if source == "a" else "a")
            await asyncio.sleep(0.01 * draw.random())
            if request_id in dropped and draw.random() < 0.3:
                suite.abort(request_id)
                break

    await asyncio.gather(*(wander(request_id) for request_id in (*ids, *dropped)))
    assert [await suite.finish(request_id) for request_id in ids] == expected
