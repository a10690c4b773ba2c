"""Copies between a KV cache and buffers of fused blocks, on a thread of their own.

`BlockCopies` is what an engine's `gather` and `scatter` may be. It runs one copy after the other
on a `CopyThread`; a copy is `HostCopies` in this process's memory, `device_copies.DeviceCopies` on
a GPU. A `CopyPlan` says where the blocks lie: as whole blocks (`BlockPlan`), or as parts of them
that engines of other shapes understand (`kvmig.engines.vllm.subblocks`).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvmig.core.background import answer_call, await_end
from kvmig.core.errors import RequestGone
from kvmig.core.layout import BlockRegion, KVLayout, fused
from kvmig.kernels.copy import address_of, backend, checksum_fused, start_copy


class CopyBackend(Protocol):
    """How a copy thread copies: ids [n], a buffer [n * block_bytes], n checksums (uint64).

    urgent: ahead of what else a device copies; a CPU has nothing else.
    """

    def gather(self, ids: Sequence[int], out: memoryview, urgent: bool = False) -> list[int]:
        """Copy blocks from the cache to the buffer."""
        ...

    def scatter(self, ids: Sequence[int], data: memoryview, urgent: bool = False) -> list[int]:
        """Copy blocks from the buffer to the cache."""
        ...


class BlockCopies:
    """An engine's `gather` and `scatter`: one copy at a time."""

    def __init__(self, layout: KVLayout, by: CopyBackend | None = None) -> None:
        """layout: of memory that outlives this; by: how, None: as whole blocks in the host's
        memory. Raises KernelUnavailable."""
        self._block_bytes = layout.block_bytes
        self._by = by or HostCopies(BlockPlan(layout))
        self._thread = CopyThread()
        self.absent: tuple[NDArray[np.bool_], int] | None = None
        """Which blocks have no memory, and how many ids each has; written on the copy thread."""

    async def gather(
        self, block_ids: Sequence[int], out: memoryview, urgent: bool = False
    ) -> list[int]:
        """Blocks [n] into `out` [n * block_bytes], fused; returns n checksums.

        urgent: ahead of other copies.
        """
        return await self._on_thread(self._gathering(block_ids, out, urgent), urgent)

    async def scatter(
        self, block_ids: Sequence[int], data: memoryview, urgent: bool = False
    ) -> list[int]:
        """`data` [n * block_bytes] into blocks [n]; returns n checksums of `data`."""
        return await self._on_thread(self._scattering(block_ids, data, urgent), urgent)

    def start_gather(self, block_ids: Sequence[int], out: memoryview) -> Future[list[int]]:
        """`gather`, ahead of other copies; from any thread. Such a copy can't be cancelled."""
        return self._thread.submit(self._gathering(block_ids, out, urgent=True), urgent=True)

    def start_scatter(self, block_ids: Sequence[int], data: memoryview) -> Future[list[int]]:
        """`scatter`, ahead of other copies; from any thread. Such a copy can't be cancelled."""
        return self._thread.submit(self._scattering(block_ids, data, urgent=True), urgent=True)

    def _gathering(
        self, block_ids: Sequence[int], out: memoryview, urgent: bool
    ) -> Callable[[], list[int]]:
        ids, out = list(block_ids), out[: len(block_ids) * self._block_bytes]

        def copy() -> list[int]:
            self._check(ids)
            return self._by.gather(ids, out, urgent)

        return copy

    def _scattering(
        self, block_ids: Sequence[int], data: memoryview, urgent: bool
    ) -> Callable[[], list[int]]:
        ids, data = list(block_ids), data[: len(block_ids) * self._block_bytes]
        return lambda: self._by.scatter(ids, data, urgent)

    def submit(self, work: Callable[[], list[int]]) -> Future[list[int]]:
        """Run `work` on the copy thread, after the present copies; callable from any thread."""
        return self._thread.submit(work, urgent=False)

    def _check(self, ids: Sequence[int]) -> None:
        """Refuse blocks that were freed, and given back, after the caller had learnt of them."""
        if self.absent is None or not ids:
            return
        absent, per_block = self.absent
        if absent[np.asarray(ids) // per_block].any():
            raise RequestGone("finished", "its blocks are gone")

    def gather_now(self, block_ids: Sequence[int], out: memoryview) -> list[int]:
        """`gather` on the calling thread, where it needn't wait for a device."""
        return self._by.gather(list(block_ids), out)

    def scatter_now(self, block_ids: Sequence[int], data: memoryview) -> list[int]:
        """`scatter` on the calling thread, where it needn't wait for a device."""
        return self._by.scatter(list(block_ids), data)

    def close(self) -> None:
        """Wait for the running copy, and end the thread."""
        self._thread.close()

    async def _on_thread(self, copy: Callable[[], list[int]], urgent: bool) -> list[int]:
        submitted = self._thread.submit(copy, urgent)
        work = asyncio.wrap_future(submitted)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # The caller frees the blocks next: a copy that has begun must have left them first.
            if not submitted.cancel():
                await await_end(work)
            raise
        finally:
            del submitted, work  # an error keeps this frame, which would keep error and buffer


class CopyThread:
    """Runs copies one at a time, urgent ones first, else in their order."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvmig-copy")
        self._lock = threading.Lock()
        self._lanes: tuple[deque[tuple[Callable[[], list[int]], Future[list[int]]]], ...]
        self._lanes = deque(), deque()

    def submit(self, copy: Callable[[], list[int]], urgent: bool) -> Future[list[int]]:
        """A future of what `copy` returns, or raises. Raises RuntimeError after `close`."""
        future: Future[list[int]] = Future()
        with self._lock:
            self._thread.submit(self._run_next)
            self._lanes[0 if urgent else 1].append((copy, future))
        return future

    def close(self) -> None:
        """Wait for all submitted copies."""
        self._thread.shutdown(wait=True)

    def _run_next(self) -> None:
        with self._lock:
            copy, future = next(lane for lane in self._lanes if lane).popleft()
        try:
            answer_call(future, copy, BaseException)
        finally:
            del future, copy


class CopyPass(NamedTuple):
    """One call of the copy kernels: the arguments of `kvmig.kernels.copy.start_copy`."""

    src: tuple[BlockRegion, ...]
    dst: tuple[BlockRegion, ...]
    src_ids: NDArray[np.int64]
    dst_ids: NDArray[np.int64]
    src_blocks: int
    dst_blocks: int

    def reversed(self) -> CopyPass:
        """The same copy the other way round."""
        return CopyPass(
            *(self.dst, self.src, self.dst_ids, self.src_ids),
            *(self.dst_blocks, self.src_blocks),
        )


class CopyPlan(Protocol):
    """The positions of fused blocks in the cache."""

    unit_bytes: int
    sums_by_copy: bool
    """Whether the kernels' checksums of each copy are the blocks', for runs of any length."""

    def gather(self, ids: Sequence[int], address: int) -> Iterable[CopyPass]:
        """Copies from the cache to the buffer at `address`, [n] fused."""
        ...

    def scatter(self, ids: Sequence[int], address: int) -> Iterable[CopyPass]:
        """Copies from the buffer to the cache."""
        ...


class BlockPlan:
    """A `CopyPlan`: an engine's blocks as it keeps them."""

    sums_by_copy = True

    def __init__(self, layout: KVLayout) -> None:
        """layout: of memory that outlives this."""
        self._layout = layout
        self.unit_bytes = layout.block_bytes

    def gather(self, ids: Sequence[int], address: int) -> Iterator[CopyPass]:
        """One copy of all."""
        layout, n = self._layout, len(ids)
        places, buffer = np.arange(n, dtype=np.int64), fused(address, layout)
        cache_ids = np.asarray(ids, np.int64)
        yield CopyPass(layout.regions, buffer, cache_ids, places, layout.num_blocks, n)

    def scatter(self, ids: Sequence[int], address: int) -> Iterator[CopyPass]:
        """One copy of all."""
        for one in self.gather(ids, address):
            yield one.reversed()


class HostCopies:
    """`CopyBackend` in this process's memory."""

    def __init__(self, plan: CopyPlan) -> None:
        """Raises KernelUnavailable."""
        self._kernels = backend()  # built now if it must be, not in somebody's first copy
        self._plan = plan

    def gather(self, ids: Sequence[int], out: memoryview, urgent: bool = False) -> list[int]:
        return self._copy(self._plan.gather(ids, address_of(out)), out)

    def scatter(self, ids: Sequence[int], data: memoryview, urgent: bool = False) -> list[int]:
        return self._copy(self._plan.scatter(ids, address_of(data)), data)

    def _copy(self, passes: Iterable[CopyPass], buffer: memoryview) -> list[int]:
        by_copy, sums = self._plan.sums_by_copy, list[int]()
        for one in passes:
            sums += start_copy(self._kernels, *one, checksums=by_copy).wait()
        return sums if by_copy else checksum_fused(buffer, self._plan.unit_bytes)
