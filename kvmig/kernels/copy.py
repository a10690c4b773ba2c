"""Copies of KV blocks between regions of one machine's memory, with a checksum a block.

Gather is a copy from the engine's regions to those of a buffer (`ground.layout.fused`),
scatter the other way round.

Example: move blocks 7 and 3 into the first two places of `buffer`, and one back:

    staged = fused(address_of(buffer), layout)
    sums = copy_blocks(layout.regions, staged, [7, 3], [0, 1], layout.num_blocks, 2)
    copy_blocks(staged, layout.regions, [1], [9], 2, layout.num_blocks)  # returns sums[1:]
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvmig.ground.errors import KernelUnavailable
from kvmig.ground.layout import Region
from kvmig.kernels import native, reference

Buffer = bytes | bytearray | memoryview

log = logging.getLogger(__name__)


class Backend(Protocol):
    """What does the work once the arguments are checked: `native.Native` or `reference`."""

    def copy(
        self,
        src: Sequence[Region],
        dst: Sequence[Region],
        src_ids: NDArray[np.int64],
        dst_ids: NDArray[np.int64],
        checksums: bool,
    ) -> list[int]:
        """Copy blocks and return their checksums, or an empty list."""
        ...

    def checksum(self, src: Sequence[Region], ids: NDArray[np.int64]) -> list[int]:
        """The blocks' checksums."""
        ...


@functools.cache
def backend() -> Backend:
    """The fastest backend here. The first call may compile for some seconds: make it at start."""
    try:
        return native.load()
    except KernelUnavailable as error:
        log.warning("KV blocks are copied by numpy, which is several times slower: %s", error)
        return reference


def copy_blocks(
    src: Sequence[Region],
    dst: Sequence[Region],
    src_ids: Sequence[int],
    dst_ids: Sequence[int],
    src_blocks: int,
    dst_blocks: int,
    checksums: bool = True,
) -> list[int]:
    """Copy block `src_ids[k]` of `src` to block `dst_ids[k]` of `dst`, for every k < n.

    src, dst: as many regions, with equal runs, of `src_blocks` and `dst_blocks` blocks;
    no written byte may be another copy's source. Returns n checksums of what was written
    (csrc/kvmig_copy.h), or an empty list without `checksums`. Runs without the GIL.
    Raises ValueError before anything is written if the arguments don't fit.
    """
    if [region.run for region in src] != [region.run for region in dst]:
        raise ValueError("source and destination differ in their regions' number or runs")
    if len(src_ids) != len(dst_ids):
        raise ValueError(f"{len(src_ids)} source ids, but {len(dst_ids)} destination ids")
    sources = _checked(src_ids, src_blocks, "source")
    targets = _checked(dst_ids, dst_blocks, "destination")
    if len(np.unique(targets)) != len(targets):
        raise ValueError("a destination block is named twice")
    return backend().copy(src, dst, sources, targets, checksums)


def checksum_fused(buffer: Buffer, block_bytes: int) -> list[int]:
    """Checksums [n] of the n blocks of `block_bytes` that fill `buffer`.

    Equal to those of `copy_blocks` when every run is a multiple of 8 bytes.
    Raises ValueError if the buffer doesn't hold whole blocks.
    """
    nbytes = memoryview(buffer).nbytes
    if block_bytes <= 0 or nbytes % block_bytes:
        raise ValueError(f"{nbytes} bytes are no whole number of blocks of {block_bytes}")
    if not nbytes:
        return []
    region = Region(address_of(buffer), block_bytes, block_bytes)
    return backend().checksum([region], np.arange(nbytes // block_bytes, dtype=np.int64))


def address_of(buffer: Buffer) -> int:
    """Where a contiguous buffer's bytes begin; read-only ones too. Keep the buffer alive."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)


def _checked(ids: Sequence[int], blocks: int, side: str) -> NDArray[np.int64]:
    checked = np.asarray(ids, np.int64)
    wrong = checked[(checked < 0) | (checked >= blocks)]
    if len(wrong):
        raise ValueError(f"{side} block {wrong[0]} is outside 0..{blocks - 1}")
    return checked
