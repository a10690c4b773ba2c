// kvmig_pack_fp8 and kvmig_unpack_fp8 over the kernels of fp8.cuh.

#include "fp8.cuh"

#include "launch.cuh"

namespace {

bool valid(int32_t dtype, int64_t rows, int64_t width, int32_t workers, const void *halves,
           const void *packed, const void *scales) {
    if ((dtype != KVMIG_BF16 && dtype != KVMIG_FP16) || rows < 0 || width < 0 || workers < 0)
        return false;
    return rows == 0 || (scales && (width == 0 || (halves && packed)));
}

}  // namespace

int kvmig_pack_fp8(const void *src, int32_t dtype, int64_t rows, int64_t width, uint8_t *packed,
                   float *scales, void *stream, int32_t workers) {
    if (!valid(dtype, rows, width, workers, src, packed, scales)) return KVMIG_BAD_ARGUMENT;
    if (!rows) return KVMIG_OK;
    return kvmig::launch(kvmig_pack_fp8_kernel, workers, kvmig::kFp8CtasPerSm,
                         kvmig::kFp8Threads, 0, stream, static_cast<const uint16_t *>(src), dtype,
                         rows, width, packed, scales);
}

int kvmig_unpack_fp8(const uint8_t *packed, const float *scales, int32_t dtype, int64_t rows,
                     int64_t width, void *dst, void *stream, int32_t workers) {
    if (!valid(dtype, rows, width, workers, dst, packed, scales)) return KVMIG_BAD_ARGUMENT;
    if (!rows) return KVMIG_OK;
    return kvmig::launch(kvmig_unpack_fp8_kernel, workers, kvmig::kFp8CtasPerSm,
                         kvmig::kFp8Threads, 0, stream, packed, scales, dtype, rows, width,
                         static_cast<uint16_t *>(dst));
}
