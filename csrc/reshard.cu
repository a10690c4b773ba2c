// kvmig_reshard over the kernel of reshard.cuh.

#include "reshard.cuh"

#include "launch.cuh"

namespace {

constexpr int64_t kMost = INT32_MAX;  // the kernel counts tokens and rows of a region in 32 bits

bool valid(const kvmig_shard *shard, int64_t n_regions, int64_t n_tokens, int32_t first_head) {
    return shard && shard->block_tokens > 0 && shard->first_head <= first_head &&
           (n_regions == 0 || shard->grids) && (n_tokens == 0 || shard->ids);
}

}  // namespace

int kvmig_reshard(const kvmig_shard *src, const kvmig_shard *dst, int64_t n_regions,
                  int64_t first_token, int64_t n_tokens, int32_t first_head, int32_t n_heads,
                  int64_t row, void *stream, int32_t workers) {
    if (n_regions < 0 || first_token < 0 || n_tokens < 0 || first_head < 0 || n_heads < 0 ||
        row < 0 || workers < 0)
        return KVMIG_BAD_ARGUMENT;
    if (first_token > kMost - n_tokens || row > kMost || first_head > kMost - n_heads ||
        n_tokens * n_heads > kMost)
        return KVMIG_BAD_ARGUMENT;
    if (!valid(src, n_regions, n_tokens, first_head) ||
        !valid(dst, n_regions, n_tokens, first_head))
        return KVMIG_BAD_ARGUMENT;
    if (!n_regions || !n_tokens || !n_heads || !row) return KVMIG_OK;
    return kvmig::launch(kvmig_reshard_kernel, workers, kvmig::kReshardCtasPerSm,
                         kvmig::kReshardThreads, 0, stream, src->grids, src->ids,
                         src->block_tokens, src->first_head, dst->grids, dst->ids,
                         dst->block_tokens, dst->first_head, n_regions,
                         static_cast<int32_t>(first_token), static_cast<int32_t>(n_tokens),
                         first_head, n_heads, static_cast<int32_t>(row));
}
