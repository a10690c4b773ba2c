"""Moves that fail must not end those to come."""

from __future__ import annotations

import asyncio

from kvmig.controlplane.messages import Pair
from kvmig.controlplane.pairing import Pairing
from kvmig.engines.base import RequestState
from kvmig.kvtransfer.report import MigrationReport


async def test_a_move_that_fails_unforeseen_does_not_end_the_moves() -> None:
    asked: list[str] = []
    moved = asyncio.Event()

    async def requests(most_waiting: int) -> list[RequestState]:
        return [RequestState("r", "running", 20, 4, 2, 0)]

    async def migrate(request_id: str, pair: Pair) -> MigrationReport:
        asked.append(pair.destination)
        if len(asked) == 1:
            raise RuntimeError("a bug")
        moved.set()
        return MigrationReport(
            id="m", request_id="r", source="a", destination="b", state="aborted", reason="busy"
        )

    pairing = Pairing(requests, lambda: (), migrate)
    running = asyncio.create_task(pairing.run())
    pairing.set([Pair("b", "tcp://b", 10.0, 10.0)])
    async with asyncio.timeout(10):
        while not asked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        pairing.set([Pair("b", "tcp://b", 10.0, 10.0)])
        await moved.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert asked == ["b", "b"]


async def test_when_one_began_to_run_while_it_moved_the_next_in_the_queue_moves() -> None:
    queue = [RequestState(name, "waiting", 20, 0, 0, 0, wanted_blocks=2) for name in "ab"]
    asked: list[str] = []
    second = asyncio.Event()

    async def requests(most_waiting: int) -> list[RequestState]:
        return [one for one in queue if one.request_id not in asked]

    async def migrate(request_id: str, pair: Pair) -> MigrationReport:
        asked.append(request_id)
        if len(asked) == 2:
            second.set()
        return MigrationReport(
            id="m",
            request_id=request_id,
            source="here",
            destination=pair.destination,
            state="aborted",
            reason="started",
        )

    pairing = Pairing(requests, lambda: (), migrate)
    running = asyncio.create_task(pairing.run())
    pairing.set([Pair("there", "tcp://there", 10.0, 10.0, "queue")])
    async with asyncio.timeout(10):
        await second.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert asked == ["a", "b"]
