"""What every implementation of the kernels can do; the C ABI (csrc/kvmig.h) in Python's terms.

Arguments are trusted here and addresses are plain integers: callers use the checked functions
of `copy`. Memory is that of `CopyKernels.device`; ids and tables are host arrays.

`stream` is a cudaStream_t as an integer (0: the legacy default stream), ignored on the CPU. On
CUDA a call returns once the work is queued, and `PendingWork` shows when it is done; on the CPU
it is done when the call returns. `workers` caps the CTAs or threads; 0 lets the implementation
choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvmig.core.layout import BlockRegion

Device = Literal["cpu", "cuda"]
Ids = NDArray[np.int64]
"""Block ids [n], int64, contiguous, in host memory."""

DONE_TIMEOUT_S = 60.0
"""Longest wait for queued work, unless the caller says otherwise."""


class PendingWork(Protocol):
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
class FinishedWork:
    """Work that was done when its call returned."""

    checksums: list[int]

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float = DONE_TIMEOUT_S) -> list[int]:
        return self.checksums


class BlockCopy(NamedTuple):
    """Block `src_ids[k]` of `src` goes to block `dst_ids[k]` of `dst`, for every k < n.

    src, dst: as many regions, with equal runs.
    """

    src: Sequence[BlockRegion]
    dst: Sequence[BlockRegion]
    src_ids: Ids
    dst_ids: Ids


class CopyKernels(Protocol):
    """One implementation on one device."""

    @property
    def name(self) -> str:
        """The implementation's name in KVMIG_KERNELS: cuda, nvrtc, triton, cpu or reference."""
        ...

    @property
    def device(self) -> Device:
        """The device whose memory the kernels take."""
        ...

    def copy(
        self, blocks: BlockCopy, *, checksums: bool, stream: int = 0, workers: int = 0
    ) -> PendingWork:
        """Copy the blocks. checksums: sum what was written."""
        ...

    def checksum(
        self, src: Sequence[BlockRegion], ids: Ids, *, stream: int = 0, workers: int = 0
    ) -> PendingWork:
        """Checksums [n] of blocks `ids` [n]."""
        ...
