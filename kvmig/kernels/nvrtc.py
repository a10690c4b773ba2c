"""The kernels of csrc/*.cuh compiled by CuPy through NVRTC at first use: a GPU without nvcc.

CuPy keeps what it compiled in its own cache.
"""

from __future__ import annotations

import functools
import importlib
import re
from typing import Any

import numpy as np

from kvmig.core.errors import KernelUnavailable
from kvmig.kernels import api, build
from kvmig.kernels.driver import CudaDriver, version
from kvmig.kernels.gpu import GpuKernels, gpu_for

HEADERS = ("copy.cuh",)
GEOMETRY = {
    "kvmig_copy_kernel": "Copy",
    "kvmig_copy_sum_kernel": "Copy",
    "kvmig_checksum_kernel": "Copy",
}
"""Kernels, and the constants k...Threads and k...CtasPerSm by which they are launched."""
_SUM_BYTES = 8


def source() -> str:
    """What is compiled. CuPy's cache doesn't look into headers, so their hash is in it."""
    recipe = build.cuda()
    head = f"// {build.BuildRecipe.fingerprint(recipe, list(HEADERS))}\n"
    return head + "".join(f'#include "{name}"\n' for name in HEADERS)


def options() -> tuple[str, ...]:
    """Compiler options for NVRTC."""
    return ("-std=c++17", "-default-device", f"-I{build.CSRC.resolve()}")


@functools.cache
def constants() -> dict[str, int]:
    """Threads and CTAs an SM, as the headers say them."""
    text = "".join((build.CSRC / name).read_text() for name in HEADERS)
    pattern = r"constexpr int k(\w+(?:Threads|CtasPerSm)) = (\d+);"
    return {name: int(value) for name, value in re.findall(pattern, text)}


class CupyLauncher:
    """A `gpu.Launcher` over the kernels themselves. Raises KernelUnavailable without CuPy."""

    name = "nvrtc"

    def __init__(self, device: CudaDriver) -> None:
        self._device = device
        try:
            self._cupy: Any = importlib.import_module("cupy")
            with self._cupy.cuda.Device(device.ordinal):
                module = self._cupy.RawModule(code=source(), options=options(), backend="nvrtc")
                self._kernels = {name: module.get_function(name) for name in GEOMETRY}
        except ImportError as error:
            package = f"cupy-cuda{version() // 1000}x"
            raise KernelUnavailable(f"{package} can't be imported: {error}") from error
        except Exception as error:  # CuPy's are of many kinds; all mean the same here
            raise KernelUnavailable(f"CuPy can't compile the kernels: {error}") from error

    def copy(self, *arguments: int) -> None:
        *tables, n, checksums, stream, workers = arguments
        name = "kvmig_copy_sum_kernel" if checksums else "kvmig_copy_kernel"
        self._clear(checksums, n, stream)
        self._launch(name, stream, workers, *_wide(*tables, n, checksums))

    def copy_tma(self, *arguments: int) -> None:
        raise KernelUnavailable("copies through the TMA need the library that nvcc builds")

    def checksum(self, *arguments: int) -> None:
        *tables, n, checksums, stream, workers = arguments
        self._clear(checksums, n, stream)
        self._launch("kvmig_checksum_kernel", stream, workers, *_wide(*tables, n, checksums))

    def _clear(self, checksums: int, n: int, stream: int) -> None:
        if checksums:
            self._device.clear(checksums, n * _SUM_BYTES, stream)

    def _launch(self, name: str, stream: int, workers: int, *arguments: Any) -> None:
        family = GEOMETRY[name]
        ctas = workers or constants()[f"{family}CtasPerSm"] * self._device.multiprocessors
        threads = constants()[f"{family}Threads"]
        cupy = self._cupy
        with cupy.cuda.Device(self._device.ordinal), cupy.cuda.ExternalStream(stream):
            self._kernels[name]((ctas,), (threads,), arguments)


def _wide(*values: int) -> tuple[np.int64, ...]:
    """Addresses and 64-bit numbers, as a kernel takes them."""
    return tuple(np.int64(value) for value in values)


def load(device: api.Device) -> GpuKernels:
    """The kernels on the calling thread's GPU (else the first). Raises KernelUnavailable."""
    return kernels_on(gpu_for(device, "kernels of NVRTC are"))


@functools.cache
def kernels_on(ordinal: int) -> GpuKernels:
    """The kernels on one GPU of this process. Raises KernelUnavailable."""
    driver = CudaDriver(ordinal)
    return GpuKernels(CupyLauncher(driver), driver)
