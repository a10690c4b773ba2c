"""A process gives back what it has freed: when, and that it does."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import sys
from asyncio import Event
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from kvmig.core.heap import give_back, keep_small
from kvmig.core.trimming import GROWN, LITTLE, PAUSE_S, MemoryTrimming

BASE = 100 << 20


def test_memory_is_given_back_by_whatever_allocates_it() -> None:
    """Under tcmalloc, glibc's function gives back nothing: 199 MB of 200 that were freed stayed."""
    done: list[tuple[str, tuple[int, ...]]] = []

    class Library:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *arguments: done.append((name, arguments))

    give_back(Library())
    assert done == [("malloc_trim", (0,)), ("MallocExtension_ReleaseFreeMemory", ())]
    give_back(object())  # one that has neither


def test_a_process_that_hardly_grows_is_left_alone() -> None:
    plan = MemoryTrimming(BASE)
    assert not plan.is_due(BASE + GROWN - 1, now=1000.0)


def test_what_has_grown_is_given_back_at_once() -> None:
    plan = MemoryTrimming(BASE)
    assert plan.is_due(BASE + GROWN, now=0.0)
    plan.record_trimmed(BASE + GROWN, BASE, now=0.0)
    assert not plan.is_due(BASE, now=0.0)
    assert plan.is_due(BASE + GROWN, now=0.0)


def test_what_was_in_use_is_looked_at_again_after_a_pause() -> None:
    plan, body = MemoryTrimming(BASE), BASE + 4 * GROWN
    assert plan.is_due(body, now=0.0)
    plan.record_trimmed(body, body, now=0.0)
    pause_s = 2 * PAUSE_S[0]
    assert not plan.is_due(body, now=pause_s - 0.1)
    assert plan.is_due(body, now=pause_s)


def test_what_stays_in_use_is_looked_at_ever_more_rarely() -> None:
    plan, larger, now = MemoryTrimming(BASE), BASE + 4 * GROWN, 0.0
    looks: list[float] = []
    while len(looks) < 20:
        if plan.is_due(larger, now):
            looks.append(now)
            plan.record_trimmed(larger, larger - LITTLE + 1, now)
        now += 1.0
    pauses = [after - before for before, after in itertools.pairwise(looks)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == PAUSE_S[1]


@given(st.lists(st.tuples(st.integers(0, 8 * GROWN), st.integers(0, 8 * GROWN)), min_size=1))
def test_whatever_was_in_use_is_given_back_once_it_is_free(steps: list[tuple[int, int]]) -> None:
    """steps: by how much the process is larger, and how much of that is in use."""
    plan, now, resident = MemoryTrimming(BASE), 0.0, BASE
    for larger, used in steps:
        now, resident = now + 1.0, BASE + larger
        if plan.is_due(resident, now):
            kept = min(resident, BASE + used)
            plan.record_trimmed(resident, kept, now)
            resident = kept
    for _ in range(int(PAUSE_S[1]) + 1):  # nothing is in use any more
        now += 1.0
        if plan.is_due(resident, now):
            plan.record_trimmed(resident, BASE, now)
            resident = BASE
    assert resident < BASE + GROWN


async def test_a_process_is_looked_at_until_the_task_is_cancelled() -> None:
    sizes, trimmed = itertools.chain([BASE, BASE, BASE + GROWN], itertools.repeat(BASE)), Event()
    task = asyncio.create_task(
        keep_small(lambda: next(sizes), trimmed.set, clock=lambda: 0.0, look_s=0.001)
    )
    async with asyncio.timeout(10):
        await trimmed.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


FREED = """
import ctypes
from kvmig.core.heap import give_back, resident_bytes

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
parts = [libc.malloc(60_000) for _ in range(1000)]  # a body of 60 MB, as a socket reads it
for part in parts:
    ctypes.memset(part, 1, 60_000)
for part in parts[:-1]:
    libc.free(ctypes.c_void_p(part))  # the last one holds the end of the heap
kept = resident_bytes()
give_back()
print(kept, resident_bytes())
"""


def test_what_the_c_library_keeps_after_a_large_body_is_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FREED], capture_output=True, text=True, timeout=60, check=True
    )
    before, after = map(int, done.stdout.split())
    assert before - after > 50_000_000
