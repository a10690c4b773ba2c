// Two GPUs of the tests' own: libcuda.so.1 as far as kvmig/kernels calls it, the run-time functions
// that csrc calls, and the kernels (kernels.cpp). It refuses what the real ones would refuse, and
// does nothing sooner than it must:
//
// - A thread without a context gets 201, a stream or an event of another context 400, any call
//   after an access outside of memory 700.
// - Each stream is a queue with a thread, which waits a random time before it does anything.
// - The host can't touch a device's memory (it is mapped without access but while the device
//   works), nor can a device another's, unless it was let to. The addresses of memory that was
//   freed are nobody's any more.
// - Memory that cuMemCreate makes holds no zeros.
// - Copies to and from the host want pinned memory.
// - A capture in global mode is spoilt by calls of other threads that aren't safe then.
// - Memory for other processes is a file without a name, so it lives as long as one of them maps
//   it; the process that made it can't import it.
//
// $CUDA_VISIBLE_DEVICES: as everywhere; $KVMIG_FAKE_NO_GPU: no device; $KVMIG_FAKE_NO_PEERS: none
// has access to the other's memory; $KVMIG_FAKE_MIG: nor to another process's (parts of one GPU);
// $KVMIG_FAKE_SMS: SMs of each, instead of 2; $KVMIG_FAKE_MPS: an MPS daemon is there;
// $KVMIG_FAKE_VERSION: CUDA's, instead of 13000; $KVMIG_FAKE_OLD: older than the run-time library.

#include "machine.h"

#define API extern "C" __attribute__((visibility("default")))
#define CALL(needs, name, ...)             \
    API int name(__VA_ARGS__) {            \
        Lock lock(machine.mutex);          \
        if (const int failed = begin(#name, needs)) return failed;

API int cuInit(unsigned flags) {
    const Lock lock(machine.mutex);
    if (std::getenv("KVMIG_FAKE_NO_GPU")) return kNoDevice;
    for (int device = 0; device < kDevices; ++device) machine.contexts[device].device = device;
    see();
    machine.initialised = true;
    return flags ? kInvalidValue : kSuccess;
}
API int cuDriverGetVersion(int *version) {
    const char *chosen = std::getenv("KVMIG_FAKE_VERSION");
    *version = chosen ? std::atoi(chosen) : 13000;
    return kSuccess;
}
API int cuGetErrorString(int error, const char **words) {
    static const std::map<int, const char *> known = {
        {kInvalidValue, "invalid argument"}, {kOutOfMemory, "out of memory"},
        {kNoDevice, "no CUDA-capable device is detected"},
        {kInvalidDevice, "invalid device ordinal"},
        {kInvalidContext, "invalid device context"}, {kMapFailed, "mapping of buffer object failed"},
        {kPeerAccessUnsupported, "peer access is not supported between these two devices"},
        {kInvalidHandle, "invalid resource handle"}, {kNotSupported, "operation not supported"},
        {kIllegalAddress, "an illegal memory access was encountered"},
        {kInvalidResources, "invalid resource configuration"},
        {kStreamDetached, "stream is detached"}};
    const auto one = known.find(error);
    *words = one == known.end() ? "another error" : one->second;
    return kSuccess;
}
CALL(kNothing, cuDeviceGet, int *device, int ordinal)
    *device = ordinal;
    return visible(ordinal) ? kSuccess : kInvalidDevice;
}
CALL(kNothing, cuDeviceGetAttribute, int *value, int attribute, int device)
    const std::map<int, int> known = {
        {16, sms()}, {75, 9}, {76, 0},  // sm_90
        {133, std::getenv("KVMIG_FAKE_MPS") != nullptr},
        {91, 1}, {113, std::getenv("KVMIG_FAKE_PINS_WRITABLE") == nullptr},  // of registered memory
        {102, 1}, {103, 1}, {110, 1}, {124, 1}};  // virtual memory, by descriptors, with GPUDirect RDMA
    const auto one = known.find(attribute);
    if (one == known.end() || !visible(device)) return kInvalidValue;
    *value = one->second;
    return kSuccess;
}
CALL(kNothing, cuDeviceGetUuid_v2, unsigned char *uuid, int device)
    if (!visible(device)) return kInvalidDevice;
    std::memset(uuid, machine.seen[device] + 1, 16);
    return kSuccess;
}

// -- contexts

