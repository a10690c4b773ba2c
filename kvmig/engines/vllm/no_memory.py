"""What stands in for `BlockMemory` where vLLM's KV cache lies in a way that can't be moved."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.sched.scheduler import Scheduler

from kvmig.engines.vllm.tables import Tables
from kvmig.engines.vllm.units import Units
from kvmig.ground.layout import KVLayout


class NoMemory:
    """No region, so no blocks to gather: with `Engine.unmovable` nobody asks for any."""

    on_gpu = False

    def __init__(self, scheduler: Scheduler) -> None:
        self.tables = Tables(scheduler, Units(scheduler.block_size))
        tokens = self.tables.block_tokens
        self.layout = KVLayout((), scheduler.kv_cache_config.num_blocks, tokens)

    def after_step(self) -> None:
        """Nothing waits for a step."""

    async def gather(
        self, block_ids: Sequence[int], out: memoryview, urgent: bool = False
    ) -> list[int]:
        """As all copies here: RuntimeError."""
        raise _no_blocks()

    async def scatter(
        self, block_ids: Sequence[int], data: memoryview, urgent: bool = False
    ) -> list[int]:
        """See `gather`."""
        raise _no_blocks()

    def gather_now(self, block_ids: Sequence[int], out: memoryview) -> list[int]:
        """See `gather`."""
        raise _no_blocks()

    def scatter_now(self, block_ids: Sequence[int], data: memoryview) -> list[int]:
        """See `gather`."""
        raise _no_blocks()

    def close(self) -> None:
        """There is nothing to free."""


def _no_blocks() -> RuntimeError:
    return RuntimeError("this engine's blocks can't be moved")
