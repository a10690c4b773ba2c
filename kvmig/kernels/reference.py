"""What the kernels must do, in plain torch: the oracle of their tests, and what runs without them.

Everything is done when a call returns, on a GPU too.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator, Sequence

import torch

from kvmig.core.errors import KernelUnavailable
from kvmig.core.layout import BlockRegion
from kvmig.kernels.api import BlockCopy, Device, FinishedWork, Ids

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB


class ReferenceKernels:
    """Plain torch on one device."""

    name = "reference"

    def __init__(self, device: Device) -> None:
        self.device = device

    def copy(
        self, blocks: BlockCopy, *, checksums: bool, stream: int = 0, workers: int = 0
    ) -> FinishedWork:
        src, dst, src_ids, dst_ids = blocks
        with self._queue(stream):
            sources, targets = (torch.from_numpy(ids).to(self.device) for ids in (src_ids, dst_ids))
            for one, other in zip(src, dst, strict=True):
                runs = self._runs(one, src_ids).index_select(0, sources)
                self._runs(other, dst_ids).index_copy_(0, targets, runs)
            return FinishedWork(self._sums(dst, dst_ids) if checksums else [])

    def checksum(
        self, src: Sequence[BlockRegion], ids: Ids, *, stream: int = 0, workers: int = 0
    ) -> FinishedWork:
        with self._queue(stream):
            return FinishedWork(self._sums(src, ids))

    def _sums(self, regions: Sequence[BlockRegion], ids: Ids) -> list[int]:
        """Checksums [n] as csrc/kvmig.h defines them; int64 wraps as uint64 does."""
        total = torch.zeros(len(ids), dtype=torch.int64, device=self.device)
        blocks = torch.from_numpy(ids).to(self.device)
        first = 0
        for region in regions:
            if not (region.run and len(ids)):
                continue
            count = -(-region.run // 8)
            padded = torch.zeros((len(ids), count * 8), dtype=torch.uint8, device=self.device)
            padded[:, : region.run] = self._runs(region, ids).index_select(0, blocks)
            index = torch.arange(first + 1, first + count + 1, device=self.device)
            total += _mix64(padded.view(torch.int64) + index * _signed(_GOLDEN)).sum(1)
            first += count
        return [value % 2**64 for value in total.tolist()]

    def _runs(self, region: BlockRegion, ids: Ids) -> torch.Tensor:
        """The region's memory [largest id + 1, run], not a copy."""
        blocks = int(ids.max()) + 1 if len(ids) else 0
        if not blocks or not region.run:
            return torch.zeros((blocks, region.run), dtype=torch.uint8, device=self.device)
        memory = self._bytes(region.base, (blocks - 1) * region.block_stride + region.run)
        return memory.as_strided((blocks, region.run), (region.block_stride, 1))

    def _bytes(self, address: int, nbytes: int) -> torch.Tensor:
        """Memory as uint8 [nbytes], not a copy."""
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        if self.device == "cuda":
            return torch.as_tensor(_CudaBytes(address, nbytes), device="cuda")
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        return torch.frombuffer(memory, dtype=torch.uint8)

    @contextlib.contextmanager
    def _queue(self, stream: int) -> Iterator[None]:
        """Work goes to `stream`, and is done when the block is left."""
        if self.device == "cpu":
            yield
            return
        queue = torch.cuda.ExternalStream(stream) if stream else torch.cuda.default_stream()
        with torch.cuda.stream(queue):
            yield
        queue.synchronize()


class _CudaBytes:
    """Memory of a GPU as torch takes it in."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def load(device: Device) -> ReferenceKernels:
    """Raises KernelUnavailable if torch can't use the device."""
    if device == "cuda" and not torch.cuda.is_available():
        raise KernelUnavailable("torch sees no GPU")
    return ReferenceKernels(device)


def _mix64(z: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser, element by element."""
    z = (z ^ _shifted(z, 30)) * _signed(_FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(_SECOND)
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, by: int) -> torch.Tensor:
    """Shift to the right, with zeros from the left."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(word: int) -> int:
    """The int64 of the same bits."""
    return word - 2**64 if word >= 2**63 else word