CALL(kNothing, cuDevicePrimaryCtxRetain, void **made, int device)
    *made = &machine.contexts[device];
    return kSuccess;
}
CALL(kNothing, cuCtxSetCurrent, void *chosen)
    current = static_cast<Context *>(chosen);
    return kSuccess;
}
CALL(kContext, cuCtxGetDevice, int *device)
    *device = current->device;
    return kSuccess;
}
CALL(kNothing, cuThreadExchangeStreamCaptureMode, int *mode)
    std::swap(*mode, capture_mode);
    return kSuccess;
}

// -- memory of the device and of the host

CALL(kUnsafe, cuMemAlloc_v2, Address *made, size_t nbytes)
    if (!nbytes) return kInvalidValue;
    const size_t size = (nbytes + kAlignment - 1) / kAlignment * kAlignment;
    auto physical = make_physical(size, machine.seen[current->device], false);
    if (!physical || !(*made = map_nothing(size))) return kOutOfMemory;
    map(*made, *physical);
    machine.memory[*made] = {size, {current->device}, physical, kAllocated};
    return kSuccess;
}
API int cuMemFree_v2(Address address) {
    Lock lock(machine.mutex);
    if (const int failed = begin("cuMemFree_v2", kUnsafe)) return failed;
    const auto found = machine.memory.find(address);
    if (found == machine.memory.end() || found->second.made != kAllocated) return kInvalidValue;
    settle_all(lock, current);
    lock.unlock();
    const std::lock_guard still(machine.working);
    lock.lock();
    const size_t size = machine.memory.at(address).size;
    machine.memory.erase(address);
    machine.freed[address] = size;
    bury(address, size);
    return kSuccess;
}
CALL(kUnsafe, cuMemHostAlloc, void **made, size_t nbytes, unsigned flags)
    if (!nbytes || flags != 1) return kInvalidValue;
    *made = std::malloc(nbytes);
    std::memset(*made, 0xa5, nbytes);
    machine.pinned[number(*made)] = {nbytes, true, false};
    return kSuccess;
}
CALL(kUnsafe, cuMemFreeHost, void *memory)
    const auto found = machine.pinned.find(number(memory));
    if (found == machine.pinned.end() || !found->second.allocated) return kInvalidValue;
    settle_all(lock, current);
    std::memset(memory, 0xdd, found->second.size);
    machine.pinned.erase(found);
    std::free(memory);
    return kSuccess;
}
CALL(kUnsafe, cuMemHostRegister_v2, void *memory, size_t nbytes, unsigned flags)
    if (!nbytes || (flags != 1 && flags != 9)) return kInvalidValue;
    const Address address = number(memory);
    const auto next = machine.pinned.lower_bound(address);
    if (pinned_at(address) != machine.pinned.end() ||
        (next != machine.pinned.end() && next->first - address < nbytes))
        return kAlreadyRegistered;
    machine.pinned[address] = {nbytes, false, flags == 9};
    return kSuccess;
}
CALL(kUnsafe, cuMemHostUnregister, void *memory)
    const auto found = machine.pinned.find(number(memory));
    if (found == machine.pinned.end() || found->second.allocated) return kNotRegistered;
    settle_all(lock, current);
    machine.pinned.erase(found);
    return kSuccess;
}
CALL(kNothing, cuPointerGetAttribute, void *value, int attribute, Address address)
    const auto found = memory_at(address);
    if ((attribute != 9 && attribute != 13) || found == machine.memory.end()) return kInvalidValue;
    const Memory &memory = found->second;
    if (attribute == 13) {  // whether cuIpcGetMemHandle takes it
        *static_cast<bool *>(value) = memory.made == kAllocated;
        return kSuccess;
    }
    const auto &seen = machine.seen;
    const auto one = std::find(seen.begin(), seen.end(), memory.physical->device);
    const int ordinal = one == seen.end() ? -2 : static_cast<int>(one - seen.begin());
    std::memcpy(value, &ordinal, sizeof ordinal);  // -2: of a device that isn't visible
    return kSuccess;
}
CALL(kContext, cuMemGetAddressRange_v2, Address *base, size_t *size, Address address)
    const auto found = memory_at(address);
    if (found == machine.memory.end()) return kInvalidValue;
    *base = found->first;
    *size = found->second.size;
    return kSuccess;
}

// -- an allocation that another process opens

struct IpcHandle {  // CUipcMemHandle
    int process, file, device;
    size_t size;
    char rest[40];
};

