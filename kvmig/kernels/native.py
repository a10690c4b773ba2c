"""The compiled copy library (csrc/kvmig_copy.h) through ctypes; calls run without the GIL."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvmig.ground.errors import KernelUnavailable
from kvmig.ground.layout import Region
from kvmig.kernels import build

ABI_VERSION = 1
"""KVMIG_ABI_VERSION of the header that this file was written for."""
PACKAGED = Path(__file__).parent / "_lib" / "libkvmig_copy.so"
"""Where setup.py puts the library."""

log = logging.getLogger(__name__)


class _CRegion(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("run", ctypes.c_int64),
    )


class Native:
    """One loaded library. Raises KernelUnavailable if it can't be used."""

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
            version = library.kvmig_abi_version()
        except (OSError, AttributeError) as error:
            raise KernelUnavailable(f"can't load {path}: {error}") from error
        if version != ABI_VERSION:
            raise KernelUnavailable(f"{path} has ABI version {version}, not {ABI_VERSION}")
        regions, numbers = ctypes.POINTER(_CRegion), ctypes.c_void_p
        self._copy = library.kvmig_copy
        self._copy.argtypes = (
            *(regions, regions, ctypes.c_int64),
            *(numbers, numbers, ctypes.c_int64, numbers),
        )
        self._checksum = library.kvmig_checksum
        self._checksum.argtypes = (regions, ctypes.c_int64, numbers, ctypes.c_int64, numbers)

    def copy(
        self,
        src: Sequence[Region],
        dst: Sequence[Region],
        src_ids: NDArray[np.int64],
        dst_ids: NDArray[np.int64],
        checksums: bool,
    ) -> list[int]:
        """Copy blocks `src_ids` [n] to `dst_ids` [n]; returns n checksums, or none."""
        sums = np.empty(len(src_ids) if checksums else 0, np.uint64)
        status = self._copy(
            *(_regions(src), _regions(dst), len(src)),
            *(src_ids.ctypes.data, dst_ids.ctypes.data, len(src_ids)),
            sums.ctypes.data if checksums else None,
        )
        _check(status)
        return sums.tolist()

    def checksum(self, src: Sequence[Region], ids: NDArray[np.int64]) -> list[int]:
        """Checksums [n] of blocks `ids` [n]."""
        sums = np.empty(len(ids), np.uint64)
        status = self._checksum(
            *(_regions(src), len(src)), *(ids.ctypes.data, len(ids)), sums.ctypes.data
        )
        _check(status)
        return sums.tolist()


def load() -> Native:
    """The library that was installed; if there is none that fits, one built for this user.

    Raises KernelUnavailable.
    """
    if PACKAGED.exists():
        try:
            return Native(PACKAGED)
        except KernelUnavailable as error:
            log.info("building the copy library anew: %s", error)
    return Native(build.cached_library())


def _regions(regions: Sequence[Region]) -> ctypes.Array[_CRegion]:
    return (_CRegion * len(regions))(*(_CRegion(r.base, r.block_stride, r.run) for r in regions))


def _check(status: int) -> None:
    if status:
        raise ValueError(f"the copy library refused its arguments (status {status})")
