"""Work that its owner does not wait for."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from kvmig.core.background import BackgroundTasks, answer_call, cancel_tasks, keep_running


async def fail() -> None:
    raise ValueError("no")


async def test_a_task_that_fails_is_logged_and_ends_no_other_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks, ended = BackgroundTasks("the owner"), asyncio.Event()
    tasks.start(fail())
    await asyncio.sleep(0)

    async def end() -> None:
        ended.set()

    tasks.start(end())
    async with asyncio.timeout(5.0):
        await ended.wait()
    await tasks.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("the owner: <coroutine object fail")


async def test_tasks_that_run_are_cancelled_with_their_owner(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tasks, cancelled = BackgroundTasks("the owner"), asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60.0)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    tasks.start(wait())
    await asyncio.sleep(0)
    await tasks.close()
    assert cancelled.is_set()
    assert caplog.records == []


async def test_work_that_fails_begins_again_until_it_is_done_or_cancelled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    turns: list[int] = []

    async def work() -> None:
        turns.append(len(turns))
        if len(turns) < 3:
            raise ValueError("no")

    failures: list[Exception] = []
    await keep_running(work, "the work", 0.0, failures.append)
    assert turns == [0, 1, 2]
    assert [str(one) for one in failures] == ["no", "no"]
    assert [one.getMessage() for one in caplog.records] == ["the work failed, and begins again"] * 2
    waits = asyncio.create_task(keep_running(asyncio.Event().wait, "a wait"))
    await asyncio.sleep(0)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits


async def test_a_task_that_fails_when_it_is_cancelled_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def breaks() -> None:
        try:
            await asyncio.sleep(60.0)
        finally:
            await fail()

    breaking, ends = asyncio.create_task(breaks()), asyncio.create_task(asyncio.sleep(60.0))
    await asyncio.sleep(0)
    await cancel_tasks(breaking, ends)
    (record,) = caplog.records
    assert record.getMessage().endswith("failed when it was cancelled")
    assert ends.cancelled()


def test_a_call_gives_its_future_its_value_or_its_error() -> None:
    seven, failed = Future[int](), Future[int]()
    answer_call(seven, lambda: 7)
    answer_call(failed, lambda: 1 // 0)
    assert seven.result() == 7
    assert isinstance(failed.exception(), ZeroDivisionError)


def test_what_a_failed_call_held_goes_with_its_future() -> None:
    """Not with the next collection of garbage: it may be an agent's threads, or a GPU's memory."""

    class HeldMemory:
        """What a call holds."""

    def fail(found: list[weakref.ref[HeldMemory]]) -> None:
        held = HeldMemory()
        found.append(weakref.ref(held))
        raise RuntimeError

    def work(calls: list[tuple[Future[None], Callable[[], None]]]) -> None:
        answer_call(*calls.pop())

    found, future = list[weakref.ref[HeldMemory]](), Future[None]()
    gc.disable()
    try:
        work([(future, lambda: fail(found))])
        assert isinstance(future.exception(), RuntimeError)
        del future
        assert found[0]() is None
    finally:
        gc.enable()


def test_a_call_whose_future_was_cancelled_is_not_made() -> None:
    future, made = Future[None](), list[int]()
    future.cancel()
    answer_call(future, lambda: made.append(1))
    assert made == []


def test_the_end_of_the_process_is_no_answer_unless_it_is_asked_for() -> None:
    def leave() -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        answer_call(Future[None](), leave)
    future = Future[None]()
    answer_call(future, leave, BaseException)
    assert isinstance(future.exception(), SystemExit)