CALL(kContext, cuIpcGetMemHandle, IpcHandle *handle, Address address)
    const auto found = machine.memory.find(address);
    if (found == machine.memory.end() || found->second.made != kAllocated) return kInvalidValue;
    const Physical &physical = *found->second.physical;
    *handle = {getpid(), physical.file, physical.device, physical.size, {}};
    return kSuccess;
}
CALL(kUnsafe, cuIpcOpenMemHandle_v2, Address *made, IpcHandle handle, unsigned flags)
    if (flags != 1) return kInvalidValue;
    if (handle.process == getpid()) return kInvalidContext;
    if (std::getenv("KVMIG_FAKE_MIG")) return kNotSupported;
    if (handle.device != machine.seen[current->device] && std::getenv("KVMIG_FAKE_NO_PEERS"))
        return kPeerAccessUnsupported;
    const std::string path = "/proc/" + std::to_string(handle.process) + "/fd/" +
                             std::to_string(handle.file);
    const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat status;
    if (file < 0 || fstat(file, &status)) return kMapFailed;
    const size_t size = static_cast<size_t>(status.st_size);
    const std::shared_ptr<Physical> physical(new Physical{file, handle.device, size, false});
    if (size != handle.size || !(*made = map_nothing(size))) return kMapFailed;
    map(*made, *physical);
    machine.memory[*made] = {size, {current->device}, physical, kOpened};
    return kSuccess;
}
API int cuIpcCloseMemHandle(Address address) {
    const std::lock_guard still(machine.working);
    const Lock lock(machine.mutex);
    if (const int failed = begin("cuIpcCloseMemHandle", kUnsafe)) return failed;
    const auto found = machine.memory.find(address);
    if (found == machine.memory.end() || found->second.made != kOpened) return kInvalidValue;
    bury(address, found->second.size);
    machine.memory.erase(found);
    return kSuccess;
}
CALL(kNothing, cuDeviceCanAccessPeer, int *can, int device, int peer)
    if (!visible(device) || !visible(peer)) return kInvalidDevice;
    *can = device != peer && !std::getenv("KVMIG_FAKE_NO_PEERS");
    return kSuccess;
}

// -- virtual memory, which processes can share

struct Properties {  // CUmemAllocationProp
    int type, handle_types, location_type, location_id;
    void *windows;
    unsigned char compression, rdma;
    unsigned short usage;
    unsigned char reserved[4];
};
struct Access {  // CUmemAccessDesc
    int location_type, location_id, flags;
};

