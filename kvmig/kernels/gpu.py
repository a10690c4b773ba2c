"""The kernels' interface on a GPU: puts tables and ids on the device, launches, reports the end.

What launches is the compiled library (`cuda`) or CuPy (`nvrtc`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Protocol

from kvmig.core.errors import KernelUnavailable
from kvmig.core.layout import BlockRegion
from kvmig.kernels import abi, api
from kvmig.kernels.api import BlockCopy, FinishedWork, Ids, PendingWork
from kvmig.kernels.call_memory import CallMemoryPool
from kvmig.kernels.driver import CudaDriver, current_device

_SUM_BYTES = 8


class KernelLauncher(Protocol):
    """The functions of csrc/kvmig.h that launch, with their arguments as integers.

    They raise ValueError, KernelUnavailable or KvmigError, as `abi.check` does.
    """

    @property
    def name(self) -> str: ...
    def copy(self, *arguments: int) -> None: ...
    def copy_tma(self, *arguments: int) -> None: ...
    def checksum(self, *arguments: int) -> None: ...


def gpu_for(device: api.Device, whose: str) -> int:
    """The number of the calling thread's GPU, else of the first. Raises KernelUnavailable.

    device: of the memory; whose: the kernels that reach a GPU's only.
    """
    if device != "cuda":
        raise KernelUnavailable(f"{whose} not for memory of the {device}")
    return current_device()


class GpuKernels:
    """`face.CopyKernels` on one GPU; from any thread, each on streams of its own."""

    device: api.Device = "cuda"

    def __init__(self, launcher: KernelLauncher, device: CudaDriver) -> None:
        self._launcher = launcher
        self._device = device
        self._pool = CallMemoryPool(device)

    @property
    def name(self) -> str:
        return self._launcher.name

    @functools.cached_property
    def has_tma(self) -> bool:
        """Whether `copy_tma` can be had."""
        self._device.enter()
        try:
            self._launcher.copy_tma(0, 0, 0, 0, 0, 0, 0, 0, 0)  # of no block
        except KernelUnavailable:
            return False
        return True

    def copy(
        self, blocks: BlockCopy, *, checksums: bool, stream: int = 0, workers: int = 0
    ) -> PendingWork:
        return self._copy(self._launcher.copy, blocks, checksums, stream, workers)

    def copy_tma(
        self, blocks: BlockCopy, *, checksums: bool, stream: int = 0, workers: int = 0
    ) -> PendingWork:
        """`copy` through the TMA. Raises KernelUnavailable below sm_90, and where a base, stride
        or run is no multiple of 16."""
        for region in (*blocks.src, *blocks.dst):
            if (region.base | region.block_stride | region.run) % 16:
                raise KernelUnavailable(
                    f"{region} is not on 16-byte boundaries, as the TMA wants it"
                )
        return self._copy(self._launcher.copy_tma, blocks, checksums, stream, workers)

    def checksum(
        self, src: Sequence[BlockRegion], ids: Ids, *, stream: int = 0, workers: int = 0
    ) -> PendingWork:
        n = len(ids)

        def launch(table: int, numbers: int, sums: int) -> None:
            self._launcher.checksum(table, len(src), numbers, n, sums, stream, workers)

        if not n or not src:
            return FinishedWork([0] * n)
        return self._queue([_regions(tuple(src)), ids.tobytes()], n, stream, launch)

    def close(self) -> None:
        """Free the memory of calls that are done. Raises KvmigError."""
        self._pool.close()

    def _copy(
        self,
        kernel: Callable[..., None],
        blocks: BlockCopy,
        checksums: bool,
        stream: int,
        workers: int,
    ) -> PendingWork:
        src, dst, src_ids, dst_ids = blocks
        n = len(src_ids)

        def launch(*addresses: int) -> None:
            src_table, dst_table, src_numbers, dst_numbers, sums = addresses
            tables = src_table, dst_table, len(src)
            kernel(*tables, src_numbers, dst_numbers, n, sums, stream, workers)

        if not n or not src:
            return FinishedWork([0] * n if checksums else [])
        tables = [_regions(tuple(src)), _regions(tuple(dst))]
        parts = [*tables, src_ids.tobytes(), dst_ids.tobytes()]
        return self._queue(parts, n if checksums else 0, stream, launch)

    def _queue(
        self, parts: Sequence[bytes], count: int, stream: int, launch: Callable[..., None]
    ) -> PendingWork:
        """Upload `parts`, launch with their addresses and that of `count` checksums (0 for none),
        and bring the checksums back."""
        self._device.enter()
        *offsets, sums_at = accumulate(map(len, parts), initial=0)
        memory = self._pool.take_memory(sums_at + count * _SUM_BYTES)
        try:
            if parts:
                ctypes.memmove(memory.pinned, b"".join(parts), sums_at)
                self._device.upload(memory.device, memory.pinned, sums_at, stream)
            sums = memory.device + sums_at if count else 0
            launch(*(memory.device + offset for offset in offsets), sums)
            if count:
                back = memory.pinned + sums_at, memory.device + sums_at
                self._device.download(*back, count * _SUM_BYTES, stream)
        finally:  # after a failure too: what was queued may still use the memory
            call = self._pool.fly(memory, stream, sums_at, count)
        return call


@functools.lru_cache(maxsize=256)
def _regions(regions: tuple[BlockRegion, ...]) -> bytes:
    return bytes(abi.region_table(regions))
