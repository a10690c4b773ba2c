// The state of the tests' two GPUs: contexts, streams with their threads, memory and who reaches
// it. For gpu.cpp alone.
#ifndef FAKEGPU_MACHINE_H
#define FAKEGPU_MACHINE_H

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cuda_runtime.h"

namespace {

enum {
    kSuccess, kInvalidValue, kOutOfMemory, kNotInitialized, kOldDriver = 35, kNoDevice = 100,
    kInvalidDevice = 101, kInvalidContext = 201, kMapFailed = 205, kPeerAccessUnsupported = 217,
    kInvalidHandle = 400, kNotReady = 600,
    kIllegalAddress = 700, kAlreadyRegistered = 712, kNotRegistered = 713, kNotSupported = 801,
    kCaptureUnsupported = 900, kCaptureInvalidated = 901, kInvalidResources = 915,
    kStreamDetached = 917
};
constexpr int kDevices = 2, kSms = 2, kGlobal = 0, kRelaxed = 2;
constexpr size_t kGranularity = 2 << 20, kAlignment = 512, kGap = 1 << 20;
constexpr unsigned kWithoutTiming = 2;  // CU_EVENT_DISABLE_TIMING
constexpr int kFile = 1;  // POSIX_FILE_DESCRIPTOR
using Address = uintptr_t;
using Lock = std::unique_lock<std::mutex>;

struct Stream;

struct Context {
    int device = 0;
    int error = kSuccess;  // sticky
    std::shared_ptr<Stream> null_stream;
};

struct Green {  // a green context
    uint64_t sms;  // a bit each
    bool destroyed = false;
};

struct Work {
    std::function<int()> run;  // an error of the device's
    std::shared_ptr<Stream> after;
    uint64_t upto = 0;  // of `after`
};

struct Stamp {  // when an event happened
    std::chrono::steady_clock::time_point at;
    bool happened = false;
    void now() {
        at = std::chrono::steady_clock::now();
        happened = true;
    }
};

struct Stream {
    Context *context;
    int priority = 0;
    std::shared_ptr<Green> green;  // null: of the primary context itself
    std::deque<Work> work;
    std::deque<std::pair<uint64_t, std::shared_ptr<Stamp>>> stamps;  // due when so much is done
    uint64_t queued = 0, done = 0;
    bool closed = false, capturing = false, spoilt = false;
};

struct Event {
    Context *context;
    bool timed;
    std::shared_ptr<Stream> stream;  // null: never recorded
    uint64_t upto = 0;
    std::shared_ptr<Stamp> stamp;  // of one that is timed, once recorded
};

struct Physical {
    int file, device;  // the machine's number of it, not this process's
    size_t size;
    bool exportable;
    ~Physical() { close(file); }
};

enum Made { kMapped, kAllocated, kOpened };  // by cuMemMap, cuMemAlloc, cuIpcOpenMemHandle

struct Memory {  // of a device, mapped
    size_t size;
    std::set<int> let;  // devices
    std::shared_ptr<Physical> physical;
    Made made = kMapped;
    bool hosted = false;  // an engine on a CPU computes in it
};

struct Pinned {
    size_t size;
    bool allocated, read_only;
};

struct Machine {
    std::mutex mutex;                 // of all below
    std::condition_variable changed;
    std::mutex working;               // held by the device that works, and by changes of mappings
    std::vector<int> seen;  // the machine's devices by their numbers in this process
    Context contexts[kDevices];
    std::map<void *, std::shared_ptr<Stream>> streams;
    std::set<std::shared_ptr<Stream>> leaving;  // destroyed, with work left
    std::map<void *, std::shared_ptr<Green>> greens;
    std::map<void *, Event> events;
    std::map<Address, Memory> memory;
    std::map<Address, size_t> reserved, freed;
    std::map<Address, Pinned> pinned;
    std::map<uint64_t, std::shared_ptr<Physical>> handles;
    std::set<ino_t> ours;
    uint64_t last = 0;
    bool initialised = false, stuck = false;
    std::string fails;
};

// Never destroyed: streams' threads wait on it until the process ends.
Machine &machine = *new Machine;
thread_local Context *current;
thread_local int capture_mode = kGlobal;

// -- devices

int sms() {
    const char *chosen = std::getenv("KVMIG_FAKE_SMS");
    return chosen ? std::atoi(chosen) : kSms;
}

// As $CUDA_VISIBLE_DEVICES has it; all where it says nothing.
void see() {
    const char *chosen = std::getenv("CUDA_VISIBLE_DEVICES");
    machine.seen.clear();
    for (int device = 0; device < kDevices; ++device) machine.seen.push_back(device);
    if (!chosen || !*chosen) return;
    machine.seen.clear();
    for (; *chosen; ++chosen)
        if (*chosen >= '0' && *chosen < '0' + kDevices) machine.seen.push_back(*chosen - '0');
}
bool visible(int ordinal) {
    return ordinal >= 0 && ordinal < static_cast<int>(machine.seen.size());
}

// -- memory

Address number(const void *pointer) { return reinterpret_cast<Address>(pointer); }

template <class Map>
typename Map::iterator holding(Map &map, Address address,
                               size_t (*size)(const typename Map::mapped_type &)) {
    auto found = map.upper_bound(address);
    if (found == map.begin()) return map.end();
    --found;
    return address - found->first < size(found->second) ? found : map.end();
}
auto memory_at(Address address) {
    return holding(machine.memory, address, +[](const Memory &one) { return one.size; });
}
auto pinned_at(Address address) {
    return holding(machine.pinned, address, +[](const Pinned &one) { return one.size; });
}
bool reserved_at(Address address) {
    const auto size = +[](const size_t &one) { return one; };
    return holding(machine.reserved, address, size) != machine.reserved.end() ||
           holding(machine.freed, address, size) != machine.freed.end();
}

// Whether a copy on `device` may touch all these bytes.
bool reachable(Address address, size_t nbytes, int device, bool writes) {
    while (nbytes) {
        size_t here = 0;
        if (const auto memory = memory_at(address); memory != machine.memory.end()) {
            if (!memory->second.let.count(device)) return false;
            here = memory->first + memory->second.size - address;
        } else if (const auto host = pinned_at(address); host != machine.pinned.end()) {
            if (writes && host->second.read_only) return false;
            here = host->first + host->second.size - address;
        } else {
            return false;
        }
        const size_t step = std::min(here, nbytes);
        address += step;
        nbytes -= step;
    }
    return true;
}

void protect(Address address, size_t size, int access) {
    mprotect(reinterpret_cast<void *>(address), size, access);
}

// While it lives, `device` works: its memory can be touched.
class Working {
  public:
    explicit Working(int device) : working_(machine.working) {
        const Lock lock(machine.mutex);
        for (const auto &[address, memory] : machine.memory)
            if (memory.let.count(device) && !memory.hosted)
                open_.emplace_back(address, memory.size);
        for (const auto &[address, size] : open_) protect(address, size, PROT_READ | PROT_WRITE);
    }
    ~Working() {
        for (const auto &[address, size] : open_) protect(address, size, PROT_NONE);
    }

