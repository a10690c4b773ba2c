// The CPU twin of the copy ABI: one pass over each run that copies and sums.

#include "kvmig_copy.h"

#include <cstddef>
#include <cstring>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the checksum is defined over little-endian words"
#endif

// One library for every x86-64: the loader takes the AVX-512 clone where the CPU has it (it
// doubles the speed of the sum; AVX2, without a 64-bit multiply, gains nothing). The
// sanitizers' start-up can't run the resolver.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && __GNUC__ >= 12 && \
    !defined(__clang__) && !defined(__SANITIZE_ADDRESS__)
#define KVMIG_CLONES __attribute__((target_clones("default", "arch=x86-64-v4")))
#else
#define KVMIG_CLONES
#endif

namespace {

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
constexpr int64_t kWord = sizeof(uint64_t);

inline uint64_t mix64(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

inline uint64_t term(uint64_t word, int64_t index) {
    return mix64(word + (static_cast<uint64_t>(index) + 1) * kGolden);
}

// Words of a run, the padded last one included.
inline int64_t words(int64_t run) { return (run + kWord - 1) / kWord; }

// The sum of the run's words, the first of which is word `first` of the block.
KVMIG_CLONES uint64_t sum_run(const unsigned char *src, int64_t run, int64_t first) {
    const int64_t whole = run / kWord;
    uint64_t sum = 0;
    for (int64_t i = 0; i < whole; ++i) {
        uint64_t word;
        std::memcpy(&word, src + i * kWord, kWord);
        sum += term(word, first + i);
    }
    if (const int64_t rest = run - whole * kWord) {
        uint64_t word = 0;
        std::memcpy(&word, src + whole * kWord, static_cast<std::size_t>(rest));
        sum += term(word, first + whole);
    }
    return sum;
}

// Copies in pieces that stay in the first-level cache, so that the sum costs no memory traffic.
// It sums what was written: if `src` changes meanwhile, the checksum tells.
uint64_t copy_run(unsigned char *dst, const unsigned char *src, int64_t run, int64_t first) {
    constexpr int64_t kPiece = 8192;
    uint64_t sum = 0;
    for (int64_t done = 0; done < run; done += kPiece) {
        const int64_t size = run - done < kPiece ? run - done : kPiece;
        std::memcpy(dst + done, src + done, static_cast<std::size_t>(size));
        sum += sum_run(dst + done, size, first + done / kWord);
    }
    return sum;
}

inline unsigned char *at(const kvmig_region &region, int64_t id) {
    return static_cast<unsigned char *>(region.base) + id * region.block_stride;
}

bool valid(const kvmig_region *regions, int64_t n_regions) {
    if (n_regions < 0 || (n_regions > 0 && !regions)) return false;
    for (int64_t r = 0; r < n_regions; ++r)
        if (!regions[r].base || regions[r].run < 0) return false;
    return true;
}

}  // namespace

int kvmig_abi_version(void) { return KVMIG_ABI_VERSION; }

int kvmig_copy(const kvmig_region *src, const kvmig_region *dst, int64_t n_regions,
               const int64_t *src_ids, const int64_t *dst_ids, int64_t n, uint64_t *checksums) {
    if (!valid(src, n_regions) || !valid(dst, n_regions)) return KVMIG_BAD_ARGUMENT;
    if (n < 0 || (n > 0 && (!src_ids || !dst_ids))) return KVMIG_BAD_ARGUMENT;
    for (int64_t r = 0; r < n_regions; ++r)
        if (src[r].run != dst[r].run) return KVMIG_BAD_ARGUMENT;

    for (int64_t k = 0; k < n; ++k) {
        uint64_t sum = 0;
        int64_t first = 0;
        for (int64_t r = 0; r < n_regions; ++r) {
            const int64_t run = src[r].run;
            unsigned char *to = at(dst[r], dst_ids[k]);
            const unsigned char *from = at(src[r], src_ids[k]);
            if (checksums)
                sum += copy_run(to, from, run, first);
            else
                std::memcpy(to, from, static_cast<std::size_t>(run));
            first += words(run);
        }
        if (checksums) checksums[k] = sum;
    }
    return KVMIG_OK;
}

int kvmig_checksum(const kvmig_region *src, int64_t n_regions, const int64_t *ids, int64_t n,
                   uint64_t *checksums) {
    if (!valid(src, n_regions)) return KVMIG_BAD_ARGUMENT;
    if (n < 0 || (n > 0 && (!ids || !checksums))) return KVMIG_BAD_ARGUMENT;

    for (int64_t k = 0; k < n; ++k) {
        uint64_t sum = 0;
        int64_t first = 0;
        for (int64_t r = 0; r < n_regions; ++r) {
            sum += sum_run(at(src[r], ids[k]), src[r].run, first);
            first += words(src[r].run);
        }
        checksums[k] = sum;
    }
    return KVMIG_OK;
}
