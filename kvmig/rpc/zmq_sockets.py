"""Control sockets: `RpcServer` (ROUTER) and `RpcClient` (DEALER) on ZeroMQ over TCP, under CURVE.

A client's first message is Hello; a server receives nothing before it. One `RpcClient` is
one connection: messages lost with it are lost, so it never reconnects silently;
its owner makes a new one. Heartbeats run on ZeroMQ's own thread.

The cluster's shared secret is the source of all keys. Connections that don't have it are never let
in, and counted with the messages that are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from types import UnionType
from typing import TypeVar
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from zmq.auth import Authenticator
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from kvmig.core.errors import PeerBehind, PeerError, TransportError
from kvmig.rpc.codec import MAX_FRAME, Frame, Frames, MessageCodec, RefusalCounter
from kvmig.rpc.messages import VERSION, Hello, ProtocolVersion, RpcMessage

HIGH_WATER = 10_000
"""Messages queued to one peer; one more is an error, not more memory."""
HEARTBEAT_MS = 1000
HEARTBEAT_TIMEOUT_MS = 10_000
"""Timeout of ZeroMQ's pings, as long as a silent instance is waited for. A process that
dies is noticed at once, by its connection."""
NETWORK_TIMEOUT_MS = 5000
"""Timeout of a connect, and of the acknowledgement by the peer's kernel. Shorter than
a heartbeat's: processes stall on a busy machine, kernels don't. Without it TCP, after a cut, would
try again ever more seldom, and the peer would stay unreachable long after the network is back."""
LINGER_MS = 100
"""What is still queued at close gets this long to leave."""
HANDSHAKE_S = 30.0
"""A handshake that takes longer has failed."""
LEAST_BYTES = 16
"""Least length of a secret."""
LOOK_S = 0.1
"""Pause between two looks at the monitor: strangers then don't wake the event loop each."""
MOST_EVENTS = 10_000
"""Events of the monitor taken at a look; others have their turn then."""

log = logging.getLogger(__name__)

Arrived = TypeVar("Arrived")

_LOST = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_TOLD = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_DISCONNECTED
)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Curve25519 keys in Z85, 40 characters each."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """The two key pairs of one cluster."""

    server: KeyPair
    client: KeyPair


def derive(secret: bytes) -> CurveKeys:
    """Derive the cluster's keys: only a process with the secret has them.

    Servers use one pair and clients the other, so neither can pose as the other's kind.
    Raises ValueError when the secret is shorter than LEAST_BYTES.
    """
    if len(secret) < LEAST_BYTES:
        raise ValueError(f"the cluster's secret must have at least {LEAST_BYTES} bytes")
    return CurveKeys(_pair(secret, b"kvmig server"), _pair(secret, b"kvmig client"))


def _pair(secret: bytes, purpose: bytes) -> KeyPair:
    key = z85.encode(blake2b(secret, digest_size=32, person=purpose).digest())
    return KeyPair(zmq.curve_public(key), key)


def _configure(socket: zmq.asyncio.Socket, keys: KeyPair) -> None:
    socket.linger = LINGER_MS
    socket.sndhwm = socket.rcvhwm = HIGH_WATER
    socket.maxmsgsize = MAX_FRAME
    socket.handshake_ivl = round(1000 * HANDSHAKE_S)
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.heartbeat_timeout = HEARTBEAT_TIMEOUT_MS
    socket.connect_timeout = socket.tcp_maxrt = NETWORK_TIMEOUT_MS
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret


def _send(socket: zmq.asyncio.Socket, frames: list[Frame], peer: str) -> None:
    if socket.closed:  # pyzmq would raise, and leave a failed future behind that nobody looks at
        raise TransportError(f"can't send to {peer}: the socket is closed")
    try:
        # DONTWAIT: pyzmq sends at once and returns a future that is already done.
        asyncio.ensure_future(
            socket.send_multipart(frames, flags=zmq.DONTWAIT, copy=False)
        ).result()
    except zmq.Again as error:
        raise PeerBehind(f"{peer} has not read {HIGH_WATER} messages") from error
    except zmq.ZMQError as error:
        raise TransportError(f"can't send to {peer}: {error}") from error


class _Admission:
    """Credentials provider that admits the cluster's client key and no other."""

    def __init__(self, keys: CurveKeys) -> None:
        self._key = keys.client.public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._key


