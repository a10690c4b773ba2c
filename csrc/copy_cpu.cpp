// Copy and checksum of blocks on the CPU.

#include "kvmig.h"
#include "run_cpu.h"
#include "workers_cpu.h"

#include <algorithm>

namespace {

using kvmig::Run;

// What a thread takes at a time, in bytes of fused blocks: long beside the taking, short beside
// the whole.
constexpr int64_t kTile = 1 << 20;
// Copies of this size and more are stored past the caches: measured, see bench/gather.py.
constexpr int64_t kStreamFrom = 8 << 20;
constexpr int64_t kLine = 64;

bool valid(const kvmig_region *regions, int64_t n_regions) {
    if (n_regions < 0 || (n_regions > 0 && !regions)) return false;
    for (int64_t r = 0; r < n_regions; ++r)
        if (!regions[r].base || regions[r].run < 0) return false;
    return true;
}

// Blocks of both ends, seen as one sequence of fused bytes.
struct Blocks {
    const kvmig_region *src;
    const kvmig_region *dst;  // null: there is none
    int64_t n_regions;
    const int64_t *src_ids;
    const int64_t *dst_ids;
    int64_t n;
    int64_t bytes = 0;  // of one block

    Blocks(const kvmig_region *from, const kvmig_region *to, int64_t regions,
           const int64_t *from_ids, const int64_t *to_ids, int64_t count)
        : src(from), dst(to), n_regions(regions), src_ids(from_ids), dst_ids(to_ids), n(count) {
        for (int64_t r = 0; r < n_regions; ++r) bytes += src[r].run;
    }

    static unsigned char *at(const kvmig_region &region, int64_t id) {
        return static_cast<unsigned char *>(region.base) + id * region.block_stride;
    }

    const unsigned char *source(int64_t k, int64_t r) const { return at(src[r], src_ids[k]); }

    // Where the run after (k, r) begins; the run itself if it is the last.
    const unsigned char *after(int64_t k, int64_t r) const {
        if (r + 1 < n_regions) return source(k, r + 1);
        return k + 1 < n ? source(k + 1, 0) : source(k, r);
    }

    // Calls piece(k, run) for the pieces of runs in the fused bytes [begin, end), but both borders
    // moved down to a whole line of their run: so every byte lies in one of adjoining ranges.
    template <class Piece>
    void each(int64_t begin, int64_t end, const Piece &piece) const {
        int64_t k = begin / bytes;
        int64_t start = k * bytes;  // of run r of block k, in fused bytes
        for (int64_t first = 0, r = 0; start < end; ++r) {
            if (r == n_regions) {
                r = first = 0;
                ++k;
            }
            const int64_t size = src[r].run;
            const int64_t from = floor_line(begin - start, size);
            const int64_t to = floor_line(end - start, size);
            if (from < to) {
                unsigned char *target = dst ? at(dst[r], dst_ids[k]) + from : nullptr;
                const unsigned char *next = to < size ? source(k, r) + to : after(k, r);
                piece(k, Run{target, source(k, r) + from, to - from, first + from / 8, next});
            }
            first += kvmig::words(size);
            start += size;
        }
    }

    static int64_t floor_line(int64_t offset, int64_t size) {
        if (offset <= 0) return 0;
        return offset >= size ? size : offset / kLine * kLine;
    }
};

void run_all(const Blocks &blocks, uint64_t *checksums, int32_t workers) {
    if (checksums) std::fill(checksums, checksums + blocks.n, 0);
    const int64_t total = blocks.n * blocks.bytes;
    const bool streaming = blocks.dst && total >= kStreamFrom;
    const kvmig::RunKernels kernels = kvmig::run_kernels(kvmig::best_isa(), streaming);
    const auto loop = blocks.dst ? kernels.copy_sum : kernels.sum;
    kvmig::share_out((total + kTile - 1) / kTile, workers, [&](int64_t tile) {
        blocks.each(tile * kTile, std::min(total, (tile + 1) * kTile),
                    [&](int64_t k, const Run &run) {
                        if (checksums)
                            __atomic_fetch_add(&checksums[k], loop(run), __ATOMIC_RELAXED);
                        else
                            kernels.copy(run);
                    });
        if (streaming) kvmig::fence();
    });
}

}  // namespace

int kvmig_copy(const kvmig_region *src, const kvmig_region *dst, int64_t n_regions,
               const int64_t *src_ids, const int64_t *dst_ids, int64_t n, uint64_t *checksums,
               void *, int32_t workers) {
    if (!valid(src, n_regions) || !valid(dst, n_regions) || workers < 0) return KVMIG_BAD_ARGUMENT;
    if (n < 0 || (n > 0 && (!src_ids || !dst_ids))) return KVMIG_BAD_ARGUMENT;
    for (int64_t r = 0; r < n_regions; ++r)
        if (src[r].run != dst[r].run) return KVMIG_BAD_ARGUMENT;
    run_all(Blocks(src, dst, n_regions, src_ids, dst_ids, n), checksums, workers);
    return KVMIG_OK;
}

int kvmig_checksum(const kvmig_region *src, int64_t n_regions, const int64_t *ids, int64_t n,
                   uint64_t *checksums, void *, int32_t workers) {
    if (!valid(src, n_regions) || workers < 0) return KVMIG_BAD_ARGUMENT;
    if (n < 0 || (n > 0 && (!ids || !checksums))) return KVMIG_BAD_ARGUMENT;
    run_all(Blocks(src, nullptr, n_regions, ids, nullptr, n), checksums, workers);
    return KVMIG_OK;
}
