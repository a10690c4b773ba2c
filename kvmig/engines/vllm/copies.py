"""Copies between a KV cache in this process's memory and a buffer of fused blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvmig.engines.vllm.units import UnitMap
from kvmig.ground.layout import KVLayout, fused
from kvmig.kernels.copy import address_of, backend, checksum_fused, copy_blocks, start_copy


class Copies(Protocol):
    """What `BlockMemory` runs on its thread: ids [n], a buffer [n * block_bytes], n checksums.

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
        self._layout = layout

    def gather(self, ids: Sequence[int], out: memoryview, urgent: bool = False) -> list[int]:
        layout, n = self._layout, len(ids)
        target = fused(address_of(out), layout)
        return copy_blocks(layout.regions, target, ids, range(n), layout.num_blocks, n)

    def scatter(self, ids: Sequence[int], data: memoryview, urgent: bool = False) -> list[int]:
        layout, n = self._layout, len(ids)
        source = fused(address_of(data), layout)
        return copy_blocks(source, layout.regions, range(n), ids, n, layout.num_blocks)


class InUnits:
    """Units that engines of other shapes understand, see `units`."""

    def __init__(self, units: UnitMap) -> None:
        self._units = units

    def gather(self, ids: Sequence[int], out: memoryview, urgent: bool = False) -> list[int]:
        for one in self._units.gather(ids, address_of(out)):
            start_copy(
                backend(),
                *(one.cache, one.buffer, one.cache_ids, one.buffer_ids),
                *(one.cache_blocks, one.buffer_blocks),
                checksums=False,
            ).wait()
        return checksum_fused(out, self._units.unit_bytes)

    def scatter(self, ids: Sequence[int], data: memoryview, urgent: bool = False) -> list[int]:
        for one in self._units.scatter(ids, address_of(data)):
            start_copy(
                backend(),
                *(one.buffer, one.cache, one.buffer_ids, one.cache_ids),
                *(one.buffer_blocks, one.cache_blocks),
                checksums=False,
            ).wait()
        return checksum_fused(data, self._units.unit_bytes)
