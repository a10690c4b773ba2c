"""A destination that computes along, for engines that can: the tokens, the aborts, the leaks."""

from __future__ import annotations

import asyncio

import pytest

from kvmig.ground.errors import MigrationRefused
from kvmig.kvtransfer.report import MigrationReport
from kvmig.testing.interposed import FOLLOWED, FOLLOWING, failing, once
from kvmig.testing.suite import QUICKER, Suite


@pytest.fixture(autouse=True)
def following(suite: Suite) -> None:
    """Only where both ends can."""
    if not all(engine.can_follow for engine in suite.engines.values()):
        pytest.skip("the engine can't follow")


@pytest.mark.parametrize("blocks", [0.3, 4.5])
@pytest.mark.parametrize("seed", [None, 11])
def test_a_followed_request_moves_token_for_token(
    suite: Suite, blocks: float, seed: int | None
) -> None:
    async def scenario(suite: Suite) -> None:
        async def attempt() -> MigrationReport:
            prompt = suite.prompt(suite.blocks(blocks))
            expected = await suite.undisturbed(prompt, suite.blocks(8), seed)
            moved = suite.submit("a", prompt, suite.blocks(8), seed)
            await suite.reach(moved, 3)
            report = await suite.move(moved, rest="follow")
            assert await suite.finish(moved) == expected
            engines = suite.came_from(moved)
            assert engines == sorted(engines)
            if report.state == "committed":
                assert report.followed is not None
                assert engines.count("a") == report.output_tokens
            return report

        await suite.until_moved(attempt)

    suite.run(scenario)


def test_followed_requests_move_both_ways_beside_others_that_stay(suite: Suite) -> None:
    async def scenario(suite: Suite) -> None:
        prompts = [suite.prompt(suite.blocks(0.7 + index)) for index in range(6)]
        length = suite.blocks(8)
        expected = [await suite.undisturbed(prompt, length) for prompt in prompts]
        homes = ["a", "b", "a", "b", "a", "b"]
        ids = [
            suite.submit(home, prompt, length) for home, prompt in zip(homes, prompts, strict=True)
        ]
        await asyncio.gather(*(suite.reach(request_id, 2) for request_id in ids))
        reports = await asyncio.gather(
            *(
                suite.move(request_id, home, "b" if home == "a" else "a", rest="follow")
                for request_id, home in list(zip(ids, homes, strict=True))[:4]
            )
        )
        full = {"no_batch_slot", "no_blocks"}
        assert {r.reason for r in reports if r.state != "committed"} <= {*QUICKER, *full}
        assert [await suite.finish(request_id) for request_id in ids] == expected

    suite.run(scenario)


def test_a_followed_request_moves_there_and_back_again(suite: Suite) -> None:
    async def scenario(suite: Suite) -> None:
        async def attempt() -> MigrationReport:
            prompt = suite.prompt(suite.blocks(2.5))
            expected = await suite.undisturbed(prompt, suite.blocks(16))
            moved = suite.submit("a", prompt, suite.blocks(16))
            await suite.reach(moved, 3)
            report = await suite.move(moved, rest="follow")
            if report.state == "committed":
                report = await suite.move(moved, "b", "a", rest="follow")
            assert await suite.finish(moved) == expected
            return report

        await suite.until_moved(attempt)

    suite.run(scenario)


@pytest.mark.parametrize("method", [*FOLLOWED, *FOLLOWING])
@pytest.mark.parametrize("after", [0, 1])
def test_whatever_fails_a_followed_request_goes_on(suite: Suite, method: str, after: int) -> None:
    async def scenario(suite: Suite) -> None:
        prompt = suite.prompt(suite.blocks(5.5))
        expected = await suite.undisturbed(prompt, suite.blocks(8))
        moved = suite.submit("a", prompt, suite.blocks(8))
        await suite.reach(moved, 3)
        engine = suite.engines["a" if method in FOLLOWED else "b"]
        engine.before = failing(method, MigrationRefused("error", "for a test"), after)
        report = await suite.move(moved, rest="follow")
        if report.state == "aborted":
            assert report.reason in ("error", *QUICKER)
        elif after == 0:
            assert method == "extend", "the switch came before it"
        assert await suite.finish(moved) == expected
        if report.state == "aborted":
            assert set(suite.came_from(moved)) == {"a"}

    suite.run(scenario)


@pytest.mark.parametrize("method", ["fork", "follow", "extend", "suspend"])
def test_a_client_that_leaves_a_followed_request_leaves_nothing(suite: Suite, method: str) -> None:
    async def scenario(suite: Suite) -> None:
        moved = suite.submit("a", suite.prompt(suite.blocks(5.5)), suite.blocks(20))
        await suite.reach(moved, 3)
        engine = suite.engines["a" if method in FOLLOWED else "b"]
        engine.before = once(method, lambda: suite.abort(moved))
        report = await suite.move(moved, rest="follow")
        assert report.state == "aborted" or method == "extend"

    suite.run(scenario)
