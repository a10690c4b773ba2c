"""Counts the strangers at a server's socket, from what libzmq's monitor tells of connections."""

from __future__ import annotations

import asyncio
import contextlib

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from kvmig.kvtransfer.handshakes import Handshakes
from kvmig.kvtransfer.refusals import Refusals

LOOK_S = 0.1
"""Between two looks. A stranger costs the event loop no wake-up, however many they are."""
MOST = 10_000
"""Events taken at a look; others have their turn then."""

_TOLD = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


class Doorkeeper:
    """Of one ROUTER, before it is bound; make it inside a running event loop, and `close` it.

    libzmq holds 2,000 events; its I/O thread waits while nobody takes them.
    """

    def __init__(self, socket: zmq.asyncio.Socket, refusals: Refusals) -> None:
        self._socket = socket
        self._refusals = refusals
        self._handshakes = Handshakes()
        self._monitor = socket.get_monitor_socket(_TOLD)
        self._events = zmq.Socket(self._monitor)
        self._task = asyncio.create_task(self._watch(), name="doorkeeper")

    def close(self) -> None:
        """Before the socket. May be called twice."""
        if self._monitor.closed:
            return
        self._task.cancel()
        self._take()  # an I/O thread that waits for room holds the lock that the next line needs
        self._socket.disable_monitor()
        self._monitor.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._take()

    def _take(self) -> None:
        now = asyncio.get_running_loop().time()
        with contextlib.suppress(zmq.Again):  # that was all
            for _ in range(MOST):
                told = recv_monitor_message(self._events, zmq.DONTWAIT)
                match told["event"]:
                    case zmq.EVENT_ACCEPTED:
                        self._handshakes.accepted(int(told["value"]), now)
                    case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                        self._handshakes.succeeded()
                    case zmq.EVENT_DISCONNECTED:
                        self._handshakes.closed(int(told["value"]))
                    case _:
                        self._handshakes.failed()
        self._refusals.strangers(self._handshakes.failures(now))
