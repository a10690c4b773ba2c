// Copies and checksums by warps: a piece is eight vectors a lane, all in flight at once.
#ifndef KVMIG_COPY_CUH
#define KVMIG_COPY_CUH

#include "pieces.cuh"

namespace kvmig {

constexpr int kCopyThreads = 256;
constexpr int kCopyCtasPerSm = 2;
constexpr int kLaneVectors = 8;
constexpr int kPieceBytes = kWarp * kLaneVectors * kVector;

// A CTA's share is read and written as one; its warps take turns at the pieces.
using CtaPieces = Pieces<kPieceBytes, kCopyThreads / kWarp>;

template <int kAccess, bool kWrites, bool kSums>
__device__ inline void pass_piece(const CtaPieces &piece, BlockSum &sum) {
    // Narrow accesses are many as they are: no more than one vector of them at once.
    constexpr int kBatch = kAccess == kVector ? kLaneVectors : 1;
    const unsigned char *from = piece.from();
    unsigned char *to = piece.to();
    const int bytes = piece.bytes(), vectors = bytes / kVector, rest = bytes % kVector;
    const uint64_t bias = kSums ? word_bias(piece.first_word()) : 0;

#pragma unroll 1
    for (int first = lane(); first < vectors; first += kWarp * kBatch) {
        Vector held[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (const int v = first + i * kWarp; v < vectors)
                held[i] = load_vector<kAccess>(from + v * kVector);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (const int v = first + i * kWarp; v < vectors) {
                if (kWrites) store_vector<kAccess>(to + v * kVector, held[i]);
                if (kSums) sum.add(sum_vector(held[i], bias + 2 * kGolden * v));
            }
    }
    if (rest && lane() == 0) {
        const Vector held = load_bytes(from + vectors * kVector, rest);
        if (kWrites) store_bytes(to + vectors * kVector, held, rest);
        if (kSums) {
            const uint64_t last = bias + 2 * kGolden * vectors;
            sum.add(rest > 8 ? sum_vector(held, last) : mix64(held.x + last));
        }
    }
}

// A whole piece on 16-byte boundaries, as nearly all are: no vector is asked whether it is there, and
// a lane's biases are one number and constants.
template <bool kWrites, bool kSums>
__device__ inline void pass_whole(const CtaPieces &piece, BlockSum &sum) {
    const unsigned char *from = piece.from() + lane() * kVector;
    Vector held[kLaneVectors];
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i)
        held[i] = load_vector<kVector>(from + i * kWarp * kVector);
    unsigned char *to = kWrites ? piece.to() + lane() * kVector : nullptr;
    const uint64_t bias = kSums ? word_bias(piece.first_word() + 2 * lane()) : 0;
#pragma unroll
    for (int i = 0; i < kLaneVectors; ++i) {
        if (kWrites) store_vector<kVector>(to + i * kWarp * kVector, held[i]);
        if (kSums) sum.add(sum_vector(held[i], bias + 2 * kGolden * kWarp * i));
    }
}

// By accesses as wide as its addresses allow.
template <bool kWrites, bool kSums>
__device__ inline void pass_other(const CtaPieces &piece, BlockSum &sum) {
    switch (piece.access()) {
        case 16: pass_piece<16, kWrites, kSums>(piece, sum); break;
        case 8: pass_piece<8, kWrites, kSums>(piece, sum); break;
        case 4: pass_piece<4, kWrites, kSums>(piece, sum); break;
        case 2: pass_piece<2, kWrites, kSums>(piece, sum); break;
        default: pass_piece<1, kWrites, kSums>(piece, sum); break;
    }
}

template <bool kWrites, bool kSums>
__device__ inline void pass_blocks(const Copies &copies) {
    BlockSum sum(copies.checksums);
    CtaPieces piece(copies, gridDim.x, blockIdx.x, threadIdx.x / kWarp);
    for (; !piece.done(); piece.next()) {
        if (kSums) sum.enter(piece.block());
        if (piece.bytes() == kPieceBytes && piece.access() == kVector) {
            pass_whole<kWrites, kSums>(piece, sum);
            continue;
        }
        pass_other<kWrites, kSums>(piece, sum);
    }
    if (kSums) sum.enter(-1);
}

}  // namespace kvmig

// The checksums are zero at the start.
#define KVMIG_COPIES                                                                          \
    const kvmig_region *src, const kvmig_region *dst, int64_t n_regions,                      \
        const int64_t *src_ids, const int64_t *dst_ids, int64_t n, uint64_t *checksums

#ifndef KVMIG_DEVICE_CODE_ONLY
extern "C" __global__ void __launch_bounds__(kvmig::kCopyThreads, kvmig::kCopyCtasPerSm)
    kvmig_copy_kernel(KVMIG_COPIES) {
    kvmig::pass_blocks<true, false>({src, dst, n_regions, src_ids, dst_ids, n, checksums});
}

extern "C" __global__ void __launch_bounds__(kvmig::kCopyThreads, kvmig::kCopyCtasPerSm)
    kvmig_copy_sum_kernel(KVMIG_COPIES) {
    kvmig::pass_blocks<true, true>({src, dst, n_regions, src_ids, dst_ids, n, checksums});
}

extern "C" __global__ void __launch_bounds__(kvmig::kCopyThreads, kvmig::kCopyCtasPerSm)
    kvmig_checksum_kernel(const kvmig_region *src, int64_t n_regions, const int64_t *ids,
                          int64_t n, uint64_t *checksums) {
    kvmig::pass_blocks<false, true>({src, nullptr, n_regions, ids, nullptr, n, checksums});
}
#endif

#endif
