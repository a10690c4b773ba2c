"""GPU memory that processes on one host share: a file descriptor of it, which a socket carries.

The memory is the driver's own (cuMemCreate), not an allocator's: it stays there as long as any
process maps it, so a late write of a peer meets no other data. GPUDirect RDMA reaches it where the
device allows that. All functions raise KvmigError with the driver's words.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import ExitStack
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint64, c_ushort, c_void_p
from dataclasses import dataclass

from kvmig.core.errors import KernelUnavailable, KvmigError
from kvmig.kernels.driver import CudaDriver

_PINNED, _ON_DEVICE, _READ_AND_WRITE, _MINIMUM = 1, 1, 3, 0
_DESCRIPTOR = 1
"""CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR."""
_CAN_EXPORT, CAN_RDMA, HAS_DMA_BUF = 103, 110, 124
"""CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, then
CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED and _DMA_BUF_SUPPORTED."""


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("windows", c_void_p),
        ("compression", c_ubyte),
        ("rdma", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_char * 64),)


_OPENS_PEERS = 1
"""CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS."""
_LEGACY = 13
"""CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE."""


@dataclass(frozen=True, slots=True)
class DeviceMapping:
    """`size` bytes of device memory in this process's address space."""

    address: int
    size: int


def properties(driver: CudaDriver, handle_types: int = 0) -> _Properties:
    """Properties of the device's memory. handle_types: how other processes open it; 0: none."""
    return _Properties(
        type=_PINNED,
        handle_types=handle_types,
        location=_Location(_ON_DEVICE, driver.ordinal),
        rdma=driver.attribute(CAN_RDMA),
    )


def create(driver: CudaDriver, nbytes: int) -> tuple[DeviceMapping, int]:
    """New memory of `nbytes` or a little more, and its descriptor, which the caller closes."""
    if not driver.attribute(_CAN_EXPORT):
        raise KernelUnavailable(f"GPU {driver.ordinal} can't share memory by file descriptors")
    wanted = properties(driver, _DESCRIPTOR)
    grain, handle, descriptor = c_size_t(), c_uint64(), c_int(-1)
    driver.call("cuMemGetAllocationGranularity", byref(grain), byref(wanted), c_int(_MINIMUM))
    size = -(-nbytes // grain.value) * grain.value
    driver.call("cuMemCreate", byref(handle), c_size_t(size), byref(wanted), c_uint64(0))
    with ExitStack() as held:
        held.callback(driver.call, "cuMemRelease", handle)  # a mapping keeps the memory
        export = byref(descriptor), handle, c_int(_DESCRIPTOR), c_uint64(0)
        driver.call("cuMemExportToShareableHandle", *export)
        try:
            return _map(driver, handle, size), descriptor.value
        except BaseException:
            os.close(descriptor.value)
            raise


def open_descriptor(driver: CudaDriver, descriptor: int, size: int) -> DeviceMapping:
    """Map another process's memory for `driver`'s device; the descriptor stays open."""
    handle = c_uint64()
    shared = c_void_p(descriptor), c_int(_DESCRIPTOR)
    driver.call("cuMemImportFromShareableHandle", byref(handle), *shared)
    try:
        return _map(driver, handle, size)
    finally:
        driver.call("cuMemRelease", handle)


def let(driver: CudaDriver, mapping: DeviceMapping) -> None:
    """Let `driver`'s device use memory that this process has mapped for another."""
    access = _Access(_Location(_ON_DEVICE, driver.ordinal), _READ_AND_WRITE)
    there = c_void_p(mapping.address), c_size_t(mapping.size)
    driver.call("cuMemSetAccess", *there, byref(access), c_size_t(1))


@dataclass(frozen=True, slots=True)
class SharedAllocation:
    """An address in a process's memory, for others: `offset` behind where that memory begins."""

    gpu: int
    handle: bytes
    offset: int


def export_allocation(driver: CudaDriver, address: int) -> SharedAllocation:
    """What another process needs to open the allocation that holds `address`."""
    capable, base, size = ctypes.c_uint64(), c_void_p(), c_size_t()
    there, handle = c_void_p(address), _Handle()
    driver.call("cuPointerGetAttribute", byref(capable), c_int(_LEGACY), there)
    if not capable.value:
        raise KernelUnavailable(
            f"memory of GPU {driver.ordinal} that wasn't made by cudaMalloc (expandable segments,"
            " vLLM's own allocator) can't be opened by another process"
        )
    driver.call("cuMemGetAddressRange_v2", byref(base), byref(size), there)
    driver.call("cuIpcGetMemHandle", byref(handle), base)
    return SharedAllocation(driver.ordinal, bytes(handle), address - int(base.value or 0))


def open_allocation(driver: CudaDriver, exported: SharedAllocation) -> int:
    """Map another process's allocation for `driver`'s device, until `close_allocation`;
    returns its address.

    Raises KernelUnavailable with both devices where that device doesn't reach the other one.
    """
    base, handle = c_void_p(), _Handle.from_buffer_copy(exported.handle)
    try:
        driver.call("cuIpcOpenMemHandle_v2", byref(base), handle, ctypes.c_uint(_OPENS_PEERS))
    except KvmigError as error:
        raise KernelUnavailable(
            f"GPU {driver.ordinal} can't open memory of GPU {exported.gpu}: {error}"
        ) from error
    return int(base.value or 0) + exported.offset


def close_allocation(driver: CudaDriver, exported: SharedAllocation, address: int) -> None:
    """Undo `open_allocation`; no copy may be running."""
    driver.call("cuIpcCloseMemHandle", c_void_p(address - exported.offset))


def close(driver: CudaDriver, mapping: DeviceMapping) -> None:
    """Unmap, on any thread; nothing may use the memory here any more."""
    there = c_void_p(mapping.address), c_size_t(mapping.size)
    driver.call_outside("cuMemUnmap", *there)
    driver.call_outside("cuMemAddressFree", *there)


def view(address: int, nbytes: int, owner: object) -> memoryview:
    """`nbytes` at `address` of a GPU, writable; keeps `owner`, whose memory it is, alive.

    Only the address means something: kernels take it, host code that reads or writes the view
    crashes. `kernels.arrays.memory_of` sees that of it and of its parts.
    """
    buffer = (ctypes.c_ubyte * nbytes).from_address(address)
    buffer.owner = owner  # type: ignore[attr-defined]
    buffer.__cuda_array_interface__ = {  # type: ignore[attr-defined]
        "shape": (nbytes,),
        "typestr": "|u1",
        "data": (address, False),
        "version": 3,
    }
    return memoryview(buffer).cast("B")


def _map(driver: CudaDriver, handle: c_uint64, size: int) -> DeviceMapping:
    address, length, nothing = c_void_p(), c_size_t(size), c_uint64(0)
    anywhere = c_size_t(0), c_void_p(0), nothing
    driver.call("cuMemAddressReserve", byref(address), length, *anywhere)
    with ExitStack() as undo:
        undo.callback(driver.call, "cuMemAddressFree", address, length)
        driver.call("cuMemMap", address, length, c_size_t(0), handle, nothing)
        undo.callback(driver.call, "cuMemUnmap", address, length)
        mapping = DeviceMapping(int(address.value or 0), size)
        let(driver, mapping)
        undo.pop_all()
    return mapping
