/* The data plane's C ABI: copies of paged KV blocks, without torch.
 *
 * Two libraries have it: libkvmig_cpu (always built) and libkvmig_cuda (where nvcc is found).
 * Raw pointers and integers only. In the CUDA library every array that a kernel reads
 * (regions, ids, checksums) must be device-accessible: device memory or pinned host memory.
 *
 * Region: block b is the `run` bytes at base + b * block_stride. A block is one run of every
 * region; its fused form is these runs one after the other.
 *
 * Checksum of a block: the sum over its 64-bit little-endian words w_i of
 * mix64(w_i + (i + 1) * golden) mod 2^64, where mix64 is splitmix64's finaliser and i counts
 * over the whole block. A run that is no multiple of 8 bytes is padded with zeros in its last
 * word; counting goes on with the next run. A sum has no order, so any number of threads may
 * split the words among them. It is of the bytes that were written.
 *
 * stream: a cudaStream_t; the call returns once the work is queued there. NULL on the CPU,
 * where the call returns when the work is done.
 * workers: CTAs of the grid on CUDA, threads on the CPU; 0 lets the library choose.
 *
 * Ids are trusted here; the Python face checks them. No destination byte may be another
 * copy's source. Each function returns KVMIG_OK, KVMIG_BAD_ARGUMENT or KVMIG_UNSUPPORTED
 * before anything is written, or KVMIG_CUDA_ERROR + cudaError_t.
 */
#ifndef KVMIG_H
#define KVMIG_H

#ifdef __CUDACC_RTC__ /* NVRTC has no such header */
typedef signed int int32_t;
typedef signed long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
#else
#include <stdint.h>
#endif

/* Raised with every change of this file that a caller could notice. */
#define KVMIG_ABI_VERSION 4

#define KVMIG_OK 0
#define KVMIG_BAD_ARGUMENT 1
#define KVMIG_UNSUPPORTED 2
#define KVMIG_CUDA_ERROR 1000

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__) && !defined(__CUDACC_RTC__)
#pragma GCC visibility push(default) /* and nothing else is exported */
#endif

int kvmig_abi_version(void);

/* "cpu" or "cuda". */
const char *kvmig_backend(void);

typedef struct {
    void *base;
    int64_t block_stride;
    int64_t run;
} kvmig_region;

/* Copies block src_ids[k] of `src` to block dst_ids[k] of `dst`, for k in [0, n): gather,
 * scatter, or paged to paged, memory of a peer or of another process included.
 * src, dst: [n_regions], with equal runs. checksums: [n] or NULL. */
int kvmig_copy(const kvmig_region *src, const kvmig_region *dst, int64_t n_regions,
               const int64_t *src_ids, const int64_t *dst_ids, int64_t n, uint64_t *checksums,
               void *stream, int32_t workers);

/* The same through the TMA's bulk copies (CUDA, on sm_90 and later, by a library that was compiled
 * for these), else KVMIG_UNSUPPORTED, also with n == 0. Base, stride and run of every region are
 * multiples of 16, which the caller has checked. */
int kvmig_copy_tma(const kvmig_region *src, const kvmig_region *dst, int64_t n_regions,
                   const int64_t *src_ids, const int64_t *dst_ids, int64_t n,
                   uint64_t *checksums, void *stream, int32_t workers);

/* checksums[k] of block ids[k] of `src`, for k in [0, n). */
int kvmig_checksum(const kvmig_region *src, int64_t n_regions, const int64_t *ids, int64_t n,
                   uint64_t *checksums, void *stream, int32_t workers);

#if defined(__GNUC__) && !defined(__CUDACC_RTC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#endif
