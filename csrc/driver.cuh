// Functions of the driver, found when they are called: the library loads where there is none.
#ifndef KVMIG_DRIVER_CUH
#define KVMIG_DRIVER_CUH

#include <cuda.h>

#include "launch.cuh"

namespace kvmig {

// CUresult and cudaError_t share their numbers.
inline int status(CUresult error) {
    return error == CUDA_SUCCESS ? KVMIG_OK : KVMIG_CUDA_ERROR + static_cast<int>(error);
}

// `name` as CUDA `version` has it (as in CUDA_VERSION), or UNSUPPORTED. The device's primary
// context is then current.
template <class Function>
int find(const char *name, unsigned version, Function *function) {
    if (const cudaError_t error = cudaFree(nullptr)) return status(error);
    void *found = nullptr;
    cudaDriverEntryPointQueryResult result;
    if (const cudaError_t error =
            cudaGetDriverEntryPointByVersion(name, &found, version, cudaEnableDefault, &result))
        return status(error);
    if (result != cudaDriverEntryPointSuccess) return KVMIG_UNSUPPORTED;
    *function = reinterpret_cast<Function>(found);
    return KVMIG_OK;
}

}  // namespace kvmig

// Calls a driver function, declared as in cuda.h; in a function that returns a status.
#define KVMIG_FIND(name, version)                                                  \
    decltype(&name) name##_found = nullptr;                                        \
    if (const int failed = kvmig::find(#name, version, &name##_found)) return failed

#endif
