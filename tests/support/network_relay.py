"""The wire between the hosts of `tests.support.network`: passes packets on, late or not at all.

Every host has one TUN device (a network card whose other end is a file of this process). A
packet that a host sends comes out here, waits for the delay, and goes into the device of the
host that it is for. It is what netem does in the kernel, where the kernel has it.

Commands come as JSON lines on stdin; its end is the end of this process, and of the devices.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import json
import os
import selectors
import struct
import sys
import time
from typing import Any

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PACKET = 65535
"""Bytes at most; also the devices' MTU."""
IPV4_DESTINATION = slice(16, 20)


def tun(name: str) -> int:
    """A new TUN device, gone when the returned descriptor is closed. Raises OSError."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TUN | IFF_NO_PI))
    except OSError:
        os.close(device)
        raise
    return device


class Relay:
    """One device a host; hosts are numbers, addresses end in the number plus one."""

    def __init__(self, names: list[str]) -> None:
        self._devices = [tun(name) for name in names]
        self._delay_s = 0.0
        self._cut: set[tuple[int, int]] = set()
        self._late: list[tuple[float, int, int, bytes]] = []
        self._order = itertools.count()

    def run(self) -> None:
        """Until the end of stdin."""
        with selectors.DefaultSelector() as selector:
            selector.register(sys.stdin.buffer, selectors.EVENT_READ)
            for host, device in enumerate(self._devices):
                selector.register(device, selectors.EVENT_READ, host)
            while True:
                wait = max(0.0, self._late[0][0] - time.monotonic()) if self._late else None
                for key, _ in selector.select(wait):
                    if key.data is not None:
                        self._take(key.data)
                    elif line := sys.stdin.buffer.readline():
                        self._obey(json.loads(line))
                        print("done", flush=True)
                    else:
                        return
                self._deliver()

    def _obey(self, command: dict[str, Any]) -> None:
        self._delay_s = command["delay_s"]
        self._cut = {(a, b) for a, b in command["cut"]}

    def _take(self, source: int) -> None:
        packet = os.read(self._devices[source], PACKET)
        if packet[0] >> 4 != 4:
            return  # no IPv6 here
        destination = packet[IPV4_DESTINATION][3] - 1
        known = 0 <= destination < len(self._devices)
        if known and not self._cut & {(source, destination), (destination, source)}:
            due = time.monotonic() + self._delay_s
            heapq.heappush(self._late, (due, next(self._order), destination, packet))

    def _deliver(self) -> None:
        while self._late and self._late[0][0] <= time.monotonic():
            _, _, destination, packet = heapq.heappop(self._late)
            with contextlib.suppress(BlockingIOError):  # a full queue drops it, as networks do
                os.write(self._devices[destination], packet)


if __name__ == "__main__":
    relay = Relay(sys.argv[1:])
    print("ready", flush=True)
    relay.run()
