"""`python -m bench.load.host ADDRESS ENGINE INSTANCES`: llumlets on stub engines, one process.

They are kvmig's own llumlets with their sockets, messages and load reports; what sends them
orders is `bench.load.orders`.
"""

from __future__ import annotations

import asyncio
import sys

import uvloop

from bench.load.orders import Answer, Done, GetLog, Log, Order, SetRate, Start, Started, obey
from bench.load.pace import Metronome
from bench.load.stub import StubEngine
from bench.load.words import words_of
from kvmig.controlplane.llumlet import Llumlet
from kvmig.engines.registry import kind_of
from kvmig.process.child import until_stopped

CLOSE_S = 3.0


class Host:
    """All instances of one cluster."""

    def __init__(self, engine: str, instances: int) -> None:
        self._words = words_of(engine)
        self._instances = instances
        self._metronome = Metronome()
        self._engines: list[StubEngine] = []
        self._llumlets: list[Llumlet] = []

    async def carry_out(self, order: Order) -> Answer:
        match order:
            case Start(launch):
                phase = len(self._engines) / self._instances
                engine = StubEngine(self._words, self._metronome, phase)
                llumlet = Llumlet(
                    launch.instance, launch.cluster, launch.secret, launch.config, engine
                )
                await llumlet.start()
                self._engines.append(engine)
                self._llumlets.append(llumlet)
                return Started(llumlet.endpoint)
            case SetRate(rate):
                self._metronome.set(rate)
                return Done()
            case GetLog():
                groups = [engine.group for engine in self._engines]
                return Log([one.ticks for one in groups], [one.began for one in groups])

    async def run(self, address: str) -> None:
        """Until SIGTERM, or until nobody holds the other end of stdin."""
        obeying = asyncio.create_task(obey(address, self.carry_out))
        stopped = asyncio.create_task(until_stopped())
        try:
            await asyncio.wait((obeying, stopped), return_when=asyncio.FIRST_COMPLETED)
            if obeying.done():
                obeying.result()
        finally:
            obeying.cancel()
            await asyncio.gather(*(one.close(CLOSE_S) for one in self._llumlets))


def main(argv: list[str]) -> None:
    address, engine, instances = argv[1:]
    kind_of(engine).prepare()
    uvloop.run(Host(engine, int(instances)).run(address))


if __name__ == "__main__":
    main(sys.argv)
