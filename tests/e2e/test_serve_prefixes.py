"""New requests go where the KV of their prompts' beginnings is, and moves take it along."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest

from kvmig_tools.nursery import Nursery
from kvmig_tools.served import SMALL, Served
from tests.conftest import PATIENT
from tests.support.leaks import leaving_nothing
from tests.support.streams import Stream, count_from, counted, move_one, row_of

pytestmark = [pytest.mark.server, pytest.mark.long]

BEGINNING = "Count: " + " ".join(f"{number:04d}" for number in range(17, 200))


@pytest.fixture(scope="module")
def served(nursery: Nursery) -> Iterator[Served]:
    flags = [
        *SMALL,
        *PATIENT,
        "--instances=2",
        "--policy=kvmig",
        "--migrate-below=0",
        "--migrate-above=1",
    ]
    with leaving_nothing(Served(flags, nursery=nursery)) as made:
        yield made


async def turn(served: Served, salt: str, last: int, *, moves: bool = False) -> str:
    """The instance where a conversation's next answer ended."""
    body = {**count_from(17, 150), "prompt": f"{BEGINNING} {last:04d}", "cache_salt": salt}
    stream = Stream(served, "/v1/completions", body)
    row = await row_of(served, stream, output_tokens=1)
    if moves:
        report = await move_one(served, row)
        assert report["state"] == "committed", report
        row = await row_of(served, stream)
    counted(await stream.end(), last - 1)
    return str(row["instance"])


async def test_turns_of_a_conversation_go_to_the_instance_that_holds_it(served: Served) -> None:
    ours = secrets.token_hex(8)
    assert len({await turn(served, ours, 200 + number) for number in range(5)}) == 1


async def test_a_prompt_of_another_tenant_is_found_nowhere(served: Served) -> None:
    salts = [secrets.token_hex(8) for _ in range(4)]
    assert len({await turn(served, salt, 200) for salt in salts}) == 2, "in turns"


async def test_the_next_turn_goes_where_the_last_one_was_moved_to(served: Served) -> None:
    ours = secrets.token_hex(8)
    first = await turn(served, ours, 200)
    there = await turn(served, ours, 201, moves=True)
    assert there != first
    # Both hold the beginning now; only one of them the whole of the last prompt.
    assert await turn(served, ours, 201) in (first, there)
