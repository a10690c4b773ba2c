// Gathers and scatters with odd sizes, each buffer exactly as large as its bytes, so that a
// sanitizer sees any access outside. Ends with 0 when every byte and checksum is right.

#include "kvmig_copy.h"

#include <cstdio>
#include <memory>
#include <vector>

namespace {

using Bytes = std::unique_ptr<unsigned char[]>;

struct Cache {
    std::vector<Bytes> memory;
    std::vector<kvmig_region> regions;
};

Cache make(const std::vector<int64_t> &runs, int64_t blocks, unsigned seed) {
    Cache cache;
    for (const int64_t run : runs) {
        const auto size = static_cast<std::size_t>(run * blocks);
        Bytes bytes(new unsigned char[size]);
        for (std::size_t i = 0; i < size; ++i) {
            seed = seed * 1664525u + 1013904223u;
            bytes[i] = static_cast<unsigned char>(seed >> 24);
        }
        cache.regions.push_back({bytes.get(), run, run});
        cache.memory.push_back(std::move(bytes));
    }
    return cache;
}

bool moved(const std::vector<int64_t> &runs) {
    Cache source = make(runs, 5, 1), target = make(runs, 3, 2);
    const auto n_regions = static_cast<int64_t>(runs.size());
    const int64_t from[] = {4, 0, 4}, to[] = {0, 2, 1};
    uint64_t written[3], read[3];
    if (kvmig_copy(source.regions.data(), target.regions.data(), n_regions, from, to, 3, written))
        return false;
    if (kvmig_checksum(source.regions.data(), n_regions, from, 3, read)) return false;
    for (int k = 0; k < 3; ++k) {
        if (written[k] != read[k]) return false;
        for (std::size_t r = 0; r < runs.size(); ++r)
            for (int64_t i = 0; i < runs[r]; ++i)
                if (source.memory[r][static_cast<std::size_t>(from[k] * runs[r] + i)] !=
                    target.memory[r][static_cast<std::size_t>(to[k] * runs[r] + i)])
                    return false;
    }
    return true;
}

}  // namespace

int main() {
    const std::vector<std::vector<int64_t>> cases = {
        {}, {1}, {7}, {8}, {9, 63, 64}, {65, 1, 4096}, {8191, 8192, 8193}, {30001}};
    for (const auto &runs : cases)
        if (!moved(runs)) {
            std::fprintf(stderr, "a copy of %zu regions is wrong\n", runs.size());
            return 1;
        }
    return 0;
}
