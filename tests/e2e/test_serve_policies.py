"""What the scheduler decides by itself: balance, queues, de-fragmentation.

Two instances of 140 blocks and few seats. What a test starts is placed by the dispatcher and held;
some clients leave, and the scheduler makes the best of the rest. Whatever it does, the answers are
exact.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from kvmig.engines.toy.script import ToyScript
from kvmig_tools.nursery import Nursery
from kvmig_tools.patience import SERVER_PATIENCE_S
from tests.conftest import PATIENT
from tests.support.leaks import assert_server_is_empty, leaving_nothing
from tests.support.streams import Stream, counted, other, row_of
from tests.support.toys import Toys

pytestmark = pytest.mark.server

BLOCK = 32
SEATS = 3
TOKENS = 60
HELD = 20
"""Where streams wait for the scheduler."""


@pytest.fixture(scope="module")
def two(toy_nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toys]:
    flags = [
        f"--block-size={BLOCK}", "--num-blocks=140", f"--max-num-seqs={SEATS}", "--instances=2",
        *PATIENT, "--policy=kvmig", "--migrate-below=3", "--migrate-above=4",
        "--shutdown-timeout=5",
    ]  # fmt: skip
    with leaving_nothing(
        Toys(flags, tmp_path_factory.mktemp("policies"), nursery=toy_nursery)
    ) as served:
        yield served


@pytest.fixture
def served(two: Toys) -> Iterator[Toys]:
    yield two
    assert_server_is_empty(two)


class Clients:
    """Streams that count on from their own numbers."""

    def __init__(self, served: Toys) -> None:
        self.served = served
        self.numbers: dict[Stream, int] = {}

    def start(self, number: int, blocks: int) -> Stream:
        """With a prompt of so many blocks, which it shares with nobody."""
        first = number - (blocks * BLOCK - 8) // 5
        prompt = "Count:" + "".join(f" {n:04d}" for n in range(first + 2, number + 2))
        body = {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
        stream = Stream(self.served, "/v1/completions", body)
        self.numbers[stream] = number
        return stream

    async def placed(self) -> dict[Stream, str]:
        """Where they run, once all are held."""
        async with asyncio.timeout(SERVER_PATIENCE_S):
            for one in self.numbers:
                await one.reach(HELD)
            rows = await asyncio.to_thread(self.served.get, "requests")
            at = {row["call_id"]: row["instance"] for row in rows}
            return {one: at[one.answer.request_id] for one in self.numbers}

    async def moved(self, why: str) -> list[dict[str, Any]]:
        """Their migrations for that reason, as soon as there are some."""
        ids = [one.answer.request_id for one in self.numbers]
        async with asyncio.timeout(SERVER_PATIENCE_S):
            while True:
                rows = await asyncio.to_thread(self.served.get, "migrations")
                found = [
                    row
                    for row in rows
                    if row["why"] == why
                    and row["state"] == "committed"
                    and any(one in row["request_id"] for one in ids)
                ]
                if found:
                    return found
                await asyncio.sleep(0.05)

    async def leave(self, *streams: Stream) -> None:
        """They don't want their answers any more."""
        for one in streams:
            del self.numbers[one]
        await asyncio.gather(*(one.leave() for one in streams))

    async def end(self) -> None:
        """All answers, which must be right."""
        for one, number in self.numbers.items():
            counted(await one.end(), number)
        self.numbers.clear()


@contextlib.asynccontextmanager
async def clients_of(served: Toys) -> AsyncIterator[Clients]:
    """Inside the block they are held; then they end right, and none is left behind."""
    clients = Clients(served)
    try:
        with served.held(HELD):
            yield clients
        await clients.end()
    finally:
        await clients.leave(*clients.numbers)


async def test_a_crowded_instance_gives_to_one_that_became_idle(served: Toys) -> None:
    async with clients_of(served) as clients:
        # Three of 43 blocks each don't crowd an instance yet: nothing moves while they are placed,
        # or a fourth might come to where three are, and wait for ever.
        for number in range(2000, 8000, 1000):
            clients.start(number, 42)
        where = await clients.placed()
        crowded = Counter(where.values()).most_common()[0][0]
        await clients.leave(*(one for one, its in where.items() if its != crowded))
        served.play(ToyScript(hold=HELD + BLOCK))
        moved = await clients.moved("balance")
    assert all((one["source"], one["destination"]) == (crowded, other(crowded)) for one in moved)


async def test_a_request_that_waits_goes_to_where_it_can_start(served: Toys) -> None:
    async with clients_of(served) as clients:
        for number in range(2 * SEATS):
            clients.start(1000 + 100 * number, 3)
        where = await clients.placed()
        last = clients.start(6000, 3)
        row = await row_of(served, last, "waiting")
        await clients.leave(*(one for one, its in where.items() if its != row["instance"]))
        moved = await clients.moved("queue")
    assert all(one["bytes"] == 0 for one in moved)


async def test_room_is_made_for_a_request_that_fits_nowhere(served: Toys) -> None:
    async with clients_of(served) as clients:
        for number in (2000, 3000, 4000):
            clients.start(number, 22)
        where = await clients.placed()
        alone = Counter(where.values()).most_common()[-1][0]
        rows = await asyncio.to_thread(served.get, "instances")
        [row] = [row for row in rows if row["id"] == alone]
        clients.start(8000, min(row["blocks_total"] - row["blocks_used"] + 4, 126))
        moved = await clients.moved("defragment")
    assert all(one["stages"] for one in moved)
