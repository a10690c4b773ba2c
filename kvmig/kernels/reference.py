"""What the kernels must do, in numpy: the oracle of their tests, and what runs without them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvmig.ground.layout import Region

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def copy(
    src: Sequence[Region],
    dst: Sequence[Region],
    src_ids: NDArray[np.int64],
    dst_ids: NDArray[np.int64],
    checksums: bool,
) -> list[int]:
    """Copy blocks `src_ids` [n] to `dst_ids` [n]; returns n checksums, or none if not wanted."""
    for source, target in zip(src, dst, strict=True):
        _runs(target, dst_ids)[dst_ids] = _runs(source, src_ids)[src_ids]
    return checksum(dst, dst_ids) if checksums else []


def checksum(src: Sequence[Region], ids: NDArray[np.int64]) -> list[int]:
    """Checksums [n] of blocks `ids` [n], as csrc/kvmig_copy.h defines them."""
    total = np.zeros(len(ids), np.uint64)
    first = 0
    for region in src:
        count = -(-region.run // 8)
        padded = np.zeros((len(ids), count * 8), np.uint8)
        padded[:, : region.run] = _runs(region, ids)[ids]
        index = np.arange(first + 1, first + count + 1, dtype=np.uint64)
        total += _mix64(padded.view("<u8") + index * _GOLDEN).sum(axis=1, dtype=np.uint64)
        first += count
    return [int(value) for value in total]


def _mix64(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64's finaliser, element by element."""
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))


def _runs(region: Region, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The region's memory [largest id + 1, run], not a copy."""
    blocks = int(ids.max()) + 1 if len(ids) else 0
    if not blocks or not region.run:
        return np.zeros((blocks, region.run), np.uint8)
    nbytes = (blocks - 1) * region.block_stride + region.run
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(region.base))
    strides = (region.block_stride, 1)
    return np.lib.stride_tricks.as_strided(memory, (blocks, region.run), strides)
