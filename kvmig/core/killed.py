"""The end of a process that was killed: it comes soon, except where the kernel keeps it."""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Awaitable
from typing import Protocol

KILLED_S = 10.0
"""Time for a killed process to be gone: one that waits for a driver may take long."""

log = logging.getLogger(__name__)


class KilledProcess(Protocol):
    """The part of `asyncio.subprocess.Process` that is used here."""

    @property
    def pid(self) -> int: ...
    def wait(self) -> Awaitable[int]: ...


async def await_killed(process: KilledProcess, name: str) -> int | None:
    """Wait for the end of a process that was killed, KILLED_S at most.

    Its exit status; None, and a line in the log, for one that is there still.
    """
    try:
        async with asyncio.timeout(KILLED_S):
            return await process.wait()
    except TimeoutError:
        _log_left(process.pid, name)
        return None


def kill_and_wait(process: subprocess.Popen[bytes], name: str) -> None:
    """Kill a process and wait for its end, KILLED_S at most; the log names one that stays."""
    process.kill()
    try:
        process.wait(KILLED_S)
    except subprocess.TimeoutExpired:
        _log_left(process.pid, name)


def _log_left(pid: int, name: str) -> None:
    log.error("%s (process %d) is there still, %g s after it was killed", name, pid, KILLED_S)
