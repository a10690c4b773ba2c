"""The server's end of the socket to the process that starts and ends deployments for it."""

from __future__ import annotations

import socket
from collections.abc import Callable

from kvmig.fleet.orders import News, Order, StepDown, encode, news_of
from kvmig.rpc.unix_packets import QueuedPackets


class InitLink:
    """The server's end; make it inside a running event loop."""

    def __init__(self, sock: socket.socket, receive: Callable[[News], None]) -> None:
        """receive: is called with each message of the supervisor, from `listen` on."""
        self._packets = QueuedPackets(
            sock,
            lambda message: receive(news_of(message)),
            lambda: None,  # the other end has gone, and so will this process
        )
        self._waiting: list[Order] = []
        self.may_order: Callable[[], bool] = lambda: True
        """Whether orders may be given now; those that may not wait for `give_orders`."""
        self.listen = self._packets.listen
        self.close = self._packets.close

    def order(self, order: Order) -> None:
        """Give an order, after those before it; none is lost as long as the other end lives."""
        self._waiting.append(order)
        self.give_orders()

    def give_orders(self) -> None:
        """Give what waits, if that may be."""
        if self.may_order():
            given, self._waiting = self._waiting, []
            for one in given:
                self._packets.send(encode(one))

    def step_down(self, order: StepDown) -> None:
        """Give this order, and none of those that wait."""
        self._waiting.clear()
        self._packets.send(encode(order))
