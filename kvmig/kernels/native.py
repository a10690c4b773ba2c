"""The C++ twin (csrc/*_cpu.cpp) through ctypes; calls run without the GIL."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvmig.core.errors import KernelUnavailable
from kvmig.core.layout import BlockRegion
from kvmig.kernels import abi, build
from kvmig.kernels.api import BlockCopy, Device, FinishedWork, Ids

PACKAGED = Path(__file__).parent / "_lib" / "libkvmig_cpu.so"
"""The path at which setup.py puts the library."""

log = logging.getLogger(__name__)


class NativeKernels:
    """One loaded library. Raises KernelUnavailable if it can't be used."""

    name = "cpu"
    device: Device = "cpu"

    def __init__(self, path: Path) -> None:
        self._library = abi.load(path, "cpu")

    def copy(
        self, blocks: BlockCopy, *, checksums: bool, stream: int = 0, workers: int = 0
    ) -> FinishedWork:
        src, dst, src_ids, dst_ids = blocks
        sums = np.empty(len(src_ids) if checksums else 0, np.uint64)
        status = self._library.kvmig_copy(
            *(abi.region_table(src), abi.region_table(dst), len(src)),
            *(src_ids.ctypes.data, dst_ids.ctypes.data, len(src_ids)),
            *(sums.ctypes.data if checksums else None, None, workers),
        )
        abi.check(status)
        return FinishedWork(sums.tolist())

    def checksum(
        self, src: Sequence[BlockRegion], ids: Ids, *, stream: int = 0, workers: int = 0
    ) -> FinishedWork:
        sums = np.empty(len(ids), np.uint64)
        status = self._library.kvmig_checksum(
            *(abi.region_table(src), len(src), ids.ctypes.data, len(ids)),
            *(sums.ctypes.data, None, workers),
        )
        abi.check(status)
        return FinishedWork(sums.tolist())


def load(device: Device = "cpu") -> NativeKernels:
    """The library that was installed; if there is none that fits, one built for this user.

    Raises KernelUnavailable.
    """
    if device != "cpu":
        raise KernelUnavailable(f"the C++ kernels can't reach the memory of {device}")
    return NativeKernels(_path())


def library() -> ctypes.CDLL:
    """The same library, declared, for what else it has. Raises KernelUnavailable."""
    return abi.load(_path(), "cpu")


def _path() -> Path:
    if PACKAGED.exists():
        try:
            abi.load(PACKAGED, "cpu")
        except KernelUnavailable as error:
            log.info("building the library again: %s", error)
        else:
            return PACKAGED
    return build.cached_library()
