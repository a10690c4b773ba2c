// One run of bytes: copied, summed, or both in one pass.

#ifndef KVMIG_RUN_CPU_H
#define KVMIG_RUN_CPU_H

#include <cstddef>
#include <cstdint>

namespace kvmig __attribute__((visibility("hidden"))) {

// Words of a run, the padded last one included.
inline int64_t words(int64_t run) { return (run + 7) / 8; }

struct Run {
    unsigned char *dst;  // null: it is summed only
    const unsigned char *src;
    int64_t size;
    int64_t first;              // the place of its first word in its block
    const unsigned char *next;  // what will be read after it; fetched ahead, never used
};

struct RunKernels {
    void (*copy)(const Run &run);
    uint64_t (*copy_sum)(const Run &run);  // the sum is of what was written
    uint64_t (*sum)(const Run &run);
};

enum class Isa { kPortable, kAvx2, kAvx512 };

// The best that this CPU has.
Isa best_isa();

// `streaming`: stores go past the caches, which is faster when the copies don't fit into them;
// others see them after fence(). The portable kernels have no such stores.
RunKernels run_kernels(Isa isa, bool streaming);

void fence();

}  // namespace kvmig

#endif
