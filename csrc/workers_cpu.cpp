#include "workers_cpu.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

namespace kvmig {
namespace {

// One call of share_out; lives on its caller's stack.
struct Job {
    void (*work)(const void *, int64_t);
    const void *context;
    const int64_t tiles;
    int32_t places;      // for helpers that may still come
    int32_t inside = 0;  // helpers at work
    Job *behind = nullptr;
    std::atomic<int64_t> next{0};

    void take() {
        for (int64_t tile; (tile = next.fetch_add(1, std::memory_order_relaxed)) < tiles;)
            work(context, tile);
    }
};

// Threads that help whoever calls. Never destroyed: they wait for work until the process ends.
class Pool {
   public:
    const pid_t process = getpid();

    void run(Job &job) {
        const int32_t helpers = job.places;
        std::unique_lock<std::mutex> lock(mutex_);
        grow(helpers);
        job.behind = jobs_;
        jobs_ = &job;
        lock.unlock();
        for (int32_t i = 0; i < helpers; ++i) posted_.notify_one();
        job.take();
        lock.lock();
        Job **link = &jobs_;
        while (*link != &job) link = &(*link)->behind;
        *link = job.behind;
        // Only those who came are waited for: a short job doesn't wait for threads to wake.
        left_.wait(lock, [&] { return job.inside == 0; });
    }

   private:
    std::mutex mutex_;
    std::condition_variable posted_, left_;
    Job *jobs_ = nullptr;
    int32_t threads_ = 0;

    void grow(int32_t wanted) {
        for (; threads_ < wanted; ++threads_) {
            try {
                std::thread([this] { help(); }).detach();
            } catch (const std::exception &) {
                return;  // no more threads to be had: those that run do all of it
            }
        }
    }

    void help() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            Job *job = jobs_;
            while (job && !job->places) job = job->behind;
            if (!job) {
                posted_.wait(lock);
                continue;
            }
            --job->places;
            ++job->inside;
            lock.unlock();
            job->take();
            lock.lock();
            if (--job->inside == 0) left_.notify_all();
        }
    }
};

// A fork leaves the child without the threads, and maybe with a lock that nobody will open: it
// gets a pool of its own.
Pool &pool() {
    static std::atomic<Pool *> current{nullptr};
    Pool *found = current.load(std::memory_order_acquire);
    if (found && found->process == getpid()) return *found;
    Pool *made = new Pool;
    if (current.compare_exchange_strong(found, made, std::memory_order_acq_rel)) return *made;
    delete made;
    return *found;
}

}  // namespace

void share_out(int64_t tiles, int32_t workers, void (*work)(const void *, int64_t),
               const void *context) {
    const auto wanted = static_cast<int32_t>(std::min<int64_t>({workers, tiles, kMaxWorkers}));
    Job job{work, context, tiles, std::max(wanted - 1, 0)};
    if (job.places)
        pool().run(job);
    else
        job.take();
}

}  // namespace kvmig
