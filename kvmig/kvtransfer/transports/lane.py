"""A lane: one TCP connection that carries chunks' bytes from a source's slots to an inbox's slots.

The control socket encrypts with XSalsa20, copies each message several times on one thread of
ZeroMQ's, and is shared with every other message. A lane carries nothing else: one thread at each
end, records sealed with AES-GCM, which processors have instructions for, straight from the slot and
straight into it. Only the source that the ticket went to can use it (`lane_cipher`).
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import secrets
import socket
import struct
import time
from concurrent.futures import Future
from threading import Lock, Thread
from typing import NamedTuple

import msgspec

from kvmig.core.errors import KvmigError, PeerError, TransportError
from kvmig.core.open_files import NO_FILE_S, lacks_descriptor
from kvmig.kvtransfer.transports.lane_cipher import (
    HEADER_BYTES,
    HELLO_BYTES,
    KEY_BYTES,
    RECORD_BYTES,
    SALT_BYTES,
    TAG_BYTES,
    RecordCipher,
    RecordHeader,
    make_hello,
    make_salt,
    read_hello,
)
from kvmig.rpc.codec import RefusalCounter

CONNECT_S = 2.0
"""Timeout of the connection, and of each half of the handshake."""
WORD_S = 0.5
"""Timeout of a stranger's half, since the source waits behind it."""
TICKET_S = 60.0
"""How long an inbox waits for its source's connection."""
STALL_S = 10.0
"""A peer that takes or sends nothing during this time in the middle of a record is given up."""
KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 3))
"""Seconds, seconds, times: a peer whose machine is gone is noticed after some 11 s."""

log = logging.getLogger(__name__)


class LaneTicket(msgspec.Struct, frozen=True):
    """An inbox's token: its listener, and the key that only its source knows."""

    host: str
    port: int
    key: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.host}, {self.port})"


class LaneSender:
    """The source's end. One thread uses it; `end` may be called from any."""

    def __init__(self, ticket: LaneTicket) -> None:
        """Connects and shakes hands. Raises TransportError."""
        try:
            key = bytes.fromhex(ticket.key)
            self._socket = socket.create_connection((ticket.host, ticket.port), CONNECT_S)
        except (OSError, ValueError) as error:
            raise TransportError(
                f"no connection to {ticket.host}:{ticket.port}: {error}"
            ) from error
        try:
            theirs, ours = _receive_exactly(self._socket, SALT_BYTES), make_salt()
            self._socket.sendall(make_hello(key, theirs, ours))
            _prepare(self._socket)
        except (OSError, ValueError) as error:
            self._socket.close()
            raise TransportError(
                f"no handshake with {ticket.host}:{ticket.port}: {error}"
            ) from error
        self._cipher = RecordCipher(key, theirs, ours)
        self._sealed = memoryview(bytearray(RECORD_BYTES + TAG_BYTES))

    @property
    def ended(self) -> bool:
        """Whether the destination has closed its end."""
        try:
            return not self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def send(self, number: int, slot: int, data: memoryview) -> None:
        """Bring `data` into the inbox's slot, as push `number`. Raises TransportError."""
        try:
            for start in range(0, data.nbytes, RECORD_BYTES):
                part = data[start : start + RECORD_BYTES]
                header = RecordHeader(number, slot, part.nbytes, start, data.nbytes).encode()
                sealed = self._sealed[: part.nbytes + TAG_BYTES]
                self._cipher.seal(header, part, sealed)
                self._write(header, sealed)
        except OSError as error:
            raise TransportError(f"the lane to the destination broke: {error}") from error

    def end(self) -> None:
        """End the connection, also under a `send` that waits. Idempotent."""
        _shut(self._socket)

    def close(self) -> None:
        """End the connection and free it. Idempotent."""
        self._socket.close()

    def _write(self, header: bytes, sealed: memoryview) -> None:
        sent = self._socket.sendmsg((header, sealed)) - HEADER_BYTES
        if sent < 0:  # a header goes whole or not at all, unless the peer is about to be given up
            raise TimeoutError("the destination takes nothing")
        while sent < sealed.nbytes:
            sent += self._socket.send(sealed[sent:])


class _Waiting(NamedTuple):
    slot: int
    number: int
    future: Future[None]


