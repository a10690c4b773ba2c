"""Sockets that a process listens on, and the files that it may open."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import socket
from collections.abc import Iterator
from pathlib import Path

from kvmig.core.config import SEND_BYTES
from kvmig.core.errors import ConfigError, StartupError

PORTS = range(20_000, 32_000)
"""Below those that Linux gives out by itself."""


def free_port() -> int:
    """Find a free TCP port of 127.0.0.1. Raises StartupError.

    It is none that the kernel gives to a connection before the server binds it.
    """
    first = secrets.randbelow(len(PORTS))
    ports: list[int] = [*PORTS[first:], *PORTS[:first]]
    for port in ports:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise StartupError(f"no port of {PORTS[0]} to {PORTS[-1]} is free")


WAITING_CLIENTS = 1024
"""Connections that the kernel accepts before a process does."""


def take_port(
    host: str | None, port: int, flag: str = "--port", *, listens: bool = True
) -> socket.socket:
    """Bind `host`:`port`, before anything slow starts. Raises ConfigError naming both, and the flag
    that gave the port.

    listens: whether clients may connect already.
    """
    address = host or "127.0.0.1"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted sockets inherit it; by default the kernel gives each up to several MB.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
    try:
        sock.bind((address, port))
        if listens:
            sock.listen(WAITING_CLIENTS)
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(f"{flag} {port} on {address} can't be used: {error}") from error
    return sock


def take_path(path: str, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
    """Listen on a Unix socket that only this user can connect to; the caller unlinks it when it
    closes it.

    A socket on which no process listens any more is taken over. Raises OSError.
    """
    sock = socket.socket(socket.AF_UNIX, kind)
    try:
        _remove_unused(Path(path), kind)
        sock.bind(path)
        Path(path).chmod(0o600)
        sock.listen(1024)
    except OSError:
        sock.close()
        raise
    return sock


@contextlib.contextmanager
def listening_at(
    path: str, setting: str, kind: socket.SocketKind = socket.SOCK_STREAM
) -> Iterator[socket.socket]:
    """A Unix socket like `take_path`'s, closed and unlinked at the end.

    Forks of this process that leave the context, too, unlink nothing. Raises ConfigError.

    setting: where the user gave the path, for the error, such as "--uds PATH".
    """
    try:
        sock = take_path(path, kind)
    except OSError as error:
        raise ConfigError(f"{setting} can't be used: {error}") from error
    owner, file = os.getpid(), Path(path).absolute()
    with sock:
        try:
            yield sock
        finally:
            if os.getpid() == owner:
                file.unlink(missing_ok=True)


def _remove_unused(path: Path, kind: socket.SocketKind) -> None:
    if path.is_socket():
        with socket.socket(socket.AF_UNIX, kind) as probe:
            probe.setblocking(False)  # a process that hangs lets clients wait without end
            try:
                probe.connect(str(path))
            except BlockingIOError:
                pass  # it listens, and takes no more of them
            except ConnectionRefusedError:
                path.unlink()


def raise_open_files() -> int:
    """Let this process and its children open as many files as the machine allows; how many."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


LONG_BYTES = 1 << 20


def take_long(sock: socket.socket) -> None:
    """Let packets of a Unix socket be as long as Linux allows: twice its net.core.wmem_max."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LONG_BYTES)
