// Memory of another process: legacy IPC for cudaMalloc, shareable handles for VMM mappings.

#include <unistd.h>

#include <cstring>

#include "driver.cuh"

static_assert(sizeof(cudaIpcMemHandle_t) == KVMIG_IPC_HANDLE_BYTES, "the handle of kvmig.h");

namespace {

constexpr unsigned kSince = 12000;
constexpr auto kDescriptor = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

CUdeviceptr address(const void *pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

}  // namespace

int kvmig_ipc_export(void *pointer, uint8_t handle[KVMIG_IPC_HANDLE_BYTES], int64_t *offset) {
    if (!pointer || !handle || !offset) return KVMIG_BAD_ARGUMENT;
    KVMIG_FIND(cuMemGetAddressRange, kSince);
    CUdeviceptr base = 0;
    if (const CUresult error = cuMemGetAddressRange_found(&base, nullptr, address(pointer)))
        return kvmig::status(error);
    cudaIpcMemHandle_t made;
    if (const cudaError_t error = cudaIpcGetMemHandle(&made, pointer)) return kvmig::status(error);
    std::memcpy(handle, &made, sizeof made);
    *offset = static_cast<int64_t>(address(pointer) - base);
    return KVMIG_OK;
}

int kvmig_ipc_import(const uint8_t handle[KVMIG_IPC_HANDLE_BYTES], void **base) {
    if (!handle || !base) return KVMIG_BAD_ARGUMENT;
    cudaIpcMemHandle_t given;
    std::memcpy(&given, handle, sizeof given);
    return kvmig::status(cudaIpcOpenMemHandle(base, given, cudaIpcMemLazyEnablePeerAccess));
}

int kvmig_ipc_close(void *base) {
    if (!base) return KVMIG_BAD_ARGUMENT;
    return kvmig::status(cudaIpcCloseMemHandle(base));
}

int kvmig_vmm_export(void *pointer, int *descriptor, int64_t *size, int64_t *offset) {
    if (!pointer || !descriptor || !size || !offset) return KVMIG_BAD_ARGUMENT;
    KVMIG_FIND(cuPointerGetAttribute, kSince);
    KVMIG_FIND(cuMemRetainAllocationHandle, kSince);
    KVMIG_FIND(cuMemExportToShareableHandle, kSince);
    KVMIG_FIND(cuMemRelease, kSince);

    CUmemGenericAllocationHandle handle = 0;
    if (const CUresult error = cuMemRetainAllocationHandle_found(&handle, pointer))
        return kvmig::status(error);
    size_t bytes = 0;
    CUdeviceptr base = 0;
    CUresult error = cuPointerGetAttribute_found(&bytes, CU_POINTER_ATTRIBUTE_MAPPING_SIZE,
                                                 address(pointer));
    if (!error)
        error = cuPointerGetAttribute_found(&base, CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR,
                                            address(pointer));
    if (!error) error = cuMemExportToShareableHandle_found(descriptor, handle, kDescriptor, 0);
    const CUresult released = cuMemRelease_found(handle);
    if (error) return kvmig::status(error);
    if (released) {
        close(*descriptor);
        return kvmig::status(released);
    }
    *size = static_cast<int64_t>(bytes);
    *offset = static_cast<int64_t>(address(pointer) - base);
    return KVMIG_OK;
}

int kvmig_vmm_import(int descriptor, int64_t size, int32_t device, void **base) {
    if (descriptor < 0 || size <= 0 || device < 0 || !base) return KVMIG_BAD_ARGUMENT;
    KVMIG_FIND(cuMemImportFromShareableHandle, kSince);
    KVMIG_FIND(cuMemAddressReserve, kSince);
    KVMIG_FIND(cuMemAddressFree, kSince);
    KVMIG_FIND(cuMemMap, kSince);
    KVMIG_FIND(cuMemUnmap, kSince);
    KVMIG_FIND(cuMemSetAccess, kSince);
    KVMIG_FIND(cuMemRelease, kSince);

    const size_t bytes = static_cast<size_t>(size);
    CUmemGenericAllocationHandle handle = 0;
    void *shared = reinterpret_cast<void *>(static_cast<intptr_t>(descriptor));
    if (const CUresult error = cuMemImportFromShareableHandle_found(&handle, shared, kDescriptor))
        return kvmig::status(error);
    CUdeviceptr reserved = 0;
    CUresult error = cuMemAddressReserve_found(&reserved, bytes, 0, 0, 0);
    bool mapped = false;
    if (!error) mapped = !(error = cuMemMap_found(reserved, bytes, 0, handle, 0));
    if (!error) {
        CUmemAccessDesc access = {};
        access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        access.location.id = device;
        access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        error = cuMemSetAccess_found(reserved, bytes, &access, 1);
    }
    // A mapping keeps the memory without the handle.
    const CUresult released = cuMemRelease_found(handle);
    if (!error) error = released;
    if (error) {
        if (mapped) cuMemUnmap_found(reserved, bytes);
        if (reserved) cuMemAddressFree_found(reserved, bytes);
        return kvmig::status(error);
    }
    *base = reinterpret_cast<void *>(reserved);
    return KVMIG_OK;
}

int kvmig_vmm_close(void *base, int64_t size) {
    if (!base || size <= 0) return KVMIG_BAD_ARGUMENT;
    KVMIG_FIND(cuMemUnmap, kSince);
    KVMIG_FIND(cuMemAddressFree, kSince);
    const size_t bytes = static_cast<size_t>(size);
    if (const CUresult error = cuMemUnmap_found(address(base), bytes)) return kvmig::status(error);
    return kvmig::status(cuMemAddressFree_found(address(base), bytes));
}
