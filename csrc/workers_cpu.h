// A small pool of threads for copies, apart from OpenMP's, which the engine computes with.

#ifndef KVMIG_WORKERS_CPU_H
#define KVMIG_WORKERS_CPU_H

#include <cstdint>

namespace kvmig __attribute__((visibility("hidden"))) {

constexpr int32_t kMaxWorkers = 64;

// Calls work(context, tile) once for every tile in [0, tiles), in no defined order, on at most
// `workers` threads, the calling one included; 0: on that alone, since the engine wants the other
// cores. Returns when all are done. Where no thread is to be had, fewer do all of it.
void share_out(int64_t tiles, int32_t workers, void (*work)(const void *, int64_t),
               const void *context);

template <class Work>
void share_out(int64_t tiles, int32_t workers, const Work &work) {
    share_out(
        tiles, workers,
        [](const void *context, int64_t tile) { (*static_cast<const Work *>(context))(tile); },
        &work);
}

}  // namespace kvmig

#endif
