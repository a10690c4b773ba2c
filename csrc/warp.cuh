// Work shared out among warps, and sums over their lanes. Device code for nvcc and for NVRTC.
#ifndef KVMIG_WARP_CUH
#define KVMIG_WARP_CUH

#include "kvmig.h"

namespace kvmig {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline int lane() { return static_cast<int>(threadIdx.x % kWarp); }

// Numbers of all warps of the grid.
__device__ inline int64_t warp() {
    return (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
}
__device__ inline int64_t warps() {
    return static_cast<int64_t>(gridDim.x) * blockDim.x / kWarp;
}

// Items [begin, end) of `total`, what worker w of `workers` takes: neighbours, so that it seldom
// goes from one block to the next, and as many as the others take or one more.
struct Share {
    int64_t begin, end;

    __device__ Share(int64_t total, int64_t workers, int64_t w) {
        const int64_t each = total / workers, extra = total - each * workers;
        begin = each * w + (w < extra ? w : extra);
        end = begin + each + (w < extra);
    }
};

template <class T>
__device__ T warp_sum(T value) {
    for (int step = kWarp / 2; step; step /= 2) value += __shfl_xor_sync(kAllLanes, value, step);
    return value;
}

// The sum over this lane and all lanes before it.
template <class T>
__device__ T warp_scan(T value) {
    for (int step = 1; step < kWarp; step *= 2) {
        const T before = __shfl_up_sync(kAllLanes, value, step);
        if (lane() >= step) value += before;
    }
    return value;
}

}  // namespace kvmig

#endif
