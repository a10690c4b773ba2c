"""A Unix socket of packets between two processes of one user, on an event loop.

`UnixPackets` drops what the other side doesn't read in time, `QueuedPackets` keeps it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Callable
from typing import Self

from kvmig.core.errors import TransportError
from kvmig.rpc.unix_peer import credentials, is_own_user

PACKET_BYTES = 1 << 16
"""Most bytes of a packet with a message, or with a piece of a longer one: any Linux lets it
through, however its sockets are set up."""
MORE, LAST = b"\xc1\x01", b"\xc1\x00"
"""Beginnings of packets with a piece: of one that is not a message's last, and of the last. No
message begins so: msgpack has no use for the first byte."""

log = logging.getLogger(__name__)


class UnixPackets:
    """One connection. From the loop's thread; to be closed. Errors are TransportError."""

    def __init__(self, sock: socket.socket, most_bytes: int) -> None:
        """sock: of packets, connected. most_bytes: of one that comes."""
        sock.setblocking(False)
        self._sock = sock
        self._most_bytes = most_bytes
        self._reading: asyncio.Future[None] | None = None
        self.process, _ = credentials(sock)

    @classmethod
    def connect(cls, path: str, most_bytes: int) -> Self:
        """Connect to this user's listener there, at once. Raises TransportError."""
        try:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            raise TransportError(f"{path} can't be reached now: {error}") from error
        try:
            sock.setblocking(False)
            sock.connect(path)
            ours = is_own_user(sock)
        except OSError as error:
            sock.close()
            raise TransportError(f"no process listens at {path}: {error}") from error
        if not ours:
            sock.close()
            raise TransportError(f"another user listens at {path}")
        return cls(sock, most_bytes)

    def send(self, packet: bytes) -> None:
        """Send without waiting. Raises TransportError if the peer has gone, or doesn't read."""
        try:
            self._sock.send(packet)
        except OSError as error:
            raise TransportError(f"a packet can't be sent: {error}") from error

    async def recv(self) -> bytes:
        """The next packet; empty: the other side has gone. To be awaited by one task."""
        while True:
            try:
                packet, _, flags, _ = self._sock.recvmsg(self._most_bytes)
            except BlockingIOError:
                await self._readable()
                continue
            except OSError:
                return b""
            if flags & socket.MSG_TRUNC:
                raise TransportError(f"a packet has more than {self._most_bytes} bytes")
            return packet

    def close(self) -> None:
        """Close the connection. May be called twice; a task that awaits a packet gets none."""
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._sock.fileno())
            self._sock.close()
        self._wake()

    async def _readable(self) -> None:
        loop = asyncio.get_running_loop()
        self._reading = loop.create_future()
        loop.add_reader(self._sock.fileno(), self._wake)
        try:
            await self._reading
        finally:
            if self._sock.fileno() >= 0:
                loop.remove_reader(self._sock.fileno())

    def _wake(self) -> None:
        if self._reading is not None and not self._reading.done():
            self._reading.set_result(None)


def packets_of(message: bytes) -> list[bytes]:
    """The packets in which a message is sent; a short one is a packet as it is."""
    if len(message) <= PACKET_BYTES:
        return [message]
    size = PACKET_BYTES - len(MORE)
    *first, last = (message[at : at + size] for at in range(0, len(message), size))
    return [*(MORE + one for one in first), LAST + last]


class QueuedPackets:
    """One connection whose messages, of any length, wait for the other side. From the loop's
    thread; to be closed.

    All are sent in order, and none is lost as long as the other side lives.
    """

    def __init__(
        self, sock: socket.socket, take: Callable[[bytes], None], gone: Callable[[], None]
    ) -> None:
        """sock: of packets, connected. take: each message that comes. gone: is called when the
        other side has gone, and may close this."""
        sock.setblocking(False)
        self._sock = sock
        self._take = take
        self._gone = gone
        self._unsent: deque[bytes] = deque()
        self._begun: list[bytes] = []
        """Pieces of a message whose last one has not come."""

    def listen(self) -> None:
        """Take what has come and will come."""
        asyncio.get_running_loop().add_reader(self._sock, self._read)

    def send(self, message: bytes) -> None:
        """Send a message, now or as soon as the other side has room."""
        self._unsent.extend(packets_of(message))
        self._flush()

    def close(self) -> None:
        """Send and take no more."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._sock)
        loop.remove_writer(self._sock)
        self._sock.close()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_writer(self._sock)
        while self._unsent:
            try:
                self._sock.send(self._unsent[0])
            except BlockingIOError:
                loop.add_writer(self._sock, self._flush)
                return
            except OSError:
                self._unsent.clear()
                self._gone()
                return
            self._unsent.popleft()

    def _read(self) -> None:
        try:
            packet = self._sock.recv(PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if packet.startswith(MORE):
            self._begun.append(packet.removeprefix(MORE))
        elif packet.startswith(LAST):
            message = b"".join((*self._begun, packet.removeprefix(LAST)))
            self._begun.clear()
            self._take(message)
        elif packet:
            self._take(packet)
        else:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._gone()
