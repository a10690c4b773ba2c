"""Two tenants with one prompt: what either left in an instance's prefix cache is its own."""

from __future__ import annotations

import secrets

import pytest

from kvmig_tools.served import Served
from tests.support.streams import Stream, count_from, counted, move_one, row_of

pytestmark = pytest.mark.server

PROMPT = "Count: " + " ".join(f"{number:04d}" for number in range(17, 60))
"""Several blocks of it; counts up to 0059."""


async def test_a_moved_request_meets_blocks_of_its_own_salt_only(served: Served) -> None:
    ours, theirs = secrets.token_hex(8), secrets.token_hex(8)
    been: set[tuple[str, str]] = set()

    for salt in (ours, theirs, ours, theirs):
        body = {**count_from(17, 180), "prompt": PROMPT, "cache_salt": salt}
        stream = Stream(served, "/v1/completions", body)
        row = await row_of(served, stream, output_tokens=1)
        been.add((row["instance"], salt))
        for tokens in (20, 60):
            row = await row_of(served, stream, output_tokens=tokens)
            report = await move_one(served, row)
            assert report["state"] == "committed", report
            there = (report["destination"], salt)
            # Also of what only a migration has brought there.
            assert (report["hit_blocks"] > 0) == (there in been), (report, been)
            been.add(there)
        counted(await stream.end(), 58)
