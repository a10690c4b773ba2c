"""Copies between a KV cache in the host's memory and fused buffers, on a thread of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from kvmig.engines.copy_thread import CopyThread
from kvmig.ground.layout import KVLayout, fused
from kvmig.kernels.copy import address_of, backend, copy_blocks

Copy = Callable[[Sequence[int], memoryview], list[int]]


class BlockCopies:
    """What an engine's `gather` and `scatter` may be: whole blocks, one copy at a time."""

    def __init__(self, layout: KVLayout) -> None:
        """layout: of memory that outlives this. Raises KernelUnavailable."""
        backend()  # built now if it must be, not in somebody's first copy
        self._layout = layout
        self._thread = CopyThread()

    async def gather(
        self, block_ids: Sequence[int], out: memoryview, urgent: bool = False
    ) -> list[int]:
        """Blocks [n] into `out` [n * block_bytes], fused; returns n checksums."""
        return await self._run(self.gather_now, block_ids, out, urgent)

    async def scatter(
        self, block_ids: Sequence[int], data: memoryview, urgent: bool = False
    ) -> list[int]:
        """`data` [n * block_bytes] into blocks [n]; returns n checksums of `data`."""
        return await self._run(self.scatter_now, block_ids, data, urgent)

    def gather_now(self, block_ids: Sequence[int], out: memoryview) -> list[int]:
        """`gather` on the calling thread."""
        layout, n = self._layout, len(block_ids)
        target = fused(address_of(out), layout)
        return copy_blocks(layout.regions, target, block_ids, range(n), layout.num_blocks, n)

    def scatter_now(self, block_ids: Sequence[int], data: memoryview) -> list[int]:
        """`scatter` on the calling thread."""
        layout, n = self._layout, len(block_ids)
        source = fused(address_of(data), layout)
        return copy_blocks(source, layout.regions, range(n), block_ids, n, layout.num_blocks)

    def close(self) -> None:
        """Wait for the running copy, and end the thread."""
        self._thread.close()

    async def _run(
        self, copy: Copy, block_ids: Sequence[int], buffer: memoryview, urgent: bool
    ) -> list[int]:
        size = len(block_ids) * self._layout.block_bytes
        call = partial(copy, list(block_ids), buffer[:size])
        work = asyncio.wrap_future(self._thread.submit(call, urgent))
        # A cancelled caller frees the blocks next: the copy must have left them first.
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.wait([work])
            raise
