// Copies and checksums: the C ABI over the kernels of copy.cuh and copy_tma.cuh.

#include "copy.cuh"

#include "copy_tma.cuh"
#include "launch.cuh"

using kvmig::launch;
using kvmig::status;

namespace {

constexpr int kTmaMajor = 9;  // sm_90

bool valid(const kvmig_region *src, int64_t n_regions, const int64_t *ids, int64_t n,
           int32_t workers) {
    return n_regions >= 0 && n >= 0 && workers >= 0 && (n == 0 || ids) &&
           (n_regions == 0 || src);
}

int clear(uint64_t *checksums, int64_t n, void *stream) {
    if (!checksums || !n) return KVMIG_OK;
    const size_t bytes = static_cast<size_t>(n) * sizeof *checksums;
    return status(cudaMemsetAsync(checksums, 0, bytes, static_cast<cudaStream_t>(stream)));
}

}  // namespace

int kvmig_abi_version(void) { return KVMIG_ABI_VERSION; }

const char *kvmig_backend(void) { return "cuda"; }

int kvmig_copy(const kvmig_region *src, const kvmig_region *dst, int64_t n_regions,
               const int64_t *src_ids, const int64_t *dst_ids, int64_t n, uint64_t *checksums,
               void *stream, int32_t workers) {
    if (!valid(src, n_regions, src_ids, n, workers) || !valid(dst, n_regions, dst_ids, n, workers))
        return KVMIG_BAD_ARGUMENT;
    if (const int failed = clear(checksums, n, stream)) return failed;
    if (!n || !n_regions) return KVMIG_OK;
    return launch(checksums ? kvmig_copy_sum_kernel : kvmig_copy_kernel, workers,
                  kvmig::kCopyCtasPerSm, kvmig::kCopyThreads, 0, stream, src, dst, n_regions,
                  src_ids, dst_ids, n, checksums);
}

int kvmig_copy_tma(const kvmig_region *src, const kvmig_region *dst, int64_t n_regions,
                   const int64_t *src_ids, const int64_t *dst_ids, int64_t n,
                   uint64_t *checksums, void *stream, int32_t workers) {
    if (!valid(src, n_regions, src_ids, n, workers) || !valid(dst, n_regions, dst_ids, n, workers))
        return KVMIG_BAD_ARGUMENT;
    int major = 0;
    if (const cudaError_t error =
            kvmig::device_attribute(cudaDevAttrComputeCapabilityMajor, &major))
        return status(error);
    cudaFuncAttributes compiled = {};
    if (const cudaError_t error = cudaFuncGetAttributes(&compiled, kvmig_copy_tma_kernel))
        return status(error);
    // Code for sm_80 also runs on later ones, and has nothing in this kernel.
    if (major < kTmaMajor || compiled.ptxVersion < 10 * kTmaMajor) return KVMIG_UNSUPPORTED;
    if (const int failed = clear(checksums, n, stream)) return failed;
    if (!n || !n_regions) return KVMIG_OK;
    constexpr int kShared = sizeof(kvmig::Ring);  // more than a kernel gets unasked
    if (const cudaError_t error = cudaFuncSetAttribute(
            kvmig_copy_tma_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared))
        return status(error);
    return launch(kvmig_copy_tma_kernel, workers, 1, kvmig::kTmaThreads, kShared, stream, src, dst,
                  n_regions, src_ids, dst_ids, n, checksums);
}

int kvmig_checksum(const kvmig_region *src, int64_t n_regions, const int64_t *ids, int64_t n,
                   uint64_t *checksums, void *stream, int32_t workers) {
    if (!valid(src, n_regions, ids, n, workers) || (n && !checksums)) return KVMIG_BAD_ARGUMENT;
    if (const int failed = clear(checksums, n, stream)) return failed;
    if (!n || !n_regions) return KVMIG_OK;
    return launch(kvmig_checksum_kernel, workers, kvmig::kCopyCtasPerSm, kvmig::kCopyThreads, 0,
                  stream, src, n_regions, ids, n, checksums);
}
