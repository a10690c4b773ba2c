"""Copies in turn, those that somebody waits for first, and callers that are cancelled meanwhile."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import pytest

from kvmig.core.layout import BlockRegion, KVLayout
from kvmig.engines.block_copies import BlockCopies, CopyThread
from tests.support.waiting import until


def test_urgent_copies_go_before_those_that_wait_and_all_keep_their_order() -> None:
    thread, begun, gate, done = CopyThread(), threading.Event(), threading.Event(), list[int]()

    def block() -> list[int]:
        begun.set()
        gate.wait(10)
        return []

    def copy(number: int) -> Callable[[], list[int]]:
        def run() -> list[int]:
            done.append(number)
            return [number]

        return run

    thread.submit(block, urgent=False)
    assert begun.wait(10)
    waiting = [
        thread.submit(copy(number), urgent)
        for number, urgent in ((1, False), (2, False), (3, True), (4, False), (5, True))
    ]
    gate.set()
    thread.close()
    assert done == [3, 5, 1, 2, 4]
    assert [one.result() for one in waiting] == [[1], [2], [3], [4], [5]]


def test_a_copy_that_fails_is_told_to_who_waits_and_the_next_one_runs() -> None:
    def fail() -> list[int]:
        raise OSError("no such block")

    thread = CopyThread()
    failing, fine = thread.submit(fail, urgent=False), thread.submit(lambda: [7], urgent=False)
    with pytest.raises(OSError, match="no such block"):
        failing.result(10)
    assert fine.result(10) == [7]
    thread.close()
    with pytest.raises(RuntimeError):
        thread.submit(list, urgent=True)


def test_a_copy_that_nobody_wants_any_more_is_left_out() -> None:
    thread, gate = CopyThread(), threading.Event()
    thread.submit(lambda: [int(gate.wait(10))], urgent=False)
    unwanted = thread.submit(lambda: [1], urgent=False)
    unwanted.cancel()
    gate.set()
    thread.close()
    assert unwanted.cancelled()


class HeldBackend:
    """Each of its copies waits until it is let go."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun: list[int] = []
        self.over = 0

    def gather(self, ids: Sequence[int], out: memoryview, urgent: bool = False) -> list[int]:
        self.begun += ids
        assert self.go_on.wait(10)
        self.over += 1
        return [0] * len(ids)

    scatter = gather


@pytest.fixture
def held() -> Iterator[tuple[HeldBackend, BlockCopies]]:
    backend = HeldBackend()
    copies = BlockCopies(KVLayout((BlockRegion(0, 64, 64),), 8, 4), backend)
    yield backend, copies
    backend.go_on.set()
    copies.close()


async def rest() -> None:
    """Until nothing goes on by itself."""
    for _ in range(50):
        await asyncio.sleep(0)


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_caller_has_its_blocks_until_the_copy_is_over_however_often_it_is_cancelled(
    held: tuple[HeldBackend, BlockCopies], times: int
) -> None:
    """By its time-out first, for example, and then because the instance stops."""
    backend, copies = held
    copying = asyncio.create_task(copies.scatter([3], memoryview(bytearray(64))))
    await until(lambda: backend.begun)
    for _ in range(times):
        copying.cancel()
        await rest()
    assert not copying.done()
    backend.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert backend.over == 1


async def test_a_time_out_is_one_whose_copy_ends_later(
    held: tuple[HeldBackend, BlockCopies],
) -> None:
    backend, copies = held

    async def in_time() -> None:
        async with asyncio.timeout(0.01):
            await copies.scatter([3], memoryview(bytearray(64)))

    copying = asyncio.create_task(in_time())
    await asyncio.sleep(0.05)
    assert not copying.done()
    backend.go_on.set()
    with pytest.raises(TimeoutError):
        await copying


async def test_a_copy_that_waits_never_begins_once_its_caller_is_cancelled(
    held: tuple[HeldBackend, BlockCopies],
) -> None:
    backend, copies = held
    buffer = memoryview(bytearray(64))
    first = asyncio.create_task(copies.gather([1], buffer))
    second = asyncio.create_task(copies.scatter([2], buffer))
    await until(lambda: backend.begun)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    backend.go_on.set()
    await first
    await copies.gather([4], buffer)
    assert backend.begun == [1, 4]


class Mapped(bytearray):
    """A buffer of which one can tell whether anybody has it."""


async def test_nobody_has_the_buffer_of_a_copy_that_failed(
    held: tuple[HeldBackend, BlockCopies], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be memory of a GPU, which would stay until garbage is collected."""
    backend, copies = held

    def fail(ids: Sequence[int], data: memoryview, urgent: bool = False) -> list[int]:
        raise OSError("no such block")

    monkeypatch.setattr(backend, "scatter", fail)
    buffer = Mapped(64)
    there = weakref.ref(buffer)
    gc.disable()
    try:
        with suppress(OSError):
            await copies.scatter([1], memoryview(buffer))
        del buffer
        await until(lambda: there() is None, within_s=5.0)  # the copy thread lets go of it, too
    finally:
        gc.enable()
