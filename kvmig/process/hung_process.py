"""A process that hangs: its parent reads what it does, and asks it where its threads are.

The kernel has one word for what a thread does. Where the threads are in the program, only the
process can print: by a signal whose handler Python runs in C, also while the event loop stands
still, or another thread holds the interpreter.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import signal
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR2
STANDARD_ERROR = 2
PRINTING_S = 0.5
"""Time for a process to print its stacks before its parent ends it."""
PROC = Path("/proc")
DOINGS = {
    "R": "it computes",
    "S": "it waits",
    "D": "it waits for a disk",
    "T": "it is stopped",
    "t": "it is stopped",
    "Z": "it has ended",
}
"""The letters of /proc/PID/stat, of a process's main thread (proc(5))."""


def print_stacks_when_asked() -> None:
    """Print where each thread is on stderr, at each STACKS_SIGNAL that this process gets."""
    faulthandler.register(STACKS_SIGNAL, file=STANDARD_ERROR, all_threads=True)


async def describe_hang(pid: int, reason: str) -> str:
    """Return the reason and what the process does, once it has had time to print its stacks.

    One that prints none when it gets the signal would end by it: it is not asked.
    """
    try:
        doing = DOINGS[(PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]]
        prints = _catches(pid, STACKS_SIGNAL)
    except (OSError, KeyError, IndexError):
        return reason
    if prints:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, STACKS_SIGNAL)
            await asyncio.sleep(PRINTING_S)
    return f"{reason}; {doing}"


def _catches(pid: int, wanted: signal.Signals) -> bool:
    for line in (PROC / str(pid) / "status").read_text().splitlines():
        name, _, mask = line.partition(":")
        if name == "SigCgt":
            return bool(int(mask, 16) >> (wanted - 1) & 1)
    return False
