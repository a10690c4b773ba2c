"""Triton's kernels as `TritonKernels` launches them, compiled for GPUs that needn't be here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvmig.kernels import triton_copy, triton_fp8, triton_reshard
from kvmig.kernels.triton_kernels import TritonKernels

KERNELS = {
    "copy_kernel": triton_copy,
    "reshard_kernel": triton_reshard,
    "pack_kernel": triton_fp8,
    "unpack_kernel": triton_fp8,
}
POINTERS = {torch.int64: "*i64", torch.uint64: "*u64"}


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
        names = self._kernel.arg_names
        constants = {name: value for name, value in self._keywords.items() if name in names}
        options = {name: value for name, value in self._keywords.items() if name not in names}
        variables = [name for name in names if name not in constants]
        types = map(_type, self._arguments)
        source = ASTSource(
            fn=self._kernel,
            signature={
                **dict(zip(variables, types, strict=True)),
                **dict.fromkeys(constants, "constexpr"),
            },
            constexprs={(names.index(name),): value for name, value in constants.items()},
        )
        target = GPUTarget("cuda", capability, 32)
        assembly: dict[str, Any] = triton.compile(source, target=target, options=options).asm
        return assembly


def recording(patched: pytest.MonkeyPatch) -> tuple[TritonKernels, dict[str, Recorder]]:
    """Kernels that launch nothing but record, and the recorder of each by its name."""
    recorders: dict[str, Recorder] = {}
    for name, module in KERNELS.items():
        recorders[name] = Recorder(getattr(module, name))
        patched.setattr(module, name, recorders[name])
    # The kernels are compiled ones all the same: they were decorated when they were imported.
    patched.setattr(triton.knobs.runtime, "interpret", True)
    return TritonKernels("cpu"), recorders


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return POINTERS[value.dtype]
    return "i32" if -(2**31) <= value < 2**31 else "i64"
