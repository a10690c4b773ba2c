"""File descriptors from one process to another on the same host, over a socket (SCM_RIGHTS)."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import secrets
import socket
import time
from threading import Thread

import msgspec

from kvmig.core.errors import TransportError
from kvmig.core.open_files import NO_FILE_S, lacks_descriptor
from kvmig.rpc.codec import RefusalCounter
from kvmig.rpc.unix_peer import is_own_user

SECRET_BYTES = 16
TIMEOUT_S = 2.0
"""Timeout of the donor's half of one exchange."""
WORD_TIMEOUT_S = 0.2
"""Timeout of a peer's half, much shorter because other peers wait behind it."""


class DescriptorTicket(msgspec.Struct, frozen=True):
    """The socket that hands a descriptor out, and the token that it asks for."""

    socket: str
    secret: str


class DescriptorDonor:
    """Gives copies of one descriptor to this user's processes that have the ticket.

    The socket is abstract: it leaves no file, and only this network namespace sees it. Who
    connects without both is a stranger, and counted.
    """

    def __init__(self, descriptor: int, refusals: RefusalCounter) -> None:
        """Keeps a copy of `descriptor` of its own until `close`."""
        self._descriptor = os.dup(descriptor)
        self._refusals = refusals
        self._secret = secrets.token_bytes(SECRET_BYTES)
        name = f"kvmig-{secrets.token_hex(8)}"
        self.ticket = DescriptorTicket(name, self._secret.hex())
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{name}")
        self._socket.listen()
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give no more. Idempotent."""
        with contextlib.suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        self._thread.join(TIMEOUT_S)
        self._socket.close()

    def _serve(self) -> None:
        try:
            while True:
                try:
                    peer, _ = self._socket.accept()
                except OSError as error:
                    if not lacks_descriptor(error):
                        return  # closed
                    time.sleep(NO_FILE_S)
                    continue
                with peer, contextlib.suppress(OSError):  # a peer that left gets nothing
                    self._give(peer)
        finally:
            os.close(self._descriptor)

    def _give(self, peer: socket.socket) -> None:
        peer.settimeout(WORD_TIMEOUT_S)
        if self._knows(peer):
            socket.send_fds(peer, [b"!"], [self._descriptor])
        else:
            self._refusals.count_strangers(1)

    def _knows(self, peer: socket.socket) -> bool:
        if not is_own_user(peer):
            return False
        try:
            word = peer.recv(SECRET_BYTES, socket.MSG_WAITALL)
        except OSError:  # it says nothing, or left
            return False
        return secrets.compare_digest(word, self._secret)


def gone(ticket: DescriptorTicket) -> bool:
    """Whether the donor has closed its socket, or died: its name is free then. It isn't gone where
    that can't be tried for want of a descriptor."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.bind(f"\0{ticket.socket}")
    except OSError:
        return False
    return True


def take(ticket: DescriptorTicket, refusals: RefusalCounter) -> int:
    """A copy of the donor's descriptor; the caller closes it. Blocks for TIMEOUT_S at most.

    Raises TransportError if the donor is gone, gives none, or is another user's: any process may
    listen under the name of a donor that is gone, and would get the word and lend its own
    memory for our blocks. That is counted.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as donor:
            donor.settimeout(TIMEOUT_S)
            donor.connect(f"\0{ticket.socket}")
            if not is_own_user(donor):
                refusals.count_strangers(1)
                raise TransportError(f"no descriptor from {ticket.socket}: another user's socket")
            donor.sendall(bytes.fromhex(ticket.secret))
            size = socket.CMSG_SPACE(array.array("i").itemsize)
            _, control, flags, _ = donor.recvmsg(1, size, socket.MSG_CMSG_CLOEXEC)
    except (OSError, ValueError) as error:
        raise TransportError(f"no descriptor from {ticket.socket}: {error}") from error
    if flags & socket.MSG_CTRUNC:
        why = os.strerror(errno.EMFILE)
        raise TransportError(f"no descriptor from {ticket.socket}: {why} in this process")
    for level, kind, data in control:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            (descriptor,) = array.array("i", data[:4])
            return descriptor
    raise TransportError(f"no descriptor from {ticket.socket}: it refused")
