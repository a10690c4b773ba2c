"""Slots in the host's memory, which transports send from or let others read."""

from __future__ import annotations

import mmap

from kvmig.kernels import pinned
from kvmig.kvtransfer.transports.base import StagingPool, TransportChannel


class HostStaging(StagingPool):
    """Slots in a mapping of this process, from `offset` on: chunks are gathered there."""

    def __init__(self, memory: mmap.mmap, slots: int, slot_bytes: int, offset: int = 0) -> None:
        super().__init__(slots, slot_bytes)
        self._memory = memory
        self._offset = offset

    @property
    def memory(self) -> memoryview:
        """See `StagingPool`."""
        return memoryview(self._memory)

    def buffer(self, slot: int) -> memoryview:
        """The slot [slot_bytes], see `TransportChannel.buffer`."""
        self.check(slot)
        start = self._offset + slot * self.slot_bytes
        return memoryview(self._memory)[start : start + self.slot_bytes]

    def close(self) -> None:
        """Free the memory, with the last view of it."""
        if not self._closed:
            super().close()
            self._free_memory()

    def _free_memory(self) -> None:
        unmap(self._memory)


class HostChannel(TransportChannel):
    """A channel out of the slots of a `HostStaging`."""

    def __init__(self, staging: HostStaging) -> None:
        self._staging = staging

    async def buffer(self, slot: int) -> memoryview:
        """The slot itself."""
        return self._staging.buffer(slot)


def unmap(memory: mmap.mmap) -> None:
    """Unmap now; while a copy still reads it, or it is pinned, with the last view and the owner's
    reference."""
    try:
        memory.close()
    except BufferError:
        pinned.leave(memory)
