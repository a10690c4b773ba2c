"""Clients' calls that pause an engine or forget its caches, such as before new weights come.

vLLM preempts its running requests for that, and expects that nothing else has blocks: else such a
call fails, when the engine is paused already. But what migrations hold is in no batch: a request
that is suspended here, and a reservation for one that comes. So such a call waits until migrations
hold nothing. None begins meanwhile, and each that is under way is given up at its next question.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from kvmig.core.background import BackgroundTasks
from kvmig.engines.vllm.core import StepCore

CLEARING = ("pause_scheduler", "sleep", "reset_prefix_cache", "release_kv_cache_memory")
"""vLLM's methods."""
SETTLE_S = 15.0
"""Longest wait for migrations: a destination frees what it holds when its lease of 10 s is over."""
LOOK_S = 0.005


class ClientCall(NamedTuple):
    """A call as `StepCore.utility` takes it."""

    client: int
    call_id: int
    method: str
    args: Any


class ClearingCalls:
    """Passes the calls of one engine's clients on, in their order; on the event loop."""

    def __init__(
        self,
        core: StepCore,
        held: Callable[[], object],
        on_engine: Callable[[Callable[[], object]], Awaitable[object]],
    ) -> None:
        """held: what migrations hold now; on_engine: runs something on the engine's thread."""
        self._core = core
        self._held = held
        self._on_engine = on_engine
        self._waiting: deque[ClientCall] = deque()
        self._tasks = BackgroundTasks("calls of an engine")
        self._passing: asyncio.Task[None] | None = None

    def pass_on(self, call: ClientCall) -> None:
        """Carry the call out, behind those that came before."""
        passing = self._passing is not None and not self._passing.done()
        if call.method not in CLEARING and not passing:
            self._core.utility(*call)
            return
        self._waiting.append(call)
        if not passing:
            self._passing = self._tasks.start(self._pass())

    def close(self) -> None:
        """The engine is closed: what waits is not carried out."""
        self._tasks.cancel()

    async def _pass(self) -> None:
        core = self._core
        try:
            while self._waiting:
                call = self._waiting.popleft()
                if call.method in CLEARING:
                    core.clears = True
                    await self._settle()
                core.utility(*call)
                await self._on_engine(lambda: None)  # behind it
                core.clears = False
        finally:
            core.clears = False

    async def _settle(self) -> None:
        """Wait until migrations hold nothing, or too long: then the call fails, as in vLLM."""
        deadline = time.monotonic() + SETTLE_S
        while await self._on_engine(self._held) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
