// Gathers and scatters with odd sizes, each buffer exactly as large as its bytes, so that a
// sanitizer sees any access outside. Ends with 0 when every byte and checksum is right.

#include "kvmig.h"
#include "run_cpu.h"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

namespace {

using Bytes = std::unique_ptr<unsigned char[]>;

Bytes random_bytes(std::size_t size, unsigned seed) {
    Bytes bytes(new unsigned char[size]);
    for (std::size_t i = 0; i < size; ++i) {
        seed = seed * 1664525u + 1013904223u;
        bytes[i] = static_cast<unsigned char>(seed >> 24);
    }
    return bytes;
}

struct Cache {
    std::vector<Bytes> memory;
    std::vector<kvmig_region> regions;
};

Cache make(const std::vector<int64_t> &runs, int64_t blocks, unsigned seed) {
    Cache cache;
    for (const int64_t run : runs) {
        Bytes bytes = random_bytes(static_cast<std::size_t>(run * blocks), seed);
        cache.regions.push_back({bytes.get(), run, run});
        cache.memory.push_back(std::move(bytes));
    }
    return cache;
}

bool moved(const std::vector<int64_t> &runs, int32_t workers) {
    Cache source = make(runs, 5, 1), target = make(runs, 3, 2);
    const auto n_regions = static_cast<int64_t>(runs.size());
    const int64_t from[] = {4, 0, 4}, to[] = {0, 2, 1};
    uint64_t written[3], read[3];
    if (kvmig_copy(source.regions.data(), target.regions.data(), n_regions, from, to, 3, written,
                   nullptr, workers))
        return false;
    if (kvmig_checksum(source.regions.data(), n_regions, from, 3, read, nullptr, workers))
        return false;
    for (int k = 0; k < 3; ++k) {
        if (written[k] != read[k]) return false;
        for (std::size_t r = 0; r < runs.size(); ++r)
            if (std::memcmp(source.memory[r].get() + from[k] * runs[r],
                            target.memory[r].get() + to[k] * runs[r],
                            static_cast<std::size_t>(runs[r])))
                return false;
    }
    return true;
}

// Every form of the loops that this CPU can run, against the portable one.
bool loops_agree(int64_t size, int64_t shift) {
    using namespace kvmig;
    const auto bytes = static_cast<std::size_t>(size);
    const Bytes source = random_bytes(bytes, 3);
    const auto room = static_cast<std::size_t>(size + shift);
    const Run summed{nullptr, source.get(), size, 5, source.get()};
    const uint64_t sum = run_kernels(Isa::kPortable, false).sum(summed);
    for (int isa = 0; isa <= static_cast<int>(best_isa()); ++isa)
        for (const bool streaming : {false, true}) {
            const RunKernels kernels = run_kernels(static_cast<Isa>(isa), streaming);
            const Bytes one(new unsigned char[room]()), other(new unsigned char[room]());
            kernels.copy({one.get() + shift, source.get(), size, 5, source.get()});
            const uint64_t written =
                kernels.copy_sum({other.get() + shift, source.get(), size, 5, source.get()});
            fence();
            if (written != sum || kernels.sum(summed) != sum) return false;
            for (const unsigned char *copy : {one.get(), other.get()})
                if (std::memcmp(copy + shift, source.get(), bytes)) return false;
        }
    return true;
}

}  // namespace

int main() {
    const std::vector<std::vector<int64_t>> cases = {
        {},           {1},          {7},           {8},    {9, 63, 64}, {65, 1, 4096},
        {8191, 8192}, {0, 8193, 0}, {30001, 9999}, {4 << 20, 100}};
    for (const auto &runs : cases)
        for (const int32_t workers : {0, 1, 2, 3})
            if (!moved(runs, workers)) {
                std::fprintf(stderr, "a copy of %zu regions is wrong\n", runs.size());
                return 1;
            }
    // Callers that come at the same time share the threads.
    std::atomic<int> right{0};
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller)
        callers.emplace_back([&] {
            for (int turn = 0; turn < 5; ++turn) right += moved({1 << 19, 77}, 3);
        });
    for (std::thread &caller : callers) caller.join();
    if (right != 15) {
        std::fprintf(stderr, "copies at the same time are wrong\n");
        return 1;
    }
    for (const int64_t size : {0, 1, 8, 31, 64, 100, 4096, 10007})
        for (const int64_t shift : {0, 3, 8, 40, 64})
            if (!loops_agree(size, shift)) {
                std::fprintf(stderr, "loops differ at %d bytes\n", static_cast<int>(size));
                return 1;
            }
    return 0;
}
