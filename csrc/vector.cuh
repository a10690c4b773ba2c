// Vectors of 16 bytes: loaded and stored in accesses as wide as the addresses allow.
#ifndef KVMIG_VECTOR_CUH
#define KVMIG_VECTOR_CUH

#include "kvmig.h"

namespace kvmig {

using Vector = ulonglong2;  // two words of the checksum
constexpr int kVector = sizeof(Vector);

// The widest access, at most a vector, that divides every number or'ed into `bits`.
__device__ inline int widest_access(uint64_t bits) {
    bits |= kVector;
    return static_cast<int>(bits & (~bits + 1));
}

template <int kBytes>
struct Access;
template <>
struct Access<8> {
    using Part = unsigned long long;
};
template <>
struct Access<4> {
    using Part = unsigned int;
};
template <>
struct Access<2> {
    using Part = unsigned short;
};
template <>
struct Access<1> {
    using Part = unsigned char;
};

// All loads and stores are streaming ones (evicted first): the blocks that pass through
// shouldn't push the engine's own data out of the L2.
template <int kBytes>
__device__ inline Vector load_vector(const unsigned char *from) {
    if constexpr (kBytes == kVector) {
        return __ldcs(reinterpret_cast<const Vector *>(from));
    } else {
        using Part = typename Access<kBytes>::Part;
        constexpr int kParts = 8 / kBytes;
        const Part *parts = reinterpret_cast<const Part *>(from);
        unsigned long long words[2] = {0, 0};
#pragma unroll
        for (int p = 0; p < 2 * kParts; ++p)
            words[p / kParts] |= static_cast<unsigned long long>(__ldcs(parts + p))
                                 << (8 * kBytes * (p % kParts));
        return Vector{words[0], words[1]};
    }
}

template <int kBytes>
__device__ inline void store_vector(unsigned char *to, Vector value) {
    if constexpr (kBytes == kVector) {
        __stcs(reinterpret_cast<Vector *>(to), value);
    } else {
        using Part = typename Access<kBytes>::Part;
        constexpr int kParts = 8 / kBytes;
        Part *parts = reinterpret_cast<Part *>(to);
        const unsigned long long words[2] = {value.x, value.y};
#pragma unroll
        for (int p = 0; p < 2 * kParts; ++p)
            __stcs(parts + p,
                   static_cast<Part>(words[p / kParts] >> (8 * kBytes * (p % kParts))));
    }
}

// Fewer bytes than a vector: the rest of it is zeros.
__device__ inline Vector load_bytes(const unsigned char *from, int count) {
    Vector value{0, 0};
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const unsigned long long byte = __ldcs(from + i);
        if (i < 8)
            value.x |= byte << (8 * i);
        else
            value.y |= byte << (8 * (i - 8));
    }
    return value;
}

__device__ inline void store_bytes(unsigned char *to, Vector value, int count) {
#pragma unroll 1
    for (int i = 0; i < count; ++i)
        __stcs(to + i, static_cast<unsigned char>(i < 8 ? value.x >> (8 * i)
                                                        : value.y >> (8 * (i - 8))));
}

}  // namespace kvmig

#endif
