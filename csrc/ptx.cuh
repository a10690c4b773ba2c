// The TMA's bulk copies and their barriers (PTX ISA, "cp.async.bulk" and "mbarrier"; sm_90).
#ifndef KVMIG_PTX_CUH
#define KVMIG_PTX_CUH

#include "kvmig.h"

#ifdef KVMIG_RACECHECK
#include "ptx_racecheck.cuh"
#elif defined(__CUDACC__)  // tests/native runs the kernels on a CPU with functions of its own

namespace kvmig {

using Barrier = uint64_t;  // in shared memory

__device__ inline uint32_t shared_address(const void *pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A phase of `barrier` ends when `count` threads have arrived, and all expected bytes too.
__device__ inline void barrier_init(Barrier *barrier, uint32_t count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(count)
                 : "memory");
}

// Barriers just made are seen by the TMA; __syncthreads() shows them to the other threads.
__device__ inline void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ inline void barrier_arrive(Barrier *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
                 : "memory");
}

__device__ inline void barrier_arrive_expecting(Barrier *barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

// Waits for the end of the phase with this parity: 0 for the first, 1 for the second, 0, ...
__device__ inline void barrier_wait(Barrier *barrier, uint32_t parity) {
    uint32_t done = 0;
    while (!done)
        asm volatile(
            "{\n"
            ".reg .pred ended;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
            "selp.u32 %0, 1, 0, ended;\n"
            "}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
}

// What passes through is evicted from the L2 first: it shouldn't push out the engine's own data.
__device__ inline uint64_t passing() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Queues global to shared; the bytes arrive at `barrier`.
__device__ inline void bulk_load(void *shared, const void *global, uint32_t bytes,
                                 Barrier *barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
        "[%0], [%1], %2, [%3], %4;" ::"r"(shared_address(shared)),
        "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(barrier)),
        "l"(passing())
        : "memory");
}

// Queues shared to global, a group of its own.
__device__ inline void bulk_store(void *global, const void *shared, uint32_t bytes) {
    asm volatile(
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;\n"
        "cp.async.bulk.commit_group;" ::"l"(__cvta_generic_to_global(global)),
        "r"(shared_address(shared)), "r"(bytes), "l"(passing())
        : "memory");
}

// Until all of this thread's stores but the latest kLatest have read their shared memory.
template <int kLatest>
__device__ inline void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLatest) : "memory");
}

// Until all of this thread's stores are written.
__device__ inline void bulk_wait_written() {
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

}  // namespace kvmig

#endif

#endif
