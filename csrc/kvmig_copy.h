/* Copies of KV blocks between regions of equally spaced runs, with a checksum a block.
 *
 * Plain C ABI: raw pointers and integers, no torch. Block b of a region is the `run`
 * bytes at base + b * block_stride; a block is one run of every region, and its fused
 * form is these runs one after the other.
 *
 * Checksum of a block: the sum over its 64-bit little-endian words w_i of
 * mix64(w_i + (i + 1) * golden) mod 2^64, where mix64 is splitmix64's finaliser and i
 * counts over the whole block. A run that is no multiple of 8 bytes is padded with
 * zeros in its last word; counting goes on with the next run. A sum has no order, so
 * any number of threads may split the words among them.
 */
#ifndef KVMIG_COPY_H
#define KVMIG_COPY_H

#include <stdint.h>

/* Raised with every change of this file that a caller could notice. */
#define KVMIG_ABI_VERSION 1

#define KVMIG_OK 0
#define KVMIG_BAD_ARGUMENT 1

#ifdef __cplusplus
extern "C" {
#endif

typedef struct {
    void *base;
    int64_t block_stride;
    int64_t run;
} kvmig_region;

int kvmig_abi_version(void);

/* Copies block src_ids[k] of `src` to block dst_ids[k] of `dst`, for k in [0, n).
 *
 * src, dst: [n_regions], with equal runs. checksums: [n], of the bytes written, or NULL.
 * Ids are trusted, and no destination byte may be another copy's source.
 * Returns KVMIG_OK, or KVMIG_BAD_ARGUMENT before anything is written.
 */
int kvmig_copy(const kvmig_region *src, const kvmig_region *dst, int64_t n_regions,
               const int64_t *src_ids, const int64_t *dst_ids, int64_t n, uint64_t *checksums);

/* checksums[k] of block ids[k] of `src`, for k in [0, n); copies nothing. */
int kvmig_checksum(const kvmig_region *src, int64_t n_regions, const int64_t *ids, int64_t n,
                   uint64_t *checksums);

#ifdef __cplusplus
}
#endif

#endif
