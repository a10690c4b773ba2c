// As much of CUDA as csrc's kernels use, for a C++ compiler: the kernels then run on the CPU, every
// thread of a CTA as a fibre, one CTA after the other. Accesses are checked for alignment, and the
// TMA's copies happen some time after they were queued.
#ifndef FAKEGPU_CUDA_RUNTIME_H
#define FAKEGPU_CUDA_RUNTIME_H

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>

#define __device__
#define __global__
#define __shared__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

#ifndef FAKEGPU_LOCAL
#define FAKEGPU_LOCAL  // thread_local where a CTA's threads are the CPU's own (ring_threads.cpp)
#endif

struct Index {
    unsigned x;
};
extern FAKEGPU_LOCAL Index threadIdx;
extern Index blockIdx, blockDim, gridDim;

struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};

namespace emulated {

void fail(const char *what);
void meet_warp();
void meet_cta();
// What lane `source` of this warp gives; every lane gives its own.
uint64_t exchange(uint64_t value, int source);
// False: it touched what it may not.
bool run(unsigned ctas, unsigned threads, size_t shared_bytes, const std::function<void()> &body);

template <class T>
uint64_t to_bits(T value) {
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    return bits;
}
template <class T>
T from_bits(uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline int lane() { return static_cast<int>(threadIdx.x % 32); }

template <class T>
void check_alignment(const T *pointer) {
    if (reinterpret_cast<uintptr_t>(pointer) % sizeof(T)) fail("a misaligned access");
}

}  // namespace emulated

template <class T>
T __shfl_sync(unsigned, T value, int source) {
    return emulated::from_bits<T>(emulated::exchange(emulated::to_bits(value), source));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int step) {
    return __shfl_sync(mask, value, emulated::lane() ^ step);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int step) {
    const int source = emulated::lane() - step;
    return __shfl_sync(mask, value, source < 0 ? emulated::lane() : source);
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
    unsigned votes = 0;
    for (int source = 0; source < 32; ++source)
        votes |= static_cast<unsigned>(__shfl_sync(mask, vote, source)) << source;
    return votes;
}
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline void __syncwarp() { emulated::meet_warp(); }
inline void __syncthreads() { emulated::meet_cta(); }
inline unsigned long long atomicAdd(unsigned long long *sum, unsigned long long term) {
    return __atomic_fetch_add(sum, term, __ATOMIC_RELAXED);
}
template <class T>
T __ldcs(const T *from) {
    emulated::check_alignment(from);
    return *from;
}
template <class T>
void __stcs(T *to, T value) {
    emulated::check_alignment(to);
    *to = value;
}
inline float __uint_as_float(unsigned bits) { return emulated::from_bits<float>(bits); }
inline unsigned __float_as_uint(float value) {
    return static_cast<unsigned>(emulated::to_bits(value));
}
inline float __fdiv_rn(float a, float b) { return a / b; }

namespace kvmig {

inline float fp16_to_float(uint16_t bits) {
    return static_cast<float>(emulated::from_bits<_Float16>(bits));
}
inline uint16_t float_to_fp16(float value) {
    return static_cast<uint16_t>(emulated::to_bits(static_cast<_Float16>(value)));
}

using Barrier = uint64_t;
void barrier_init(Barrier *barrier, uint32_t count);
inline void barrier_init_fence() {}
void barrier_arrive(Barrier *barrier);
void barrier_arrive_expecting(Barrier *barrier, uint32_t bytes);
void barrier_wait(Barrier *barrier, uint32_t parity);
void bulk_load(void *shared, const void *global, uint32_t bytes, Barrier *barrier);
void bulk_store(void *global, const void *shared, uint32_t bytes);
void bulk_wait_unread(size_t latest);
template <int kLatest>
void bulk_wait_read() {
    bulk_wait_unread(kLatest);
}
inline void bulk_wait_written() { bulk_wait_unread(0); }

}  // namespace kvmig

#define CUDART_VERSION 13000
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorMemoryAllocation };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrComputeCapabilityMajor };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
using cudaStream_t = void *;

struct dim3 {
    unsigned x;
    dim3(unsigned count = 1) : x(count) {}
};
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
};

// See gpu.cpp.
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaMemsetAsync(void *to, int byte, size_t count, cudaStream_t stream);
namespace emulated {
cudaError_t launch(const cudaLaunchConfig_t &config, std::function<void()> kernel);
}

struct cudaFuncAttributes {
    int ptxVersion;
};
// $KVMIG_FAKE_PTX: of a library that was compiled for other GPUs than sm_90.
template <class... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *found, void (*)(Parameters...)) {
    const char *chosen = std::getenv("KVMIG_FAKE_PTX");
    found->ptxVersion = chosen ? std::atoi(chosen) : 90;
    return cudaSuccess;
}
template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*)(Parameters...), cudaFuncAttribute, int) {
    return cudaSuccess;
}
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
    return emulated::launch(*config, [=] { kernel(arguments...); });
}

#endif
