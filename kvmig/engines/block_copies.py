"""Copies between a KV cache and fused buffers, on a thread of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from kvmig.engines.copies import Copies, WholeBlocks
from kvmig.engines.copy_thread import CopyThread
from kvmig.ground.layout import KVLayout

Copy = Callable[[Sequence[int], memoryview, bool], list[int]]


class BlockCopies:
    """What an engine's `gather` and `scatter` may be: one copy at a time."""

    def __init__(self, layout: KVLayout, by: Copies | None = None) -> None:
        """layout: of memory that outlives this; by: how, None: as whole blocks in the host's
        memory. Raises KernelUnavailable."""
        self._block_bytes = layout.block_bytes
        self._by = by or WholeBlocks(layout)
        self._thread = CopyThread()

    async def gather(
        self, block_ids: Sequence[int], out: memoryview, urgent: bool = False
    ) -> list[int]:
        """Blocks [n] into `out` [n * block_bytes], fused; returns n checksums.

        urgent: ahead of other copies.
        """
        return await self._run(self._by.gather, block_ids, out, urgent)

    async def scatter(
        self, block_ids: Sequence[int], data: memoryview, urgent: bool = False
    ) -> list[int]:
        """`data` [n * block_bytes] into blocks [n]; returns n checksums of `data`."""
        return await self._run(self._by.scatter, block_ids, data, urgent)

    def gather_now(self, block_ids: Sequence[int], out: memoryview) -> list[int]:
        """`gather` on the calling thread, where it needn't wait for a device."""
        return self._by.gather(list(block_ids), out)

    def scatter_now(self, block_ids: Sequence[int], data: memoryview) -> list[int]:
        """`scatter` on the calling thread, where it needn't wait for a device."""
        return self._by.scatter(list(block_ids), data)

    def close(self) -> None:
        """Wait for the running copy, and end the thread."""
        self._thread.close()

    async def _run(
        self, copy: Copy, block_ids: Sequence[int], buffer: memoryview, urgent: bool
    ) -> list[int]:
        size = len(block_ids) * self._block_bytes
        call = partial(copy, list(block_ids), buffer[:size], urgent)
        work = asyncio.wrap_future(self._thread.submit(call, urgent))
        # A cancelled caller frees the blocks next: the copy must have left them first.
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise
