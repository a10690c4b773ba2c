"""What the scheduler decides by itself, on real engines: balance, queues, de-fragmentation.

Two instances of 140 blocks and few seats. What a test starts is placed by the dispatcher; some
clients leave, and the scheduler makes the best of the rest. Whatever it does, the answers are
exact. On a busy machine requests may have ended before there is anything to decide: then the
test tries again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest

from kvmig.cli.served import Served
from tests.conftest import PATIENT
from tests.leaks import Footprint, assert_server_is_empty
from tests.streams import TIMEOUT_S, TRIES, EndedEarly, Stream, counted, other, row_of

pytestmark = pytest.mark.server

BLOCK = 32
SEATS = 3


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = [
        "--enforce-eager", f"--block-size={BLOCK}", "--num-gpu-blocks-override=141",
        "--max-model-len=4096", f"--max-num-seqs={SEATS}", "--instances=2", *PATIENT,
        "--policy=kvmig", "--migrate-below=3", "--migrate-above=4", "--drain-timeout=5",
    ]  # fmt: skip
    log = tmp_path_factory.mktemp("policies") / "log"
    with Served(flags, log=log) as served:
        yield served
        footprint = Footprint.of(served)
    footprint.assert_gone()


@pytest.fixture
def served(two: Served) -> Iterator[Served]:
    yield two
    assert_server_is_empty(two)


class Clients:
    """Streams that count on from their own numbers."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.numbers: dict[Stream, int] = {}

    def start(self, number: int, blocks: int, tokens: int) -> Stream:
        """With a prompt of so many blocks, which it shares with nobody."""
        first = number - (blocks * BLOCK - 8) // 5
        prompt = "Count:" + "".join(f" {n:04d}" for n in range(first + 2, number + 2))
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        stream = Stream(self.served, "/v1/completions", body)
        self.numbers[stream] = number
        return stream

    async def placed(self) -> dict[Stream, str]:
        """Where they run, once all do. Raises EndedEarly."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                rows = await asyncio.to_thread(self.served.get, "requests")
                at = {row["call_id"]: row["instance"] for row in rows if row["output_tokens"] > 0}
                if all(one.answer.request_id in at for one in self.numbers):
                    return {one: at[one.answer.request_id] for one in self.numbers}
                if any(one.task.done() for one in self.numbers):
                    raise EndedEarly("before the last one ran")

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
async def clients_of(served: Served) -> AsyncIterator[Clients]:
    """None is left behind."""
    clients = Clients(served)
    try:
        yield clients
    finally:
        await clients.leave(*clients.numbers)


async def seen(
    served: Served, why: str, play: Callable[[Clients], Awaitable[None]]
) -> list[dict[str, Any]]:
    """Migrations for that reason, after playing it until there are some."""
    for _ in range(TRIES):
        with contextlib.suppress(EndedEarly):
            async with clients_of(served) as clients:
                await play(clients)
        rows: list[dict[str, Any]] = await asyncio.to_thread(served.get, "migrations")
        if found := [row for row in rows if row["why"] == why and row["state"] == "committed"]:
            return found
    raise AssertionError(f"no migration for {why} in {TRIES} tries")


async def test_a_crowded_instance_gives_to_one_that_became_idle(served: Served) -> None:
    async def play(clients: Clients) -> None:
        for number in range(2000, 8000, 1000):
            clients.start(number, 36, 2000)
        where = await clients.placed()
        crowded = Counter(where.values()).most_common()[0][0]
        await clients.leave(*(one for one, its in where.items() if its != crowded))
        await clients.end()

    moved = await seen(served, "balance", play)
    assert all(one["source"] == other(one["destination"]) for one in moved)


async def test_a_request_that_waits_goes_to_where_it_can_start(served: Served) -> None:
    async def play(clients: Clients) -> None:
        for number in range(2 * SEATS):
            clients.start(1000 + 100 * number, 3, 1300)
        where = await clients.placed()
        last = clients.start(6000, 3, 100)
        row = await row_of(served, last, "waiting")
        await clients.leave(*(one for one, its in where.items() if its != row["instance"]))
        await clients.end()

    moved = await seen(served, "queue", play)
    assert all(one["bytes"] == 0 for one in moved)


async def test_room_is_made_for_a_request_that_fits_nowhere(served: Served) -> None:
    async def play(clients: Clients) -> None:
        for number in (2000, 3000, 4000):
            clients.start(number, 22, 2500)
        where = await clients.placed()
        alone = Counter(where.values()).most_common()[-1][0]
        rows = await asyncio.to_thread(served.get, "instances")
        [row] = [row for row in rows if row["id"] == alone]
        clients.start(8000, min(row["blocks_total"] - row["blocks_used"] + 4, 126), 50)
        await clients.end()

    moved = await seen(served, "defragment", play)
    assert all(one["stages"] for one in moved)
