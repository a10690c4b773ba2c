// Between shards that differ in block size, in heads, and in the order of heads and tokens.

#include "kvmig.h"
#include "workers_cpu.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace {

// What a thread takes at a time, in tokens of one region.
constexpr int64_t kTileTokens = 64;

bool valid(const kvmig_shard *shard, int64_t n_regions, int64_t n_tokens) {
    if (!shard || shard->block_tokens <= 0 || shard->first_head < 0) return false;
    if (n_regions > 0 && (!shard->grids || (n_tokens > 0 && !shard->ids))) return false;
    for (int64_t r = 0; r < n_regions; ++r)
        if (!shard->grids[r].base) return false;
    return true;
}

// The rows of one head of consecutive tokens within a block, and of the heads beside it.
struct Rows {
    unsigned char *first;
    int64_t token_stride;
    int64_t head_stride;
};

Rows rows_of(const kvmig_shard &shard, int64_t region, int64_t token, int64_t head) {
    const kvmig_grid &grid = shard.grids[region];
    const int64_t block = shard.ids[token / shard.block_tokens];
    const int64_t place = block * grid.block_stride +
                          token % shard.block_tokens * grid.token_stride +
                          (head - shard.first_head) * grid.head_stride;
    return {static_cast<unsigned char *>(grid.base) + place, grid.token_stride, grid.head_stride};
}

// [outer, inner] rows; inner ones that lie one after the other at both ends are one copy.
void copy_rows(const Rows &dst, const Rows &src, int64_t tokens, int64_t heads, int64_t row) {
    const auto loops = [row](unsigned char *to, const unsigned char *from, int64_t outer,
                             int64_t to_outer, int64_t from_outer, int64_t inner, int64_t to_inner,
                             int64_t from_inner) {
        const bool dense = to_inner == row && from_inner == row;
        const int64_t pieces = dense ? 1 : inner;
        const auto size = static_cast<std::size_t>(dense ? inner * row : row);
        for (int64_t i = 0; i < outer; ++i)
            for (int64_t j = 0; j < pieces; ++j)
                std::memcpy(to + i * to_outer + j * to_inner,
                            from + i * from_outer + j * from_inner, size);
    };
    // The inner loop is along the destination's order: what is written is then written in a row.
    if (dst.head_stride <= dst.token_stride)
        loops(dst.first, src.first, tokens, dst.token_stride, src.token_stride, heads,
              dst.head_stride, src.head_stride);
    else
        loops(dst.first, src.first, heads, dst.head_stride, src.head_stride, tokens,
              dst.token_stride, src.token_stride);
}

}  // namespace

int kvmig_reshard(const kvmig_shard *src, const kvmig_shard *dst, int64_t n_regions,
                  int64_t first_token, int64_t n_tokens, int32_t first_head, int32_t n_heads,
                  int64_t row, void *, int32_t workers) {
    if (n_regions < 0 || first_token < 0 || n_tokens < 0 || n_heads < 0 || row < 0 || workers < 0)
        return KVMIG_BAD_ARGUMENT;
    if (!valid(src, n_regions, n_tokens) || !valid(dst, n_regions, n_tokens))
        return KVMIG_BAD_ARGUMENT;
    if (first_head < src->first_head || first_head < dst->first_head) return KVMIG_BAD_ARGUMENT;
    if (!n_heads || !row) return KVMIG_OK;

    const int64_t tiles = (n_tokens + kTileTokens - 1) / kTileTokens;
    kvmig::share_out(tiles * n_regions, workers, [&](int64_t tile) {
        const int64_t region = tile / tiles;
        int64_t token = first_token + tile % tiles * kTileTokens;
        const int64_t end = std::min(first_token + n_tokens, token + kTileTokens);
        while (token < end) {
            // As far as both blocks reach.
            const int64_t tokens =
                std::min({end - token, src->block_tokens - token % src->block_tokens,
                          dst->block_tokens - token % dst->block_tokens});
            copy_rows(rows_of(*dst, region, token, first_head),
                      rows_of(*src, region, token, first_head), tokens, n_heads, row);
            token += tokens;
        }
    });
    return KVMIG_OK;
}
