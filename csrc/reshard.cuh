// Rows of heads and tokens from one arrangement to another. A warp takes neighbouring rows, as
// many at once as fit into its lanes by vectors of 16 bytes.
#ifndef KVMIG_RESHARD_CUH
#define KVMIG_RESHARD_CUH

#include "vector.cuh"
#include "warp.cuh"

namespace kvmig {

constexpr int kReshardThreads = 256;
constexpr int kReshardCtasPerSm = 4;
constexpr int kRowsInFlight = 2;

// kvmig_shard, and the first head and token as this end counts them.
struct Side {
    const kvmig_grid *grids;
    const int64_t *ids;
    int32_t block_tokens, first_head;

    __device__ unsigned char *row(const kvmig_grid &grid, int32_t token, int32_t head) const {
        const int64_t block = ids[token / block_tokens];
        return static_cast<unsigned char *>(grid.base) + block * grid.block_stride +
               token % block_tokens * grid.token_stride + (head - first_head) * grid.head_stride;
    }
};

// Row r is that of token r / n_heads and head r % n_heads, both counted from the first.
struct Rows {
    int32_t first_token, n_tokens, first_head, n_heads, bytes;
};

__device__ inline uint64_t alignment_bits(const kvmig_grid &grid) {
    return reinterpret_cast<uint64_t>(grid.base) | static_cast<uint64_t>(grid.block_stride) |
           static_cast<uint64_t>(grid.token_stride) | static_cast<uint64_t>(grid.head_stride);
}

// Rows [first, last) of one region.
template <int kAccess>
__device__ inline void move_rows(const Side &src, const kvmig_grid &source, const Side &dst,
                                 const kvmig_grid &target, const Rows &rows, int32_t first,
                                 int32_t last) {
    const int vectors = rows.bytes / kVector, rest = rows.bytes % kVector;
    int lanes = 1;  // of one row
    while (lanes < vectors && lanes < kWarp) lanes *= 2;
    const int per_step = kWarp / lanes, place = lane() % lanes;

#pragma unroll 1
    for (int32_t r = first + lane() / lanes; r < last; r += per_step * kRowsInFlight) {
        const unsigned char *from[kRowsInFlight];
        unsigned char *to[kRowsInFlight];
#pragma unroll
        for (int i = 0; i < kRowsInFlight; ++i)
            if (const int32_t row = r + i * per_step; row < last) {
                const int32_t token = rows.first_token + row / rows.n_heads;
                const int32_t head = rows.first_head + row % rows.n_heads;
                from[i] = src.row(source, token, head);
                to[i] = dst.row(target, token, head);
            }
#pragma unroll 1
        for (int v = place; v < vectors; v += lanes) {
            Vector held[kRowsInFlight];
#pragma unroll
            for (int i = 0; i < kRowsInFlight; ++i)
                if (r + i * per_step < last) held[i] = load_vector<kAccess>(from[i] + v * kVector);
#pragma unroll
            for (int i = 0; i < kRowsInFlight; ++i)
                if (r + i * per_step < last) store_vector<kAccess>(to[i] + v * kVector, held[i]);
        }
        if (rest && place == 0)
#pragma unroll
            for (int i = 0; i < kRowsInFlight; ++i)
                if (r + i * per_step < last)
                    store_bytes(to[i] + vectors * kVector,
                                load_bytes(from[i] + vectors * kVector, rest), rest);
    }
}

}  // namespace kvmig

extern "C" __global__ void __launch_bounds__(kvmig::kReshardThreads)
    kvmig_reshard_kernel(const kvmig_grid *src_grids, const int64_t *src_ids,
                         int32_t src_block_tokens, int32_t src_first_head,
                         const kvmig_grid *dst_grids, const int64_t *dst_ids,
                         int32_t dst_block_tokens, int32_t dst_first_head, int64_t n_regions,
                         int32_t first_token, int32_t n_tokens, int32_t first_head,
                         int32_t n_heads, int32_t row) {
    using namespace kvmig;
    const Side src{src_grids, src_ids, src_block_tokens, src_first_head};
    const Side dst{dst_grids, dst_ids, dst_block_tokens, dst_first_head};
    const Rows rows{first_token, n_tokens, first_head, n_heads, row};
    const int64_t per_region = static_cast<int64_t>(n_tokens) * n_heads;
    const Share share(per_region * n_regions, warps(), warp());
    int64_t left = share.end - share.begin;
    int64_t region = share.begin / per_region, first = share.begin - region * per_region;
    for (; left; ++region, first = 0) {
        const int64_t count = left < per_region - first ? left : per_region - first;
        const kvmig_grid source = src.grids[region], target = dst.grids[region];
        const auto from = static_cast<int32_t>(first), to = static_cast<int32_t>(first + count);
        switch (widest_access(alignment_bits(source) | alignment_bits(target))) {
            case 16: move_rows<16>(src, source, dst, target, rows, from, to); break;
            case 8: move_rows<8>(src, source, dst, target, rows, from, to); break;
            case 4: move_rows<4>(src, source, dst, target, rows, from, to); break;
            case 2: move_rows<2>(src, source, dst, target, rows, from, to); break;
            default: move_rows<1>(src, source, dst, target, rows, from, to); break;
        }
        left -= count;
    }
}

#endif
