// NCCL's calls that kvmig makes, between two processes or two GPUs of one, over a Unix socket. The
// GPUs are those of tests/native/fakegpu, through its driver's own calls ($FAKENCCL_DRIVER). As with
// the real one, a send ends when it is received, nothing ends by itself when the peer is gone, and an
// abort ends whatever waits on a stream.

#include <dlfcn.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#define API extern "C" __attribute__((visibility("default")))

namespace {

enum { kSuccess, kCudaError, kSystemError, kInternal, kInvalidArgument, kInvalidUsage, kRemote,
       kInProgress };
constexpr size_t kIdBytes = 128, kUuidBytes = 16;
constexpr int kByte = 1, kVersion = 22304;

struct UniqueId {
    char name[kIdBytes];
};
struct Config {
    size_t size;
    unsigned magic, version;
    int blocking, cga_cluster_size, min_ctas, max_ctas;
    const char *net_name;
    int split_share;
};

template <class... Arguments>
int driver(const char *name, Arguments... arguments) {
    static void *const loaded = dlopen(std::getenv("FAKENCCL_DRIVER"), RTLD_NOW | RTLD_LOCAL);
    return reinterpret_cast<int (*)(Arguments...)>(dlsym(loaded, name))(arguments...);
}

struct Communicator {
    int rank = 0, socket = -1;
    unsigned char uuid[kUuidBytes] = {};
    std::atomic<int> state{kInProgress}, working{0};
    std::atomic<bool> aborted{false};
    std::thread joining;
    std::vector<void *> staged;

    // All bytes, or none of them matters any more.
    bool exchange(void *data, size_t nbytes, bool sends) {
        auto *at = static_cast<char *>(data);
        while (nbytes && !aborted) {
            pollfd ready{socket, static_cast<short>(sends ? POLLOUT : POLLIN), 0};
            if (poll(&ready, 1, 5) <= 0) continue;
            const ssize_t done = sends ? ::send(socket, at, nbytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                                       : ::recv(socket, at, nbytes, MSG_DONTWAIT);
            if (done <= 0) {  // the peer is gone: a kernel on a GPU waits on
                usleep(1000);
                continue;
            }
            at += done;
            nbytes -= static_cast<size_t>(done);
        }
        return !nbytes;
    }
};

void join(Communicator *made, UniqueId id) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, id.name, 40);
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + 40);
    auto *const where = reinterpret_cast<sockaddr *>(&address);
    const int one = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (made->rank) {
        bind(one, where, size);
        listen(one, 1);
        pollfd ready{one, POLLIN, 0};
        while (!made->aborted && poll(&ready, 1, 5) <= 0) {
        }
        if (!made->aborted) made->socket = accept4(one, nullptr, nullptr, SOCK_CLOEXEC);
        close(one);
    } else {
        while (!made->aborted && connect(one, where, size)) usleep(2000);
        made->socket = one;
    }
    unsigned char theirs[kUuidBytes];
    if (!made->exchange(made->uuid, kUuidBytes, true) ||
        !made->exchange(theirs, kUuidBytes, false))
        return;
    const bool same = !std::memcmp(theirs, made->uuid, kUuidBytes);
    made->state = same ? kInvalidUsage : kSuccess;
}

struct Transfer {
    Communicator *communicator;
    void *stage;
    size_t nbytes;
    bool sends;
};

void run(void *data) {
    const std::unique_ptr<Transfer> work(static_cast<Transfer *>(data));
    Communicator &one = *work->communicator;
    uint64_t size = work->nbytes, theirs = size;
    char taken = 1;
    if (work->sends) {
        one.exchange(&size, sizeof size, true) && one.exchange(work->stage, size, true) &&
            one.exchange(&taken, 1, false);
    } else if (one.exchange(&theirs, sizeof theirs, false)) {
        if (theirs != size)
            one.state = kInvalidUsage;  // and it waits on
        while (theirs != size && !one.aborted) usleep(1000);
        one.exchange(work->stage, size, false) && one.exchange(&taken, 1, true);
    }
    --one.working;
}

int transfer(void *memory, size_t count, int type, int peer, Communicator *one, void *stream,
             bool sends) {
    if (type != kByte || peer != 1 - one->rank || one->state != kSuccess) return kInvalidArgument;
    void *stage = nullptr;
    if (driver("cuMemHostAlloc", &stage, count, 1u)) return kCudaError;
    one->staged.push_back(stage);
    if (sends && driver("cuMemcpyDtoHAsync_v2", stage, memory, count, stream)) return kCudaError;
    ++one->working;
    if (driver("cuLaunchHostFunc", stream, &run,
               static_cast<void *>(new Transfer{one, stage, count, sends})))
        return kCudaError;
    if (!sends && driver("cuMemcpyHtoDAsync_v2", memory, stage, count, stream)) return kCudaError;
    return kSuccess;
}

}  // namespace

API int ncclGetVersion(int *version) {
    const char *chosen = std::getenv("FAKENCCL_VERSION");
    *version = chosen ? std::atoi(chosen) : kVersion;
    return kSuccess;
}

API const char *ncclGetErrorString(int status) {
    return status == kInvalidUsage ? "invalid usage" : "some failure";
}

API int ncclGetUniqueId(UniqueId *id) {
    static std::atomic<int> made{0};
    std::memset(id, 0, sizeof *id);
    std::snprintf(id->name, 40, "fakenccl-%d-%d", getpid(), ++made);
    return kSuccess;
}

API int ncclCommInitRankConfig(Communicator **made, int ranks, UniqueId id, int rank,
                               Config *config) {
    if (ranks != 2 || config->size != sizeof *config || config->magic != 0xcafebeef ||
        config->blocking || config->max_ctas < 1 || config->min_ctas != INT_MIN)
        return kInvalidArgument;
    auto *one = *made = new Communicator;
    one->rank = rank;
    int device = 0;
    if (driver("cuCtxGetDevice", &device) ||
        driver("cuDeviceGetUuid_v2", static_cast<unsigned char *>(one->uuid), device))
        return kCudaError;
    one->joining = std::thread(join, one, id);
    return kInProgress;
}

API int ncclCommGetAsyncError(Communicator *one, int *state) {
    *state = one->state;
    return kSuccess;
}

API int ncclSend(const void *memory, size_t count, int type, int peer, Communicator *one,
                 void *stream) {
    return transfer(const_cast<void *>(memory), count, type, peer, one, stream, true);
}

API int ncclRecv(void *memory, size_t count, int type, int peer, Communicator *one,
                 void *stream) {
    return transfer(memory, count, type, peer, one, stream, false);
}

API int ncclCommAbort(Communicator *one) {
    one->aborted = true;
    one->joining.join();
    while (one->working) usleep(100);
    int status = driver("cuCtxSynchronize");  // the copies to and from what is freed here
    for (void *stage : one->staged) status |= driver("cuMemFreeHost", stage);
    if (one->socket >= 0) close(one->socket);
    delete one;
    return status ? kCudaError : kSuccess;
}
