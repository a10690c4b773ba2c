"""Gives a process's freed memory back to the system: see `trimming`."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

from kvmig.core.clock import Clock, monotonic
from kvmig.core.trimming import Trimming

LOOK_S = 2.0
"""Between two looks at how large the process is."""


def resident_bytes() -> int:
    """Of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def give_back() -> None:
    """All that the C library keeps free in whole pages, if it is one that can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


async def keep_small(
    resident: Callable[[], int] = resident_bytes,
    trim: Callable[[], None] = give_back,
    clock: Clock = monotonic,
    look_s: float = LOOK_S,
) -> None:
    """Until it is cancelled: a task of each process that takes what clients send."""
    plan = Trimming(resident())
    while True:
        await asyncio.sleep(look_s)
        if plan.due(before := resident(), clock()):
            trim()
            plan.done(before, resident(), clock())
