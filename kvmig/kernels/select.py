"""Which implementation copies on a device: the fastest there is, or the one that is asked for.

Every implementation is a module with `load(device) -> CopyKernels`, which raises KernelUnavailable
where it can't run, and is imported only when its turn has come.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os

import numpy as np

from kvmig.core.errors import ConfigError, KernelUnavailable, KvmigError
from kvmig.core.layout import BlockRegion
from kvmig.kernels.api import BlockCopy, CopyKernels, Device
from kvmig.kernels.driver import CudaDriver, current_device
from kvmig.kernels.gpu import GpuKernels

VARIABLE = "KVMIG_KERNELS"
TRIAL_BYTES = 4096
MODULES = {
    "cuda": "kvmig.kernels.cuda",
    "nvrtc": "kvmig.kernels.nvrtc",
    "triton": "kvmig.kernels.triton_kernels",
    "cpu": "kvmig.kernels.native",
    "reference": "kvmig.kernels.reference",
}
ORDER: dict[Device, tuple[str, ...]] = {
    "cuda": ("cuda", "nvrtc", "triton", "reference"),
    "cpu": ("cpu", "reference"),
}
"""Fastest first."""

log = logging.getLogger(__name__)


def kernels(device: Device) -> CopyKernels:
    """The kernels for memory of `device`; the first call may compile, so make it at start.

    $KVMIG_KERNELS forces one of MODULES wherever it can be: one of the GPU only leaves memory of
    the host to the host's. Raises ConfigError for a name that isn't there, and KernelUnavailable
    with the reason if it can't run here.
    """
    return _chosen(device, os.environ.get(VARIABLE, ""), _gpu(device))


def _gpu(device: Device) -> int:
    """The calling thread's: its kernels are no other's."""
    try:
        return current_device() if device == "cuda" else 0
    except KernelUnavailable:  # each implementation says why it can't run
        return 0


@functools.cache
def _chosen(device: Device, forced: str, gpu: int) -> CopyKernels:
    if not forced:
        return _fastest(device)
    if forced not in MODULES:
        raise ConfigError(f"{VARIABLE}={forced} is not one of {', '.join(MODULES)}")
    try:
        if device == "cpu" and forced not in (*ORDER["cpu"], "triton"):
            load(forced, "cuda")
            return _fastest("cpu")
        return load(forced, device)
    except KernelUnavailable as error:
        raise KernelUnavailable(f"{VARIABLE}={forced}: {error}") from error


def _fastest(device: Device) -> CopyKernels:
    *fast, last = ORDER[device]
    reasons: list[str] = []
    for name in fast:
        try:
            return load(name, device)
        except KernelUnavailable as error:
            reasons.append(f"{name}: {error}")
    log.warning("KV blocks are copied by torch, which is several times slower: %s", reasons)
    return load(last, device)


def load(name: str, device: Device) -> CopyKernels:
    """The implementation of that name. Raises KernelUnavailable if it can't run here."""
    try:
        module = importlib.import_module(MODULES[name])
    except ImportError as error:
        raise KernelUnavailable(f"{name} can't be imported: {error}") from error
    loaded: CopyKernels = module.load(device)
    if device == "cuda":
        _try_out(loaded)
    return loaded


def _try_out(kernels: CopyKernels) -> None:
    """Launch each kernel once: what is compiled, made or refused at its first use is so now."""
    gpu, ids = CudaDriver(current_device()), np.zeros(1, np.int64)
    memory = gpu.allocate(2 * TRIAL_BYTES)
    here, there = (
        [BlockRegion(address, TRIAL_BYTES, TRIAL_BYTES)]
        for address in (memory, memory + TRIAL_BYTES)
    )
    blocks = BlockCopy(here, there, ids, ids)
    try:
        for checksums in (True, False):
            kernels.copy(blocks, checksums=checksums).wait()
        kernels.checksum(here, ids).wait()
        if isinstance(kernels, GpuKernels) and kernels.has_tma:
            for checksums in (True, False):
                kernels.copy_tma(blocks, checksums=checksums).wait()
    except KernelUnavailable:
        raise
    except KvmigError as error:
        raise KernelUnavailable(f"{kernels.name} kernels don't run on this GPU: {error}") from error
    finally:
        gpu.free(memory)
