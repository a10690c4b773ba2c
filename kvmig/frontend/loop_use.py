"""What single calls take of a front end's event loop, on which all tokens wait.

A call with a large body is timed while it runs: each step of its own tasks, by the processor time
of the loop's thread, without what the garbage of all takes. Who stalls the loop again and again
isn't let in for a while. For a loaded machine, for threads and for others' work no call is blamed.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from kvmig.asgi.call import HttpCall, current_call

LARGE_BYTES = 16_384
"""Calls with smaller bodies aren't timed."""
STALL_S = 0.25
"""Processor time of a step from which on it is a stall."""
MOST, WITHIN_S = 3, 60.0
"""Stalls of one account, from which on it isn't let in."""
CLOSED_S = 10.0
"""Time from an account's last stall until its calls are admitted again."""

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class StallRecord:
    """Stalls of the last minute, by who pays for them. Pure."""

    def __init__(self) -> None:
        self._stalls: dict[str, deque[float]] = {}

    def record_stall(self, payer: str, now: float) -> None:
        """Record that one of the payer's calls has stalled the loop."""
        self._stalls.setdefault(payer, deque(maxlen=MOST)).append(now)
        for one, stalls in list(self._stalls.items()):
            if now - stalls[-1] > WITHIN_S:
                del self._stalls[one]

    def closed_s(self, payer: str, now: float) -> float:
        """Seconds until the payer is admitted; 0: it is now."""
        stalls = self._stalls.get(payer)
        if stalls is None or len(stalls) < MOST or stalls[-1] - stalls[0] > WITHIN_S:
            return 0.0
        return max(0.0, stalls[-1] + CLOSED_S - now)


class LoopUse:
    """Times the calls of one front end. `watch` its loop once."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.stalls = StallRecord()
        self.collecting_s = 0.0
        """Processor time of this thread that garbage collection took."""
        self._clock = clock
        self._collection_began = 0.0

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Time tasks, too, that timed calls begin."""
        loop.set_task_factory(self._make_task)
        gc.callbacks.append(self._collects)

    def close(self, loop: asyncio.AbstractEventLoop) -> None:
        """Watch no more."""
        if self._collects in gc.callbacks:
            loop.set_task_factory(None)
            gc.callbacks.remove(self._collects)

    async def run(self, call: HttpCall, payer: str, work: Coroutine[Any, Any, Result]) -> Result:
        """Do the call's work; payer: of its stalls; empty: it isn't timed."""
        call.loop_payer = payer
        return await (TimedCoroutine(work, call, self) if payer else work)

    def spent(self, call: HttpCall, seconds: float) -> None:
        """Record the processor time that a step of the call has taken of the loop."""
        if seconds >= STALL_S and not call.over:
            logger.warning("a call of %s took the event loop for %.2f s", call.loop_payer, seconds)
            self.stalls.record_stall(call.loop_payer, self._clock())

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, work: Any, **options: Any
    ) -> asyncio.Task[Any]:
        call = current_call.get()
        if call is not None and call.loop_payer and not call.over:
            work = TimedCoroutine(work, call, self)
        return asyncio.Task(work, loop=loop, **options)

    def _collects(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._collection_began = time.thread_time()
        else:
            self.collecting_s += time.thread_time() - self._collection_began


class TimedCoroutine(Coroutine[Any, Any, Result], Awaitable[Result]):
    """A coroutine, whose steps are timed."""

    def __init__(self, work: Coroutine[Any, Any, Result], call: HttpCall, use: LoopUse) -> None:
        self._work = work
        self._call = call
        self._use = use

    def send(self, value: Any) -> Any:
        """Go on."""
        return self._step(self._work.send, value)

    def throw(self, *error: Any) -> Any:
        """Go on with an error."""
        return self._step(self._work.throw, *error)

    def close(self) -> None:
        """Close the coroutine."""
        self._work.close()

    def __await__(self) -> Iterator[Any]:  # type: ignore[override]
        return self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)  # libraries look whether a coroutine has begun

    def _step(self, go_on: Callable[..., Any], *args: Any) -> Any:
        use = self._use
        began, collecting_s = time.thread_time(), use.collecting_s
        try:
            return go_on(*args)
        finally:
            collected_s = use.collecting_s - collecting_s
            use.spent(self._call, time.thread_time() - began - collected_s)
