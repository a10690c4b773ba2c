"""Work that its owner does not wait for: background tasks, and calls on another thread."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

log = logging.getLogger(__name__)

Value = TypeVar("Value")

UNFORESEEN_S = 1.0
"""Pause before work begins again after an unforeseen failure."""


class BackgroundTasks:
    """Tasks of one owner. A task that fails is logged, and ends no other one."""

    def __init__(self, owner: str) -> None:
        """owner: its name in the log."""
        self._owner = owner
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(
        self, work: Coroutine[Any, Any, Value], name: str | None = None
    ) -> asyncio.Task[Value]:
        """Start the work as a background task."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def cancel(self) -> None:
        """Cancel all that still run."""
        for task in self._tasks:
            task.cancel()

    async def close(self) -> None:
        """Cancel all that still run, and wait for their ends."""
        self.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)  # `_ended` logs what failed

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s: %s failed", self._owner, task.get_coro(), exc_info=error)


async def keep_running(
    work: Callable[[], Coroutine[Any, Any, object]],
    name: str,
    pause_s: float = UNFORESEEN_S,
    failed: Callable[[Exception], object] = lambda error: None,
) -> None:
    """Do work that has no end by itself, and begin it again whenever it fails, which is logged.

    name: of the work, in the log. failed: called with each failure.
    """
    while True:
        try:
            await work()
        except Exception as error:
            log.exception("%s failed, and begins again", name)
            failed(error)
        else:
            return
        await asyncio.sleep(pause_s)


async def cancel_tasks(*tasks: asyncio.Future[Any] | None) -> None:
    """Cancel the tasks, and wait for their ends. None stands for a task that was never made.

    A task that fails because it is cancelled is logged; what one that had ended before has raised
    is its owner's to look at.
    """
    made = [task for task in tasks if task is not None]
    running = [task for task in made if not task.done()]
    for task in running:
        task.cancel()
    await asyncio.gather(*made, return_exceptions=True)
    for task in running:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%r failed when it was cancelled", task, exc_info=error)


async def await_end(work: asyncio.Future[Any]) -> None:
    """Wait until the work has ended, however often the caller is cancelled meanwhile; then raise
    CancelledError if it was. What the work has raised is its owner's to look at."""
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError


def answer_call(
    future: Future[Value],
    call: Callable[[], Value],
    errors: type[BaseException] = Exception,
) -> None:
    """Run the call, unless the future was cancelled; its value or error goes to the future.

    errors: those that only the future raises; others are raised here. The caller must not keep the
    future, either: the error keeps all frames that it was raised under, and the future the error.
    """
    try:
        if future.set_running_or_notify_cancel():
            future.set_result(call())
    except errors as error:
        future.set_exception(error)
    finally:
        del future, call  # or what the call held would stay until garbage is collected
