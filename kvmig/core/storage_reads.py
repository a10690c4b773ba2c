"""Reads of users' files for an event loop: storage may never answer, as a network's whose server is
away, and a read that hangs can't be ended.

Each read has a thread of its own, which keeps no process from ending. A read that makes no progress
is given up, and its thread stays until the storage answers; there are never more than a certain
number of threads, and what hangs is not read once more meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from kvmig.core.background import answer_call
from kvmig.core.errors import KvmigError
from kvmig.core.read_progress import PROGRESS, ReadProgress

SILENT_S = 10.0
"""Time without progress after which a read is given up."""
MOST_READS = 64
"""Threads at most, those that hang included."""

log = logging.getLogger(__name__)

Value = TypeVar("Value")


class StorageSilent(KvmigError, OSError):
    """Storage doesn't answer; the message names the file."""


class StorageReads:
    """Threads that read for one event loop."""

    def __init__(self, most: int = MOST_READS, silent_s: float = SILENT_S) -> None:
        """most: threads. silent_s: time without progress."""
        self._places = asyncio.Semaphore(most)
        self._most = most
        self._silent_s = silent_s
        self._hung: dict[str, ReadProgress] = {}

    async def read(self, whose: str, folder: str, call: Callable[[], Value]) -> Value:
        """The value of `call`, which reads in that folder, and calls `note_path` before each file.

        whose: begins the error. folder: is not read while an earlier read of it hangs; empty: it is
        none. Raises StorageSilent, and what the call raises.
        """
        if (hung := self._hung.get(folder)) is not None:
            raise self._silent(whose, hung)
        try:
            async with asyncio.timeout(self._silent_s):
                await self._places.acquire()
        except TimeoutError as error:
            raise StorageSilent(
                f"{whose}: {folder or 'its files'} can't be read: {self._most} other reads wait for"
                " storage that does not answer"
            ) from error
        progress, future = ReadProgress(whose, folder), Future[Value]()
        waiting = asyncio.wrap_future(future)
        waiting.add_done_callback(partial(self._end, folder, progress))
        try:
            name = f"reads {folder}"
            args = (progress, future, call)
            threading.Thread(target=_answer, args=args, name=name, daemon=True).start()
        except RuntimeError:  # there can't be another thread
            waiting.cancel()
            raise
        before = -1
        while not waiting.done() and progress.steps != before:
            before = progress.steps
            await asyncio.wait({waiting}, timeout=self._silent_s)
        if waiting.done():
            return waiting.result()
        if folder:
            self._hung[folder] = progress
        silent = self._silent(progress.whose, progress)
        log.warning("%s", silent)
        raise silent

    def _silent(self, whose: str, progress: ReadProgress) -> StorageSilent:
        where = progress.path or "a file"
        return StorageSilent(
            f"{whose}: {where} can't be read: its storage does not answer within"
            f" {self._silent_s:g} s"
        )

    def _end(self, folder: str, progress: ReadProgress, waiting: asyncio.Future[Value]) -> None:
        self._places.release()
        error = None if waiting.cancelled() else waiting.exception()  # maybe its caller has gone
        if self._hung.get(folder) is progress:
            del self._hung[folder]
            log.warning("%s answers again: %s", progress.path or folder, error or "it was read")


def _answer(progress: ReadProgress, future: Future[Value], call: Callable[[], Value]) -> None:
    PROGRESS.set(progress)  # in this thread's own context
    answer_call(future, call)
