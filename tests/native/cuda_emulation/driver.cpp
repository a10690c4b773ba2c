// Memory that processes share, on the host: allocations by address, VMM mappings as memfds. What a
// library holds is counted. $KVMIG_EMULATED_FAILURE names a function that fails.

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <string>

#include "cuda.h"
#include "cuda_runtime.h"
#include "cudaTypedefs.h"

#define TEST_API extern "C" __attribute__((visibility("default")))

namespace {

struct Mapping {
    size_t size;
    int file;  // -1: reserved only
};

std::map<CUdeviceptr, size_t> allocations;
std::map<CUdeviceptr, Mapping> mappings;
std::map<CUmemGenericAllocationHandle, int> handles;  // files
CUmemGenericAllocationHandle last_handle;

CUresult outcome(const char *name) {
    const char *chosen = std::getenv("KVMIG_EMULATED_FAILURE");
    return chosen && name == std::string(chosen) ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

template <class Map>
typename Map::iterator at_or_before(Map &map, CUdeviceptr pointer) {
    auto found = map.upper_bound(pointer);
    return found == map.begin() ? map.end() : --found;
}

CUmemGenericAllocationHandle handle_of(int file) {
    handles[++last_handle] = file;
    return last_handle;
}

CUresult copy_batch(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                    CUmemcpyAttributes *, size_t *, size_t, size_t *, CUstream stream) {
    if (!stream) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; ++i)
        std::memcpy(reinterpret_cast<void *>(to[i]), reinterpret_cast<void *>(from[i]), sizes[i]);
    return outcome("cuMemcpyBatchAsync");
}

}  // namespace

// A cudaMalloc allocation, and a VMM mapping: 0 if there is no room.
TEST_API void *emulated_malloc(size_t size) {
    void *made = std::malloc(size);
    allocations[reinterpret_cast<CUdeviceptr>(made)] = size;
    return made;
}
TEST_API void *emulated_map(size_t size) {
    const int file = memfd_create("emulated", MFD_CLOEXEC);
    if (ftruncate(file, static_cast<off_t>(size))) return nullptr;
    void *made = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    mappings[reinterpret_cast<CUdeviceptr>(made)] = {size, file};
    return made;
}
// Handles and mappings that were not given back.
TEST_API int emulated_held() { return static_cast<int>(handles.size() + mappings.size()); }

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    const auto found = at_or_before(allocations, reinterpret_cast<CUdeviceptr>(pointer));
    if (found == allocations.end()) return cudaErrorInvalidValue;
    std::memcpy(handle->reserved, &found->first, sizeof found->first);
    return cudaSuccess;
}
cudaError_t cudaIpcOpenMemHandle(void **base, cudaIpcMemHandle_t handle, unsigned) {
    std::memcpy(base, handle.reserved, sizeof *base);
    return allocations.count(reinterpret_cast<CUdeviceptr>(*base)) ? cudaSuccess
                                                                   : cudaErrorInvalidValue;
}
cudaError_t cudaIpcCloseMemHandle(void *base) {
    return allocations.count(reinterpret_cast<CUdeviceptr>(base)) ? cudaSuccess
                                                                  : cudaErrorInvalidValue;
}

CUresult cuMemGetAddressRange(CUdeviceptr *base, size_t *, CUdeviceptr pointer) {
    const auto found = at_or_before(allocations, pointer);
    if (found == allocations.end()) return CUDA_ERROR_INVALID_VALUE;
    *base = found->first;
    return outcome("cuMemGetAddressRange");
}
CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr pointer) {
    const auto found = at_or_before(mappings, pointer);
    if (found == mappings.end()) return CUDA_ERROR_INVALID_VALUE;
    if (attribute == CU_POINTER_ATTRIBUTE_MAPPING_SIZE)
        std::memcpy(value, &found->second.size, sizeof found->second.size);
    else
        std::memcpy(value, &found->first, sizeof found->first);
    return outcome("cuPointerGetAttribute");
}
CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *pointer) {
    const auto found = at_or_before(mappings, reinterpret_cast<CUdeviceptr>(pointer));
    if (found == mappings.end() || outcome("cuMemRetainAllocationHandle"))
        return CUDA_ERROR_INVALID_VALUE;
    *handle = handle_of(dup(found->second.file));
    return CUDA_SUCCESS;
}
CUresult cuMemExportToShareableHandle(void *shared, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType, unsigned long long) {
    if (const CUresult failed = outcome("cuMemExportToShareableHandle")) return failed;
    const int copied = dup(handles.at(handle));
    std::memcpy(shared, &copied, sizeof copied);
    return CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shared,
                                        CUmemAllocationHandleType) {
    const int copied = dup(static_cast<int>(reinterpret_cast<intptr_t>(shared)));
    if (copied < 0) return CUDA_ERROR_INVALID_VALUE;
    *handle = handle_of(copied);
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    close(handles.at(handle));
    handles.erase(handle);
    return outcome("cuMemRelease");
}
CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t, CUdeviceptr,
                             unsigned long long) {
    if (const CUresult failed = outcome("cuMemAddressReserve")) return failed;
    void *made = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *pointer = reinterpret_cast<CUdeviceptr>(made);
    mappings[*pointer] = {size, -1};
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr pointer, size_t size) {
    if (!mappings.count(pointer) || mappings[pointer].file >= 0) return CUDA_ERROR_INVALID_VALUE;
    munmap(reinterpret_cast<void *>(pointer), size);
    mappings.erase(pointer);
    return CUDA_SUCCESS;
}
CUresult cuMemMap(CUdeviceptr pointer, size_t size, size_t, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
    if (const CUresult failed = outcome("cuMemMap")) return failed;
    const int file = dup(handles.at(handle));
    mmap(reinterpret_cast<void *>(pointer), size, PROT_NONE, MAP_SHARED | MAP_FIXED, file, 0);
    mappings.at(pointer).file = file;
    return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr pointer, size_t) {
    if (!mappings.count(pointer) || mappings[pointer].file < 0) return CUDA_ERROR_INVALID_VALUE;
    close(mappings[pointer].file);
    mappings[pointer].file = -1;
    return CUDA_SUCCESS;
}
CUresult cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *, size_t) {
    if (const CUresult failed = outcome("cuMemSetAccess")) return failed;
    mprotect(reinterpret_cast<void *>(pointer), size, PROT_READ | PROT_WRITE);
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
#define FUNCTION(name) {#name, reinterpret_cast<void *>(name)}
    static const std::map<std::string, void *> functions = {
        FUNCTION(cuMemGetAddressRange),
        FUNCTION(cuPointerGetAttribute),
        FUNCTION(cuMemRetainAllocationHandle),
        FUNCTION(cuMemExportToShareableHandle),
        FUNCTION(cuMemImportFromShareableHandle),
        FUNCTION(cuMemRelease),
        FUNCTION(cuMemAddressReserve),
        FUNCTION(cuMemAddressFree),
        FUNCTION(cuMemMap),
        FUNCTION(cuMemUnmap),
        FUNCTION(cuMemSetAccess),
        {"cuMemcpyBatchAsync", reinterpret_cast<void *>(copy_batch)},
    };
    const char *old = std::getenv("KVMIG_EMULATED_WITHOUT");  // a driver that is too old
    const auto one = functions.find(name);
    const bool there = one != functions.end() && !(old && name == std::string(old));
    *result = there ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    *found = there ? one->second : nullptr;
    return cudaSuccess;
}
