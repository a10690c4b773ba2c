"""Gives a process's freed memory back to the system: see `trimming`."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path

from kvmig.core.clock import Clock, monotonic
from kvmig.core.trimming import MemoryTrimming

LOOK_S = 2.0
"""Pause between two readings of the process's size."""


def resident_bytes() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def give_back() -> None:
    """Return all free whole pages of the C library to the kernel, if the library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


async def keep_small(
    resident: Callable[[], int] = resident_bytes,
    trim: Callable[[], None] = give_back,
    clock: Clock = monotonic,
    look_s: float = LOOK_S,
) -> None:
    """Trim the heap until cancelled: a task of each process that receives clients' data."""
    plan = MemoryTrimming(resident())
    while True:
        await asyncio.sleep(look_s)
        if plan.is_due(before := resident(), clock()):
            trim()
            plan.record_trimmed(before, resident(), clock())
