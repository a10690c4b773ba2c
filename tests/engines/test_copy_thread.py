"""Copies in turn, and those that somebody waits for first."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvmig.engines.block_copies import CopyThread


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
