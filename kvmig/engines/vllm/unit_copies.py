"""Copies in units that engines of other shapes understand, of a cache in this process's memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvmig.engines.vllm.units import UnitMap
from kvmig.kernels.copy import address_of, backend, checksum_fused, start_copy


class InUnits:
    """Implements `kvmig.engines.copies.Copies`, see `units`."""

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
