// Kernels that might take the place of csrc's, for a GPU to decide (bench.gpu.gather). kvmig uses none.
//
// The ring of the TMA with larger stages, or with more of them: more bytes under way in one CTA, and
// runs of 18 KiB in one piece instead of two. And the vector kernels with the next piece's loads
// under way while a warp sums this one, with each CTA's part contiguous, or in tiles that CTAs take in
// turn. docs/data-plane.md, "What bounds a kernel", has what the figures say.
#define KVMIG_DEVICE_CODE_ONLY
#include "copy.cuh"
#include "copy_tma.cuh"
#include "launch.cuh"

namespace kvmig {

constexpr int kTilesPerBlock = 8;
constexpr int kSmBytes = 228 * 1024;  // of an sm_90's shared memory, 1 KiB of it a CTA's own
constexpr int kCtaBytes = 1024;

using RingOf32k = StageRing<32 * 1024, 3>;
using RingOf64k = StageRing<64 * 1024, 3>;
using DeepRing = StageRing<16 * 1024, 6>;
static_assert(2 * (sizeof(RingOf32k) + kCtaBytes) <= kSmBytes, "two on an SM");
static_assert(2 * (sizeof(DeepRing) + kCtaBytes) <= kSmBytes, "two on an SM");
static_assert(sizeof(RingOf64k) + kCtaBytes <= kSmBytes, "one on an SM, and no engine's beside it");

__device__ inline bool is_whole(const CtaPieces &piece) {
    return piece.bytes() == kPieceBytes && piece.access() == kVector;
}

// From this whole piece to the last one of those that follow it: as soon as a vector is stored and
// summed, its registers take one of the next piece.
template <bool kSums>
__device__ inline void roll_pieces(CtaPieces &piece, BlockSum &sum) {
    const unsigned char *from = piece.from() + lane() * kVector;
    Vector held[kLaneVectors];
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i)
        held[i] = load_vector<kVector>(from + i * kWarp * kVector);
    for (bool more = true; more;) {
        unsigned char *to = piece.to() + lane() * kVector;
        const uint64_t bias = kSums ? word_bias(piece.first_word() + 2 * lane()) : 0;
        if (kSums) sum.enter(piece.block());
        piece.next();
        more = !piece.done() && is_whole(piece);
        if (more) from = piece.from() + lane() * kVector;
#pragma unroll
        for (int i = 0; i < kLaneVectors; ++i) {
            store_vector<kVector>(to + i * kWarp * kVector, held[i]);
            if (kSums) sum.add(sum_vector(held[i], bias + 2 * kGolden * kWarp * i));
            if (more) held[i] = load_vector<kVector>(from + i * kWarp * kVector);
        }
    }
}

// The share's blocks, by all warps of the CTA.
template <bool kSums>
__device__ inline void roll_share(const Copies &copies, int64_t shares, int64_t share) {
    BlockSum sum(copies.checksums);
    CtaPieces piece(copies, shares, share, threadIdx.x / kWarp);
    while (!piece.done()) {
        if (is_whole(piece)) {
            roll_pieces<kSums>(piece, sum);
            continue;
        }
        if (kSums) sum.enter(piece.block());
        pass_other<true, kSums>(piece, sum);
        piece.next();
    }
    if (kSums) sum.enter(-1);
}

template <bool kSums>
__device__ inline void roll_tiles(const Copies &copies) {
    const int64_t tiles = copies.n * kTilesPerBlock;
    for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x)
        roll_share<kSums>(copies, tiles, tile);
}

}  // namespace kvmig

#define KVMIG_GIVEN \
    kvmig::Copies { src, dst, n_regions, src_ids, dst_ids, n, checksums }
#define KVMIG_ROLLING(name, ...)                                                             \
    extern "C" __global__ void __launch_bounds__(kvmig::kCopyThreads, kvmig::kCopyCtasPerSm) \
        name(KVMIG_COPIES) {                                                                 \
        __VA_ARGS__;                                                                         \
    }
KVMIG_ROLLING(kvmig_rolling_kernel,
              kvmig::roll_share<false>(KVMIG_GIVEN, gridDim.x, blockIdx.x))
