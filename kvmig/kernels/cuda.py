"""The compiled CUDA library (csrc/*.cu) through ctypes."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from pathlib import Path

from kvmig.core.errors import KernelUnavailable
from kvmig.kernels import abi, api, build
from kvmig.kernels.driver import CudaDriver, version
from kvmig.kernels.gpu import GpuKernels, gpu_for

PACKAGED = Path(__file__).parent / "_lib" / "libkvmig_cuda.so"
"""The path at which setup.py puts the library."""

NO_DEVICE, OLD_DRIVER = 100, 35
"""cudaErrorNoDevice; cudaErrorInsufficientDriver, which is also that of no driver."""

log = logging.getLogger(__name__)


def check(status: int) -> None:
    """`abi.check`, but KernelUnavailable where the GPU or its driver is the reason."""
    if status == abi.CUDA_ERROR + OLD_DRIVER:
        major, minor = version() // 1000, version() % 1000 // 10
        raise KernelUnavailable(
            f"NVIDIA's driver is too old: it is for CUDA {major}.{minor}, and kvmig's CUDA library "
            "was built by a later toolkit"
        )
    if status == abi.CUDA_ERROR + NO_DEVICE:
        raise KernelUnavailable("no NVIDIA GPU can be used")
    abi.check(status)


class CudaLibrary:
    """A `gpu.Launcher`: the library's own launches."""

    name = "cuda"

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def copy(self, *arguments: int) -> None:
        check(self._library.kvmig_copy(*arguments))

    def copy_tma(self, *arguments: int) -> None:
        check(self._library.kvmig_copy_tma(*arguments))

    def checksum(self, *arguments: int) -> None:
        check(self._library.kvmig_checksum(*arguments))


def load(device: api.Device) -> GpuKernels:
    """The kernels on the calling thread's GPU (else the first). Raises KernelUnavailable."""
    return kernels_on(gpu_for(device, "the CUDA library is"))


@functools.cache
def kernels_on(ordinal: int) -> GpuKernels:
    """The kernels on one GPU of this process. Raises KernelUnavailable."""
    return GpuKernels(CudaLibrary(library()), CudaDriver(ordinal))


@functools.cache
def library() -> ctypes.CDLL:
    """The one that was installed; if there is none that fits, one built for this user by nvcc.

    $KVMIG_CUDA_LIBRARY is another file to load. Raises KernelUnavailable.
    """
    if chosen := os.environ.get("KVMIG_CUDA_LIBRARY"):
        return abi.load(Path(chosen), "cuda")
    if PACKAGED.exists():
        try:
            return abi.load(PACKAGED, "cuda")
        except KernelUnavailable as error:
            log.info("building the CUDA library again: %s", error)
    return abi.load(build.cached_library(build.cuda()), "cuda")