CALL(kUnsafe, cuMemCreate, uint64_t *handle, size_t nbytes, const Properties *wanted,
     uint64_t flags)
    if (!nbytes || nbytes % kGranularity || flags || wanted->type != 1 ||
        wanted->location_type != 1 || wanted->windows || wanted->compression || wanted->usage)
        return kInvalidValue;
    if (!visible(wanted->location_id)) return kInvalidDevice;
    const int device = machine.seen[wanted->location_id];
    auto made = make_physical(nbytes, device, wanted->handle_types == kFile);
    struct stat status;
    if (!made || fstat(made->file, &status)) return kOutOfMemory;
    const std::vector<char> anything(kGranularity, '\xff');  // what another process has left
    for (size_t at = 0; at < nbytes; at += kGranularity)
        if (pwrite(made->file, anything.data(), kGranularity, static_cast<off_t>(at)) !=
            static_cast<ssize_t>(kGranularity))
            return kOutOfMemory;
    machine.ours.insert(status.st_ino);
    machine.handles[*handle = ++machine.last] = made;
    return kSuccess;
}
CALL(kNothing, cuMemGetAllocationGranularity, size_t *size, const Properties *, int)
    *size = kGranularity;
    return kSuccess;
}
CALL(kNothing, cuMemRelease, uint64_t handle)
    return machine.handles.erase(handle) ? kSuccess : kInvalidValue;
}
CALL(kNothing, cuMemExportToShareableHandle, int *file, uint64_t handle, int type, uint64_t flags)
    const auto found = machine.handles.find(handle);
    if (found == machine.handles.end() || type != kFile || flags || !found->second->exportable)
        return kInvalidValue;
    *file = fcntl(found->second->file, F_DUPFD_CLOEXEC, 0);
    return kSuccess;
}
CALL(kContext, cuMemImportFromShareableHandle, uint64_t *handle, intptr_t file, int type)
    struct stat status;
    if (type != kFile || fstat(static_cast<int>(file), &status)) return kInvalidValue;
    if (machine.ours.count(status.st_ino)) return kInvalidContext;
    if (std::getenv("KVMIG_FAKE_MIG")) return kNotSupported;
    const int kept = fcntl(static_cast<int>(file), F_DUPFD_CLOEXEC, 0);
    char name[40] = "";
    const std::string link = "/proc/self/fd/" + std::to_string(kept);
    if (readlink(link.c_str(), name, sizeof name - 1) < 0 || !std::strstr(name, "fakegpu")) {
        close(kept);
        return kInvalidValue;
    }
    const int device = std::strstr(name, "fakegpu1") ? 1 : 0;
    machine.handles[*handle = ++machine.last].reset(
        new Physical{kept, device, static_cast<size_t>(status.st_size), false});
    return kSuccess;
}
CALL(kNothing, cuMemAddressReserve, Address *made, size_t size, size_t, Address, uint64_t)
    if (!size || size % kGranularity) return kInvalidValue;
    if (!(*made = map_nothing(size))) return kOutOfMemory;
    machine.reserved[*made] = size;
    return kSuccess;
}
CALL(kNothing, cuMemAddressFree, Address address, size_t size)
    const auto found = machine.reserved.find(address);
    if (found == machine.reserved.end() || found->second != size) return kInvalidValue;
    for (const auto &[mapped, memory] : machine.memory)
        if (mapped >= address && mapped < address + size) return kInvalidValue;
    machine.freed[address] = size;
    machine.reserved.erase(found);
    return kSuccess;
}
CALL(kNothing, cuMemMap, Address address, size_t size, size_t offset, uint64_t handle,
     uint64_t flags)
    const auto found = machine.handles.find(handle);
    if (found == machine.handles.end() || !reserved_at(address) || offset || flags ||
        size != found->second->size || memory_at(address) != machine.memory.end())
        return kInvalidValue;
    map(address, *found->second);
    machine.memory[address] = {size, {}, found->second};
    return kSuccess;
}
API int cuMemUnmap(Address address, size_t size) {
    const std::lock_guard still(machine.working);
    const Lock lock(machine.mutex);
    if (const int failed = begin("cuMemUnmap", kNothing)) return failed;
    const auto found = machine.memory.find(address);
    if (found == machine.memory.end() || found->second.made != kMapped ||
        found->second.size != size)
        return kInvalidValue;
    bury(address, size);
    machine.memory.erase(found);
    return kSuccess;
}
CALL(kNothing, cuMemSetAccess, Address address, size_t size, const Access *access, size_t count)
    const auto found = machine.memory.find(address);
    if (found == machine.memory.end() || found->second.made != kMapped ||
        found->second.size != size)
        return kInvalidValue;
    for (size_t i = 0; i < count; ++i) {
        const int device = access[i].location_id;
        if (access[i].location_type != 1 || !visible(device)) return kInvalidDevice;
        if (std::getenv("KVMIG_FAKE_NO_PEERS") &&
            machine.seen[device] != found->second.physical->device)
            return kInvalidDevice;
        if (access[i].flags == 3)
            found->second.let.insert(device);
        else
            found->second.let.erase(device);
    }
    return kSuccess;
}

// -- copies

CALL(kContext, cuMemcpyHtoDAsync_v2, void *to, const void *from, size_t nbytes, void *stream)
    return copy_later(to, from, nbytes, stream);
}
CALL(kContext, cuMemcpyDtoHAsync_v2, void *to, const void *from, size_t nbytes, void *stream)
    return copy_later(to, from, nbytes, stream);
}
CALL(kContext, cuMemcpyDtoDAsync_v2, void *to, const void *from, size_t nbytes, void *stream)
    return copy_later(to, from, nbytes, stream);
}
CALL(kUnsafe, cuMemcpyHtoD_v2, void *to, const void *from, size_t nbytes)
    return copy_now(lock, to, from, nbytes, {to, nbytes, true});
}
CALL(kUnsafe, cuMemcpyDtoH_v2, void *to, const void *from, size_t nbytes)
    return copy_now(lock, to, from, nbytes, {from, nbytes, false});
}
struct BatchAttributes {  // CUmemcpyAttributes
    int order, source_type, source_id, target_type, target_id;
    unsigned flags;
};
CALL(kContext, cuMemcpyBatchAsync, void **to, void **from, size_t *sizes, size_t count,
     const BatchAttributes *attributes, const size_t *first, size_t n_attributes, size_t *,
     void *stream)
    if (!stream || !count || n_attributes != 1 || *first || attributes->order != 1)
        return kInvalidValue;
    for (size_t i = 0; i < count; ++i)
        if (const int failed = copy_later(to[i], from[i], sizes[i], stream)) return failed;
    return kSuccess;
}
CALL(kContext, cuMemsetD8Async, void *to, unsigned char byte, size_t count, void *stream)
    return fill_later(to, byte, count, stream);
}

