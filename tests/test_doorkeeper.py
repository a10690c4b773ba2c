"""Strangers at a control socket, whatever they speak: not let in, counted, a burden for nobody."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from threading import Thread

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvmig.kvtransfer import link
from kvmig.kvtransfer.link import HANDSHAKE_S, Client, Handshakes, Server
from kvmig.kvtransfer.messages import Aborted, PeerMessage

SECRET = b"a secret of the cluster"
SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
CURVE = b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""Of ZMTP 3.0: after the signature, what a client of CURVE says first."""


WHAT = ["open", "in", "fail", "out"]


@given(st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 9)), max_size=60))
def test_never_too_many_are_told_and_all_of_them_in_the_end(steps: list[tuple[str, int]]) -> None:
    handshakes, told, failed = Handshakes(), 0, 0
    shaking, over = set[int](), set[int]()
    for number, (what, one) in enumerate(steps):
        now = number / len(steps)
        if what == "open" and one not in shaking | over:
            handshakes.accepted(one, now)
            shaking.add(one)
        elif what in ("in", "fail") and one in shaking:
            failed += what == "fail"
            handshakes.succeeded() if what == "in" else handshakes.failed()
            shaking.remove(one)
            over.add(one)
        elif what == "out" and one in shaking | over:
            handshakes.closed(one)
            failed += one in shaking
            shaking.discard(one)
            over.discard(one)
        told += handshakes.failures(now)
        assert told <= failed
    told += handshakes.failures(2 * HANDSHAKE_S)
    assert told == failed + len(shaking)


def test_one_that_just_left_is_told_at_once_where_nobody_else_is_new() -> None:
    handshakes = Handshakes()
    handshakes.accepted(7, 0.0)
    handshakes.succeeded()
    assert handshakes.failures(0.0) == 0
    handshakes.accepted(8, 1.0)
    assert handshakes.failures(1.0) == 0
    handshakes.closed(8)
    assert handshakes.failures(1.0) == 1
    assert handshakes.failures(1.0) == 0


def test_one_that_failed_is_told_at_once_and_once() -> None:
    handshakes = Handshakes()
    for descriptor in (7, 8):
        handshakes.accepted(descriptor, 0.0)
    handshakes.succeeded()
    handshakes.failed()
    handshakes.failed()  # refused, and then it left
    assert handshakes.failures(0.0) == 1
    handshakes.closed(8)
    assert handshakes.failures(100.0) == 0


def with_curve(server_key: bytes) -> Callable[[zmq.Socket[bytes]], None]:
    def configure(stranger: zmq.Socket[bytes]) -> None:
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.curve_serverkey = server_key

    return configure


def plain(stranger: zmq.Socket[bytes]) -> None:
    stranger.plain_username, stranger.plain_password = b"user", b"password"


def null(stranger: zmq.Socket[bytes]) -> None:
    """As it is."""


BY_ZEROMQ = {
    "a key of its own": with_curve(link.derive(SECRET).server.public),
    "another server's key": with_curve(link.derive(b"a secret of others").server.public),
    "a name and a password": plain,
    "no key": null,
}
BY_TCP = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "nothing": b"",
    "an unfinished greeting": SIGNATURE,
    "an old ZeroMQ": SIGNATURE + b"\x01\x05\x00\x00",
    "the oldest ZeroMQ": b"\x01\x00\x02\x00hi",
    "a frame of 2^64 bytes": SIGNATURE + CURVE + b"\x06" + b"\xff" * 8,
    "a first command that is none": SIGNATURE + CURVE + b"\x04\x03abc",
}


def stranger_by_zeromq(endpoint: str, configure: Callable[[zmq.Socket[bytes]], None]) -> None:
    """Stays until it was refused."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    with context.socket(zmq.DEALER) as stranger:
        stranger.linger, stranger.reconnect_ivl = 0, -1
        configure(stranger)
        monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED)
        stranger.connect(endpoint)
        assert monitor.poll(20_000)
        stranger.disable_monitor()
        monitor.close()


def strangers_by_tcp(endpoint: str, said: bytes, count: int = 1) -> None:
    """They don't wait for an answer."""
    port = int(endpoint.rsplit(":", 1)[1])
    for _ in range(count):
        with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger:
            stranger.sendall(said)


async def counted(server: Server, count: int) -> None:
    async with asyncio.timeout(20):
        while server.refusals.counts() != {"unauthenticated": count}:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@asynccontextmanager
async def linked() -> AsyncIterator[Server]:
    """A server, and a client of its cluster that is let in."""
    server = Server(SECRET, "peer", "a", PeerMessage)
    client = Client(server.endpoint, SECRET, "peer", "b", PeerMessage)
    try:
        await server.recv()
        yield server
        client.send(Aborted("still here"))
        assert (await server.recv())[1] == Aborted("still here")
    finally:
        client.close()
        server.close()


@pytest.mark.parametrize("kind", BY_ZEROMQ)
async def test_a_stranger_that_speaks_zeromq_is_refused_and_counted(kind: str) -> None:
    async with linked() as server:
        await asyncio.to_thread(stranger_by_zeromq, server.endpoint, BY_ZEROMQ[kind])
        await counted(server, 1)


@pytest.mark.parametrize("kind", BY_TCP)
async def test_a_stranger_that_speaks_something_else_is_refused_and_counted(kind: str) -> None:
    async with linked() as server:
        await asyncio.to_thread(strangers_by_tcp, server.endpoint, BY_TCP[kind])
        await counted(server, 1)


async def test_many_strangers_are_all_counted_and_nothing_is_kept_of_them() -> None:
    async with linked() as server:
        await asyncio.to_thread(strangers_by_tcp, server.endpoint, b"hello", count=1000)
        await counted(server, 1000)
        handshakes = server._handshakes._handshakes
        assert (handshakes._young, handshakes._undecided) == ({}, 0)


async def test_a_server_closes_while_libzmq_waits_for_events_to_be_taken() -> None:
    """As it does when more strangers come, while the event loop is held up, than it can note."""
    server = Server(SECRET, "peer", "a", PeerMessage)
    came = 0

    def flood() -> None:
        nonlocal came
        with suppress(OSError):  # the server is gone
            while True:
                strangers_by_tcp(server.endpoint, b"hello")
                came += 1

    strangers = Thread(target=flood)
    strangers.start()
    before = -1
    while came > before:  # they all come in until nobody accepts them any more
        before = came
        strangers.join(0.5)
    server.close()
    strangers.join(20)
    assert not strangers.is_alive()
    assert 0 < server.refusals.counts()["unauthenticated"] <= came
