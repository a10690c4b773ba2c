"""A sign of life for the service manager that started this process (systemd's sd_notify protocol).

A fleet's supervisor and the agent of a unit are children of systemd only, so that only systemd can
end them when they hang: with `WatchdogSec=` it does, and `Restart=` starts them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

SOCKET = "NOTIFY_SOCKET"
PERIOD = "WATCHDOG_USEC"


async def notify_manager() -> None:
    """Report that this process is ready, then that its event loop turns, until cancelled.

    Returns at once where no manager listens.
    """
    address = os.environ.get(SOCKET, "")
    if not address:
        return
    if address.startswith("@"):  # Linux's abstract names
        address = f"\0{address[1:]}"
    period_s = float(os.environ.get(PERIOD, "0")) / 1e6
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
        sock.setblocking(False)
        _send(sock, address, b"READY=1")
        while period_s > 0:
            _send(sock, address, b"WATCHDOG=1")
            await asyncio.sleep(period_s / 3)


def _send(sock: socket.socket, address: str, text: bytes) -> None:
    with contextlib.suppress(OSError):  # a manager that doesn't read; the next one may come
        sock.sendto(text, address)
