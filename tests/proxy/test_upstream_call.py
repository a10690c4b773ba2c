"""One call's connection to a deployment, without a deployment."""

from __future__ import annotations

import asyncio

from kvmig.proxy.relay import UpstreamCall

HEAD = b"HTTP/1.1 200 OK\r\n"


class Client(asyncio.WriteTransport):
    """Notes what it gets."""

    def __init__(self, order: list[bytes]) -> None:
        super().__init__()
        self._order = order

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self._order.append(bytes(data))


def passed(*parts: bytes) -> list[bytes]:
    """What happened, in order, as an answer came in these parts."""

    async def run() -> list[bytes]:
        call, order = UpstreamCall(), list[bytes]()
        call.before_last = lambda: order.append(b"last")
        first, *others = parts
        call.data_received(first)
        call.pass_to(Client(order))
        for one in others:
            call.data_received(one)
        return order

    return asyncio.run(run())


def test_before_the_last_of_a_body_it_is_said_that_it_ends() -> None:
    length = HEAD + b"content-length: 4\r\n\r\n"
    assert passed(length, b"ab", b"cd") == [b"ab", b"last", b"cd"]
    chunked = HEAD + b"transfer-encoding: chunked\r\n\r\n"
    assert passed(chunked, b"2\r\nab\r\n", b"0\r\n\r\n") == [
        b"2\r\nab\r\n", b"last", b"0\r\n\r\n",
    ]  # fmt: skip


def test_also_where_it_comes_with_the_head() -> None:
    assert passed(HEAD + b"content-length: 2\r\n\r\nab") == [b"last", b"ab"]
