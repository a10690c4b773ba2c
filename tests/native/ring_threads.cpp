// The TMA's kernel on threads of the CPU, one for each of a CTA's and one for the TMA, under
// ThreadSanitizer: it reports two accesses to the ring, one of them a write, that no barrier orders.
// A barrier orders exactly what an mbarrier does: an arrival releases, a wait acquires, and so do
// the TMA's bytes. Shared memory is the ring; the blocks are copied and summed as well.

#define FAKEGPU_LOCAL thread_local
#include "cuda_runtime.h"

#include <atomic>
#include <cstdio>
#include <thread>
#include <vector>

#include "copy_tma.cuh"

thread_local Index threadIdx;
Index blockIdx, blockDim, gridDim;

namespace kvmig {
alignas(128) unsigned char kvmig_shared[227 * 1024];
}

namespace {

// All that come, each time: C++20's std::barrier is not in every compiler.
struct Meeting {
    std::atomic<unsigned> arrived{0}, generation{0};

    void meet(unsigned expected) {
        const unsigned now = generation.load(std::memory_order_acquire);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == expected) {
            arrived.store(0, std::memory_order_relaxed);
            generation.fetch_add(1, std::memory_order_acq_rel);
            return;
        }
        while (generation.load(std::memory_order_acquire) == now) std::this_thread::yield();
    }
};

Meeting cta_meeting, warp_meetings[32];
uint64_t slots[32][2][32];
thread_local unsigned turn;

// phase, threads that are still to arrive, their number, bytes to arrive
struct Parts {
    unsigned phase : 1, missing : 15, count : 15;
    int32_t bytes;
};

void change(uint64_t *barrier, unsigned arriving, int32_t bytes) {
    uint64_t before = __atomic_load_n(barrier, __ATOMIC_RELAXED), after;
    do {
        Parts parts = emulated::from_bits<Parts>(before);
        parts.missing -= arriving;
        parts.bytes += bytes;
        if (!parts.missing && !parts.bytes) {
            parts.phase ^= 1;
            parts.missing = parts.count;
        }
        after = emulated::to_bits(parts);
    } while (!__atomic_compare_exchange_n(barrier, &before, after, false, __ATOMIC_RELEASE,
                                          __ATOMIC_RELAXED));
}

struct BulkCopy {
    void *to;
    const void *from;
    uint32_t bytes;
    uint64_t *barrier;  // of a load
};

// Two of the TMA's, so that loads and stores run at the same time. Nothing orders the kernel behind
// an engine except barriers and `done`.
struct Engine {
    BulkCopy queue[4096];
    std::atomic<size_t> queued{0}, done{0};
    std::atomic<bool> over{false};

    void add(const BulkCopy &copy) {
        const size_t at = queued.load(std::memory_order_relaxed);
        queue[at] = copy;
        queued.store(at + 1, std::memory_order_release);
    }
    void serve() {
        for (size_t at = 0;; ++at) {
            while (queued.load(std::memory_order_acquire) == at) {
                if (over) return;
                std::this_thread::yield();
            }
            const BulkCopy next = queue[at];
            const auto *from = static_cast<const unsigned char *>(next.from);
            auto *to = static_cast<unsigned char *>(next.to);
            for (uint32_t i = 0; i < next.bytes; ++i) to[i] = from[i];  // memcpy isn't watched
            if (next.barrier) change(next.barrier, 0, -static_cast<int32_t>(next.bytes));
            done.fetch_add(1, std::memory_order_release);
        }
    }
} loads, stores;

}  // namespace

namespace emulated {

void fail(const char *what) {
    std::fprintf(stderr, "%s\n", what);
    std::abort();
}
void meet_warp() { warp_meetings[threadIdx.x / 32].meet(32); }
void meet_cta() { cta_meeting.meet(blockDim.x); }
uint64_t exchange(uint64_t value, int source) {
    const unsigned warp = threadIdx.x / 32, now = turn++ % 2;
    slots[warp][now][lane()] = value;
    meet_warp();
    return slots[warp][now][source];
}

}  // namespace emulated

namespace kvmig {

void barrier_init(Barrier *barrier, uint32_t count) {
    Parts parts{};
    parts.missing = parts.count = count;
    *barrier = emulated::to_bits(parts);
}
void barrier_arrive(Barrier *barrier) { change(barrier, 1, 0); }
void barrier_arrive_expecting(Barrier *barrier, uint32_t bytes) {
    change(barrier, 1, static_cast<int32_t>(bytes));
}
void barrier_wait(Barrier *barrier, uint32_t parity) {
    while (emulated::from_bits<Parts>(__atomic_load_n(barrier, __ATOMIC_ACQUIRE)).phase == parity)
        std::this_thread::yield();
}
void bulk_load(void *shared, const void *global, uint32_t bytes, Barrier *barrier) {
    loads.add({shared, global, bytes, barrier});
}
void bulk_store(void *global, const void *shared, uint32_t bytes) {
    stores.add({global, shared, bytes, nullptr});
}
void bulk_wait_unread(size_t latest) {
    while (stores.queued.load(std::memory_order_relaxed) -
               stores.done.load(std::memory_order_acquire) > latest)
        std::this_thread::yield();
}

}  // namespace kvmig

int main() {
    constexpr int64_t kBlocks = 5, kRegions = 2;
    constexpr int64_t kRuns[kRegions] = {3 * kvmig::Ring::kStageBytes + 48, 1024};
    std::vector<unsigned char> source[kRegions], target[kRegions];
    kvmig_region src[kRegions], dst[kRegions];
    const int64_t src_ids[kBlocks] = {4, 0, 3, 1, 2}, dst_ids[kBlocks] = {1, 2, 0, 4, 3};
    for (int64_t r = 0; r < kRegions; ++r) {
        source[r].resize(static_cast<size_t>(kBlocks * kRuns[r]));
        target[r].resize(source[r].size());
        unsigned state = 7;
        for (unsigned char &byte : source[r])
            byte = static_cast<unsigned char>((state = state * 1664525u + 1013904223u) >> 24);
        src[r] = {source[r].data(), kRuns[r], kRuns[r]};
        dst[r] = {target[r].data(), kRuns[r], kRuns[r]};
    }
    uint64_t sums[kBlocks] = {};
    gridDim.x = 2;
    blockDim.x = kvmig::kTmaThreads;
    std::thread loading([] { loads.serve(); }), storing([] { stores.serve(); });
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {
        std::vector<std::thread> threads;
        for (unsigned t = 0; t < blockDim.x; ++t)
            threads.emplace_back([&, t] {
                threadIdx.x = t;
                kvmig_copy_tma_kernel(src, dst, kRegions, src_ids, dst_ids, kBlocks, sums);
            });
        for (std::thread &thread : threads) thread.join();
    }
    loads.over = stores.over = true;
    loading.join();
    storing.join();
    for (int64_t b = 0; b < kBlocks; ++b) {
        uint64_t sum = 0;
        int64_t word = 0;
        for (int64_t r = 0; r < kRegions; ++r) {
            const unsigned char *from = source[r].data() + src_ids[b] * kRuns[r];
            if (std::memcmp(from, target[r].data() + dst_ids[b] * kRuns[r],
                            static_cast<size_t>(kRuns[r])))
                emulated::fail("a block is not as it was");
            for (int64_t i = 0; i < kRuns[r] / 8; ++i, ++word) {
                uint64_t value;
                std::memcpy(&value, from + 8 * i, sizeof value);
                sum += kvmig::mix64(value + kvmig::word_bias(word));
            }
        }
        if (sum != sums[b]) emulated::fail("another checksum");
    }
    std::puts("as it was");
}
