"""Parking: an engine that has nothing to do gives memory back, and later computes as before.

On a CPU it is the memory of the KV cache. On a GPU the engine sleeps as vLLM has it (level 1, which
`--enable-sleep-mode` prepares): its weights go to the host's memory, and the KV cache is dropped.

Nothing of a request or a migration may be there, and nothing gets in meanwhile: clients' requests
wait, and migrations are refused (`kvmig.engines.vllm.migration.check_awake`). An engine that wakes
first computes the probe of its start again. One that computes something else serves no more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from kvmig.core.errors import NotParked
from kvmig.engines.vllm.config import sleeps
from kvmig.engines.vllm.core import StepCore
from kvmig.engines.vllm.incoming import IncomingRequests
from kvmig.engines.vllm.memory import BlockMemory
from kvmig.engines.vllm.own_requests import OwnRequests

LEVEL = 1
"""The level of vLLM's sleep: weights are kept. Level 2 drops them, and has come back with
others."""
BY_CLIENTS = ("sleep", "wake_up", "release_kv_cache_memory")
"""vLLM's calls that take memory away, or give it back."""


class VllmParking:
    """Parks one engine and wakes it; on the event loop."""

    def __init__(
        self,
        core: StepCore,
        memory: BlockMemory,
        incoming: IncomingRequests,
        own: OwnRequests,
        arriving: Callable[[], object],
        on_engine: Callable[[Callable[[], None]], Awaitable[None]],
    ) -> None:
        """arriving: migrations that come; on_engine: runs something on the engine's thread."""
        self._core = core
        self._memory = memory
        self._incoming = incoming
        self._own = own
        self._arriving = arriving
        self._on_engine = on_engine

    async def park(self) -> None:
        """Give the memory back. Raises NotParked."""
        if not self._own.canary:
            raise NotParked("nothing shows whether it computes the same afterwards")
        self._incoming.hold()
        try:
            if self._incoming.submitted:
                raise NotParked("it has requests")
            await self._on_engine(self._give_back)
        except BaseException:
            if not self._core.model_executor.is_sleeping:
                self._incoming.let_in()
            raise

    async def unpark(self) -> None:
        """Take the memory again, and let requests in. Raises NotParked if the engine doesn't
        compute what it did at its start."""
        await self._on_engine(self._take_back)
        await self._own.compare()
        self._incoming.let_in()

    def check_call(self, method: str, args: Sequence[Any]) -> None:
        """Refuse a client's call of vLLM's that would take the memory from under a migration.

        Raises NotParked.
        """
        if method not in BY_CLIENTS or not sleeps(self._core.vllm_config):
            return
        if method != "sleep" or tuple(args[:1]) != (0,):
            raise NotParked(f"{method} is the server's to call: POST /kvmig/v1/park and unpark")

    # -- on the engine's thread

    def _give_back(self) -> None:
        core = self._core
        core.collect()  # steps in flight may outlive their requests
        busy = core.scheduler.has_requests() or core.batch_queue or self._arriving()
        if busy or not core.reset_prefix_cache():
            raise NotParked("it has requests")
        self._memory.settle()
        if not self._memory.on_gpu:
            self._memory.give_back()
        elif sleeps(core.vllm_config):
            core.sleep(LEVEL)
        else:
            raise NotParked("it is on a GPU and was started without --enable-sleep-mode")

    def _take_back(self) -> None:
        if self._core.model_executor.is_sleeping:
            self._core.wake_up()
