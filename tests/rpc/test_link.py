"""The control sockets, with real ones; strangers, whatever they speak, are counted and let in
nowhere."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from threading import Thread

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.errors import PeerBehind, PeerError, TransportError
from kvmig.kvtransfer.messages import Abort, Aborted, PeerMessage
from kvmig.rpc import zmq_sockets
from kvmig.rpc.codec import MAX_FRAMES, MessageCodec
from kvmig.rpc.messages import VERSION, Hello, ProtocolVersion
from kvmig.rpc.zmq_sockets import HANDSHAKE_S, HandshakeFailures, RpcClient, RpcServer
from tests.support.inside import socket_of, undecided_strangers
from tests.support.waiting import until

SECRET = b"a secret of the cluster"


def hello() -> Hello:
    return Hello(VERSION.major, "peer", "b", VERSION.minor)


@asynccontextmanager
async def linked(
    secret: bytes = SECRET, name: str = "b"
) -> AsyncIterator[tuple[RpcServer, RpcClient]]:
    server = RpcServer(SECRET, "peer", "a", PeerMessage)
    client = RpcClient(server.endpoint, secret, "peer", name, PeerMessage)
    try:
        yield server, client
    finally:
        client.close()
        server.close()


CLOSED_AT_ONCE = """
import asyncio, uvloop
from kvmig.rpc.zmq_sockets import RpcServer
from kvmig.kvtransfer.messages import PeerMessage

async def main():
    server = RpcServer(b"a secret of the cluster", "peer", "a", PeerMessage)
    asyncio.get_running_loop().call_soon(server.close)
    await asyncio.sleep(0.1)