class _Authenticator(Authenticator):
    """Answers libzmq who may come in. Make and start it inside a running event loop.

    pyzmq's own for asyncio closes its descriptor while the loop watches it still, and takes it off
    a turn later. libuv ends the process (uv__epoll_ctl_flush) that hasn't polled in between.
    """

    context: zmq.asyncio.Context
    _requests: zmq.asyncio.Socket | None = None
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._requests = requests = self.context.socket(zmq.REP)
        requests.linger = 1
        requests.bind("inproc://zeromq.zap.01")
        self.zap_socket = zmq.Socket(requests)  # where it sends its answers, at once
        self._task = asyncio.create_task(self._answer(requests), name="authenticator")

    def stop(self) -> None:
        """May be called twice, and where it never started."""
        if self._task is not None:
            self._task.cancel()
        if self._requests is not None:
            self._requests.close()

    async def _answer(self, requests: zmq.asyncio.Socket) -> None:
        while True:
            await self.handle_zap_message(await requests.recv_multipart())


class RpcServer:
    """One bound ROUTER socket; must be made inside a running event loop."""

    def __init__(
        self,
        secret: bytes,
        role: str,
        name: str,
        messages: UnionType,
        host: str = "127.0.0.1",
        port: int = 0,
        version: ProtocolVersion = VERSION,
        refusals: RefusalCounter | None = None,
        endpoint: str = "",
    ) -> None:
        """Binds `host`:`port` (0: any free one), or `endpoint`; counts in `refusals`, or in its
        own.

        Raises zmq.ZMQError if it can't bind.
        """
        self.refusals = RefusalCounter() if refusals is None else refusals
        keys = derive(secret)
        self._version = version
        self._hello = Hello(version.major, role, name, version.minor)
        self._codec = MessageCodec(messages)
        self._greeted: set[bytes] = set()
        # A context of its own: the authenticator's address is one a context.
        self._context = zmq.asyncio.Context()
        self._authenticator = _Authenticator(self._context)
        self._authenticator.configure_curve_callback(credentials_provider=_Admission(keys))
        self._socket = self._context.socket(zmq.ROUTER)
        self._handshakes = HandshakeCounter(self._socket, self.refusals)
        try:
            self._authenticator.start()
            _configure(self._socket, keys.server)
            self._socket.curve_server = True
            self._socket.router_handover = True
            self._socket.router_mandatory = True
            self._socket.bind(endpoint or f"tcp://{host}:{port}")
        except BaseException:
            self.close()
            raise
        self.endpoint: str = bytes(self._socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        self.host = urlsplit(self.endpoint).hostname or host

    async def recv(self) -> tuple[bytes, RpcMessage, list[memoryview]]:
        """The next message: who sent it (for `send`), what, and its payload frames.

        Raises PeerError for one that can't be read or that came before a good Hello;
        the server goes on, so call again.
        """
        identity, *frames = await self._socket.recv_multipart(copy=False)
        sender = bytes(identity.buffer)
        try:
            message, payload = self._codec.decode([frame.buffer for frame in frames])
            if isinstance(message, Hello):
                self._greet(sender, message)
            elif sender not in self._greeted:
                name = type(message).__name__
                raise PeerError(f"{sender!r} sent {name} before Hello", "early")
        except PeerError as error:
            self.refusals.count(error)
            raise
        return sender, message, payload

    def messages(self) -> AsyncIterator[tuple[bytes, RpcMessage, list[memoryview]]]:
        """The valid messages, as from `recv`; invalid ones are logged and ignored."""
        return _readable(self.recv, "ignored")

    def _greet(self, sender: bytes, hello: Hello) -> None:
        if self._version.understands(hello.version) and hello.name.encode() == sender:
            self._greeted.add(sender)
            return
        self._greeted.discard(sender)
        try:
            self.send(sender, self._hello)  # so that the other side can say why, too
        finally:
            raise PeerError(
                f"{hello.name} as {sender!r} speaks protocol {hello.version}, not {self._version}",
                "version",
            )

    def send(self, identity: bytes, message: RpcMessage, payload: Frames = ()) -> None:
        """Queue a message, at once. Raises TransportError if the peer is gone, PeerBehind if
        it is too slow."""
        frames = [identity, *self._codec.encode(message, payload)]
        _send(self._socket, frames, repr(identity))

    def close(self) -> None:
        """Unbind. Blocks for LINGER_MS at most. May be called twice."""
        self._authenticator.stop()
        self._handshakes.close()
        self._socket.close()
        self._context.term()


class RpcClient:
    """One connected DEALER socket; must be made inside a running event loop."""

    def __init__(
        self,
        endpoint: str,
        secret: bytes,
        role: str,
        name: str,
        messages: UnionType,
        version: ProtocolVersion = VERSION,
        refusals: RefusalCounter | None = None,
    ) -> None:
        """Connects and says Hello; whether that worked is seen at the first `recv`.

        What is refused is counted in `refusals`, if given. Raises TransportError if `endpoint`
        is none.
        """
        keys = derive(secret)
        self.endpoint = endpoint
        self.reached = True
        """False once it turned out that nothing listens at the endpoint."""
        self._refusals = RefusalCounter() if refusals is None else refusals
        self._version = version
        self._codec = MessageCodec(messages)
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        _configure(self._socket, keys.client)
        self._socket.curve_serverkey = keys.server.public
        self._socket.routing_id = name.encode()
        self._socket.reconnect_ivl = -1
        self._monitor = self._socket.get_monitor_socket(_LOST)
        self._arriving: asyncio.Future[list[zmq.Frame]] | None = None
        self._lost = asyncio.ensure_future(self._watch())
        self._lost.add_done_callback(self._give_up)
        try:
            self._socket.connect(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise TransportError(f"can't connect to {endpoint[:100]!r}: {error}") from error
        # Refused already? Then the monitor says so, and `recv` does.
        with contextlib.suppress(TransportError):
            self.send(Hello(version.major, role, name, version.minor))

    async def _watch(self) -> None:
        ended = await recv_monitor_message(self._monitor)
        self.reached = ended["event"] != zmq.EVENT_CLOSED

    def _give_up(self, _: asyncio.Future[None]) -> None:
        # Waiting for both at once would cost a tenth of a millisecond a message.
        if self._arriving is not None:
            self._arriving.cancel()

    async def recv(self) -> tuple[RpcMessage, list[memoryview]]:
        """The next message and its payload frames.

        Raises TransportError once the connection is lost or was never let in, and
        PeerError for a message that can't be read or a server of another protocol.
        """
        arrived = asyncio.ensure_future(self._socket.recv_multipart(copy=False))
        if not arrived.done():
            if self._lost.done():
                arrived.cancel()
                raise TransportError(f"{self.endpoint}: connection lost or refused")
            self._arriving = arrived
            try:
                await arrived
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self._lost.done() or (task is not None and task.cancelling()):
                    raise
                raise TransportError(f"{self.endpoint}: connection lost or refused") from None
            finally:
                self._arriving = None
        try:
            message, payload = self._codec.decode([frame.buffer for frame in arrived.result()])
            if isinstance(message, Hello) and not self._version.understands(message.version):
                told = f"speaks protocol {message.version}, not {self._version}"
                raise PeerError(f"{message.name} {told}", "version")
        except PeerError as error:
            self._refusals.count(error)
            raise
        return message, payload

    def messages(
        self, peer: str, refuse: Callable[[PeerError], None] | None = None
    ) -> AsyncIterator[tuple[RpcMessage, list[memoryview]]]:
        """The valid messages, as from `recv`; invalid ones are logged and ignored.

        peer: the other side, for the log. refuse: is called with what is wrong with a message
        before it is ignored; what it raises ends the iteration. Raises TransportError at the end.
        """
        return _readable(self.recv, f"ignored from {peer}", refuse)

    def send(self, message: RpcMessage, payload: Frames = ()) -> None:
        """Queue a message, at once. Raises TransportError if the peer is gone, PeerBehind if
        it is too slow."""
        if self._lost.done():
            raise TransportError(f"{self.endpoint}: connection lost or refused")
        _send(self._socket, self._codec.encode(message, payload), self.endpoint)

    def close(self) -> None:
        """Disconnect. May be called twice."""
        if self._socket.closed:
            return
        self._lost.cancel()
        self._socket.disable_monitor()
        self._monitor.close()
        self._socket.close()


async def _readable(
    recv: Callable[[], Awaitable[Arrived]],
    ignored: str,
    refuse: Callable[[PeerError], None] | None = None,
) -> AsyncIterator[Arrived]:
    """Receive until `recv` raises something else than PeerError. ignored: how such a log begins."""
    while True:
        try:
            arrived = await recv()
        except PeerError as error:
            if refuse is not None:
                refuse(error)
            log.warning("%s: %s", ignored, error)
        else:
            yield arrived


class HandshakeCounter:
    """Counts the strangers at one ROUTER socket. Make it before the socket is bound.

    libzmq holds 2,000 events; its I/O thread waits while none takes them.
    """

    def __init__(self, socket: zmq.asyncio.Socket, refusals: RefusalCounter) -> None:
        self._socket = socket
        self._refusals = refusals
        self._handshakes = HandshakeFailures()
        self._monitor = socket.get_monitor_socket(_TOLD)
        self._events = zmq.Socket(self._monitor)
        self._task = asyncio.create_task(self._watch(), name="handshake counter")

    def close(self) -> None:
        """Stop, before the socket is closed. May be called twice."""
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
            for _ in range(MOST_EVENTS):
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
        self._refusals.count_strangers(self._handshakes.failures(now))


class HandshakeFailures:
    """Counts handshakes that failed at one server, from what libzmq's monitor reports. Pure.

    libzmq reports which descriptor was accepted or closed. It reports that a handshake succeeded or
    failed, but not which, and nothing of the failure where the peer doesn't even speak ZeroMQ
    (libzmq 4.3.5, src/zmtp_engine.cpp). Such connections are found by difference: accepted, not
    succeeded, and gone. Only open connections are remembered, each for HANDSHAKE_S at most.
    """

    def __init__(self) -> None:
        self._young: dict[int, float] = {}
        """Open connections by descriptor, and since when: their handshakes may be under way."""
        self._undecided = 0
        """Accepted, and not known to have succeeded or failed; which ones is unknown."""
        self._failed = 0

    def accepted(self, descriptor: int, now: float) -> None:
        """A connection was accepted. now: seconds."""
        self._young[descriptor] = now
        self._undecided += 1

    def succeeded(self) -> None:
        """The handshake of one of the open connections succeeded."""
        self._decided()

    def failed(self) -> None:
        """The handshake of an open connection failed; libzmq reports some twice."""
        if self._undecided > 0:
            self._failed += 1
            self._decided()

    def closed(self, descriptor: int) -> None:
        """A connection is gone, whether it was let in or not."""
        self._young.pop(descriptor, None)

    def failures(self, now: float) -> int:
        """How many more failed than when last asked.

        A failure of which libzmq says nothing, while another's handshake was under way, may be
        counted as late as HANDSHAKE_S after that.
        """
        for old in [one for one, since in self._young.items() if now - since > HANDSHAKE_S]:
            del self._young[old]
        gone = max(0, self._undecided - len(self._young))
        self._undecided -= gone
        failed, self._failed = self._failed + gone, 0
        return failed

    def _decided(self) -> None:
        self._undecided -= 1
        if self._undecided <= 0:
            self._young.clear()
