// kvmig_copy_engine: one batched call of the driver.

#include <new>
#include <vector>

#include "driver.cuh"

#if CUDART_VERSION >= 12080

#include <cudaTypedefs.h>

namespace {

constexpr unsigned kSince = 12080;

struct Batch {
    std::vector<CUdeviceptr> to, from;
    std::vector<size_t> sizes;

    void add(const kvmig_region &dst, int64_t dst_id, const kvmig_region &src, int64_t src_id) {
        if (!src.run) return;
        to.push_back(reinterpret_cast<CUdeviceptr>(dst.base) +
                     static_cast<CUdeviceptr>(dst_id * dst.block_stride));
        from.push_back(reinterpret_cast<CUdeviceptr>(src.base) +
                       static_cast<CUdeviceptr>(src_id * src.block_stride));
        sizes.push_back(static_cast<size_t>(src.run));
    }
};

}  // namespace

int kvmig_copy_engine(const kvmig_region *src, const kvmig_region *dst, int64_t n_regions,
                      const int64_t *src_ids, const int64_t *dst_ids, int64_t n, void *stream) {
    if (n_regions < 0 || n < 0 || (n_regions && (!src || !dst)) || (n && (!src_ids || !dst_ids)))
        return KVMIG_BAD_ARGUMENT;
    for (int64_t r = 0; r < n_regions; ++r)
        if (!src[r].base || !dst[r].base || src[r].run < 0 || src[r].run != dst[r].run)
            return KVMIG_BAD_ARGUMENT;
    if (!n || !n_regions) return KVMIG_OK;
    if (!stream) return KVMIG_BAD_ARGUMENT;  // the driver refuses the default one

    Batch batch;
    try {
        for (int64_t k = 0; k < n; ++k)
            for (int64_t r = 0; r < n_regions; ++r)
                batch.add(dst[r], dst_ids[k], src[r], src_ids[k]);
    } catch (const std::bad_alloc &) {
        return KVMIG_CUDA_ERROR + static_cast<int>(cudaErrorMemoryAllocation);
    }
    if (batch.sizes.empty()) return KVMIG_OK;

    PFN_cuMemcpyBatchAsync_v12080 copy = nullptr;
    if (const int failed = kvmig::find("cuMemcpyBatchAsync", kSince, &copy)) return failed;
    CUmemcpyAttributes attributes = {};
    attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    size_t first = 0, failed_at = 0;
    return kvmig::status(copy(batch.to.data(), batch.from.data(), batch.sizes.data(),
                              batch.sizes.size(), &attributes, &first, 1, &failed_at,
                              static_cast<CUstream>(stream)));
}

#else

int kvmig_copy_engine(const kvmig_region *, const kvmig_region *, int64_t, const int64_t *,
                      const int64_t *, int64_t, void *) {
    return KVMIG_UNSUPPORTED;
}

#endif