uvloop.run(main())
"""


def test_a_server_closed_before_its_loop_has_polled_does_not_end_the_process() -> None:
    """libuv aborts where a descriptor is closed that it is about to watch."""
    ended = subprocess.run([sys.executable, "-c", CLOSED_AT_ONCE], check=False, timeout=60)
    assert ended.returncode == 0


async def test_hello_comes_first_then_messages_go_both_ways_with_their_payload() -> None:
    async with linked() as (server, client):
        client.send(Abort("m", "timeout"), [b"one", memoryview(b"two" * 100_000)])
        assert await server.recv() == (b"b", hello(), [])
        sender, message, payload = await server.recv()
        assert (sender, message) == (b"b", Abort("m", "timeout"))
        assert [bytes(part) for part in payload] == [b"one", b"two" * 100_000]
        server.send(sender, Aborted("m"), [b"three"])
        answer, parts = await client.recv()
        assert (answer, [bytes(part) for part in parts]) == (Aborted("m"), [b"three"])


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def test_links_that_have_ended_leave_no_descriptor_open() -> None:
    """A process has three contexts of ZeroMQ, of seven descriptors each, once it has sent a large
    message: its server's, its clients', and the one with which pyzmq frees what it has sent."""
    large, counts = [bytes(1 << 20)], list[int]()
    for _ in range(4):
        for _ in range(5):
            async with linked() as (server, client):
                client.send(Abort("m", "timeout"), large)
                await server.recv()
                await server.recv()
        await until(lambda: open_files() <= max(counts, default=1 << 10))
        counts.append(open_files())
    assert counts[-1] <= counts[0]


async def test_a_send_after_the_close_is_refused_and_leaves_nothing_to_complain_of() -> None:
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with linked() as (server, _):
        sender, *_ = await server.recv()
        receiving = asyncio.ensure_future(server.recv())
        await asyncio.sleep(0.01)
        server.close()
        with pytest.raises(TransportError, match="the socket is closed"):
            server.send(sender, Aborted("m"))
        receiving.cancel()
    gc.collect()
    assert complaints == []


async def test_who_does_not_read_is_told_from_who_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_sockets, "HIGH_WATER", 2)
    async with linked() as (server, client):
        sender, *_ = await server.recv()

        def fill() -> None:
            for _ in range(1000):
                server.send(sender, Aborted("m"), [bytes(1 << 20)])

        with pytest.raises(PeerBehind, match="has not read 2 messages"):
            fill()
        client.close()
        with pytest.raises(TransportError, match="can't send to b'nobody'"):
            server.send(b"nobody", Aborted("m"))


async def test_a_client_with_another_secret_is_never_heard_and_is_told() -> None:
    async with linked(secret=b"some other secret") as (server, client):
        hearing = asyncio.ensure_future(server.recv())
        with pytest.raises(TransportError, match="lost or refused"):
            await client.recv()
        assert not hearing.done()
        hearing.cancel()


@pytest.mark.parametrize(
    "theirs", [ProtocolVersion(VERSION.major + 1, 0), VERSION._replace(minor=99)]
)
async def test_another_version_is_refused_at_both_ends_with_both_numbers(
    theirs: ProtocolVersion,
) -> None:
    server = RpcServer(SECRET, "peer", "a", PeerMessage)
    client = RpcClient(server.endpoint, SECRET, "peer", "b", PeerMessage, theirs)
    client.send(Abort("m", "timeout"))
    with pytest.raises(PeerError, match=f"b'b' speaks protocol {theirs}, not {VERSION}"):
        await server.recv()
    with pytest.raises(PeerError, match="before Hello"):
        await server.recv()
    with pytest.raises(PeerError, match=f"a speaks protocol {VERSION}, not {theirs}"):
        await client.recv()
    client.close()
    server.close()


@pytest.mark.parametrize("step", [-1, 1])
async def test_the_minor_versions_next_to_this_one_are_understood(step: int) -> None:
    neighbour = VERSION._replace(minor=VERSION.minor + step)
    server = RpcServer(SECRET, "peer", "a", PeerMessage, version=neighbour)
    client = RpcClient(server.endpoint, SECRET, "peer", "b", PeerMessage)
    client.send(Abort("m", "timeout"))
    assert (await server.recv())[1] == hello()
    assert (await server.recv())[1] == Abort("m", "timeout")
    client.close()
    server.close()


async def test_garbage_is_refused_and_the_server_goes_on() -> None:
    async with linked() as (server, client):
        await server.recv()
        await socket_of(client).send_multipart([b"\xc1garbage"])
        await socket_of(client).send_multipart(
            [MessageCodec(PeerMessage).encode(Aborted("m"))[0][:-1]]
        )
        client.send(Aborted("fine"))
        for _ in range(2):
            with pytest.raises(PeerError, match="not a message"):
                await server.recv()
        assert (await server.recv())[1] == Aborted("fine")


async def test_what_cannot_be_read_is_logged_and_the_next_message_is_handed_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with linked() as (server, client):
        await socket_of(client).send_multipart([b"\xc1garbage"])
        client.send(Aborted("to the server"))
        arriving = server.messages()
        assert (await anext(arriving))[1] == hello()
        sender, message, _ = await anext(arriving)
        assert message == Aborted("to the server")
        await socket_of(server).send_multipart([sender, b"\xc1garbage"])
        server.send(sender, Aborted("to the client"))
        refused: list[PeerError] = []
        message, _ = await anext(client.messages("the other side", refused.append))
        assert message == Aborted("to the client")
        assert [one.reason for one in refused] == ["unreadable"]
    logged = [one.getMessage() for one in caplog.records]
    assert [one.split("not a message")[0] for one in logged] == [
        "ignored: ",
        "ignored from the other side: ",
    ]


async def test_who_refuses_a_message_with_an_error_receives_no_more() -> None:
    def refuse(error: PeerError) -> None:
        raise error

    async with linked() as (server, client):
        sender, *_ = await server.recv()
        await socket_of(server).send_multipart([sender, b"\xc1garbage"])
        with pytest.raises(PeerError, match="not a message"):
            await anext(client.messages("the other side", refuse))


async def test_sending_to_a_client_that_left_raises() -> None:
    async with linked() as (server, client):
        await server.recv()
        client.close()
        refused = ""
        while not refused:
            try:
                server.send(b"b", Aborted("m"))
            except TransportError as error:
                refused = str(error)
            await asyncio.sleep(0.01)
        assert "b'b'" in refused


async def test_a_server_that_left_ends_the_clients_wait() -> None:
    async with linked() as (server, client):
        await server.recv()
        waiting = asyncio.ensure_future(client.recv())
        await asyncio.sleep(0)
        server.close()
        with pytest.raises(TransportError, match="connection lost"):
            await waiting
        with pytest.raises(TransportError, match="connection lost"):
            client.send(Aborted("m"))


async def test_a_new_client_of_the_same_name_takes_over() -> None:
    async with linked() as (server, _):
        await server.recv()
        second = RpcClient(server.endpoint, SECRET, "peer", "b", PeerMessage)
        await server.recv()
        server.send(b"b", Aborted("m"))
        assert (await second.recv())[0] == Aborted("m")
        second.close()


async def test_a_cancelled_wait_loses_no_message() -> None:
    async with linked() as (server, client):
        sender, _, _ = await server.recv()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.recv(), 0.01)
        server.send(sender, Aborted("m"))
        assert (await client.recv())[0] == Aborted("m")


async def test_what_is_no_endpoint_is_an_error_and_leaves_nothing() -> None:
    with pytest.raises(TransportError, match="can't connect to 'nowhere'"):
        RpcClient("nowhere", SECRET, "peer", "b", PeerMessage)


async def test_a_port_in_use_is_an_error_and_leaves_nothing() -> None:
    server = RpcServer(SECRET, "peer", "a", PeerMessage)
    port = int(server.endpoint.rsplit(":", 1)[1])
    with pytest.raises(zmq.ZMQError, match="in use"):
        RpcServer(SECRET, "peer", "a", PeerMessage, port=port)
    server.close()


def test_keys_need_a_secret_of_some_length_and_never_show_it() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        zmq_sockets.derive(b"short")
    derived = zmq_sockets.derive(SECRET)
    assert derived.server.public != derived.client.public
    assert derived.server.secret.decode() not in repr(derived)


async def test_the_secret_and_keys_are_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with linked() as (server, _):
        await server.recv()
    derived = zmq_sockets.derive(SECRET)
    for secret in (SECRET, derived.server.secret, derived.client.secret):
        assert secret.decode() not in caplog.text


def test_too_many_frames_are_refused() -> None:
    with pytest.raises(PeerError, match="frames"):
        MessageCodec(PeerMessage).decode([memoryview(b"")] * (MAX_FRAMES + 1))
    with pytest.raises(PeerError, match="0 frames"):
        MessageCodec(PeerMessage).decode([])


def test_deep_nesting_is_a_peer_error() -> None:
    header = b"\x82\xa4type\xa7Aborted\xa1x" + b"\x91" * 100_000
    with pytest.raises(PeerError):
        MessageCodec(PeerMessage).decode([memoryview(header)])


SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
CURVE = b"\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""Of ZMTP 3.0: after the signature, what a client of CURVE says first."""


