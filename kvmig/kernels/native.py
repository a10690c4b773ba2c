"""The C++ twin (csrc/*_cpu.cpp) through ctypes; calls run without the GIL."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvmig.ground.errors import KernelUnavailable
from kvmig.ground.layout import Region
from kvmig.kernels import abi, build
from kvmig.kernels.face import Device, Finished, Half, Ids, Shard

PACKAGED = Path(__file__).parent / "_lib" / "libkvmig_cpu.so"
"""Where setup.py puts the library."""

log = logging.getLogger(__name__)


class Native:
    """One loaded library. Raises KernelUnavailable if it can't be used."""

    name = "cpu"
    device: Device = "cpu"

    def __init__(self, path: Path) -> None:
        self._library = abi.load(path, "cpu")

    def copy(
        self,
        src: Sequence[Region],
        dst: Sequence[Region],
        src_ids: Ids,
        dst_ids: Ids,
        *,
        checksums: bool,
        stream: int = 0,
        workers: int = 0,
    ) -> Finished:
        sums = np.empty(len(src_ids) if checksums else 0, np.uint64)
        status = self._library.kvmig_copy(
            *(abi.region_table(src), abi.region_table(dst), len(src)),
            *(src_ids.ctypes.data, dst_ids.ctypes.data, len(src_ids)),
            *(sums.ctypes.data if checksums else None, None, workers),
        )
        abi.check(status)
        return Finished(sums.tolist())

    def checksum(
        self, src: Sequence[Region], ids: Ids, *, stream: int = 0, workers: int = 0
    ) -> Finished:
        sums = np.empty(len(ids), np.uint64)
        status = self._library.kvmig_checksum(
            *(abi.region_table(src), len(src), ids.ctypes.data, len(ids)),
            *(sums.ctypes.data, None, workers),
        )
        abi.check(status)
        return Finished(sums.tolist())

    def reshard(
        self,
        src: Shard,
        dst: Shard,
        tokens: range,
        heads: range,
        row: int,
        *,
        stream: int = 0,
        workers: int = 0,
    ) -> Finished:
        tables = abi.grid_table(src.grids), abi.grid_table(dst.grids)
        ends = (_end(shard, table) for shard, table in zip((src, dst), tables, strict=True))
        status = self._library.kvmig_reshard(
            *(ctypes.byref(end) for end in ends),
            *(len(src.grids), tokens.start, len(tokens), heads.start, len(heads)),
            *(row, None, workers),
        )
        abi.check(status)
        return Finished([])

    def pack_fp8(
        self,
        src: int,
        dtype: Half,
        rows: int,
        width: int,
        packed: int,
        scales: int,
        *,
        stream: int = 0,
        workers: int = 0,
    ) -> Finished:
        abi.check(
            self._library.kvmig_pack_fp8(src, dtype, rows, width, packed, scales, None, workers)
        )
        return Finished([])

    def unpack_fp8(
        self,
        packed: int,
        scales: int,
        dtype: Half,
        rows: int,
        width: int,
        dst: int,
        *,
        stream: int = 0,
        workers: int = 0,
    ) -> Finished:
        abi.check(
            self._library.kvmig_unpack_fp8(packed, scales, dtype, rows, width, dst, None, workers)
        )
        return Finished([])


def load(device: Device = "cpu") -> Native:
    """The library that was installed; if there is none that fits, one built for this user.

    Raises KernelUnavailable.
    """
    if device != "cpu":
        raise KernelUnavailable(f"the C++ kernels can't reach the memory of {device}")
    if PACKAGED.exists():
        try:
            return Native(PACKAGED)
        except KernelUnavailable as error:
            log.info("building the copy library anew: %s", error)
    return Native(build.cached_library())


def _end(shard: Shard, table: ctypes.Array[abi.CGrid]) -> abi.CShard:
    return abi.CShard(
        ctypes.addressof(table), shard.ids.ctypes.data, shard.block_tokens, shard.first_head
    )
