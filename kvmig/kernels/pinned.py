"""Mappings of the host that a GPU's kernels reach: their pages are pinned once in a process.

A mapping stays mapped as long as it is pinned, even when its owner has closed it: then the next
copy unpins it (`leave`). Engines of one process that use the same mapping share its pin, which
holds for all GPUs.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import weakref
from collections import Counter, OrderedDict
from dataclasses import dataclass
from threading import Lock

from kvmig.core.errors import KvmigError
from kvmig.kernels.arrays import address_of
from kvmig.kernels.driver import CudaDriver

MOST = 40
"""Mappings that are kept, those used last: of as many sources as have inboxes, and one's own."""

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, which Python's mmap doesn't name."""
_USES_HOST_ADDRESSES = 91
"""CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM."""
_PINS_READ_ONLY = 113
"""CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED."""

log = logging.getLogger(__name__)


def pins_read_only(device: CudaDriver) -> bool:
    """Whether the device can have pages pinned that this process has mapped for reading only."""
    return bool(device.attribute(_PINS_READ_ONLY))


class _SharedPins:
    """How many users each pinned address has in this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._users: Counter[int] = Counter()

    def pin(self, device: CudaDriver, view: memoryview) -> None:
        """Raises KvmigError."""
        address = address_of(view)
        with self._lock:
            if not self._users[address]:
                if not device.attribute(_USES_HOST_ADDRESSES):
                    raise KvmigError(f"GPU {device.ordinal} doesn't use the host's addresses")
                device.pin(address, view.nbytes, view.readonly)
            self._users[address] += 1

    def unpin(self, device: CudaDriver, view: memoryview) -> None:
        """Raises KvmigError."""
        address = address_of(view)
        with self._lock:
            self._users[address] -= 1
            if not self._users[address]:
                del self._users[address]
                device.unpin(address)


_shared = _SharedPins()


_left: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""Mappings with views left, whose owners have closed them, by their ids."""


def leave(mapping: mmap.mmap) -> None:
    """Note that its owner closes a mapping: each `PinnedMemory` unpins it when it is used next."""
    _left[id(mapping)] = mapping


def _take_pages(mapping: mmap.mmap) -> None:
    """Have the mapping's pages there before they are pinned, huge ones where the kernel allows it.

    An older kernel knows neither advice, and memory that is mapped for reading only isn't written:
    the driver takes the pages then, one by one.
    """
    for advice in (mmap.MADV_HUGEPAGE, _POPULATE_WRITE):
        with contextlib.suppress(OSError):
            mapping.madvise(advice)


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
        for left in [known for known in self._known if known in _left]:
            self._drop(self._known.pop(left))
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
        _take_pages(mapping)
        try:
            _shared.pin(self._device, view)
        except KvmigError as error:
            log.warning(
                "copies to and from %d bytes of the host take a detour, which is slower: %s",
                view.nbytes,
                str(error),  # whose frames would keep the mapping
            )
            return _Mapping(view, pinned=False)
        return _Mapping(view, pinned=True)

    def _drop(self, known: _Mapping) -> None:
        with known.view as view:
            if known.pinned:
                _shared.unpin(self._device, view)
