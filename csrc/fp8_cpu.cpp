// 16-bit floats to float8 e4m3 with a scale a row, and back.

#include "kvmig.h"
#include "workers_cpu.h"

#include <algorithm>
#include <cstring>

// The loops are plain C++ that the compiler makes vectors of, once more for CPUs with AVX2.
#if defined(__x86_64__) && defined(__GNUC__)
#define KVMIG_AVX2 __attribute__((target("avx2")))
#define KVMIG_HAS_AVX2 __builtin_cpu_supports("avx2")
#else
#define KVMIG_AVX2
#define KVMIG_HAS_AVX2 false
#endif
#define KVMIG_INLINE inline __attribute__((always_inline))

namespace {

constexpr float kMax = 448.0f;
constexpr int64_t kTileBytes = 1 << 18;

KVMIG_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

KVMIG_INLINE float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Without a branch, so that a loop of it becomes vectors.
KVMIG_INLINE uint32_t pick(bool condition, uint32_t yes, uint32_t no) {
    const uint32_t mask = 0u - static_cast<uint32_t>(condition);
    return (yes & mask) | (no & ~mask);
}

struct Bf16 {
    static KVMIG_INLINE float widen(uint16_t half) {
        return float_of(static_cast<uint32_t>(half) << 16);
    }

    static KVMIG_INLINE uint16_t narrow(float value) {
        const uint32_t bits = bits_of(value);
        const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const bool nan = (bits & 0x7fffffff) > 0x7f800000;
        return static_cast<uint16_t>(pick(nan, (bits >> 16) | 0x40, rounded));
    }
};

struct Fp16 {
    static KVMIG_INLINE float widen(uint16_t half) {
        const uint32_t sign = (half & 0x8000u) << 16;
        const uint32_t rest = half & 0x7fffu;
        const uint32_t normal = (rest << 13) + (112u << 23);  // the exponents' biases differ
        const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-24f);
        const uint32_t finite = pick(rest < 0x400, small, normal);
        return float_of(sign | pick(rest >= 0x7c00, 0x7f800000u | (rest << 13), finite));
    }

    static KVMIG_INLINE uint16_t narrow(float value) {
        const uint32_t bits = bits_of(value);
        const uint32_t rest = bits & 0x7fffffff;
        // Below 2^-14 a sum with 0.5 leaves the subnormal's digits at the lower end.
        const uint32_t small = bits_of(float_of(rest) + 0.5f) - 0x3f000000u;
        const uint32_t normal = (rest - (112u << 23) + 0xfff + ((rest >> 13) & 1)) >> 13;
        uint32_t half = pick(rest < (113u << 23), small, normal);
        half = pick(rest >= 0x477ff000u, 0x7c00u, half);  // 65520 and more round to infinity
        half = pick(rest > 0x7f800000u, 0x7e00u, half);
        return static_cast<uint16_t>((bits >> 16 & 0x8000u) | half);
    }
};

struct E4m3 {
    // Bias 7, 3 digits, no infinity; subnormals are multiples of 2^-9; 0x7f is NaN.
    static KVMIG_INLINE uint8_t narrow(float value) {
        const uint32_t bits = bits_of(value);
        const uint32_t rest = bits & 0x7fffffff;
        const uint32_t small = bits_of(float_of(rest) + 0x1p14f) - bits_of(0x1p14f);
        const uint32_t normal = (rest - (120u << 23) + 0x7ffff + ((rest >> 20) & 1)) >> 20;
        uint32_t code = pick(rest < (121u << 23), small, normal);
        code = pick(rest >= bits_of(kMax), 0x7e, code);
        code = pick(rest > 0x7f800000u, 0x7f, code);
        return static_cast<uint8_t>((bits >> 24 & 0x80u) | code);
    }

    static KVMIG_INLINE float widen(uint8_t code) {
        const uint32_t sign = (code & 0x80u) << 24;
        const uint32_t rest = code & 0x7fu;
        const uint32_t normal = (rest << 20) + (120u << 23);
        const uint32_t small = bits_of(static_cast<float>(static_cast<int32_t>(rest)) * 0x1p-9f);
        const uint32_t finite = pick(rest < 8, small, normal);
        return float_of(sign | pick(rest == 0x7f, 0x7fc00000u, finite));
    }
};

