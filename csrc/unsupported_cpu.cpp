// What needs a GPU.

#include "kvmig.h"

int kvmig_abi_version(void) { return KVMIG_ABI_VERSION; }

const char *kvmig_backend(void) { return "cpu"; }

int kvmig_copy_tma(const kvmig_region *, const kvmig_region *, int64_t, const int64_t *,
                   const int64_t *, int64_t, uint64_t *, void *, int32_t) {
    return KVMIG_UNSUPPORTED;
}

int kvmig_copy_engine(const kvmig_region *, const kvmig_region *, int64_t, const int64_t *,
                      const int64_t *, int64_t, void *) {
    return KVMIG_UNSUPPORTED;
}

int kvmig_ipc_export(void *, uint8_t[KVMIG_IPC_HANDLE_BYTES], int64_t *) {
    return KVMIG_UNSUPPORTED;
}

int kvmig_ipc_import(const uint8_t[KVMIG_IPC_HANDLE_BYTES], void **) { return KVMIG_UNSUPPORTED; }

int kvmig_ipc_close(void *) { return KVMIG_UNSUPPORTED; }

int kvmig_vmm_export(void *, int *, int64_t *, int64_t *) { return KVMIG_UNSUPPORTED; }

int kvmig_vmm_import(int, int64_t, int32_t, void **) { return KVMIG_UNSUPPORTED; }

int kvmig_vmm_close(void *, int64_t) { return KVMIG_UNSUPPORTED; }
