"""Mappings of the host that a GPU copies from and to by itself: their pages are pinned once.

A mapping stays mapped as long as it is pinned, even when its owner has closed it.
"""

from __future__ import annotations

import logging
import mmap
from collections import OrderedDict
from dataclasses import dataclass

from kvmig.core.errors import KvmigError
from kvmig.kernels.arrays import address_of
from kvmig.kernels.driver import CudaDriver

MOST = 40
"""Mappings that are kept, those used last: of as many sources as have inboxes, and one's own."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Mapping:
    """`view` keeps it mapped; not `pinned`: the device won't have it."""

    view: memoryview
    pinned: bool


class PinnedMemory:
    """One thread uses it, and no copy is under way when it does."""

    def __init__(self, device: CudaDriver, most: int = MOST) -> None:
        self._device = device
        self._most = most
        self._known: OrderedDict[int, _Mapping] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def has(self, buffer: memoryview) -> bool:
        """Whether the buffer is pinned now: it is if it lies in a mapping that can be."""
        mapping = buffer.obj
        if not isinstance(mapping, mmap.mmap):
            return False
        known = self._known.pop(id(mapping), None) or self._pin(mapping)
        self._known[id(mapping)] = known
        while len(self._known) > self._most:
            self._drop(self._known.popitem(last=False)[1])
        return known.pinned

    def close(self) -> None:
        """Unpin all. Raises KvmigError."""
        while self._known:
            self._drop(self._known.popitem()[1])

    def _pin(self, mapping: mmap.mmap) -> _Mapping:
        view = memoryview(mapping)
        try:
            self._device.pin(address_of(view), view.nbytes, view.readonly)
        except KvmigError as error:
            log.info("copies of these %d bytes go by pinned memory: %s", view.nbytes, error)
            return _Mapping(view, pinned=False)
        return _Mapping(view, pinned=True)

    def _drop(self, known: _Mapping) -> None:
        with known.view as view:
            if known.pinned:
                self._device.unpin(address_of(view))
