"""Connections to a server's Unix socket, made by an event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import TypeVar

FULL_S = 0.02
"""Pause between two tries while as many wait as the server's socket takes."""

ProtocolT = TypeVar("ProtocolT", bound=asyncio.Protocol)


async def connect_unix(make: Callable[[], ProtocolT], path: str, timeout_s: float) -> ProtocolT:
    """Connect to a server, and return the connection's protocol. While the server's queue is full,
    it is tried again: such a server is busy, not gone. Raises OSError, also after the timeout."""
    # An event loop takes a full queue for a connection that is under way, or leaves its handle.
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        async with asyncio.timeout(timeout_s):
            while not _connects(sock, path):  # noqa: ASYNC110 - nobody announces a place
                await asyncio.sleep(FULL_S)
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_unix_connection(make, sock=sock)
    except BaseException:
        sock.close()
        raise
    return protocol


def _connects(sock: socket.socket, path: str) -> bool:
    try:
        sock.connect(path)
    except BlockingIOError:
        return False
    return True
