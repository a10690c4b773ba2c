// The functions of ptx.cuh in CUDA C++ alone, for compute-sanitizer's racecheck, which knows
// cuda::barrier and plain accesses but neither mbarriers nor bulk copies in PTX: the ring's order is
// then what it checks. With -DKVMIG_RACECHECK only; slow, since one thread copies.
#ifndef KVMIG_PTX_RACECHECK_CUH
#define KVMIG_PTX_RACECHECK_CUH

#include <cuda/barrier>

namespace kvmig {

using Barrier = cuda::barrier<cuda::thread_scope_block>;

__device__ inline void barrier_init(Barrier *barrier, uint32_t count) {
    init(barrier, static_cast<int>(count));
}

__device__ inline void barrier_init_fence() {}

__device__ inline void barrier_arrive(Barrier *barrier) { (void)barrier->arrive(); }

// The bytes came before: see bulk_load.
__device__ inline void barrier_arrive_expecting(Barrier *, uint32_t) {}

__device__ inline void barrier_wait(Barrier *barrier, uint32_t parity) {
    barrier->wait_parity(parity != 0);
}

__device__ inline void copy_bytes(void *to, const void *from, uint32_t bytes) {
    for (uint32_t i = 0; i < bytes / 16; ++i)
        static_cast<ulonglong2 *>(to)[i] = static_cast<const ulonglong2 *>(from)[i];
}

__device__ inline void bulk_load(void *shared, const void *global, uint32_t bytes,
                                 Barrier *barrier) {
    copy_bytes(shared, global, bytes);
    (void)barrier->arrive();
}

__device__ inline void bulk_store(void *global, const void *shared, uint32_t bytes) {
    copy_bytes(global, shared, bytes);
}

template <int kLatest>
__device__ inline void bulk_wait_read() {}

__device__ inline void bulk_wait_written() {}

}  // namespace kvmig

#endif