  private:
    std::lock_guard<std::mutex> working_;
    std::vector<std::pair<Address, size_t>> open_;
};

// Addresses of its own, with a gap behind that nobody gets.
Address map_nothing(size_t size) {
    void *made = mmap(nullptr, size + kGap, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                      -1, 0);
    return made == MAP_FAILED ? 0 : number(made);
}

// A device's memory is a file without a name.
std::shared_ptr<Physical> make_physical(size_t size, int device, bool exportable) {
    const int file = memfd_create(device ? "fakegpu1" : "fakegpu0", MFD_CLOEXEC);
    std::shared_ptr<Physical> made(new Physical{file, device, size, exportable});
    return ftruncate(file, static_cast<off_t>(size)) ? nullptr : made;
}

void map(Address address, const Physical &physical) {
    mmap(reinterpret_cast<void *>(address), physical.size, PROT_NONE, MAP_SHARED | MAP_FIXED,
         physical.file, 0);
}

// Its pages go back, its address is nobody's any more.
void bury(Address address, size_t size) {
    mmap(reinterpret_cast<void *>(address), size, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

// -- streams

void dawdle() {
    static std::atomic<unsigned> seeds{1};
    thread_local std::minstd_rand random(seeds++);
    if (random() % 2) std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
}

void serve(std::shared_ptr<Stream> stream) {
    Lock lock(machine.mutex);
    while (true) {
        machine.changed.wait(lock, [&] {
            if (stream->work.empty()) return stream->closed;
            const Work &next = stream->work.front();
            return !machine.stuck && (!next.after || next.after->done >= next.upto);
        });
        if (stream->work.empty()) {
            machine.leaving.erase(stream);
            return;
        }
        const std::function<int()> run = stream->work.front().run;
        if (run && !stream->context->error) {
            lock.unlock();
            dawdle();
            const int error = run();
            lock.lock();
            if (error) stream->context->error = error;
        }
        stream->work.pop_front();
        ++stream->done;
        for (auto &due = stream->stamps; !due.empty() && due.front().first <= stream->done;) {
            due.front().second->now();
            due.pop_front();
        }
        machine.changed.notify_all();
    }
}

std::shared_ptr<Stream> make_stream(Context *context, int priority) {
    auto stream = std::make_shared<Stream>();
    stream->context = context;
    stream->priority = priority;
    std::thread(serve, stream).detach();
    return stream;
}

void queue(Stream &stream, Work work) {
    stream.work.push_back(std::move(work));
    ++stream.queued;
    machine.changed.notify_all();
}

void settle(Lock &lock, const std::shared_ptr<Stream> &stream, uint64_t upto) {
    machine.changed.wait(lock, [&] { return stream->done >= upto; });
}

void settle_all(Lock &lock, const Context *context) {
    std::vector<std::shared_ptr<Stream>> all;
    for (const auto &[handle, stream] : machine.streams)
        if (stream->context == context) all.push_back(stream);
    for (const auto &stream : machine.leaving)
        if (stream->context == context) all.push_back(stream);
    if (context->null_stream) all.push_back(context->null_stream);
    for (const auto &stream : all) settle(lock, stream, stream->queued);
}

// The current context's stream, or an error.
int find(void *handle, std::shared_ptr<Stream> *found) {
    if (!handle) {
        if (!current->null_stream) current->null_stream = make_stream(current, 0);
        *found = current->null_stream;
        return kSuccess;
    }
    const auto one = machine.streams.find(handle);
    if (one == machine.streams.end() || one->second->context != current) return kInvalidHandle;
    if (one->second->green && one->second->green->destroyed) return kStreamDetached;
    *found = one->second;
    return kSuccess;
}

// -- what every call begins with

enum Needs { kNothing, kContext, kUnsafe };  // unsafe: not while another thread captures

int begin(const char *name, Needs needs) {
    if (machine.fails == name) return kInvalidValue;
    if (!machine.initialised) return kNotInitialized;
    if (needs == kNothing) return kSuccess;
    if (!current) return kInvalidContext;
    if (current->error) return current->error;
    if (needs == kUnsafe && capture_mode != kRelaxed) {
        bool spoilt = false;
        for (const auto &[handle, stream] : machine.streams)
            if (stream->capturing) spoilt = stream->spoilt = true;
        if (spoilt) return kCaptureUnsupported;
    }
    return kSuccess;
}

struct Span {
    const void *address;
    size_t nbytes;
    bool written;

    bool reached_by(int device) const {
        return reachable(number(address), nbytes, device, written);
    }
    bool pageable() const {  // the host's, and not pinned
        const Address first = number(address);
        return memory_at(first) == machine.memory.end() && !reserved_at(first) &&
               !reached_by(current->device);
    }
};

// Queues work on these bytes: error 700 if the stream's device doesn't reach them all by then.
void work_on(Stream &stream, std::vector<Span> spans, std::function<void()> work) {
    const int device = stream.context->device;
    queue(stream, {[=] {
                       const Working working(device);
                       {
                           const Lock lock(machine.mutex);
                           for (const Span &one : spans)
                               if (!one.reached_by(device)) return int(kIllegalAddress);
                       }
                       work();
                       return int(kSuccess);
                   }, nullptr});
}

int copy_later(void *to, const void *from, size_t nbytes, void *handle) {
    std::shared_ptr<Stream> stream;
    if (const int failed = find(handle, &stream)) return failed;
    const Span target{to, nbytes, true}, source{from, nbytes, false};
    if (target.pageable() || source.pageable()) return kInvalidValue;
    work_on(*stream, {target, source}, [=] { std::memcpy(to, from, nbytes); });
    return kSuccess;
}

// These take any memory of the host's, and wait for the default stream.
int copy_now(Lock &lock, void *to, const void *from, size_t nbytes, Span device) {
    std::shared_ptr<Stream> stream;
    if (const int failed = find(nullptr, &stream)) return failed;
    work_on(*stream, {device}, [=] { std::memcpy(to, from, nbytes); });
    settle(lock, stream, stream->queued);
    return stream->context->error;
}

int fill_later(void *to, int byte, size_t nbytes, void *handle) {
    std::shared_ptr<Stream> stream;
    if (const int failed = find(handle, &stream)) return failed;
    work_on(*stream, {{to, nbytes, true}}, [=] { std::memset(to, byte, nbytes); });
    return kSuccess;
}

}  // namespace

#endif
