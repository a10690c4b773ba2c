"""The pages behind an engine's KV cache, given back to the machine and taken again by blocks.

A cache is as large as it may ever become, and has memory only where it may be written. Blocks that
share a page are a *group*: it is given back as a whole. `Balloon`s decide which.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Protocol

from kvmig.core.errors import KvmigError, UnsupportedLayout
from kvmig.core.layout import BlockRegion
from kvmig.kernels.vmm import AddressRange

_MADV_DONTNEED, _MADV_NOHUGEPAGE = 4, 15


class CacheBacking(Protocol):
    """The memory behind one cache's blocks. Blocks without memory are never read or written."""

    group: int
    """Blocks [k * group, (k + 1) * group) have pages of their own."""
    group_bytes: int

    def give_pages(self, groups: Sequence[int]) -> None:
        """Their pages go back to the machine; what was in them is lost. Raises KvmigError."""
        ...

    def take_pages(self, groups: Sequence[int]) -> None:
        """Give the groups memory; its content is undefined. Raises KvmigError."""
        ...


class MadviseBacking:
    """A `CacheBacking` in the memory of this process: a page that is written comes by itself."""

    def __init__(self, regions: Sequence[BlockRegion], num_blocks: int) -> None:
        """regions: in a mapping of this process's own. Raises UnsupportedLayout."""
        self.group = group_of(regions, num_blocks, mmap.PAGESIZE)
        self.group_bytes = self.group * sum(one.block_stride for one in regions)
        self._regions = tuple(regions)
        self._libc = ctypes.CDLL(None, use_errno=True)
        # One page that is written must not bring 2 MiB along.
        for address, nbytes in spans(regions, self.group, range(num_blocks // self.group)):
            self._advise(address, nbytes, _MADV_NOHUGEPAGE)

    def give_pages(self, groups: Sequence[int]) -> None:
        """See `CacheBacking`. 0.1 ms a MiB."""
        for address, nbytes in spans(self._regions, self.group, groups):
            self._advise(address, nbytes, _MADV_DONTNEED)

    def take_pages(self, groups: Sequence[int]) -> None:
        """See `CacheBacking`."""

    def _advise(self, address: int, nbytes: int, advice: int) -> None:
        if self._libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice):
            error = os.strerror(ctypes.get_errno())
            if advice != _MADV_NOHUGEPAGE:  # a kernel without huge pages knows no such word
                raise KvmigError(f"memory of the KV cache can't be given back: {error}")


class VmmBacking:
    """A `CacheBacking` in a GPU's memory, whose pages are mapped and unmapped.

    Driven on the tests' GPUs; not yet measured on a real one.
    """

    def __init__(
        self, addresses: AddressRange, regions: Sequence[BlockRegion], num_blocks: int
    ) -> None:
        """regions: among the addresses. Raises UnsupportedLayout."""
        self.group = group_of(regions, num_blocks, addresses.page, addresses.address)
        self.group_bytes = self.group * sum(one.block_stride for one in regions)
        self._addresses = addresses
        self._regions = tuple(regions)

    def give_pages(self, groups: Sequence[int]) -> None:
        """See `CacheBacking`."""
        self._addresses.driver.settle()  # a step in flight may have written there
        self._addresses.drop(self._pages(groups))

    def take_pages(self, groups: Sequence[int]) -> None:
        """See `CacheBacking`. Where the device has no memory left, none of them is there."""
        self._addresses.put(self._pages(groups))

    def _pages(self, groups: Sequence[int]) -> Iterator[int]:
        for address, nbytes in spans(self._regions, self.group, groups):
            yield from range(address, address + nbytes, self._addresses.page)


def group_of(regions: Sequence[BlockRegion], num_blocks: int, page: int, start: int = 0) -> int:
    """How many blocks fill whole pages in each region. start: where a page begins.

    Raises UnsupportedLayout.
    """
    strides = [one.block_stride for one in regions]
    group = math.lcm(*(page // math.gcd(page, stride) for stride in strides))
    if any((one.base - start) % page for one in regions) or num_blocks % group:
        raise UnsupportedLayout(
            f"blocks of {strides[0]} bytes per layer, {num_blocks} of them, don't fill pages of"
            f" {page} bytes"
        )
    return group


def spans(
    regions: Sequence[BlockRegion], group: int, groups: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """(address, bytes) of the groups' memory, as few as there are."""
    runs: list[tuple[int, int]] = []
    for number in sorted(groups):
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    for region in regions:
        size = region.block_stride * group
        for first, end in runs:
            yield region.base + first * size, (end - first) * size
