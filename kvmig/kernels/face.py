"""What every implementation of the kernels can do; the C ABI (csrc/kvmig.h) in Python's terms.

Arguments are trusted here and addresses are plain integers: callers use the checked functions
of `copy`, `reshard` and `fp8`. Memory is that of `Kernels.device`; ids and tables are host arrays.

`stream` is a cudaStream_t as an integer (0: the legacy default stream), ignored on the CPU. On
CUDA a call returns once the work is queued, and `Pending` says when it is done; on the CPU it is
done when the call returns. `workers` caps the CTAs or threads; 0 lets the implementation choose.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kvmig.ground.layout import Region

Device = Literal["cpu", "cuda"]
Ids = NDArray[np.int64]
"""Block ids [n], int64, contiguous, in host memory."""

DONE_TIMEOUT_S = 60.0
"""Longest wait for queued work, unless the caller says otherwise."""


class Half(enum.IntEnum):
    """The 16-bit floats that fp8 is packed from; the values are those of the C ABI."""

    BF16 = 0
    FP16 = 1


@dataclass(frozen=True, slots=True)
class Grid:
    """One region as rows: token t of head h of block b is the row at
    `base + b * block_stride + t * token_stride + h * head_stride` (bytes)."""

    base: int
    block_stride: int
    token_stride: int
    head_stride: int


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """One end of a reshard: token t of the sequence lies in block `ids[t // block_tokens]`, at
    `t % block_tokens`; head h of the model is head `h - first_head` of the grids."""

    grids: Sequence[Grid]
    ids: Ids
    block_tokens: int
    first_head: int = 0


class Pending(Protocol):
    """Work that was started."""

    def done(self) -> bool:
        """Whether it is finished; never waits."""
        ...

    def wait(self, timeout_s: float = DONE_TIMEOUT_S) -> list[int]:
        """Wait for the end; returns the checksums [n], or [] if none were asked for.

        Raises TimeoutError, or KvmigError if the device failed. May be called again.
        """
        ...


@dataclass(frozen=True, slots=True)
class Finished:
    """Work that was done when its call returned."""

    checksums: list[int]

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float = DONE_TIMEOUT_S) -> list[int]:
        return self.checksums


class Kernels(Protocol):
    """One implementation on one device."""

    @property
    def name(self) -> str:
        """As in KVMIG_KERNELS: cuda, nvrtc, triton, cpu or reference."""
        ...

    @property
    def device(self) -> Device:
        """Where the memory must be."""
        ...

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
    ) -> Pending:
        """Copy block `src_ids[k]` of `src` to block `dst_ids[k]` of `dst`, for every k < n.

        src, dst: as many regions, with equal runs. `checksums`: sum what was written.
        """
        ...

    def checksum(
        self, src: Sequence[Region], ids: Ids, *, stream: int = 0, workers: int = 0
    ) -> Pending:
        """Checksums [n] of blocks `ids` [n]."""
        ...

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
    ) -> Pending:
        """Copy rows of `row` bytes of these `heads` and `tokens`, in every grid, from src to dst.

        Both ranges have step 1; heads and tokens are numbered over the model and the sequence.
        """
        ...

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
    ) -> Pending:
        """`src` [rows, width] of `dtype` to float8 e4m3 `packed` [rows, width] (1 byte each) and
        float32 `scales` [rows] = max|x| / 448, or 1 for a row of zeros. Three addresses."""
        ...

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
    ) -> Pending:
        """`dst[r, i] = packed[r, i] * scales[r]`, rounded to nearest even in `dtype`."""
        ...