// -- events and streams

CALL(kContext, cuEventCreate, void **made, unsigned flags)
    if (flags & ~kWithoutTiming) return kInvalidValue;
    *made = new char;
    machine.events[*made] = {current, !(flags & kWithoutTiming), nullptr, 0, nullptr};
    return kSuccess;
}
CALL(kContext, cuEventRecord, void *event, void *handle)
    const auto found = machine.events.find(event);
    std::shared_ptr<Stream> stream;
    if (const int failed = find(handle, &stream)) return failed;
    if (found == machine.events.end() || found->second.context != current) return kInvalidHandle;
    found->second.stream = stream;
    found->second.upto = stream->queued;
    if (!found->second.timed) return kSuccess;
    const auto stamp = found->second.stamp = std::make_shared<Stamp>();
    if (stream->done >= stream->queued) stamp->now();
    else stream->stamps.emplace_back(stream->queued, stamp);
    return kSuccess;
}
CALL(kUnsafe, cuEventQuery, void *event)
    const auto found = machine.events.find(event);
    if (found == machine.events.end() || found->second.context != current) return kInvalidHandle;
    const Event &one = found->second;
    if (machine.stuck) return kNotReady;
    return !one.stream || one.stream->done >= one.upto ? kSuccess : kNotReady;
}
CALL(kContext, cuEventElapsedTime, float *ms, void *from, void *to)
    const auto first = machine.events.find(from), last = machine.events.find(to);
    for (const auto &one : {first, last})
        if (one == machine.events.end() || one->second.context != current || !one->second.stamp)
            return kInvalidHandle;
    const Stamp &begin = *first->second.stamp, &end = *last->second.stamp;
    if (machine.stuck || !begin.happened || !end.happened) return kNotReady;
    *ms = std::chrono::duration<float, std::milli>(end.at - begin.at).count();
    return kSuccess;
}
CALL(kContext, cuEventDestroy_v2, void *event)
    if (!machine.events.erase(event)) return kInvalidHandle;
    delete static_cast<char *>(event);
    return kSuccess;
}
CALL(kContext, cuCtxGetStreamPriorityRange, int *lowest, int *highest)
    *lowest = 0;
    *highest = -5;
    return kSuccess;
}
CALL(kContext, cuStreamCreateWithPriority, void **made, unsigned flags, int priority)
    if (flags != 1 || priority > 0 || priority < -5) return kInvalidValue;
    *made = new char;
    machine.streams[*made] = make_stream(current, priority);
    return kSuccess;
}
CALL(kContext, cuStreamGetPriority, void *handle, int *priority)
    std::shared_ptr<Stream> stream;
    if (const int failed = find(handle, &stream)) return failed;
    *priority = stream->priority;
    return kSuccess;
}
CALL(kContext, cuStreamDestroy_v2, void *handle)
    std::shared_ptr<Stream> stream;
    const int failed = handle ? find(handle, &stream) : kInvalidHandle;
    if (failed == kStreamDetached) stream = machine.streams.at(handle);
    else if (failed) return failed;
    stream->closed = true;
    if (!stream->work.empty()) machine.leaving.insert(stream);
    machine.streams.erase(handle);
    machine.changed.notify_all();
    delete static_cast<char *>(handle);
    return kSuccess;
}
CALL(kUnsafe, cuStreamSynchronize, void *handle)
    std::shared_ptr<Stream> stream;
    if (const int failed = find(handle, &stream)) return failed;
    settle(lock, stream, stream->queued);
    return stream->context->error;
}
CALL(kUnsafe, cuCtxSynchronize)
    settle_all(lock, current);
    return current->error;
}
CALL(kContext, cuStreamWaitEvent, void *handle, void *event, unsigned flags)
    const auto found = machine.events.find(event);
    std::shared_ptr<Stream> stream;
    if (const int failed = find(handle, &stream)) return failed;
    if (found == machine.events.end() || flags) return kInvalidHandle;
    if (found->second.stream) queue(*stream, {nullptr, found->second.stream, found->second.upto});
    return kSuccess;
}
CALL(kContext, cuLaunchHostFunc, void *handle, void (*function)(void *), void *data)
    std::shared_ptr<Stream> stream;
    if (const int failed = find(handle, &stream)) return failed;
    queue(*stream, {[=] {
                        function(data);
                        return int(kSuccess);
                    }, nullptr});
    return kSuccess;
}
CALL(kContext, cuStreamBeginCapture_v2, void *handle, int mode)
    std::shared_ptr<Stream> stream;
    if (const int failed = find(handle, &stream)) return failed;
    if (mode != kGlobal || !handle) return kInvalidValue;
    stream->capturing = true;
    return kSuccess;
}
CALL(kContext, cuStreamEndCapture, void *handle, void **graph)
    std::shared_ptr<Stream> stream;
    if (const int failed = find(handle, &stream)) return failed;
    *graph = nullptr;
    stream->capturing = false;
    return std::exchange(stream->spoilt, false) ? kCaptureInvalidated : kSuccess;
}

