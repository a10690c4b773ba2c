"""One thread for calls that block: a library's that isn't thread-safe, or that has no loop."""

from __future__ import annotations

import asyncio
import atexit
import logging
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from weakref import WeakSet

from kvmig.core.background import answer_call

log = logging.getLogger(__name__)

T = TypeVar("T")
Item = tuple[Future[Any], Callable[[], Any]]


EXIT_S = 2.0
"""How long the process's end waits for each thread that is to end."""
_ending: WeakSet[Thread] = WeakSet()


@atexit.register
def _join() -> None:
    """Libraries end the process with an error if they are in the middle of something."""
    for thread in list(_ending):
        thread.join(EXIT_S)


class CallWorker:
    """Runs calls one after the other. A daemon: a call that never returns keeps no process."""

    def __init__(
        self, name: str, idle: Callable[[], object] | None = None, idle_s: float | None = None
    ) -> None:
        """idle: called every `idle_s` seconds while there is nothing else to do."""
        self._name = name
        self._idle = idle
        self._idle_s = idle_s
        self._calls: SimpleQueue[Item | None] = SimpleQueue()
        self._thread = Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Run `call` after those before it. Cancelling the future skips it, if it isn't running."""
        future: Future[T] = Future()
        self._calls.put((future, call))
        return future

    async def run(self, call: Callable[[], T]) -> T:
        """`submit`, and wait for the result."""
        return await asyncio.wrap_future(self.submit(call))

    def post(self, call: Callable[[], object]) -> None:
        """`submit` work that is not waited for; an error is logged."""

        def report(future: Future[object]) -> None:
            if not future.cancelled() and (error := future.exception()) is not None:
                log.warning("%s: %r", self._name, error)

        self.submit(call).add_done_callback(report)

    def close(self) -> None:
        """End the thread after what is queued; doesn't wait. Idempotent."""
        _ending.add(self._thread)
        self._calls.put(None)

    def _next(self) -> Item | None:
        while True:
            try:
                return self._calls.get(timeout=self._idle_s)
            except Empty:
                if self._idle is not None:
                    self._idle()

    def _serve(self) -> None:
        while (item := self._next()) is not None:
            future, call = item
            answer_call(future, call, BaseException)
            del item, future, call  # not kept until the next one comes