class LaneArrivals:
    """Which push each slot has got last, and who waits for one. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._last: dict[int, int] = {}
        self._waiting: list[_Waiting] = []
        self._ended: str | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return self._ended is not None

    def wait(self, slot: int, number: int) -> Future[None]:
        """Done once push `number` has come into `slot`; fails with TransportError at the end."""
        future: Future[None] = Future()
        with self._lock:
            if self._last.get(slot, 0) >= number:
                future.set_result(None)
            elif self._ended is not None:
                future.set_exception(TransportError(self._ended))
            else:
                self._waiting.append(_Waiting(slot, number, future))
        return future

    def came(self, slot: int, number: int) -> None:
        """Push `number` is in `slot`."""
        with self._lock:
            self._last[slot] = number
            done = [one for one in self._waiting if one.slot == slot and one.number <= number]
            self._waiting = [one for one in self._waiting if one not in done]
        for one in done:
            if one.future.set_running_or_notify_cancel():
                one.future.set_result(None)

    def end(self, reason: str) -> None:
        """Fail all that wait, now and later."""
        with self._lock:
            self._ended = self._ended or reason
            left, self._waiting = self._waiting, []
        for one in left:
            if one.future.set_running_or_notify_cancel():
                one.future.set_exception(TransportError(reason))


class LaneReceiver:
    """The destination's end: it admits one connection of one source, and ends with it."""

    def __init__(
        self, host: str, memory: mmap.mmap, slots: int, slot_bytes: int, refusals: RefusalCounter
    ) -> None:
        """Listens on a free port. memory: [slots * slot_bytes]; refusals: counts strangers.

        Raises TransportError if it can't listen.
        """
        self.arrivals = LaneArrivals()
        self._memory, self._slots, self._slot_bytes = memory, slots, slot_bytes
        self._key, self._refusals = secrets.token_bytes(KEY_BYTES), refusals
        self._lock = Lock()
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._open: socket.socket = socket.create_server((host, 0), family=family)
        except OSError as error:
            raise TransportError(f"can't listen on {host}: {error}") from error
        port = int(self._open.getsockname()[1])
        self.ticket = LaneTicket(host, port, self._key.hex())
        self._thread = Thread(target=self._run, name=f"lane {port}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the connection; the thread ends by itself. Idempotent."""
        with self._lock:
            self._closed = True
            _shut(self._open)

    def _run(self) -> None:
        reason = "the lane's connection has ended"
        try:
            admitted = self._admit()
            if admitted is None:
                reason = "the source didn't connect"
                return
            peer, cipher = admitted
            self._serve(peer, cipher)
        except PeerError as error:
            self._refusals.count(error)
            reason = str(error)
            log.warning("a lane is closed: %s", error)
        except (KvmigError, OSError) as error:
            reason = f"the lane broke: {error}"
        finally:
            self.close()
            self.arrivals.end(reason)
            self._open.close()

    def _admit(self) -> tuple[socket.socket, RecordCipher] | None:
        """The source's connection, which takes the listener's place; None if it doesn't come."""
        until = time.monotonic() + TICKET_S
        while (left := until - time.monotonic()) > 0:
            self._open.settimeout(left)
            try:
                peer, _ = self._open.accept()
            except TimeoutError:
                return None
            except OSError as error:
                if not lacks_descriptor(error):
                    raise
                time.sleep(min(left, NO_FILE_S))
                continue
            salt = self._greet(peer)
            if salt is None:
                peer.close()
                self._refusals.count_strangers(1)
                continue
            ours, theirs = salt
            with self._lock:
                self._open.close()
                self._open = peer
                if self._closed:
                    return None
            _prepare(peer)
            return peer, RecordCipher(self._key, ours, theirs)
        return None

    def _greet(self, peer: socket.socket) -> tuple[bytes, bytes] | None:
        """The salts of both ends; None for a stranger."""
        ours = make_salt()
        peer.settimeout(WORD_S)
        try:
            peer.sendall(ours)
            theirs = read_hello(self._key, ours, _receive_exactly(peer, HELLO_BYTES))
        except OSError:  # it says nothing, or left
            return None
        return None if theirs is None else (ours, theirs)

    def _serve(self, peer: socket.socket, cipher: RecordCipher) -> None:
        header = memoryview(bytearray(HEADER_BYTES))
        sealed = memoryview(bytearray(RECORD_BYTES + TAG_BYTES))
        slots = memoryview(self._memory)
        while _fill(peer, header, waits=True):
            record = RecordHeader.decode(header)
            if record.slot >= self._slots or record.total > self._slot_bytes:
                raise PeerError(f"{record.total} bytes for slot {record.slot}")
            body = sealed[: record.nbytes + TAG_BYTES]
            if not _fill(peer, body, waits=False):
                return
            start = record.slot * self._slot_bytes + record.start
            cipher.open(bytes(header), body, slots[start : start + record.nbytes])
            if record.last:
                self.arrivals.came(record.slot, record.number)


def _prepare(peer: socket.socket) -> None:
    """Blocking, with the kernel's own time-outs: Python's would cost a call of poll each time."""
    peer.settimeout(None)
    stall = struct.pack("ll", int(STALL_S), 0)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, stall)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, stall)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in KEEPALIVE:
        peer.setsockopt(socket.IPPROTO_TCP, option, value)


def _fill(peer: socket.socket, buffer: memoryview, waits: bool) -> bool:
    """Receive all of `buffer`; False at the connection's end. waits: for its first byte, as long
    as the connection lives. Raises OSError, for a peer that stalls, too."""
    got = 0
    while got < buffer.nbytes:
        try:
            count = peer.recv_into(buffer[got:], 0, socket.MSG_WAITALL)
        except BlockingIOError:
            if waits and not got:
                continue
            raise TimeoutError("the source stalls in the middle of a record") from None
        if not count:
            return False
        got += count
    return True


def _receive_exactly(peer: socket.socket, nbytes: int) -> bytes:
    data = bytearray()
    while len(data) < nbytes:
        part = peer.recv(nbytes - len(data))
        if not part:
            raise ConnectionError("the peer has closed the connection")
        data += part
    return bytes(data)


def _shut(peer: socket.socket) -> None:
    """End a connection or a listener; who waits there is woken."""
    with contextlib.suppress(OSError):  # closed already, or not connected
        peer.shutdown(socket.SHUT_RDWR)
