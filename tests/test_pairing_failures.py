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

    async def requests() -> list[RequestState]:
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