KVMIG_ROLLING(kvmig_rolling_sum_kernel,
              kvmig::roll_share<true>(KVMIG_GIVEN, gridDim.x, blockIdx.x))
KVMIG_ROLLING(kvmig_tiles_kernel, kvmig::roll_tiles<false>(KVMIG_GIVEN))
KVMIG_ROLLING(kvmig_tiles_sum_kernel, kvmig::roll_tiles<true>(KVMIG_GIVEN))

#define KVMIG_RING(name, AnyRing)                                                           \
    extern "C" __global__ void __launch_bounds__(kvmig::kTmaThreads) name(KVMIG_COPIES) {   \
        if (checksums)                                                                      \
            kvmig::pass_ring<true, kvmig::AnyRing>(KVMIG_GIVEN);                            \
        else                                                                                \
            kvmig::pass_ring<false, kvmig::AnyRing>(KVMIG_GIVEN);                           \
    }
KVMIG_RING(kvmig_ring_32k_kernel, RingOf32k)
KVMIG_RING(kvmig_ring_64k_kernel, RingOf64k)
KVMIG_RING(kvmig_ring_deep_kernel, DeepRing)

namespace {

using Kernel = void (*)(KVMIG_COPIES);

struct Variant {
    const char *name;
    Kernel plain, summing;
    int per_sm, threads;
    size_t ring_bytes;  // 0: by vectors
};

constexpr Variant kVariants[] = {
    {"rolling", kvmig_rolling_kernel, kvmig_rolling_sum_kernel, kvmig::kCopyCtasPerSm,
     kvmig::kCopyThreads, 0},
    {"rolling-tiles", kvmig_tiles_kernel, kvmig_tiles_sum_kernel, kvmig::kCopyCtasPerSm,
     kvmig::kCopyThreads, 0},
    {"tma-32k", kvmig_ring_32k_kernel, kvmig_ring_32k_kernel, 1, kvmig::kTmaThreads,
     sizeof(kvmig::RingOf32k)},
    {"tma-64k", kvmig_ring_64k_kernel, kvmig_ring_64k_kernel, 1, kvmig::kTmaThreads,
     sizeof(kvmig::RingOf64k)},
    {"tma-deep", kvmig_ring_deep_kernel, kvmig_ring_deep_kernel, 1, kvmig::kTmaThreads,
     sizeof(kvmig::DeepRing)},
};
constexpr int32_t kCount = sizeof kVariants / sizeof *kVariants;

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// NULL: there are no more.
const char *kvmig_variant_name(int32_t number) {
    return number >= 0 && number < kCount ? kVariants[number].name : nullptr;
}

// Of its shared memory; 0: it takes runs of any length and address, as kvmig_copy, else what
// kvmig_copy_tma takes.
int64_t kvmig_variant_ring_bytes(int32_t number) {
    return number >= 0 && number < kCount ? static_cast<int64_t>(kVariants[number].ring_bytes) : 0;
}

// As kvmig_copy, which see.
int kvmig_copy_variant(int32_t number, const kvmig_region *src, const kvmig_region *dst,
                       int64_t n_regions, const int64_t *src_ids, const int64_t *dst_ids,
                       int64_t n, uint64_t *checksums, void *stream, int32_t workers) {
    if (number < 0 || number >= kCount || n_regions < 0 || n < 0 || workers < 0)
        return KVMIG_BAD_ARGUMENT;
    if (!n || !n_regions) return KVMIG_OK;
    if (checksums) {
        const size_t bytes = static_cast<size_t>(n) * sizeof *checksums;
        if (const cudaError_t error =
                cudaMemsetAsync(checksums, 0, bytes, static_cast<cudaStream_t>(stream)))
            return kvmig::status(error);
    }
    const Variant &one = kVariants[number];
    const Kernel kernel = checksums ? one.summing : one.plain;
    if (one.ring_bytes)
        if (const cudaError_t error =
                cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     static_cast<int>(one.ring_bytes)))
            return kvmig::status(error);
    return kvmig::launch(kernel, workers, one.per_sm, one.threads, one.ring_bytes, stream, src,
                         dst, n_regions, src_ids, dst_ids, n, checksums);
}

}  // extern "C"
#pragma GCC visibility pop
