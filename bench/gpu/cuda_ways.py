"""The CUDA library's copies that are not in every implementation's face, and kernels that might
take the place of its own (variants.cu), which kvmig doesn't use."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

from bench.gpu.device import TMA, Way
from kvmig.core.errors import KernelUnavailable
from kvmig.kernels import abi, build, cuda
from kvmig.kernels.api import BlockCopy, CopyKernels, FinishedWork, PendingWork
from kvmig.kernels.driver import CudaDriver, current_device
from kvmig.kernels.gpu import GpuKernels

SOURCE = Path(__file__).with_name("variants.cu")
VARIANT_TARGET = "90"
"""What variants are compiled for, and PTX of it for later GPUs: all of them to save time."""


def tma(kernels: CopyKernels) -> Iterator[Way]:
    """Copies through the TMA, where the GPU has one."""
    if isinstance(kernels, GpuKernels) and kernels.has_tma:
        yield Way(TMA, kernels.copy_tma)


def engine() -> Way:
    """The copy engines, without checksums."""

    def copy(blocks: BlockCopy, *, checksums: bool, stream: int, workers: int) -> PendingWork:
        CudaDriver(current_device()).copy_blocks(*blocks, stream)
        return FinishedWork([])

    return Way("engine", copy, capped=False, summing=False)


def variants_library() -> build.BuildRecipe:
    """The library of variants.cu."""
    product = build.cuda()
    number = VARIANT_TARGET
    targets = [f"-gencode=arch=compute_{number},code={code}_{number}" for code in ("sm", "compute")]
    command = [*build.CUDA_FLAGS, f"-I{build.CSRC}", *targets]
    parts = ("libkvmig_cuda_variants", (SOURCE,), product.headers)
    return build.BuildRecipe(*parts, lambda: [build.nvcc(), *command], product.link)


class VariantLauncher:
    """A `KernelLauncher` of one kernel of variants.cu."""

    def __init__(self, library: ctypes.CDLL, number: int, name: str) -> None:
        self.name = name
        self._number = number
        self._copy = library.kvmig_copy_variant
        self._copy.argtypes = (ctypes.c_int32, *abi.PROTOTYPES["kvmig_copy"])

    def copy(self, *arguments: int) -> None:
        cuda.check(self._copy(self._number, *arguments))

    copy_tma = copy

    def checksum(self, *arguments: int) -> None:
        raise KernelUnavailable("variants only copy")


def variant_kernels(library: ctypes.CDLL, device: CudaDriver) -> Iterator[tuple[GpuKernels, bool]]:
    """Each kernel of a library that has variants.cu, and whether it is one of the TMA's."""
    library.kvmig_variant_name.restype = ctypes.c_char_p
    library.kvmig_variant_ring_bytes.restype = ctypes.c_int64
    number = 0
    while (name := library.kvmig_variant_name(number)) is not None:
        launcher = VariantLauncher(library, number, name.decode())
        yield GpuKernels(launcher, device), library.kvmig_variant_ring_bytes(number) > 0
        number += 1


def variants(kernels: CopyKernels) -> list[Way]:
    """Copies by each of them, where the GPU has a TMA. Raises KernelUnavailable without nvcc."""
    if not isinstance(kernels, GpuKernels) or not kernels.has_tma:
        return []
    library = ctypes.CDLL(str(build.cached_library(variants_library())))
    return [
        Way(by.name, by.copy_tma if has_ring else by.copy)
        for by, has_ring in variant_kernels(library, CudaDriver(current_device()))
    ]
