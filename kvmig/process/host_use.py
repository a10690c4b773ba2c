"""The host's memory that processes take, as the kernel counts it."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
FORGET_PEAK = "5"
"""The word that /proc/PID/clear_refs takes to forget a peak."""


def peak_bytes(pids: Iterable[int]) -> int:
    """The most bytes that these processes have had each since `forget_peaks`: of their own, and
    pages of files such as libraries. What they share, such as a KV cache that several workers
    have, is left out; one that has ended has none. Raises OSError."""
    total = 0
    for pid in pids:
        try:
            text = (PROC / str(pid) / "status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        fields = dict(line.split(":", 1) for line in text.splitlines())
        if "VmHWM" in fields:  # one that is ending has no memory any more
            total += _bytes(fields["VmHWM"]) - _bytes(fields["RssShmem"])
    return total


def forget_peaks(pids: Iterable[int]) -> None:
    """Let the most that these processes have had be what they have now. Raises OSError."""
    for pid in pids:
        try:
            (PROC / str(pid) / "clear_refs").write_text(FORGET_PEAK)
        except (FileNotFoundError, ProcessLookupError):
            continue


def _bytes(field: str) -> int:
    return int(field.split()[0]) * 1024


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