template <class Half>
KVMIG_INLINE void pack_row(const uint16_t *src, int64_t width, uint8_t *packed, float *scale) {
    uint16_t most = 0;  // the bits of positive floats are ordered as they are
    for (int64_t i = 0; i < width; ++i)
        most = std::max(most, static_cast<uint16_t>(src[i] & 0x7fff));
    const float by = most ? Half::widen(most) / kMax : 1.0f;
    for (int64_t i = 0; i < width; ++i) packed[i] = E4m3::narrow(Half::widen(src[i]) / by);
    *scale = by;
}

template <class Half>
KVMIG_INLINE void unpack_row(const uint8_t *packed, float scale, int64_t width, uint16_t *dst) {
    for (int64_t i = 0; i < width; ++i) dst[i] = Half::narrow(E4m3::widen(packed[i]) * scale);
}

using Pack = void (*)(const uint16_t *, int64_t, uint8_t *, float *);
using Unpack = void (*)(const uint8_t *, float, int64_t, uint16_t *);

template <class Half>
void pack_portable(const uint16_t *src, int64_t width, uint8_t *packed, float *scale) {
    pack_row<Half>(src, width, packed, scale);
}

template <class Half>
KVMIG_AVX2 void pack_avx2(const uint16_t *src, int64_t width, uint8_t *packed, float *scale) {
    pack_row<Half>(src, width, packed, scale);
}

template <class Half>
void unpack_portable(const uint8_t *packed, float scale, int64_t width, uint16_t *dst) {
    unpack_row<Half>(packed, scale, width, dst);
}

template <class Half>
KVMIG_AVX2 void unpack_avx2(const uint8_t *packed, float scale, int64_t width, uint16_t *dst) {
    unpack_row<Half>(packed, scale, width, dst);
}

bool valid(const void *src, const void *dst, const float *scales, int32_t dtype, int64_t rows,
           int64_t width, int32_t workers) {
    if (rows < 0 || width < 0 || workers < 0) return false;
    if (dtype != KVMIG_BF16 && dtype != KVMIG_FP16) return false;
    return rows == 0 || (scales && (width == 0 || (src && dst)));
}

// Calls row(r) for every row.
template <class Row>
void each_row(int64_t rows, int64_t width, int32_t workers, const Row &row) {
    const int64_t tile_rows = std::max<int64_t>(1, kTileBytes / std::max<int64_t>(1, 2 * width));
    kvmig::share_out((rows + tile_rows - 1) / tile_rows, workers, [&](int64_t tile) {
        const int64_t end = std::min(rows, (tile + 1) * tile_rows);
        for (int64_t r = tile * tile_rows; r < end; ++r) row(r);
    });
}

}  // namespace

int kvmig_pack_fp8(const void *src, int32_t dtype, int64_t rows, int64_t width, uint8_t *packed,
                   float *scales, void *, int32_t workers) {
    if (!valid(src, packed, scales, dtype, rows, width, workers)) return KVMIG_BAD_ARGUMENT;
    const bool wide = KVMIG_HAS_AVX2;
    const Pack pack = dtype == KVMIG_BF16 ? (wide ? pack_avx2<Bf16> : pack_portable<Bf16>)
                                          : (wide ? pack_avx2<Fp16> : pack_portable<Fp16>);
    const auto *from = static_cast<const uint16_t *>(src);
    each_row(rows, width, workers, [&](int64_t r) {
        pack(from + r * width, width, packed + r * width, scales + r);
    });
    return KVMIG_OK;
}

int kvmig_unpack_fp8(const uint8_t *packed, const float *scales, int32_t dtype, int64_t rows,
                     int64_t width, void *dst, void *, int32_t workers) {
    if (!valid(packed, dst, scales, dtype, rows, width, workers)) return KVMIG_BAD_ARGUMENT;
    const bool wide = KVMIG_HAS_AVX2;
    const Unpack unpack = dtype == KVMIG_BF16
                              ? (wide ? unpack_avx2<Bf16> : unpack_portable<Bf16>)
                              : (wide ? unpack_avx2<Fp16> : unpack_portable<Fp16>);
    auto *to = static_cast<uint16_t *>(dst);
    each_row(rows, width, workers, [&](int64_t r) {
        unpack(packed + r * width, scales[r], width, to + r * width);
    });
    return KVMIG_OK;
}
