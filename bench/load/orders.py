"""What a benchmark tells the process of its stub engines: over one ZeroMQ REP socket."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import zmq
import zmq.asyncio

from kvmig.launcher.launch import LlumletLaunch

TIMEOUT_MS = 120_000


class Start(msgspec.Struct, frozen=True, tag=True):
    """Make an instance; answered with Started."""

    launch: LlumletLaunch


class SetRate(msgspec.Struct, frozen=True, tag=True):
    """So many tokens a second for each stream; answered with Done."""

    rate: float


class GetLog(msgspec.Struct, frozen=True, tag=True):
    """Answered with Log."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """endpoint: of the instance's llumlet."""

    endpoint: str


class Done(msgspec.Struct, frozen=True, tag=True):
    """So it is."""


class Log(msgspec.Struct, frozen=True, tag=True):
    """When tokens were made, see `bench.load.pace.Group`: of each group of streams."""

    ticks: list[list[float]]
    began: list[dict[str, int]]


Order = Start | SetRate | GetLog
Answer = Started | Done | Log


class Orders:
    """The benchmark's end."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
        for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
            self._socket.setsockopt(option, TIMEOUT_MS)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)

    def give(self, order: Order) -> Answer:
        """Raises zmq.Again if nobody answers."""
        self._socket.send(msgspec.msgpack.encode(order))
        answer: Answer = msgspec.msgpack.decode(self._socket.recv(), type=Answer)
        return answer

    def close(self) -> None:
        """Disconnect."""
        self._socket.close()


async def obey(address: str, carry_out: Callable[[Order], Awaitable[Answer]]) -> None:
    """The stubs' end: answers until cancelled."""
    with zmq.asyncio.Context.instance().socket(zmq.REP) as socket:
        socket.linger = 0
        socket.bind(address)
        while True:
            order: Order = msgspec.msgpack.decode(await socket.recv(), type=Order)
            await socket.send(msgspec.msgpack.encode(await carry_out(order)))
