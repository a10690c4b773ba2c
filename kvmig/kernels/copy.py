"""Copies of KV blocks between regions of one device's memory, with a checksum per block.

Gather is a copy from the engine's regions to those of a buffer (`core.layout.fused`),
scatter the other way round.

Example: move blocks 7 and 3 into the first two places of `buffer`, and one back:

    staged = fused(address_of(buffer), layout)
    sums = copy_blocks(layout.regions, staged, [7, 3], [0, 1], layout.num_blocks, 2)
    copy_blocks(staged, layout.regions, [1], [9], 2, layout.num_blocks)  # returns sums[1:]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvmig.core.layout import BlockRegion
from kvmig.kernels import checks
from kvmig.kernels.api import BlockCopy, CopyKernels, Ids, PendingWork
from kvmig.kernels.arrays import address_of, memory_of
from kvmig.kernels.select import kernels

__all__ = ["address_of", "backend", "checksum_fused", "copy_blocks", "start_copy"]


def backend() -> CopyKernels:
    """The kernels for memory of the host. The first call may compile: make it at start."""
    return kernels("cpu")


def copy_blocks(
    src: Sequence[BlockRegion],
    dst: Sequence[BlockRegion],
    src_ids: Sequence[int],
    dst_ids: Sequence[int],
    src_blocks: int,
    dst_blocks: int,
    checksums: bool = True,
    workers: int = 0,
) -> list[int]:
    """`start_copy` on the host, to its end: n checksums, or [] without `checksums`."""
    return start_copy(
        backend(),
        *(src, dst, src_ids, dst_ids, src_blocks, dst_blocks),
        checksums=checksums,
        workers=workers,
    ).wait()


def start_copy(
    by: CopyKernels,
    src: Sequence[BlockRegion],
    dst: Sequence[BlockRegion],
    src_ids: Sequence[int] | Ids,
    dst_ids: Sequence[int] | Ids,
    src_blocks: int,
    dst_blocks: int,
    *,
    checksums: bool = True,
    stream: int = 0,
    workers: int = 0,
) -> PendingWork:
    """Copy block `src_ids[k]` of `src` to block `dst_ids[k]` of `dst`, for every k < n.

    src, dst: as many regions, with equal runs, of `src_blocks` and `dst_blocks` blocks, in
    memory of `by.device`; no written byte may be another copy's source. The checksums [n] are
    of what was written (csrc/kvmig.h). Runs without the GIL; `stream` and `workers` as in `face`.
    Raises ValueError before anything is written if the arguments don't fit.
    """
    blocks = checked(src, dst, src_ids, dst_ids, src_blocks, dst_blocks)
    checks.worker_count(workers)
    return by.copy(blocks, checksums=checksums, stream=stream, workers=workers)


def checked(
    src: Sequence[BlockRegion],
    dst: Sequence[BlockRegion],
    src_ids: Sequence[int] | Ids,
    dst_ids: Sequence[int] | Ids,
    src_blocks: int,
    dst_blocks: int,
) -> BlockCopy:
    """What `start_copy` copies, if all of its arguments fit. Raises ValueError."""
    checks.same_runs(src, dst)
    checks.real_memory(src, "source")
    checks.real_memory(dst, "destination")
    sources = checks.block_ids(src_ids, src_blocks, "source")
    targets = checks.block_ids(dst_ids, dst_blocks, "destination")
    checks.same_length(sources, targets)
    checks.written_once(targets)
    return BlockCopy(src, dst, sources, targets)


def checksum_fused(buffer: Any, block_bytes: int) -> list[int]:
    """Checksums [n] of the n blocks of `block_bytes` that fill `buffer` (any contiguous array).

    Equal to those of `copy_blocks` when every run is a multiple of 8 bytes.
    Raises ValueError if the buffer doesn't hold whole blocks.
    """
    memory = memory_of(buffer)
    if block_bytes <= 0 or memory.nbytes % block_bytes:
        raise ValueError(f"{memory.nbytes} bytes are no whole number of blocks of {block_bytes}")
    if not memory.nbytes:
        return []
    region = BlockRegion(memory.address, block_bytes, block_bytes)
    ids = np.arange(memory.nbytes // block_bytes, dtype=np.int64)
    return kernels(memory.device).checksum([region], ids).wait()
