"""A child process of the launcher: how it is told what to be, when to go, and when it starts again.

The launcher writes one JSON line to its stdin and keeps the pipe open; its end, however
it ends, closes the pipe. The child says that it is ready with one JSON line on a file
descriptor of its own, so that nothing that a library prints can be taken for it.
"""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
from typing import TypeVar

import msgspec

from kvmig.ground.errors import StartupError

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


PAUSES_S = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Before the first start again in a row, the second, ...; the last one repeats."""
STABLE_S = 60.0
"""A process that has served for so long starts a new row with its next death."""


class Restarts:
    """Decides when a process that died starts again. most: in a row; None: without end.

    Example, most = 2: dead after 1 s of serving: again in 0.5 s; after 3 s: again in 1 s;
    after 2 s: given up. Had it served for a minute, it would be again in 0.5 s.
    """

    def __init__(self, most: int | None = None) -> None:
        self._most = math.inf if most is None else most
        self.deaths = 0
        """In a row."""

    def died(self, served_s: float) -> float | None:
        """Seconds until it shall start again; None: give it up. served_s: since it was ready."""
        if served_s >= STABLE_S:
            self.deaths = 0
        self.deaths += 1
        if self.deaths > self._most:
            return None
        return PAUSES_S[min(self.deaths, len(PAUSES_S)) - 1]
