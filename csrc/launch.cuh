// What every launch needs: a grid for the device, and errors as kvmig.h numbers them.
#ifndef KVMIG_LAUNCH_CUH
#define KVMIG_LAUNCH_CUH

#include <cuda_runtime.h>

#include "kvmig.h"

namespace kvmig {

inline int status(cudaError_t error) {
    return error == cudaSuccess ? KVMIG_OK : KVMIG_CUDA_ERROR + static_cast<int>(error);
}

// An attribute of the current device.
inline cudaError_t device_attribute(cudaDeviceAttr attribute, int *value) {
    int device = 0;
    if (const cudaError_t error = cudaGetDevice(&device)) return error;
    return cudaDeviceGetAttribute(value, attribute, device);
}

// Queues `kernel` on `workers` CTAs; 0: on `per_sm` of them for each SM, which are all resident.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), int32_t workers, int per_sm, int threads,
           size_t shared_bytes, void *stream, Arguments... arguments) {
    int ctas = workers;
    if (!ctas) {
        if (const cudaError_t error = device_attribute(cudaDevAttrMultiProcessorCount, &ctas))
            return status(error);
        ctas *= per_sm;
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(ctas));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = static_cast<cudaStream_t>(stream);
    return status(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace kvmig

#endif
