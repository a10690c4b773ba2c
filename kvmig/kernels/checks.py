"""What the kernels trust, checked: every refusal is one ValueError before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from kvmig.core.layout import BlockRegion
from kvmig.kernels.api import Ids


def block_ids(ids: ArrayLike, blocks: int, side: str) -> Ids:
    """Ids [n] as int64, each in 0..blocks - 1."""
    given = np.asarray(ids)
    if given.size and not np.issubdtype(given.dtype, np.integer):
        raise ValueError(f"{side} block ids are {given.dtype}, not integers")
    if given.ndim != 1:
        raise ValueError(f"{side} block ids have {given.ndim} dimensions, not one")
    checked = np.ascontiguousarray(given, np.int64)
    wrong = checked[(checked < 0) | (checked >= blocks)]
    if len(wrong):
        raise ValueError(f"{side} block {wrong[0]} is outside 0..{blocks - 1}")
    return checked


def written_once(ids: Ids) -> None:
    """No destination id may come twice: which copy came last would be chance."""
    values, counts = np.unique(ids, return_counts=True)
    if len(values) != len(ids):
        raise ValueError(f"destination block {values[counts > 1][0]} is named twice")


def same_length(src_ids: Ids, dst_ids: Ids) -> None:
    """One destination id for every source id."""
    if len(src_ids) != len(dst_ids):
        raise ValueError(f"{len(src_ids)} source ids, but {len(dst_ids)} destination ids")


def same_runs(src: Sequence[BlockRegion], dst: Sequence[BlockRegion]) -> None:
    """Blocks of one end must be blocks of the other, run by run."""
    if [region.run for region in src] != [region.run for region in dst]:
        raise ValueError("source and destination differ in their regions' number or runs")


def real_memory(regions: Sequence[BlockRegion], side: str) -> None:
    """Addresses and sizes that can be; runs of different blocks must not touch."""
    for number, region in enumerate(regions):
        if region.base <= 0:
            raise ValueError(f"{side} region {number} begins at address {region.base}")
        if region.run < 0:
            raise ValueError(f"{side} region {number} has a run of {region.run} bytes")
        if region.block_stride < region.run:
            raise ValueError(
                f"{side} region {number}: runs of {region.run} bytes overlap at a block stride "
                f"of {region.block_stride}"
            )


def worker_count(workers: int) -> None:
    """0 or more."""
    if workers < 0:
        raise ValueError(f"workers is {workers}, should be 0 (the kernels choose) or more")
