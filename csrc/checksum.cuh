// The checksum of kvmig.h, vector by vector.
#ifndef KVMIG_CHECKSUM_CUH
#define KVMIG_CHECKSUM_CUH

#include "vector.cuh"

namespace kvmig {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;

__device__ inline uint64_t mix64(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// What is added to word i before it is mixed.
__device__ inline uint64_t word_bias(int64_t i) { return static_cast<uint64_t>(i + 1) * kGolden; }

// Two words, the first of which has this bias.
__device__ inline uint64_t sum_vector(Vector value, uint64_t bias) {
    return mix64(value.x + bias) + mix64(value.y + bias + kGolden);
}

// Words of a run, the padded last one included.
__device__ inline int64_t words_of(int64_t run) { return (run + 7) / 8; }

}  // namespace kvmig

#endif
