"""What one call of a GPU kernel needs besides the blocks: its tables and ids there, its
checksums back.

A call's memory is a pinned half, which the host writes and reads, and a device half, which the
kernel does. It is used again when the call is done, which an event shows.
"""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass

from kvmig.kernels.api import DONE_TIMEOUT_S
from kvmig.kernels.driver import CudaDriver

SMALLEST = 1 << 12
_SPIN_S = 200e-6
_POLL_S = 50e-6


@dataclass(frozen=True, slots=True)
class CallMemory:
    """`nbytes` at each of two addresses, and the event of the call's end."""

    nbytes: int
    pinned: int
    device: int
    event: int


class QueuedCall:
    """A call on its way: a `face.Pending`."""

    def __init__(self, pool: CallMemoryPool, memory: CallMemory, sums_at: int, count: int) -> None:
        self._pool = pool
        self._memory: CallMemory | None = memory
        self._sums_at = sums_at
        self._checksums = [0] * count

    def done(self) -> bool:
        """Raises KvmigError if the device failed."""
        with self._pool.lock:
            return self.settle()

    def settle(self) -> bool:
        """The same, called with the pool's lock held: when it is done, its memory goes back."""
        if self._memory is None:
            return True
        if not self._pool.happened(self._memory):
            return False
        if count := len(self._checksums):
            at = self._memory.pinned + self._sums_at
            self._checksums = list((ctypes.c_uint64 * count).from_address(at))
        self._pool.give_back(self._memory)
        self._memory = None
        return True

    def wait(self, timeout_s: float = DONE_TIMEOUT_S) -> list[int]:
        """Raises TimeoutError, and KvmigError if the device failed."""
        start = time.monotonic()
        while not self.done():
            spent = time.monotonic() - start
            if spent > timeout_s:
                raise TimeoutError(f"queued copies are not done after {timeout_s:g} s")
            time.sleep(0 if spent < _SPIN_S else _POLL_S)
        return self._checksums


class CallMemoryPool:
    """A pool as large as the most calls that were ever in flight at once."""

    def __init__(self, device: CudaDriver) -> None:
        self._device = device
        self._free: list[CallMemory] = []
        self._flying: list[QueuedCall] = []
        self._unmarked: list[CallMemory] = []
        self.lock = threading.Lock()

    def take_memory(self, nbytes: int) -> CallMemory:
        """Memory of at least `nbytes`, reused or new. Raises KvmigError."""
        with self.lock:
            self._flying = [call for call in self._flying if not call.settle()]
            for memory in sorted(self._free, key=lambda one: one.nbytes):
                if memory.nbytes >= nbytes:
                    self._free.remove(memory)
                    return memory
        return self._make(max(SMALLEST, 1 << (nbytes - 1).bit_length()))

    def fly(self, memory: CallMemory, stream: int, sums_at: int = 0, count: int = 0) -> QueuedCall:
        """What is queued on `stream` now is the call that uses `memory`.

        Raises KvmigError if the device can't mark the call's end. The call may run, so no other
        call gets its memory; `close` frees it.
        """
        try:
            self._device.record(memory.event, stream)
        except BaseException:
            with self.lock:
                self._unmarked.append(memory)
            raise
        call = QueuedCall(self, memory, sums_at, count)
        with self.lock:
            self._flying.append(call)
        return call

    def happened(self, memory: CallMemory) -> bool:
        return self._device.happened(memory.event)

    def give_back(self, memory: CallMemory) -> None:
        """Called with the lock held."""
        self._free.append(memory)

    def close(self) -> None:
        """Free what no call uses; freeing waits for the device. Raises KvmigError."""
        with self.lock:
            self._flying = [call for call in self._flying if not call.settle()]
            self._free += self._unmarked
            self._unmarked.clear()
            while self._free:
                memory = self._free.pop()
                self._device.free(memory.device)  # first: it is what waits
                self._device.free_pinned(memory.pinned)
                self._device.destroy_event(memory.event)

    def _make(self, nbytes: int) -> CallMemory:
        pinned = self._device.allocate_pinned(nbytes)
        try:
            device = self._device.allocate(nbytes)
            try:
                return CallMemory(nbytes, pinned, device, self._device.new_event())
            except BaseException:
                self._device.free(device)
                raise
        except BaseException:
            self._device.free_pinned(pinned)
            raise
