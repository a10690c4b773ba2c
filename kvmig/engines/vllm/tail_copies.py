"""A tail's blocks out of the source's cache, and into the destination's, in the pause.

On a CPU the engine's thread copies them, between two steps. On a GPU the copy thread does, and the
engine's thread has the copy begin: at the source as soon as no step holds the request, at the
destination while it prepares the request.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future, wait

from msgspec.structs import replace

from kvmig.core.background import await_end
from kvmig.engines.base import CameBlocks, RequestTail
from kvmig.engines.block_copies import BlockCopies


class TailGather:
    """The copy of one suspended request's tail to `out`."""

    def __init__(
        self, copies: BlockCopies, block_bytes: int, on_gpu: bool, out: memoryview | None
    ) -> None:
        self._copies = copies
        self._block_bytes = block_bytes
        self._on_gpu = on_gpu
        self._out = out
        self._beginning = threading.Lock()
        self._copy: Future[list[int]] | None = None

    def begin(self, block_ids: list[int]) -> list[int]:
        """Gather, or have the copy thread gather; called on the engine's thread. Returns the
        checksums, none if they aren't known yet, or not all fits."""
        with self._beginning:
            size = len(block_ids) * self._block_bytes
            if not block_ids or self._out is None or size > self._out.nbytes:
                return []
            if not self._on_gpu:
                return self._copies.gather_now(block_ids, self._out[:size])
            self._copy = self._copies.start_gather(block_ids, self._out)
            return []

    async def finish(self, tail: RequestTail) -> RequestTail:
        """The tail, with the checksums of what was gathered. Raises what the copy has raised."""
        if self._copy is None:
            return tail
        await _ended(self._copy)
        return replace(tail, checksums=self._copy.result())

    async def give_up(self) -> None:
        """End with `out`: no copy to it runs when this returns, nor begins later."""
        with self._beginning:
            self._out = None
        if self._copy is not None:
            await _ended(self._copy)


async def _ended(copy: Future[list[int]]) -> None:
    """Wait for the copy's end, which comes by itself in any case (`SideStream.settle`), also if the
    caller is cancelled meanwhile: it frees the blocks next."""
    work = asyncio.wrap_future(copy)
    try:
        await await_end(work)
    finally:
        work.exception()  # whoever wants its result raises it


class LastBlocks:
    """Blocks of one commit. On a CPU they are copied between two steps, with the rest of the
    commit; on a GPU the copy thread copies them, and an engine that is idle anyway prepares the
    request meanwhile."""

    def __init__(self, last: CameBlocks, copies: BlockCopies, on_gpu: bool) -> None:
        """The copy on a GPU begins now."""
        self._last = last
        self._copies = copies
        self._copy: Future[list[int]] | None = None
        if on_gpu:
            self._copy = copies.start_scatter(last.block_ids, last.fused)

    async def copied(self) -> None:
        """Wait for the copy on a GPU, however it ends: `land` raises what it has raised."""
        if self._copy is not None:
            await _ended(self._copy)

    def land(self) -> None:
        """Put the tail's blocks into the cache, on the engine's thread. Raises MigrationRefused if
        they came changed, and what the copy raises."""
        last = self._last
        if self._copy is None:
            sums = self._copies.scatter_now(last.block_ids, last.fused)
        else:
            sums = self._copy.result()
        last.check(sums)

    def settle(self) -> None:
        """Wait, on the engine's thread, until no copy writes them: they may be freed then. A copy
        ends by itself in any case (`SideStream.settle`)."""
        if self._copy is not None:
            wait([self._copy])
