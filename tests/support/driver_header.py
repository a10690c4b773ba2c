"""The structures and numbers of the CUDA driver's header that kvmig writes down for itself."""

from __future__ import annotations

import ctypes

from kvmig.kernels import driver, ipc

PRINTS = """
#include <cstddef>
#include <cstdio>
#include <cuda.h>
#define SAY(what) std::printf("%zu ", static_cast<size_t>(what))
int main() {
    SAY(sizeof(CUmemAllocationProp)); SAY(offsetof(CUmemAllocationProp, requestedHandleTypes));
    SAY(offsetof(CUmemAllocationProp, location)); SAY(offsetof(CUmemAllocationProp, location.id));
    SAY(offsetof(CUmemAllocationProp, win32HandleMetaData));
    SAY(offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable));
    SAY(sizeof(CUmemAccessDesc)); SAY(offsetof(CUmemAccessDesc, flags));
    SAY(sizeof(CUmemcpyAttributes)); SAY(offsetof(CUmemcpyAttributes, flags));
    SAY(CU_MEM_ALLOCATION_TYPE_PINNED); SAY(CU_MEM_LOCATION_TYPE_DEVICE);
    SAY(CU_MEM_ACCESS_FLAGS_PROT_READWRITE); SAY(CU_MEM_ALLOC_GRANULARITY_MINIMUM);
    SAY(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    SAY(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
    SAY(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
    SAY(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM); SAY(CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE);
    SAY(CU_STREAM_CAPTURE_MODE_RELAXED); SAY(CU_STREAM_NON_BLOCKING); SAY(CU_EVENT_DISABLE_TIMING);
    SAY(CU_EVENT_DEFAULT);
    SAY(CU_MEMHOSTREGISTER_PORTABLE); SAY(CU_MEMHOSTREGISTER_READ_ONLY);
    SAY(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT); SAY(CUDA_ERROR_NOT_READY);
}
"""
"""A program that prints them as the header has them."""


def our_numbers() -> list[int]:
    """The same, as kvmig has them."""
    wanted, access, how = ipc._Properties, ipc._Access, driver.CopyAttributes
    return [
        *(ctypes.sizeof(wanted), wanted.handle_types.offset, wanted.location.offset),
        *(wanted.location.offset + ipc._Location.id.offset, wanted.windows.offset),
        *(wanted.rdma.offset, ctypes.sizeof(access), access.flags.offset),
        *(ctypes.sizeof(how), how.flags.offset),
        *(ipc._PINNED, ipc._ON_DEVICE, ipc._READ_AND_WRITE, ipc._MINIMUM, ipc._DESCRIPTOR),
        *(ipc._CAN_EXPORT, ipc.CAN_RDMA, driver._IN_STREAM_ORDER, driver._BESIDE_KERNELS),
        *(driver._RELAXED, driver._STREAM_NON_BLOCKING, driver._EVENT_WITHOUT_TIMING),
        driver._EVENT_WITH_TIMING,
        *(driver._PORTABLE, driver._READ_ONLY, driver._MULTIPROCESSORS, driver.NOT_READY),
    ]
