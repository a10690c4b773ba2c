"""What a process takes of the host's memory, and how much of some of its own is there."""

from __future__ import annotations

import ctypes
import mmap
import os

import pytest

from kvmig.process.host_use import forget_peaks, peak_bytes, resident_bytes

SIZE = 64 << 20
PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def test_memory_counts_once_it_is_written_and_what_was_not_is_not_there() -> None:
    with mmap.mmap(-1, SIZE, flags=PRIVATE) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        forget_peaks([os.getpid()])
        before = peak_bytes([os.getpid()])
        assert resident_bytes(address, SIZE) < SIZE // 8
        ctypes.memset(address, 1, SIZE)
        assert resident_bytes(address, SIZE) == SIZE
        assert peak_bytes([os.getpid()]) - before == pytest.approx(SIZE, rel=0.1)


def test_the_most_stays_until_it_is_forgotten() -> None:
    with mmap.mmap(-1, SIZE, flags=PRIVATE) as memory:
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 1, SIZE)
    most = peak_bytes([os.getpid()])
    forget_peaks([os.getpid()])
    assert most - peak_bytes([os.getpid()]) > SIZE * 0.9


def test_what_is_shared_with_others_is_nobodys_own() -> None:
    with mmap.mmap(-1, SIZE) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        forget_peaks([os.getpid()])
        before = peak_bytes([os.getpid()])
        ctypes.memset(address, 1, SIZE)
        assert resident_bytes(address, SIZE) == 0
        assert peak_bytes([os.getpid()]) - before < SIZE // 8


def test_a_process_that_has_ended_takes_nothing() -> None:
    forget_peaks([1 << 30])
    assert peak_bytes([1 << 30]) == 0
