"""Orders to park an engine and to wake it, some of which were given before."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from kvmig.controlplane.parking import EngineParking
from kvmig.core.errors import NotParked
from kvmig.engines.base import ServingEngine


class ProbedEngine:
    """It says what is done to it; each takes until `go` is set."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.go = asyncio.Event()
        self.same = True

    async def park(self) -> None:
        self.done.append("park")
        await self.go.wait()

    async def unpark(self) -> None:
        self.done.append("probe")
        await self.go.wait()
        if not self.same:
            raise NotParked("it computes otherwise")


def parking(engine: ProbedEngine) -> EngineParking:
    return EngineParking(cast("ServingEngine", engine))


async def test_one_that_is_awake_is_not_probed_again_whatever_the_probe_would_say() -> None:
    engine = ProbedEngine()
    engine.same = False
    it = parking(engine)
    await it.set_parked(False)
    assert (engine.done, it.parked) == ([], False)


async def test_an_order_that_is_given_twice_at_once_is_carried_out_once() -> None:
    engine = ProbedEngine()
    it = parking(engine)
    orders = [asyncio.create_task(it.set_parked(True)) for _ in range(2)]
    await asyncio.sleep(0)
    engine.go.set()
    await asyncio.gather(*orders)
    await asyncio.gather(it.set_parked(False), it.set_parked(False))
    assert (engine.done, it.parked) == (["park", "probe"], False)


async def test_one_that_does_not_wake_stays_parked_and_is_probed_at_the_next_order() -> None:
    engine = ProbedEngine()
    engine.go.set()
    it = parking(engine)
    await it.set_parked(True)
    engine.same = False
    with pytest.raises(NotParked):
        await it.set_parked(False)
    assert it.parked
    engine.same = True
    await it.set_parked(False)
    assert (engine.done, it.parked) == (["park", "probe", "probe"], False)
