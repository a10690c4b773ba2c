"""The kernels in Triton: for a GPU without nvcc; on the CPU under TRITON_INTERPRET=1, for tests.

Nothing else imports this module before it is chosen: it loads torch and Triton.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray

from kvmig.core.errors import KernelUnavailable
from kvmig.core.layout import BlockRegion
from kvmig.kernels import triton_copy
from kvmig.kernels.api import BlockCopy, Device, FinishedWork, Ids, PendingWork
from kvmig.kernels.triton_launch import TritonLauncher, alignment, power_of_two

COPY_TILE = 32 << 10
"""Bytes that a CTA has under way: a KV run of most models in one to a few tiles."""
SMALL_TILE = 4096
"""Tile for shorter runs; in between, a run is one tile: few kernels are compiled."""
LANES = 4096
"""Most elements of a tile, where they are narrower than 8 bytes."""
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
"""No multiplication and addition in one rounding: the results are defined bit by bit."""
UNITS = {16: tl.uint64, 8: tl.uint64, 4: tl.uint32, 2: tl.uint16, 1: tl.uint8}
"""What is loaded at an alignment; two 64-bit lanes side by side make a 128-bit load."""


class TritonKernels:
    """`face.CopyKernels`. Raises KernelUnavailable where Triton has nothing to run on."""

    name = "triton"

    def __init__(self, device: Device = "cuda") -> None:
        interpreted = triton.knobs.runtime.interpret
        if device == "cpu" and not interpreted:
            raise KernelUnavailable("Triton runs on the CPU only under TRITON_INTERPRET=1")
        if device == "cuda" and interpreted:
            raise KernelUnavailable("TRITON_INTERPRET=1 keeps Triton off the GPU")
        if device == "cuda" and not torch.cuda.is_available():
            raise KernelUnavailable("torch finds no GPU that Triton could run on")
        self.device: Device = device
        on = torch.device("cpu")
        if device == "cuda":
            on = torch.device("cuda", torch.cuda.current_device())
        self._launcher = TritonLauncher(on)

    def copy(
        self, blocks: BlockCopy, *, checksums: bool, stream: int = 0, workers: int = 0
    ) -> PendingWork:
        """See `face.CopyKernels`."""
        src, dst, *ids = blocks
        return self._copy(src, dst, ids, True, checksums, stream, workers)

    def checksum(
        self, src: Sequence[BlockRegion], ids: Ids, *, stream: int = 0, workers: int = 0
    ) -> PendingWork:
        """See `face.CopyKernels`."""
        return self._copy(src, src, (ids,), False, True, stream, workers)

    def _copy(
        self,
        src: Sequence[BlockRegion],
        dst: Sequence[BlockRegion],
        ids: Sequence[Ids],
        writes: bool,
        checksums: bool,
        stream: int,
        workers: int,
    ) -> PendingWork:
        n = len(ids[0])
        longest = max((region.run for region in src), default=0)
        if not n or not longest:
            return FinishedWork([0] * n if checksums else [])
        aligned = alignment(
            number for r in (*src, *dst) for number in (r.base, r.block_stride, r.run)
        )
        unit = UNITS[aligned]
        tile = max(min(power_of_two(longest), COPY_TILE, LANES * _size(unit)), SMALL_TILE)
        tiles = -(-longest // tile)
        items = n * len(src) * tiles
        with self._launcher.on(stream):
            table = self._launcher.upload(_region_table(src, dst), *ids)
            sums = self._launcher.sums(n if checksums else 0)
            triton_copy.copy_kernel[self._launcher.grid(workers, items)](
                *(table, sums.view(torch.uint64), items, n, len(src), tiles),
                tile=tile,
                unit=unit,
                align=aligned,
                writes=writes,
                sums=checksums,
                **OPTIONS,
            )
            return self._launcher.pending(sums if checksums else None)


def _region_table(src: Sequence[BlockRegion], dst: Sequence[BlockRegion]) -> NDArray[np.int64]:
    """[n_regions, triton_copy.COLUMNS]."""
    rows: list[tuple[int, ...]] = []
    first_word = 0
    for source, target in zip(src, dst, strict=True):
        ends = (source.base, source.block_stride, target.base, target.block_stride)
        rows.append((*ends, source.run, first_word))
        first_word += -(-source.run // 8)
    return np.array(rows, np.int64)


def _size(unit: tl.tensor) -> int:
    """Bytes of a Triton type."""
    return int(unit.primitive_bitwidth) // 8


def load(device: Device) -> TritonKernels:
    """Raises KernelUnavailable where Triton has nothing to run on."""
    return TritonKernels(device)
