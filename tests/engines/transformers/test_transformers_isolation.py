"""Transformers engines whose requests share no prefix: what users are kept apart by."""

from __future__ import annotations

import pytest

from kvmig.engines.transformers import factory
from tests.support.transformers_bench import Bench, benched

pytestmark = pytest.mark.engine

PROMPT = list(b"101 102 103 104 105 106 107 108 109 110 111 112")
"""Several blocks."""


class SharingBench(Bench):
    def __init__(self) -> None:
        some = {"num_blocks": 40, "max_batch_tokens": 64, "max_batch_requests": 4}
        super().__init__({name: factory(**some) for name in "ab"})


class ApartBench(Bench):
    def __init__(self) -> None:
        some = {"num_blocks": 40, "max_batch_tokens": 64, "max_batch_requests": 4}
        super().__init__({name: factory(**some, share_prefixes=False) for name in "ab"})


@pytest.mark.parametrize(("kind", "shares"), [(ApartBench, False), (SharingBench, True)])
async def test_a_request_that_comes_meets_no_blocks_of_another_unless_prefixes_are_shared(
    kind: type[Bench], shares: bool
) -> None:
    async with benched(kind) as bench, bench.migrator() as move:
        expected = await bench.finish(bench.send("b", PROMPT, 40))
        moves = bench.send("a", PROMPT, 40)
        await bench.reach(moves, 5)
        report = await move.migrate(moves, "a", "b")
        assert report.state == "committed", report
        assert (report.hit_blocks > 0) == shares
        assert await bench.finish(moves) == expected
