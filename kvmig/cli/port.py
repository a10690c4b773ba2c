"""The HTTP port, taken before anything slow starts."""

from __future__ import annotations

import socket

from kvmig.ground.errors import ConfigError
from kvmig.ground.http import SEND_BYTES


def take_port(host: str | None, port: int) -> socket.socket:
    """Bind `host`:`port`. Raises ConfigError naming both."""
    address = host or "127.0.0.1"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted sockets inherit it; by default the kernel gives each up to several MB.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    try:
        sock.bind((address, port))
        sock.listen(1024)
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(f"--port {port} on {address} can't be used: {error}") from error
    return sock
