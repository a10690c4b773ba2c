// What needs a GPU.

#include "kvmig.h"

int kvmig_abi_version(void) { return KVMIG_ABI_VERSION; }

const char *kvmig_backend(void) { return "cpu"; }

int kvmig_copy_tma(const kvmig_region *, const kvmig_region *, int64_t, const int64_t *,
                   const int64_t *, int64_t, uint64_t *, void *, int32_t) {
    return KVMIG_UNSUPPORTED;
}
