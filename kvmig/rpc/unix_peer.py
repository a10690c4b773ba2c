"""The process at the other end of a Unix socket, as the kernel reports it (SO_PEERCRED)."""

from __future__ import annotations

import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")


def credentials(sock: socket.socket) -> tuple[int, int]:
    """(process, user) at the other end: who connected, or who listens."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    process, user, _ = _CREDENTIALS.unpack(raw)
    return int(process), int(user)


def is_own_user(sock: socket.socket) -> bool:
    """Whether a process of this process's user is at the other end."""
    return credentials(sock)[1] == os.geteuid()
