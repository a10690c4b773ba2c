// A walk over the pieces of many blocks: a piece is at most kBytes of one run.
//
// Pieces are numbered over all blocks, region by region. A worker's share are neighbours, so that
// the GPU reads and writes few places at once; kStep hands take turns at the pieces of a share. One
// atomic addition a block and hand is enough for the checksums.
#ifndef KVMIG_PIECES_CUH
#define KVMIG_PIECES_CUH

#include "checksum.cuh"
#include "warp.cuh"

namespace kvmig {

struct Copies {
    const kvmig_region *src, *dst;  // dst is NULL where blocks are only summed
    int64_t n_regions;
    const int64_t *src_ids, *dst_ids;
    int64_t n;
    uint64_t *checksums;
};

template <int kBytes, int kStep = 1>
class Pieces {
  public:
    // Called by whole warps, whose lanes agree on `worker` and `hand`, in 0..kStep - 1.
    __device__ Pieces(const Copies &copies, int64_t workers, int64_t worker, int hand = 0)
        : copies_(copies) {
        int64_t per_block = 0;
        for (int64_t r = lane(); r < copies.n_regions; r += kWarp)
            per_block += pieces_of(copies.src[r].run);
        per_block = warp_sum(per_block);
        const int64_t total = per_block * copies.n;
        const Share share(total, workers, worker);
        const int64_t begin = share.begin + hand;
        if (begin >= share.end) return;
        left_ = (share.end - begin + kStep - 1) / kStep;
        block_ = begin / per_block;
        find(begin - block_ * per_block);
        enter();
    }

    __device__ bool done() const { return left_ == 0; }
    __device__ int64_t left() const { return left_; }
    __device__ int64_t block() const { return block_; }
    __device__ const unsigned char *from() const { return from_ + piece_ * kBytes; }
    __device__ unsigned char *to() const { return to_ + piece_ * kBytes; }
    __device__ int bytes() const {
        const int64_t rest = run_ - piece_ * kBytes;
        return static_cast<int>(rest < kBytes ? rest : kBytes);
    }
    // Of the piece's first word; kBytes is a multiple of 8.
    __device__ int64_t first_word() const { return first_word_ + piece_ * (kBytes / 8); }
    // The widest access that both ends of this run allow.
    __device__ int access() const {
        return widest_access(reinterpret_cast<uint64_t>(from_) | reinterpret_cast<uint64_t>(to_));
    }

    __device__ void next() {
        piece_ += kStep;
        if (--left_ == 0 || piece_ < pieces_of(run_)) return;
        do {  // over runs that are shorter than a step, empty ones too
            piece_ -= pieces_of(run_);
            first_word_ += words_of(run_);
            if (++region_ == copies_.n_regions) {
                region_ = 0;
                first_word_ = 0;
                ++block_;
            }
            run_ = copies_.src[region_].run;
        } while (piece_ >= pieces_of(run_));
        enter();
    }

  private:
    __device__ static int64_t pieces_of(int64_t run) { return (run + kBytes - 1) / kBytes; }

    // The region in which piece `piece` of a block lies, by prefix sums over 32 regions at once.
    __device__ void find(int64_t piece) {
        for (int64_t base = 0;; base += kWarp) {
            const int64_t r = base + lane();
            const int64_t run = r < copies_.n_regions ? copies_.src[r].run : 0;
            const int64_t pieces = warp_scan(pieces_of(run)), words = warp_scan(words_of(run));
            const unsigned found = __ballot_sync(kAllLanes, piece < pieces);
            if (found) {
                const int source = __ffs(static_cast<int>(found)) - 1;
                region_ = base + source;
                piece_ = piece - __shfl_sync(kAllLanes, pieces - pieces_of(run), source);
                first_word_ += __shfl_sync(kAllLanes, words - words_of(run), source);
                return;
            }
            piece -= __shfl_sync(kAllLanes, pieces, kWarp - 1);
            first_word_ += __shfl_sync(kAllLanes, words, kWarp - 1);
        }
    }

    // Reads what belongs to the run of this block and region.
    __device__ void enter() {
        const kvmig_region source = copies_.src[region_];
        run_ = source.run;
        from_ = static_cast<const unsigned char *>(source.base) +
                copies_.src_ids[block_] * source.block_stride;
        if (!copies_.dst) return;
        const kvmig_region target = copies_.dst[region_];
        to_ = static_cast<unsigned char *>(target.base) +
              copies_.dst_ids[block_] * target.block_stride;
    }

    const Copies copies_;
    int64_t left_ = 0, block_ = 0, region_ = 0, piece_ = 0, first_word_ = 0, run_ = 0;
    const unsigned char *from_ = nullptr;
    unsigned char *to_ = nullptr;
};

// A worker's part of the checksum of the block it is at.
class BlockSum {
  public:
    __device__ explicit BlockSum(uint64_t *checksums) : checksums_(checksums) {}

    // Called by whole warps before the first word of `block`; -1: there is none any more.
    __device__ void enter(int64_t block) {
        if (block == block_) return;
        if (block_ >= 0) {
            const uint64_t sum = warp_sum(sum_);
            if (lane() == 0)
                atomicAdd(reinterpret_cast<unsigned long long *>(checksums_ + block_),
                          static_cast<unsigned long long>(sum));
        }
        block_ = block;
        sum_ = 0;
    }
    __device__ void add(uint64_t term) { sum_ += term; }

  private:
    uint64_t *checksums_;
    int64_t block_ = -1;
    uint64_t sum_ = 0;
};

}  // namespace kvmig

#endif
