// As much of NVIDIA's driver as kvmig/kernels/driver.py calls, with the host's memory as the
// device's: it refuses what the real one would. $KVMIG_EMULATED_FAILURE names a function that
// fails, $KVMIG_EMULATED_NO_GPU leaves it without a device.

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <set>

namespace {

enum { kSuccess, kInvalidValue = 1, kNoDevice = 100, kInvalidContext = 201, kNotReady = 600,
       kAlreadyRegistered = 712, kNotRegistered = 713 };

thread_local void *context;
char primary;
std::set<void *> device_memory, pinned_memory, registered, events, streams;
int queries_left;  // until the event that is asked for has happened

bool fails(const char *name) {
    const char *chosen = std::getenv("KVMIG_EMULATED_FAILURE");
    return chosen && !std::strcmp(chosen, name);
}

int make(std::set<void *> &set, void **made, size_t bytes) {
    if (!context) return kInvalidContext;
    if (!bytes) return kInvalidValue;
    *made = std::malloc(bytes);
    set.insert(*made);
    return kSuccess;
}

int drop(std::set<void *> &set, void *one) {
    if (!context) return kInvalidContext;
    if (!set.erase(one)) return kInvalidValue;
    std::free(one);
    return kSuccess;
}

bool known(void *stream) { return !stream || streams.count(stream); }

}  // namespace

#define KVMIG_DRIVER(name, ...)       \
    extern "C" int name(__VA_ARGS__) { \
        if (fails(#name)) return kInvalidValue;

KVMIG_DRIVER(cuInit, unsigned flags)
    return std::getenv("KVMIG_EMULATED_NO_GPU") ? kNoDevice : flags ? kInvalidValue : kSuccess;
}
KVMIG_DRIVER(cuDriverGetVersion, int *version)
    *version = 13000;
    return kSuccess;
}
KVMIG_DRIVER(cuDeviceGet, int *device, int ordinal)
    *device = ordinal;
    return ordinal ? 101 : kSuccess;
}
KVMIG_DRIVER(cuDevicePrimaryCtxRetain, void **made, int device)
    *made = &primary;
    return device ? kInvalidValue : kSuccess;
}
KVMIG_DRIVER(cuCtxSetCurrent, void *chosen)
    context = chosen;
    return chosen == &primary ? kSuccess : kInvalidContext;
}
KVMIG_DRIVER(cuCtxGetDevice, int *device)
    *device = 0;
    return context ? kSuccess : kInvalidContext;
}
KVMIG_DRIVER(cuDeviceGetAttribute, int *value, int attribute, int device)
    *value = attribute == 16 ? 132 : attribute == 75 ? 9 : 0;
    return device ? kInvalidValue : kSuccess;
}
KVMIG_DRIVER(cuMemAlloc_v2, void **made, size_t bytes)
    return make(device_memory, made, bytes);
}
KVMIG_DRIVER(cuMemFree_v2, void *one)
    return drop(device_memory, one);
}
KVMIG_DRIVER(cuMemHostAlloc, void **made, size_t bytes, unsigned)
    return make(pinned_memory, made, bytes);
}
KVMIG_DRIVER(cuMemFreeHost, void *one)
    return drop(pinned_memory, one);
}
KVMIG_DRIVER(cuMemHostRegister_v2, void *one, size_t bytes, unsigned flags)
    if (!context) return kInvalidContext;
    if (!bytes || (flags != 1 && flags != 9)) return kInvalidValue;
    return registered.insert(one).second ? kSuccess : kAlreadyRegistered;
}
KVMIG_DRIVER(cuMemHostUnregister, void *one)
    if (!context) return kInvalidContext;
    return registered.erase(one) ? kSuccess : kNotRegistered;
}
KVMIG_DRIVER(cuMemcpyHtoDAsync_v2, void *to, const void *from, size_t bytes, void *stream)
    if (!context || !known(stream)) return kInvalidContext;
    std::memcpy(to, from, bytes);
    return kSuccess;
}
KVMIG_DRIVER(cuMemcpyDtoHAsync_v2, void *to, const void *from, size_t bytes, void *stream)
    if (!context || !known(stream)) return kInvalidContext;
    std::memcpy(to, from, bytes);
    return kSuccess;
}
KVMIG_DRIVER(cuMemsetD8Async, void *to, unsigned char byte, size_t count, void *stream)
    if (!context || !known(stream)) return kInvalidContext;
    std::memset(to, byte, count);
    return kSuccess;
}
KVMIG_DRIVER(cuEventCreate, void **made, unsigned)
    return make(events, made, 1);
}
KVMIG_DRIVER(cuEventRecord, void *event, void *stream)
    queries_left = 2;
    return events.count(event) && known(stream) ? kSuccess : kInvalidValue;
}
KVMIG_DRIVER(cuEventQuery, void *event)
    if (!context) return kInvalidContext;
    if (!events.count(event)) return kInvalidValue;
    return queries_left-- > 0 ? kNotReady : kSuccess;
}
KVMIG_DRIVER(cuEventDestroy_v2, void *event)
    return drop(events, event);
}
KVMIG_DRIVER(cuCtxGetStreamPriorityRange, int *lowest, int *highest)
    *lowest = 0;
    *highest = -5;
    return context ? kSuccess : kInvalidContext;
}
KVMIG_DRIVER(cuStreamCreateWithPriority, void **made, unsigned flags, int priority)
    if (flags != 1 || priority > 0 || priority < -5) return kInvalidValue;
    return make(streams, made, 1);
}
KVMIG_DRIVER(cuStreamDestroy_v2, void *stream)
    return drop(streams, stream);
}
KVMIG_DRIVER(cuStreamWaitEvent, void *stream, void *event, unsigned flags)
    return known(stream) && events.count(event) && !flags ? kSuccess : kInvalidValue;
}
KVMIG_DRIVER(cuGetErrorString, int error, const char **words)
    *words = error == kNoDevice ? "no CUDA-capable device is detected" : "invalid argument";
    return kSuccess;
}
