// Copies through a ring in shared memory: the TMA fills and empties its stages, ordered by one
// thread, while the CTA's other warps sum what lies there. The ring is small, so that a CTA of an
// engine's kernels fits beside one of these.
#ifndef KVMIG_COPY_TMA_CUH
#define KVMIG_COPY_TMA_CUH

#include "pieces.cuh"
#include "ptx.cuh"

namespace kvmig {

constexpr int kDraining = 1;  // stages whose stores may still be reading; the others load
#ifdef __CUDACC__
constexpr int kSummingWarps = 8;  // two a scheduler: one alone waits for its own results
#else
constexpr int kSummingWarps = 4;  // the tests' CPU runs a CTA's threads one after the other
#endif
constexpr int kTmaThreads = kWarp * (1 + kSummingWarps);

struct Stage {
    unsigned char *to;
    int64_t block, first_word;
    int bytes;
    Barrier filled, summed;
};

template <int kBytes, int kCount>
struct StageRing {
    static constexpr int kStageBytes = kBytes, kStages = kCount;

    alignas(128) unsigned char data[kStages][kStageBytes];
    Stage stages[kStages];

    // How often stage i % kStages was used before item i, as the parity that a wait asks for.
    __device__ static uint32_t parity(int64_t i) { return static_cast<uint32_t>(i / kStages % 2); }
};
using Ring = StageRing<16 * 1024, 3>;
static_assert(sizeof(Ring) <= 49 * 1024, "a quarter of an SM's shared memory, at most");

// One thread. Item i + kStages - kDraining is loaded when the store of item i - kDraining has
// left the stage that both use.
template <bool kSums, class AnyRing>
__device__ inline void move_pieces(AnyRing &ring, Pieces<AnyRing::kStageBytes> &piece,
                                   int64_t count) {
    constexpr int kStages = AnyRing::kStages;
    int64_t loaded = 0;
    const auto load_next = [&] {
        const int s = static_cast<int>(loaded % kStages);
        Stage &stage = ring.stages[s];
        if (kSums && loaded >= kStages) barrier_wait(&stage.summed, ring.parity(loaded - kStages));
        stage.to = piece.to();
        stage.block = piece.block();
        stage.first_word = piece.first_word();
        stage.bytes = piece.bytes();
        const uint32_t bytes = static_cast<uint32_t>(stage.bytes);
        barrier_arrive_expecting(&stage.filled, bytes);
        bulk_load(ring.data[s], piece.from(), bytes, &stage.filled);
        piece.next();
        ++loaded;
    };
    while (loaded < count && loaded < kStages - kDraining) load_next();
    for (int64_t i = 0; i < count; ++i) {
        const int s = static_cast<int>(i % kStages);
        barrier_wait(&ring.stages[s].filled, ring.parity(i));
        bulk_store(ring.stages[s].to, ring.data[s],
                   static_cast<uint32_t>(ring.stages[s].bytes));
        if (loaded == count) continue;
        bulk_wait_read<kDraining>();
        load_next();
    }
    bulk_wait_written();
}

template <class AnyRing>
__device__ inline void sum_stages(AnyRing &ring, int64_t count, uint64_t *checksums) {
    const int first = static_cast<int>(threadIdx.x) - kWarp;
    BlockSum sum(checksums);
    for (int64_t i = 0; i < count; ++i) {
        const int s = static_cast<int>(i % AnyRing::kStages);
        Stage &stage = ring.stages[s];
        barrier_wait(&stage.filled, ring.parity(i));
        sum.enter(stage.block);
        const Vector *held = reinterpret_cast<const Vector *>(ring.data[s]);
        const uint64_t bias = word_bias(stage.first_word);
        const int vectors = stage.bytes / kVector;
#pragma unroll 4
        for (int v = first; v < vectors; v += kWarp * kSummingWarps)
            sum.add(sum_vector(held[v], bias + 2 * kGolden * v));
        __syncwarp();
        if (lane() == 0) barrier_arrive(&stage.summed);
    }
    sum.enter(-1);
}

template <bool kSums, class AnyRing>
__device__ inline void pass_ring(const Copies &copies) {
    extern __shared__ __align__(128) unsigned char kvmig_shared[];
    AnyRing &ring = *reinterpret_cast<AnyRing *>(kvmig_shared);
    if (threadIdx.x == 0) {
        for (Stage &stage : ring.stages) {
            barrier_init(&stage.filled, 1);
            barrier_init(&stage.summed, kSummingWarps);
        }
        barrier_init_fence();
    }
    __syncthreads();
    Pieces<AnyRing::kStageBytes> piece(copies, gridDim.x, blockIdx.x);
    const int64_t count = piece.left();
    if (threadIdx.x == 0)
        move_pieces<kSums>(ring, piece, count);
    else if (kSums && threadIdx.x >= kWarp)
        sum_stages(ring, count, copies.checksums);
}

}  // namespace kvmig

#ifndef KVMIG_DEVICE_CODE_ONLY
// Empty below sm_90, where kvmig_copy_tma doesn't launch it.
extern "C" __global__ void __launch_bounds__(kvmig::kTmaThreads)
    kvmig_copy_tma_kernel(const kvmig_region *src, const kvmig_region *dst, int64_t n_regions,
                          const int64_t *src_ids, const int64_t *dst_ids, int64_t n,
                          uint64_t *checksums) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    const kvmig::Copies copies{src, dst, n_regions, src_ids, dst_ids, n, checksums};
    if (checksums)
        kvmig::pass_ring<true, kvmig::Ring>(copies);
    else
        kvmig::pass_ring<false, kvmig::Ring>(copies);
#endif
}
#endif

#endif
