// Head rows of 16-bit floats to float8 with a scale a row, and back. Some lanes of a warp share a
// row; they read it twice, the second time from the L1.
#ifndef KVMIG_FP8_CUH
#define KVMIG_FP8_CUH

#include "float8.cuh"
#include "warp.cuh"

namespace kvmig {

constexpr int kFp8Threads = 256;
constexpr int kFp8CtasPerSm = 4;
constexpr int kAtOnce = 8;  // elements a lane: 16 bytes of halves, 8 of float8

struct alignas(16) Halves {
    uint16_t of[kAtOnce];
};
struct alignas(8) Codes {
    uint8_t of[kAtOnce];
};

// Elements a step: eight where a row is a number of them and lies on their boundaries, else one.
__device__ inline bool wide(const void *halves, const void *codes, int64_t width) {
    return (reinterpret_cast<uint64_t>(halves) % sizeof(Halves) == 0) &&
           (reinterpret_cast<uint64_t>(codes) % sizeof(Codes) == 0) && width % kAtOnce == 0;
}

// How a warp's lanes share rows of `steps` steps: `lanes` of them a row.
struct RowLanes {
    int lanes, place;
    int64_t rows, row;  // rows a pass, and this lane's row in it

    __device__ explicit RowLanes(int64_t steps) : lanes(1) {
        while (lanes < steps && lanes < kWarp) lanes *= 2;
        place = lane() % lanes;
        rows = kWarp / lanes;
        row = lane() / lanes;
    }
};

template <int kType, bool kWide>
__device__ inline float row_most(const uint16_t *row, int64_t width, const RowLanes &lanes) {
    float most = 0;
    if constexpr (kWide) {
        const Halves *parts = reinterpret_cast<const Halves *>(row);
        for (int64_t i = lanes.place; i < width / kAtOnce; i += lanes.lanes) {
            const Halves part = parts[i];
#pragma unroll
            for (int e = 0; e < kAtOnce; ++e)
                most = fmaxf(most, fabsf(half_to_float<kType>(part.of[e])));
        }
    } else {
        for (int64_t i = lanes.place; i < width; i += lanes.lanes)
            most = fmaxf(most, fabsf(half_to_float<kType>(row[i])));
    }
    for (int step = lanes.lanes / 2; step; step /= 2)
        most = fmaxf(most, __shfl_xor_sync(kAllLanes, most, step));
    return most;
}

template <int kType, bool kWide>
__device__ inline void pack_rows(const uint16_t *src, int64_t rows, int64_t width,
                                 uint8_t *packed, float *scales) {
    const RowLanes lanes(kWide ? width / kAtOnce : width);
    const Share share(rows, warps(), warp());
    for (int64_t first = share.begin; first < share.end; first += lanes.rows) {
        const int64_t row = first + lanes.row;
        const bool here = row < share.end;  // else it only takes part in the other lanes' maximum
        const uint16_t *from = src + row * width;
        const float most = row_most<kType, kWide>(from, here ? width : 0, lanes);
        if (!here) continue;
        const float scale = most > 0 ? __fdiv_rn(most, kFloat8Most) : 1.0f;
        if (lanes.place == 0) scales[row] = scale;
        if constexpr (kWide) {
            for (int64_t i = lanes.place; i < width / kAtOnce; i += lanes.lanes) {
                const Halves part = reinterpret_cast<const Halves *>(from)[i];
                Codes codes;
#pragma unroll
                for (int e = 0; e < kAtOnce; ++e)
                    codes.of[e] = float_to_float8(
                        __fdiv_rn(half_to_float<kType>(part.of[e]), scale));
                reinterpret_cast<Codes *>(packed + row * width)[i] = codes;
            }
        } else {
            for (int64_t i = lanes.place; i < width; i += lanes.lanes)
                packed[row * width + i] =
                    float_to_float8(__fdiv_rn(half_to_float<kType>(from[i]), scale));
        }
    }
}

template <int kType, bool kWide>
__device__ inline void unpack_rows(const uint8_t *packed, const float *scales, int64_t rows,
                                   int64_t width, uint16_t *dst) {
    const RowLanes lanes(kWide ? width / kAtOnce : width);
    const Share share(rows, warps(), warp());
    for (int64_t row = share.begin + lanes.row; row < share.end; row += lanes.rows) {
        const uint8_t *from = packed + row * width;
        uint16_t *to = dst + row * width;
        const float scale = scales[row];
        if constexpr (kWide) {
            for (int64_t i = lanes.place; i < width / kAtOnce; i += lanes.lanes) {
                const Codes codes = reinterpret_cast<const Codes *>(from)[i];
                Halves part;
#pragma unroll
                for (int e = 0; e < kAtOnce; ++e)
                    part.of[e] = float_to_half<kType>(float8_to_float(codes.of[e]) * scale);
                reinterpret_cast<Halves *>(to)[i] = part;
            }
        } else {
            for (int64_t i = lanes.place; i < width; i += lanes.lanes)
                to[i] = float_to_half<kType>(float8_to_float(from[i]) * scale);
        }
    }
}

template <int kType>
__device__ inline void pack(const uint16_t *src, int64_t rows, int64_t width, uint8_t *packed,
                            float *scales) {
    if (wide(src, packed, width))
        pack_rows<kType, true>(src, rows, width, packed, scales);
    else
        pack_rows<kType, false>(src, rows, width, packed, scales);
}

template <int kType>
__device__ inline void unpack(const uint8_t *packed, const float *scales, int64_t rows,
                              int64_t width, uint16_t *dst) {
    if (wide(dst, packed, width))
        unpack_rows<kType, true>(packed, scales, rows, width, dst);
    else
        unpack_rows<kType, false>(packed, scales, rows, width, dst);
}

}  // namespace kvmig

extern "C" __global__ void __launch_bounds__(kvmig::kFp8Threads)
    kvmig_pack_fp8_kernel(const uint16_t *src, int32_t dtype, int64_t rows, int64_t width,
                          uint8_t *packed, float *scales) {
    if (dtype == KVMIG_FP16)
        kvmig::pack<KVMIG_FP16>(src, rows, width, packed, scales);
    else
        kvmig::pack<KVMIG_BF16>(src, rows, width, packed, scales);
}

extern "C" __global__ void __launch_bounds__(kvmig::kFp8Threads)
    kvmig_unpack_fp8_kernel(const uint8_t *packed, const float *scales, int32_t dtype,
                            int64_t rows, int64_t width, uint16_t *dst) {
    if (dtype == KVMIG_FP16)
        kvmig::unpack<KVMIG_FP16>(packed, scales, rows, width, dst);
    else
        kvmig::unpack<KVMIG_BF16>(packed, scales, rows, width, dst);
}

#endif
