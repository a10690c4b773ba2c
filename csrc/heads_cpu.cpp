// Head-wise blocks, see heads.h.

#include "heads.h"

#include <algorithm>

int kvmig_heads_take(int64_t *free, int64_t *n_free, uint8_t *held, int64_t n, int64_t *out) {
    if (!free || !n_free || !held || !out || n < 0 || n > *n_free) return KVMIG_BAD_ARGUMENT;
    for (int64_t k = 0; k < n; ++k) {
        out[k] = free[--*n_free];
        held[out[k]] = 1;
    }
    return KVMIG_OK;
}

int kvmig_heads_give(int64_t *free, int64_t *n_free, uint8_t *held, int64_t n_units,
                     const int64_t *units, int64_t n) {
    if (!free || !n_free || !held || !units || n < 0) return KVMIG_BAD_ARGUMENT;
    int64_t given = 0;
    for (; given < n; ++given) {
        const int64_t unit = units[given];
        if (unit < 0 || unit >= n_units || !held[unit]) break;
        held[unit] = 0;
    }
    if (given < n) {
        for (int64_t k = 0; k < given; ++k) held[units[k]] = 1;
        return KVMIG_BAD_ARGUMENT;
    }
    std::copy(units, units + n, free + *n_free);
    *n_free += n;
    return KVMIG_OK;
}

int kvmig_heads_rows(const int64_t *table, int64_t n_blocks, int64_t units, int64_t tokens,
                     const int64_t *index, int64_t n, int64_t first, int64_t n_heads,
                     int64_t *rows) {
    if (!table || n < 0 || (n > 0 && (!index || !rows)) || tokens < 1) return KVMIG_BAD_ARGUMENT;
    if (first < 0 || n_heads < 0 || first + n_heads > units) return KVMIG_BAD_ARGUMENT;
    for (int64_t k = 0; k < n; ++k)
        if (index[k] < 0 || index[k] >= n_blocks * tokens) return KVMIG_BAD_ARGUMENT;
    for (int64_t k = 0; k < n; ++k) {
        const int64_t *heads = table + index[k] / tokens * units + first;
        const int64_t token = index[k] % tokens;
        for (int64_t h = 0; h < n_heads; ++h) *rows++ = heads[h] * 2 * tokens + token;
    }
    return KVMIG_OK;
}