WHAT = ["open", "in", "fail", "out"]


@given(st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 9)), max_size=60))
def test_never_too_many_are_told_and_all_of_them_in_the_end(steps: list[tuple[str, int]]) -> None:
    handshakes, told, failed = HandshakeFailures(), 0, 0
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
    handshakes = HandshakeFailures()
    handshakes.accepted(7, 0.0)
    handshakes.succeeded()
    assert handshakes.failures(0.0) == 0
    handshakes.accepted(8, 1.0)
    assert handshakes.failures(1.0) == 0
    handshakes.closed(8)
    assert handshakes.failures(1.0) == 1
    assert handshakes.failures(1.0) == 0


def test_one_that_failed_is_told_at_once_and_once() -> None:
    handshakes = HandshakeFailures()
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
    "a key of its own": with_curve(zmq_sockets.derive(SECRET).server.public),
    "another server's key": with_curve(zmq_sockets.derive(b"a secret of others").server.public),
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


async def counted(server: RpcServer, count: int) -> None:
    await until(lambda: server.refusals.counts() == {"unauthenticated": count})


@asynccontextmanager
async def served() -> AsyncIterator[RpcServer]:
    """A server, and a client of its cluster that is let in."""
    server = RpcServer(SECRET, "peer", "a", PeerMessage)
    client = RpcClient(server.endpoint, SECRET, "peer", "b", PeerMessage)
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
    async with served() as server:
        await asyncio.to_thread(stranger_by_zeromq, server.endpoint, BY_ZEROMQ[kind])
        await counted(server, 1)


@pytest.mark.parametrize("kind", BY_TCP)
async def test_a_stranger_that_speaks_something_else_is_refused_and_counted(kind: str) -> None:
    async with served() as server:
        await asyncio.to_thread(strangers_by_tcp, server.endpoint, BY_TCP[kind])
        await counted(server, 1)


async def test_many_strangers_are_all_counted_and_nothing_is_kept_of_them() -> None:
    async with served() as server:
        await asyncio.to_thread(strangers_by_tcp, server.endpoint, b"hello", count=1000)
        await counted(server, 1000)
        assert undecided_strangers(server) == (0, 0)


async def test_a_server_closes_while_libzmq_waits_for_events_to_be_taken() -> None:
    """As it does when more strangers come, while the event loop is held up, than it can note."""
    server = RpcServer(SECRET, "peer", "a", PeerMessage)
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
