"""Triton's kernels as `TritonKernels` launches them, compiled for GPUs that needn't be here."""

from __future__ import annotations

from typing import Any

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kvmig.kernels import triton_copy
from kvmig.kernels.triton_kernels import TritonKernels

KERNELS = {
    "copy_kernel": triton_copy,
}


class AbsentGpu:
    """What Triton asks a driver for when it compiles."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        # A number of its own: Triton remembers by it what it compiles for.
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)


class Recorder:
    """Stands in for a kernel, and keeps what it was launched with last."""

    def __init__(self, kernel: Any) -> None:
        self.grid: tuple[int, ...] = ()
        self._kernel = kernel
        self._arguments: tuple[Any, ...] = ()
        self._keywords: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Recorder:
        self.grid = grid
        return self

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        self._arguments, self._keywords = arguments, keywords

    def compiled(self, capability: int) -> dict[str, Any]:
        """What the compiler makes of that launch: ttir, ptx, cubin, sass and more."""
        with pytest.MonkeyPatch.context() as briefly:
            # Not by `set_active`: there may be no driver to go back to.
            briefly.setattr(driver, "_active", AbsentGpu(capability))
            made = self._kernel.warmup(*self._arguments, grid=self.grid, **self._keywords)
        assembly: dict[str, Any] = made.asm
        return assembly


def recording(patched: pytest.MonkeyPatch) -> tuple[TritonKernels, dict[str, Recorder]]:
    """Kernels that launch nothing but record, and the recorder of each by its name."""
    recorders: dict[str, Recorder] = {}
    for name, module in KERNELS.items():
        recorders[name] = Recorder(getattr(module, name))
        patched.setattr(module, name, recorders[name])
    # The kernels are compiled ones all the same: they were decorated when they were imported.
    with pytest.MonkeyPatch.context() as briefly:
        briefly.setattr(triton.knobs.runtime, "interpret", True)
        return TritonKernels("cpu"), recorders
