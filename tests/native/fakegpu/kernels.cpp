// The CTA's fibres, and what they wait for.

#include "cuda_runtime.h"

#include <setjmp.h>
#include <signal.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "kvmig.h"

FAKEGPU_LOCAL Index threadIdx;
Index blockIdx, blockDim, gridDim;

namespace kvmig {
constexpr size_t kSharedBytes = 227 * 1024;  // what a CTA of a Hopper can have
alignas(128) unsigned char kvmig_shared[kSharedBytes];
}  // namespace kvmig

namespace emulated {
namespace {

constexpr size_t kStackBytes = 64 * 1024;
constexpr long kMostRounds = 10'000'000;

struct Fibre {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[kStackBytes]};
    bool finished;
};
struct Meeting {
    unsigned arrived = 0, generation = 0;
};
struct BulkCopy {
    void *to;
    const void *from;
    uint32_t bytes;
    uint64_t *barrier;  // of a load
};

std::mutex one_launch;
std::vector<Fibre> fibres;
ucontext_t scheduler;
unsigned current;
const std::function<void()> *body;
Meeting cta_meeting, warp_meetings[32];
uint64_t slots[32][2][32];  // two turns: a fast lane may be one exchange ahead
std::deque<BulkCopy> loads, stores;
unsigned random_state = 1;

bool chance() { return (random_state = random_state * 1664525u + 1013904223u) >> 31; }

void enter() {
    (*body)();
    fibres[current].finished = true;
    swapcontext(&fibres[current].context, &scheduler);
}

void pass() { swapcontext(&fibres[current].context, &scheduler); }

void meet(Meeting &meeting, unsigned expected) {
    const unsigned generation = meeting.generation;
    if (++meeting.arrived == expected) {
        meeting.arrived = 0;
        ++meeting.generation;
        return;
    }
    while (meeting.generation == generation) pass();
}

// A barrier's 64 bits: phase, threads that are still to arrive, their number, bytes to arrive.
struct Parts {
    unsigned phase : 1, missing : 15, count : 15;
    int32_t bytes;
};
void change(uint64_t *barrier, unsigned arriving, int32_t bytes) {
    Parts parts = from_bits<Parts>(*barrier);
    parts.missing -= arriving;
    parts.bytes += bytes;
    if (!parts.missing && !parts.bytes) {
        parts.phase ^= 1;
        parts.missing = parts.count;
    }
    *barrier = to_bits(parts);
}

void copy_now(std::deque<BulkCopy> &queue) {
    const BulkCopy one = queue.front();
    queue.pop_front();
    std::memcpy(one.to, one.from, one.bytes);
    if (one.barrier) change(one.barrier, 0, -static_cast<int32_t>(one.bytes));
}

void run_cta(unsigned threads) {
    for (unsigned t = 0; t < threads; ++t) {
        Fibre &fibre = fibres[t];
        fibre.finished = false;
        getcontext(&fibre.context);
        fibre.context.uc_stack.ss_sp = fibre.stack.get();
        fibre.context.uc_stack.ss_size = kStackBytes;
        fibre.context.uc_link = nullptr;
        makecontext(&fibre.context, enter, 0);
    }
    cta_meeting = {};
    for (Meeting &meeting : warp_meetings) meeting = {};
    unsigned running = threads;
    for (long round = 0; running; ++round) {
        if (round == kMostRounds) fail("threads wait for each other forever");
        for (unsigned t = 0; t < threads; ++t) {
            if (fibres[t].finished) continue;
            threadIdx.x = current = t;
            swapcontext(&scheduler, &fibres[t].context);
            running -= fibres[t].finished;
        }
        if (!loads.empty() && chance()) copy_now(loads);
        if (!stores.empty() && chance()) copy_now(stores);
    }
    if (!loads.empty() || !stores.empty()) fail("a CTA ended before its bulk copies");
}

void check_bulk(const void *a, const void *b, uint32_t bytes) {
    if ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | bytes) % 16 || !bytes)
        fail("a bulk copy that is not on 16-byte boundaries");
}

// A kernel's access to memory that isn't its device's ends the launch, any other the process.
thread_local sigjmp_buf *faulted;
struct sigaction before;

void fault(int, siginfo_t *, void *) {
    if (faulted) siglongjmp(*faulted, 1);
    sigaction(SIGSEGV, &before, nullptr);
}

// A library that came since the last launch may have taken the signal.
void watch_faults() {
    struct sigaction now = {}, action = {};
    sigaction(SIGSEGV, nullptr, &now);
    if (now.sa_flags & SA_SIGINFO && now.sa_sigaction == fault) return;
    action.sa_sigaction = fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before);
}

}  // namespace

void fail(const char *what) {
    std::fprintf(stderr, "emulated CUDA: %s\n", what);
    std::abort();
}

void meet_warp() { meet(warp_meetings[threadIdx.x / 32], 32); }

void meet_cta() { meet(cta_meeting, blockDim.x); }

uint64_t exchange(uint64_t value, int source) {
    const unsigned warp = threadIdx.x / 32, turn = warp_meetings[warp].generation % 2;
    slots[warp][turn][lane()] = value;
    meet_warp();
    return slots[warp][turn][source];
}

bool run(unsigned ctas, unsigned threads, size_t shared_bytes,
         const std::function<void()> &kernel) {
    const std::lock_guard lock(one_launch);
    watch_faults();
    if (threads > 1024 || threads % 32 || !ctas) fail("a launch that no GPU takes");
    if (shared_bytes > kvmig::kSharedBytes) fail("more shared memory than there is");
    if (fibres.size() < threads) fibres = std::vector<Fibre>(threads);
    body = &kernel;
    gridDim.x = ctas;
    blockDim.x = threads;
    sigjmp_buf here;
    if (sigsetjmp(here, 1)) {
        faulted = nullptr;
        loads.clear();
        stores.clear();
        return false;
    }
    faulted = &here;
    for (blockIdx.x = 0; blockIdx.x < ctas; ++blockIdx.x) {
        std::memset(kvmig::kvmig_shared, 0xa5, shared_bytes);
        run_cta(threads);
    }
    faulted = nullptr;
    return true;
}

}  // namespace emulated

namespace kvmig {

void barrier_init(Barrier *barrier, uint32_t count) {
    emulated::Parts parts{};
    parts.missing = parts.count = count;
    *barrier = emulated::to_bits(parts);
}

void barrier_arrive(Barrier *barrier) { emulated::change(barrier, 1, 0); }

void barrier_arrive_expecting(Barrier *barrier, uint32_t bytes) {
    emulated::change(barrier, 1, static_cast<int32_t>(bytes));
}

void barrier_wait(Barrier *barrier, uint32_t parity) {
    while (emulated::from_bits<emulated::Parts>(*barrier).phase == parity) emulated::pass();
}

void bulk_load(void *shared, const void *global, uint32_t bytes, Barrier *barrier) {
    emulated::check_bulk(shared, global, bytes);
    emulated::loads.push_back({shared, global, bytes, barrier});
}

void bulk_store(void *global, const void *shared, uint32_t bytes) {
    emulated::check_bulk(shared, global, bytes);
    emulated::stores.push_back({global, shared, bytes, nullptr});
}

void bulk_wait_unread(size_t latest) {
    while (emulated::stores.size() > latest) emulated::pass();
}

}  // namespace kvmig
