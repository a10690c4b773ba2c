"""The host's memory that processes take, as the kernel counts it."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
OWN = "RssAnon:", "RssFile:"
"""Fields of /proc/PID/status: memory of a process's own, and pages of files such as libraries. What
is shared with others, such as a KV cache that several workers have, is in neither."""


def taken_bytes(pids: Iterable[int]) -> int:
    """Bytes that these processes have now, without what they share; none of one that has ended."""
    total = 0
    for pid in pids:
        try:
            lines = (PROC / str(pid) / "status").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(OWN))
    return total


def resident_bytes(begin: int, length: int) -> int:
    """Bytes of this process's own memory at these addresses that are in memory; 0 where it has
    none there, or shares it. Raises OSError."""
    if length <= 0 or not _is_own(begin):
        return 0
    first = begin // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(begin + length - first) // mmap.PAGESIZE)
    present = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t(pages * mmap.PAGESIZE)
    if libc.mincore(ctypes.c_void_p(first), size, present):
        raise OSError(ctypes.get_errno(), "the memory of the KV cache can't be looked at")
    return bytes(present).count(1) * mmap.PAGESIZE


def _is_own(address: int) -> bool:
    for line in (PROC / "self" / "maps").read_text().splitlines():
        span, flags, *_ = line.split()
        begin, _, end = span.partition("-")
        if int(begin, 16) <= address < int(end, 16):
            return flags.endswith("p")
    return False
