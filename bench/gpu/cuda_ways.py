"""The CUDA library's copies that are not in every implementation's face."""

from __future__ import annotations

from collections.abc import Iterator

from bench.gpu.device import TMA, Way
from kvmig.kernels.api import BlockCopy, FinishedWork, Kernels, PendingWork
from kvmig.kernels.driver import CudaDriver, current_device
from kvmig.kernels.gpu import GpuKernels


def tma(kernels: Kernels) -> Iterator[Way]:
    """Copies through the TMA, where the GPU has one."""
    if isinstance(kernels, GpuKernels) and kernels.has_tma:
        yield Way(TMA, kernels.copy_tma)


def engine() -> Way:
    """The copy engines, without checksums."""

    def copy(blocks: BlockCopy, *, checksums: bool, stream: int, workers: int) -> PendingWork:
        CudaDriver(current_device()).copy_blocks(*blocks, stream)
        return FinishedWork([])

    return Way("engine", copy, capped=False, summing=False)
