/* Head-wise blocks of a KV cache on the CPU: which are free, and where a request's tokens lie.
 *
 * A unit holds `tokens` tokens of one head of one layer: a row of keys for each, then a row of
 * values for each, 2 * tokens rows in all. A block of a request is `units` units, any ones, in the
 * order layer, head; `table` [blocks, units] says which.
 *
 * Each function returns KVMIG_OK, or KVMIG_BAD_ARGUMENT and has changed nothing. */
#ifndef KVMIG_HEADS_H
#define KVMIG_HEADS_H

#include "kvmig.h"

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

/* Moves n units from the end of free[0, *n_free) to out[0, n), and marks them in held. */
int kvmig_heads_take(int64_t *free, int64_t *n_free, uint8_t *held, int64_t n, int64_t *out);

/* Moves units[0, n) back. Refused: one outside [0, n_units), one that nobody holds or named twice. */
int kvmig_heads_give(int64_t *free, int64_t *n_free, uint8_t *held, int64_t n_units,
                     const int64_t *units, int64_t n);

/* The rows of keys of n tokens in the heads [first, first + n_heads) of a block's units:
 * rows[k * n_heads + h], where token k is the (index[k] % tokens)th of block index[k] / tokens.
 * index: each in [0, n_blocks * tokens). The row of values lies `tokens` further. */
int kvmig_heads_rows(const int64_t *table, int64_t n_blocks, int64_t units, int64_t tokens,
                     const int64_t *index, int64_t n, int64_t first, int64_t n_heads,
                     int64_t *rows);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#ifdef __cplusplus
}
#endif

#endif
