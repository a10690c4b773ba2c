"""One thread for copies, with a lane for those that somebody's pause waits for."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

Copy = Callable[[], list[int]]


class CopyThread:
    """Runs copies one at a time, urgent ones first, else in their order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvmig-copy")
        self._lock = threading.Lock()
        self._lanes: tuple[deque[tuple[Copy, Future[list[int]]]], ...] = (deque(), deque())

    def submit(self, copy: Copy, urgent: bool) -> Future[list[int]]:
        """What `copy` returns, or raises. Raises RuntimeError after `close`."""
        future: Future[list[int]] = Future()
        with self._lock:
            self._thread.submit(self._run_next)
            self._lanes[0 if urgent else 1].append((copy, future))
        return future

    def close(self) -> None:
        """Wait for all that was submitted."""
        self._thread.shutdown(wait=True)

    def _run_next(self) -> None:
        with self._lock:
            copy, future = next(lane for lane in self._lanes if lane).popleft()
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(copy())
        except BaseException as error:  # noqa: BLE001 - raised where the copy is awaited
            future.set_exception(error)
