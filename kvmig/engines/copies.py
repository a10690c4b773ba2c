"""Copies between a KV cache and a buffer of fused blocks; of a cache in this process's memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvmig.ground.layout import KVLayout, fused
from kvmig.kernels.copy import address_of, backend, copy_blocks


class Copies(Protocol):
    """What runs on a copy thread: ids [n], a buffer [n * block_bytes], n checksums.

    urgent: ahead of what else a device copies; a CPU has nothing else.
    """

    def gather(self, ids: Sequence[int], out: memoryview, urgent: bool = False) -> list[int]:
        """From the cache to the buffer."""
        ...

    def scatter(self, ids: Sequence[int], data: memoryview, urgent: bool = False) -> list[int]:
        """From the buffer to the cache."""
        ...


class WholeBlocks:
    """Blocks as the engine keeps them."""

    def __init__(self, layout: KVLayout) -> None:
        """layout: of memory that outlives this. Raises KernelUnavailable."""
        backend()  # built now if it must be, not in somebody's first copy
        self._layout = layout

    def gather(self, ids: Sequence[int], out: memoryview, urgent: bool = False) -> list[int]:
        layout, n = self._layout, len(ids)
        target = fused(address_of(out), layout)
        return copy_blocks(layout.regions, target, ids, range(n), layout.num_blocks, n)

    def scatter(self, ids: Sequence[int], data: memoryview, urgent: bool = False) -> list[int]:
        layout, n = self._layout, len(ids)
        source = fused(address_of(data), layout)
        return copy_blocks(source, layout.regions, range(n), ids, n, layout.num_blocks)
