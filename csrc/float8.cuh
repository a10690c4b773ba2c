// 16-bit floats and float8 e4m3 (finite), bit by bit, so that every device rounds alike.
#ifndef KVMIG_FLOAT8_CUH
#define KVMIG_FLOAT8_CUH

#include "kvmig.h"

namespace kvmig {

constexpr float kFloat8Most = 448.0f;
constexpr float kFloat8LeastNormal = 0.015625f;  // 2^-6; below, steps of 2^-9

#ifdef __CUDACC__  // tests/native has its own
__device__ inline float fp16_to_float(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
__device__ inline uint16_t float_to_fp16(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}
#endif

template <int kType>
__device__ inline float half_to_float(uint16_t bits) {
    if (kType == KVMIG_FP16) return fp16_to_float(bits);
    return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

// To nearest even.
template <int kType>
__device__ inline uint16_t float_to_half(float value) {
    if (kType == KVMIG_FP16) return float_to_fp16(value);
    const uint32_t bits = __float_as_uint(value);
    if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// To nearest even, saturating; NaN stays NaN.
__device__ inline uint8_t float_to_float8(float value) {
    const uint32_t sign = __float_as_uint(value) >> 24 & 0x80;
    const float size = fabsf(value);
    if (size != size) return static_cast<uint8_t>(sign | 0x7f);
    if (size < kFloat8LeastNormal)
        return static_cast<uint8_t>(sign | static_cast<uint32_t>(rintf(size * 512.0f)));
    uint32_t bits = __float_as_uint(fminf(size, kFloat8Most));
    bits += 0x7ffff + (bits >> 20 & 1);  // keeps 3 of 23 bits, carries into the exponent
    return static_cast<uint8_t>(sign | ((bits >> 20) - (120 << 3)));  // bias 127 to 7
}

__device__ inline float float8_to_float(uint8_t code) {
    const uint32_t sign = static_cast<uint32_t>(code & 0x80) << 24, rest = code & 0x7f;
    if (rest == 0x7f) return __uint_as_float(sign | 0x7fc00000);
    if (rest < 8) return __uint_as_float(sign | __float_as_uint(static_cast<float>(rest) / 512));
    return __uint_as_float(sign | (rest + (120 << 3)) << 20);
}

}  // namespace kvmig

#endif
