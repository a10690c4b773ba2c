#ifndef CUDA_EMULATION_TYPEDEFS_H
#define CUDA_EMULATION_TYPEDEFS_H

#include "cuda.h"

using PFN_cuMemcpyBatchAsync_v12080 = CUresult (*)(CUdeviceptr *to, CUdeviceptr *from,
                                                   size_t *sizes, size_t count,
                                                   CUmemcpyAttributes *attributes,
                                                   size_t *first_of_attributes,
                                                   size_t n_attributes, size_t *failed_at,
                                                   CUstream stream);

#endif
