"""Gives a process's freed memory back to the system: see `trimming`."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kvmig.core.clock import TimeSource, monotonic
from kvmig.core.trimming import MemoryTrimming

LOOK_S = 2.0
"""Pause between two readings of the process's size."""


def resident_bytes() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


RELEASES: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("malloc_trim", (0,)),
    ("MallocExtension_ReleaseFreeMemory", ()),
)
"""Functions that return free memory, with arguments: glibc's, and that of tcmalloc, which vLLM's
build for CPUs brings along and which instances there use (LD_PRELOAD)."""


def give_back(library: Any = None) -> None:
    """Return all free whole pages to the kernel, as far as what allocates memory here can.

    library: with the functions of this process; None: it is looked up.
    """
    library = ctypes.CDLL(None) if library is None else library
    for name, arguments in RELEASES:
        if (release := getattr(library, name, None)) is not None:
            release(*arguments)


async def keep_small(
    resident: Callable[[], int] = resident_bytes,
    trim: Callable[[], None] = give_back,
    clock: TimeSource = monotonic,
    look_s: float = LOOK_S,
) -> None:
    """Trim the heap until cancelled: a task of each process that receives clients' data."""
    plan = MemoryTrimming(resident())
    while True:
        await asyncio.sleep(look_s)
        if plan.is_due(before := resident(), clock()):
            trim()
            plan.record_trimmed(before, resident(), clock())
