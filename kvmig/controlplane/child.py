"""A child process of the launcher: how it is told what to be, and when to go.

The launcher writes one JSON line to its stdin and keeps the pipe open; its end, however
it ends, closes the pipe. The child says that it is ready with one JSON line on a file
descriptor of its own, so that nothing that a library prints can be taken for it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import TypeVar

import msgspec

from kvmig.core.errors import StartupError

Launch = TypeVar("Launch", bound=msgspec.Struct)


def lead_group() -> None:
    """Become a process group: Ctrl-C reaches only the launcher, and all of us can be ended at once.

    Not a session: Linux schedules sessions as groups (autogroup, see sched(7)), and on a few cores
    busy instances then kept each other, the front end and the scheduler off them for seconds.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)


def read_launch(kind: type[Launch]) -> Launch:
    """The launch document, from stdin. Raises StartupError if there is none or a wrong one."""
    lead_group()
    try:
        return msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)
    except msgspec.DecodeError as error:
        raise StartupError(f"no {kind.__name__} on stdin: {error}") from error


def announce(descriptor: int, ready: msgspec.Struct) -> None:
    """Tell the launcher. Raises StartupError if it doesn't listen."""
    try:
        with os.fdopen(descriptor, "wb") as pipe:
            pipe.write(msgspec.json.encode(ready) + b"\n")
    except OSError as error:
        raise StartupError(f"can't announce on descriptor {descriptor}: {error}") from error


async def until_stopped() -> None:
    """Wait for SIGTERM or for the end of the launcher.

    SIGINT is ignored: a terminal sends it to every process at once, and it is the
    launcher that decides what a Ctrl-C means.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    stdin = sys.stdin.fileno()

    def heard() -> None:
        if not os.read(stdin, 4096):
            stop.set()

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_reader(stdin, heard)
    try:
        await stop.wait()
    finally:
        loop.remove_reader(stdin)
        loop.remove_signal_handler(signal.SIGTERM)


class StopSignals:
    """The launcher's wishes: `stop` at SIGTERM, `at_once` at a second one or at its own end."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.at_once = asyncio.Event()

    def listen(self) -> None:
        """Listen to SIGTERM and stdin. SIGINT is for the launcher: a terminal sends it to all."""
        loop = asyncio.get_running_loop()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        loop.add_signal_handler(signal.SIGTERM, self._signalled)
        loop.add_reader(sys.stdin.fileno(), self._heard)

    def _signalled(self) -> None:
        (self.at_once if self.stop.is_set() else self.stop).set()

    def _heard(self) -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            self.stop.set()
            self.at_once.set()
