"""A rest that isn't sent, for engines that compute it again: the tokens, and a failed commit."""

from __future__ import annotations

import pytest

from kvmig.ground.errors import MigrationRefused
from kvmig.kvtransfer.pause_cost import MOST_TOKENS
from kvmig.kvtransfer.report import MigrationReport
from kvmig.testing.interposed import failing
from kvmig.testing.suite import QUICKER, Suite


@pytest.fixture(autouse=True)
def recomputing(suite: Suite) -> None:
    """Only where both ends can, and a rest of up to two blocks isn't too long for it."""
    for engine in suite.engines.values():
        if not engine.can_recompute:
            pytest.skip("the engine can't compute a rest again")
        if 2 * engine.layout.block_tokens > MOST_TOKENS:
            pytest.skip(f"a rest of two blocks has more than {MOST_TOKENS} tokens")


@pytest.mark.parametrize("seed", [None, 11])
def test_a_request_whose_rest_is_computed_again_moves_there_and_back_token_for_token(
    suite: Suite, seed: int | None
) -> None:
    async def scenario(suite: Suite) -> None:
        async def attempt() -> MigrationReport:
            prompt = suite.prompt(suite.blocks(4.5))
            expected = await suite.undisturbed(prompt, suite.blocks(16), seed)
            moved = suite.submit("a", prompt, suite.blocks(16), seed)
            await suite.reach(moved, 3)
            report = await suite.move(moved, rest="recompute")
            if report.state == "committed":
                assert report.pause_cost is not None
                assert (report.pause_cost.way, report.tail_blocks) == ("recompute", 0)
                report = await suite.move(moved, "b", "a", rest="recompute")
            assert await suite.finish(moved) == expected
            return report

        await suite.until_moved(attempt)

    suite.run(scenario)


def test_a_commit_that_fails_leaves_the_request_where_all_its_blocks_are(suite: Suite) -> None:
    async def scenario(suite: Suite) -> None:
        prompt = suite.prompt(suite.blocks(4.5))
        expected = await suite.undisturbed(prompt, suite.blocks(8))
        moved = suite.submit("a", prompt, suite.blocks(8))
        await suite.reach(moved, 3)
        suite.engines["b"].before = failing("commit", MigrationRefused("error", "for a test"))
        report = await suite.move(moved, rest="recompute")
        assert (report.state, report.reason in ("error", *QUICKER)) == ("aborted", True)
        assert await suite.finish(moved) == expected
        assert set(suite.came_from(moved)) == {"a"}

    suite.run(scenario)
