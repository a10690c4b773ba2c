"""Host memory in a memfd, mapped by two processes: stands in for a GPU's in tests of `mapped`."""

from __future__ import annotations

import ctypes
import mmap
import os

from kvmig.kernels.copy import address_of
from kvmig.kernels.face import Device
from kvmig.kvtransfer.transports.mapped import Allocation, Donor, ExportedMemory, MemoryHandle, take
from kvmig.kvtransfer.wire import RefusalCounter

OFFSET = mmap.PAGESIZE
"""Of the memory in its allocation, as a GPU's allocator has it."""


class HostMemory:
    """Memory of memfd_create, whose descriptor goes over a socket as VMM memory's does."""

    transport = "cuda-ipc"
    device: Device = "cpu"

    def __init__(self, refusals: RefusalCounter | None = None) -> None:
        self.mapped: dict[int, mmap.mmap] = {}
        self.refusals = refusals or RefusalCounter()

    def allocate(self, nbytes: int) -> Allocation:
        """A memfd, mapped; the descriptor is kept for `export`."""
        descriptor = os.memfd_create("kvmig-test", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, OFFSET + nbytes)
        memory = mmap.mmap(descriptor, OFFSET + nbytes)
        self._descriptor = descriptor
        return Allocation(address_of(memoryview(memory)) + OFFSET, memory)

    def export(self, allocation: Allocation, nbytes: int) -> ExportedMemory:
        """A donor of the descriptor."""
        donor = Donor(self._descriptor, self.refusals)
        self.forget()
        return ExportedMemory(MemoryHandle(OFFSET + nbytes, OFFSET, ticket=donor.ticket), donor)

    def forget(self) -> None:
        """Close the descriptor; the mapping stays."""
        os.close(self._descriptor)

    def map(self, exported: MemoryHandle) -> int:
        """The donor's memory."""
        assert exported.ticket is not None
        descriptor = take(exported.ticket, self.refusals)
        try:
            memory = mmap.mmap(descriptor, exported.size)
        finally:
            os.close(descriptor)
        address = address_of(memoryview(memory)) + exported.offset
        self.mapped[address] = memory
        return address

    def unmap(self, exported: MemoryHandle, address: int) -> None:
        """Let it go."""
        self.mapped.pop(address).close()

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """With memmove."""
        ctypes.memmove(target, source, nbytes)
