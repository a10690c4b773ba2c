"""GPU memory of another process on this host, through the CUDA library.

Memory of cudaMalloc goes by a handle of 64 bytes; memory of virtual memory management (torch's
expandable segments, vLLM's sleep mode) by a file descriptor, which a Unix socket carries.
A mapping is on the calling thread's GPU (`driver.Driver.enter`). All functions raise KvmigError
with CUDA's error, and KernelUnavailable without library or GPU.
"""

from __future__ import annotations

from ctypes import byref, c_int, c_int64, c_uint8, c_void_p
from dataclasses import dataclass

from kvmig.kernels.cuda import check, library

HANDLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class IpcHandle:
    """A cudaMalloc allocation, and where in it the memory begins that was exported."""

    handle: bytes
    offset: int


@dataclass(frozen=True, slots=True)
class VmmHandle:
    """A mapping of `size` bytes as a file descriptor, which its receiver closes; and where in it
    the memory begins that was exported."""

    descriptor: int
    size: int
    offset: int


def export_ipc(address: int) -> IpcHandle:
    """Name memory of cudaMalloc for another process."""
    handle, offset = (c_uint8 * HANDLE_BYTES)(), c_int64()
    check(library().kvmig_ipc_export(address, handle, byref(offset)))
    return IpcHandle(bytes(handle), offset.value)


def import_ipc(exported: IpcHandle) -> int:
    """Map another process's allocation; returns the base, to which `offset` is added."""
    if len(exported.handle) != HANDLE_BYTES:
        raise ValueError(f"an IPC handle of {len(exported.handle)} bytes, not {HANDLE_BYTES}")
    handle = (c_uint8 * HANDLE_BYTES).from_buffer_copy(exported.handle)
    base = c_void_p()
    check(library().kvmig_ipc_import(handle, byref(base)))
    return int(base.value or 0)


def close_ipc(base: int) -> None:
    """Unmap what `import_ipc` returned."""
    check(library().kvmig_ipc_close(base))


def export_vmm(address: int) -> VmmHandle:
    """Name a VMM mapping for another process."""
    descriptor, size, offset = c_int(-1), c_int64(), c_int64()
    results = byref(descriptor), byref(size), byref(offset)
    check(library().kvmig_vmm_export(address, *results))
    return VmmHandle(descriptor.value, size.value, offset.value)


def import_vmm(descriptor: int, size: int, device: int = 0) -> int:
    """Map another process's memory on `device`; returns the base. The descriptor stays open."""
    base = c_void_p()
    check(library().kvmig_vmm_import(descriptor, size, device, byref(base)))
    return int(base.value or 0)


def close_vmm(base: int, size: int) -> None:
    """Unmap what `import_vmm` returned."""
    check(library().kvmig_vmm_close(base, size))