// -- a part of the SMs

#include "green.h"

// -- the run-time library, on the thread's context or else the first device's

namespace {

int runtime() {
    if (std::getenv("KVMIG_FAKE_OLD")) return kOldDriver;
    if (!machine.initialised) return kNoDevice;
    if (!current) current = &machine.contexts[0];
    return current->error;
}

}  // namespace

cudaError_t cudaGetDevice(int *device) {
    const Lock lock(machine.mutex);
    const int failed = runtime();
    if (!failed) *device = current->device;
    return cudaError_t(failed);
}
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    *value = attribute == cudaDevAttrMultiProcessorCount ? sms() : 9;
    return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void *to, int byte, size_t count, cudaStream_t stream) {
    const Lock lock(machine.mutex);
    const int failed = runtime();
    return cudaError_t(failed ? failed : fill_later(to, byte, count, stream));
}
cudaError_t emulated::launch(const cudaLaunchConfig_t &config, std::function<void()> kernel) {
    const Lock lock(machine.mutex);
    std::shared_ptr<Stream> stream;
    if (const int failed = runtime()) return cudaError_t(failed);
    if (const int failed = find(config.stream, &stream)) return cudaError_t(failed);
    const int device = current->device;
    queue(*stream, {[=] {
                        const Working working(device);
                        const bool right = run(config.gridDim.x, config.blockDim.x,
                                               config.dynamicSmemBytes, kernel);
                        return int(right ? kSuccess : kIllegalAddress);
                    }, nullptr});
    return cudaSuccess;
}

// -- for tests

// The driver's function of this name fails from now on; empty: none does.
API void fakegpu_fail(const char *name) {
    const Lock lock(machine.mutex);
    machine.fails = name;
}
// Nothing happens any more, until it is taken back.
API void fakegpu_stick(int stuck) {
    const Lock lock(machine.mutex);
    machine.stuck = stuck;
    machine.changed.notify_all();
}
// What the stream has still to do.
API int fakegpu_pending(void *handle) {
    const Lock lock(machine.mutex);
    const auto &stream = machine.streams.at(handle);
    return static_cast<int>(stream->queued - stream->done);
}
// What isn't given back: a device's memory, pinned memory, events, streams, handles, reservations,
// green contexts.
API void fakegpu_held(int held[7]) {
    const Lock lock(machine.mutex);
    const size_t counts[] = {machine.memory.size(), machine.pinned.size(), machine.events.size(),
                             machine.streams.size(), machine.handles.size(),
                             machine.reserved.size(), machine.greens.size()};
    std::copy(std::begin(counts), std::end(counts), held);
}
// Sizes of memory of the devices; returns how many there are.
API int fakegpu_sizes(size_t *sizes, int most) {
    const Lock lock(machine.mutex);
    int count = 0;
    for (const auto &[address, memory] : machine.memory)
        if (count++ < most) sizes[count - 1] = memory.size;
    return count;
}
// The host may touch this memory, too: an engine that computes on a CPU keeps its KV cache there.
API void fakegpu_host(Address address) {
    const std::lock_guard still(machine.working);
    const Lock lock(machine.mutex);
    Memory &memory = machine.memory.at(address);
    memory.hosted = true;
    protect(address, memory.size, PROT_READ | PROT_WRITE);
}
// As new, but for what a context was told is wrong with it.
API void fakegpu_mend() {
    const Lock lock(machine.mutex);
    machine.fails.clear();
    machine.stuck = false;
    for (Context &context : machine.contexts) context.error = kSuccess;
    machine.changed.notify_all();
}
