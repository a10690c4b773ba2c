"""CUDA IPC: GPU memory that two processes on one host map, of one device or of NVLink peers.

Memory of cudaMalloc goes by an IPC handle of its whole allocation and the offset in it, VMM
memory (expandable segments) by a POSIX file descriptor. Copies run on a side stream.
"""

from __future__ import annotations

import os
from typing import Any

from kvmig.ground.errors import KvmigError, TransportError
from kvmig.kernels import cuda, ipc
from kvmig.kernels.face import Device
from kvmig.kvtransfer.messages import Offer
from kvmig.kvtransfer.transports.base import Inbox, Staging
from kvmig.kvtransfer.transports.mapped import (
    Allocation,
    Donor,
    ExportedMemory,
    MappedInbox,
    MappedStaging,
    MemoryHandle,
    take,
)
from kvmig.kvtransfer.wire import RefusalCounter

NAME = "cuda-ipc"


def open_staging(slots: int, slot_bytes: int, refusals: RefusalCounter) -> Staging:
    """Slots in this process's GPU. Raises TransportError if there is none."""
    return MappedStaging(CudaMemory(refusals), slots, slot_bytes)


def open_inbox(offer: Offer, refusals: RefusalCounter) -> Inbox:
    """Buffers in this process's GPU. Raises TransportError if there is none."""
    return MappedInbox(CudaMemory(refusals), offer)


class CudaMemory:
    """Memory of torch's current device. refusals: of strangers at sockets for descriptors."""

    transport = NAME
    device: Device = "cuda"

    def __init__(self, refusals: RefusalCounter) -> None:
        """Raises TransportError without a GPU or the CUDA library."""
        import torch

        if not torch.cuda.is_available():
            raise TransportError("CUDA IPC needs an NVIDIA GPU, and torch sees none")
        try:
            cuda.library()
        except KvmigError as error:
            raise TransportError(f"CUDA IPC needs kvmig's CUDA library: {error}") from error
        self._refusals = refusals
        self._device = torch.cuda.current_device()
        self._stream = torch.cuda.Stream(self._device)

    def allocate(self, nbytes: int) -> Allocation:
        """From torch's allocator."""
        import torch

        tensor = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return Allocation(tensor.data_ptr(), tensor)

    def export(self, allocation: Allocation, nbytes: int) -> ExportedMemory:
        """A handle for cudaMalloc memory, a descriptor for VMM memory."""
        try:
            found = ipc.export_ipc(allocation.address)
        except (KvmigError, ValueError):  # not cudaMalloc memory: the next line says if it is none
            return self._export_vmm(allocation)
        size = found.offset + nbytes
        return ExportedMemory(MemoryHandle(size, found.offset, handle=found.handle.hex()))

    def map(self, exported: MemoryHandle) -> int:
        """Into this process's address space, for the current device."""
        if exported.ticket is None:
            handle = ipc.IpcHandle(bytes.fromhex(exported.handle), exported.offset)
            return ipc.import_ipc(handle) + exported.offset
        descriptor = take(exported.ticket, self._refusals)
        try:
            return ipc.import_vmm(descriptor, exported.size, self._device) + exported.offset
        finally:
            os.close(descriptor)

    def unmap(self, exported: MemoryHandle, address: int) -> None:
        """Out of it."""
        base = address - exported.offset
        if exported.ticket is None:
            ipc.close_ipc(base)
        else:
            ipc.close_vmm(base, exported.size)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """On the side stream; returns when it is over there."""
        import torch

        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            _tensor(target, nbytes).copy_(_tensor(source, nbytes), non_blocking=True)
            self._stream.synchronize()

    def _export_vmm(self, allocation: Allocation) -> ExportedMemory:
        found = ipc.export_vmm(allocation.address)
        try:
            donor = Donor(found.descriptor, self._refusals)
        finally:
            os.close(found.descriptor)
        return ExportedMemory(MemoryHandle(found.size, found.offset, ticket=donor.ticket), donor)


class _Raw:
    """Device memory as CUDA libraries exchange it."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _tensor(address: int, nbytes: int) -> Any:
    import torch

    return torch.as_tensor(_Raw(address, nbytes), device="cuda")
