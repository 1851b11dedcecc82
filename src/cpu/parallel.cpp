#include "parallel.hpp"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/env.hpp"

namespace tilewise::cpu {
namespace {

// ---------------------------------------------------------------------------------------------------------------------
// How many threads make sense here

int threads_by_affinity() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0) return std::max(1, CPU_COUNT(&set));
    return std::max(1u, std::thread::hardware_concurrency());
}

// cgroup v2, then v1. 0: no quota.
int threads_by_quota() {
    long long quota = -1, period = -1;
    if (std::FILE* file = std::fopen("/sys/fs/cgroup/cpu.max", "re")) {
        if (std::fscanf(file, "%lld %lld", &quota, &period) != 2) quota = -1;  // "max 100000"
        std::fclose(file);
    } else {
        const auto read = [](const char* path, long long& value) {
            if (std::FILE* f = std::fopen(path, "re")) {
                if (std::fscanf(f, "%lld", &value) != 1) value = -1;
                std::fclose(f);
            }
        };
        read("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", quota);
        read("/sys/fs/cgroup/cpu/cpu.cfs_period_us", period);
    }
    if (quota <= 0 || period <= 0) return 0;
    return static_cast<int>(std::max(1LL, (quota + period - 1) / period));
}

int machine_limit() {
    static const int quota = threads_by_quota();
    // Seldom asked again: the kernel's answer takes as long as attention of a few tokens.
    thread_local int affinity = 0;
    thread_local unsigned calls = 0;
    if (calls++ % 64 == 0) affinity = threads_by_affinity();
    return quota > 0 ? std::min(affinity, quota) : affinity;
}

// ---------------------------------------------------------------------------------------------------------------------
// The OpenMP run time: the one in the process, else the system's. Never linked, so none comes in a second time.

struct OpenMp {
    // libgomp's entry point, which LLVM's and Intel's run times offer too.
    void (*parallel)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags) = nullptr;
    int (*max_threads)() = nullptr;
    std::string name;
};

struct Scan {
    std::vector<std::string> found;
};

int rank_of(const char* path) {  // several in one process: the one that numerical libraries prefer
    const char* slash = std::strrchr(path, '/');
    const char* file = slash ? slash + 1 : path;
    if (std::strncmp(file, "libiomp5", 8) == 0) return 0;
    if (std::strncmp(file, "libomp", 6) == 0 && std::strncmp(file, "libompi", 7) != 0) return 1;
    if (std::strncmp(file, "libgomp", 7) == 0) return 2;
    return -1;
}

bool open_runtime(const char* path, int flags, OpenMp& runtime) {
    void* handle = dlopen(path, RTLD_LAZY | flags);
    if (handle == nullptr) return false;
    const auto parallel = reinterpret_cast<decltype(OpenMp::parallel)>(dlsym(handle, "GOMP_parallel"));
    const auto max_threads = reinterpret_cast<decltype(OpenMp::max_threads)>(dlsym(handle, "omp_get_max_threads"));
    if (parallel == nullptr || max_threads == nullptr) return false;
    runtime = {parallel, max_threads, path};
    return true;  // the handle stays open: threads live in that library
}

std::mutex runtime_mutex;
std::string own_runtime;  // path of a run time that we loaded ourselves; gives way to one the host brings later

unsigned long long libraries_loaded() {
    unsigned long long adds = 0;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            *static_cast<unsigned long long*>(data) = info->dlpi_adds;
            return 1;  // the first entry is enough: the counter is global
        },
        &adds);
    return adds;
}

OpenMp find_runtime() {
    Scan scan;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            if (info->dlpi_name && rank_of(info->dlpi_name) >= 0)
                static_cast<Scan*>(data)->found.emplace_back(info->dlpi_name);
            return 0;
        },
        &scan);
    std::stable_sort(scan.found.begin(), scan.found.end(), [](const std::string& a, const std::string& b) {
        const bool own_a = a == own_runtime, own_b = b == own_runtime;
        return own_a != own_b ? own_b : rank_of(a.c_str()) < rank_of(b.c_str());
    });
    OpenMp runtime;
    for (const std::string& path : scan.found) {
        if (open_runtime(path.c_str(), RTLD_NOLOAD, runtime)) return runtime;
    }
    for (const char* file : {"libgomp.so.1", "libomp.so.5", "libomp.so", "libiomp5.so"}) {
        if (open_runtime(file, 0, runtime)) {
            Dl_info info;
            if (dladdr(reinterpret_cast<void*>(runtime.parallel), &info) && info.dli_fname)
                own_runtime = info.dli_fname;
            return runtime;
        }
    }
    return runtime;
}

const OpenMp& openmp() {
    static std::vector<std::unique_ptr<OpenMp>> kept;  // never freed while a thread may still use an older one
    static std::atomic<const OpenMp*> current{nullptr};
    static std::atomic<unsigned long long> seen{0};
    const unsigned long long now = libraries_loaded();
    const OpenMp* runtime = current.load(std::memory_order_acquire);
    if (runtime && seen.load(std::memory_order_relaxed) == now) return *runtime;
    const std::lock_guard lock(runtime_mutex);
    kept.push_back(std::make_unique<OpenMp>(find_runtime()));
    current.store(kept.back().get(), std::memory_order_release);
    seen.store(libraries_loaded(), std::memory_order_relaxed);
    return *kept.back();
}

// ---------------------------------------------------------------------------------------------------------------------
// Without OpenMP: a few threads that wait for work. One job at a time; a second caller meanwhile works alone.

class Pool {
public:
    bool try_run(int threads, void (*body)(void*), void* data) {
        const std::unique_lock job(job_mutex_, std::try_to_lock);
        if (!job.owns_lock()) return false;
        {
            const std::lock_guard lock(mutex_);
            while (static_cast<int>(workers_.size()) < threads - 1) {
                const size_t id = workers_.size();
                workers_.emplace_back([this, id] { work(id); });
            }
            body_ = body, data_ = data;
            wanted_ = static_cast<size_t>(threads - 1);
            running_ = wanted_;
            ++generation_;
        }
        start_.notify_all();
        body(data);
        std::unique_lock lock(mutex_);
        done_.wait(lock, [this] { return running_ == 0; });
        return true;
    }

    ~Pool() {
        {
            const std::lock_guard lock(mutex_);
            stop_ = true;
        }
        start_.notify_all();
        for (std::thread& worker : workers_) worker.join();
    }

private:
    void work(size_t id) {
        uint64_t seen = 0;
        std::unique_lock lock(mutex_);
        for (;;) {
            start_.wait(lock, [&] { return stop_ || (generation_ != seen && id < wanted_); });
            if (stop_) return;
            seen = generation_;
            const auto body = body_;
            void* data = data_;
            lock.unlock();
            body(data);
            lock.lock();
            if (--running_ == 0) done_.notify_all();
        }
    }

    std::mutex job_mutex_, mutex_;
    std::condition_variable start_, done_;
    std::vector<std::thread> workers_;
    void (*body_)(void*) = nullptr;
    void* data_ = nullptr;
    size_t wanted_ = 0, running_ = 0;
    uint64_t generation_ = 0;
    bool stop_ = false;
};

Pool& pool() {
    // Never destroyed in a forked child, where its threads do not exist; elsewhere the process ends with it.
    static Pool* instance = new Pool;
    return *instance;
}

// ---------------------------------------------------------------------------------------------------------------------
// Settings and the loop

std::atomic<int> requested_threads{0};
std::atomic<bool> team_was_used{false};
std::atomic<bool> serial_after_fork{false};
thread_local bool inside = false;

struct Host {
    void (*function)(void*, int64_t, int32_t, void (*)(void*, int64_t), void*) = nullptr;
    void* user = nullptr;
    int32_t num_threads = 1;
};
std::mutex host_mutex;
Host host_executor;

Host host() {
    const std::lock_guard lock(host_mutex);
    return host_executor;
}

// A forked child has none of the team's threads: waiting for them would hang. It works serially instead.
void watch_forks() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] {
        if (team_was_used.load()) serial_after_fork.store(true);
    });
    (void)registered;
}

struct Job {
    const std::function<void(int64_t, int)>* body;
    int64_t count;
    std::atomic<int64_t> next{0};
    std::atomic<int> slots{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error{};
    std::mutex error_mutex{};

    void call(int64_t index, int slot) {
        if (failed.load(std::memory_order_relaxed)) return;
        try {
            (*body)(index, slot);
        } catch (...) {
            const std::lock_guard lock(error_mutex);
            if (!error) error = std::current_exception();
            failed.store(true);
        }
    }
};

void drain(void* data) {
    Job& job = *static_cast<Job*>(data);
    const int slot = job.slots.fetch_add(1);
    const bool outer = inside;
    inside = true;
    for (int64_t index = job.next.fetch_add(1); index < job.count; index = job.next.fetch_add(1)) job.call(index, slot);
    inside = outer;
}

// A host's executor gives no thread number: calls that run at once take different slots from this set.
struct HostJob {
    Job* job;
    std::vector<std::atomic<bool>> taken;
};

void host_body(void* context, int64_t index) {
    HostJob& host_job = *static_cast<HostJob*>(context);
    size_t slot = 0;
    while (host_job.taken[slot].exchange(true, std::memory_order_acquire)) slot = (slot + 1) % host_job.taken.size();
    const bool outer = inside;
    inside = true;
    host_job.job->call(index, static_cast<int>(slot));
    inside = outer;
    host_job.taken[slot].store(false, std::memory_order_release);
}

}  // namespace

int max_threads() {
    if (const Host h = host(); h.function) return h.num_threads;
    if (const int requested = requested_threads.load()) return requested;
    if (const int from_env = std::atoi(core::env("TILEWISE_NUM_THREADS").c_str()); from_env > 0) return from_env;
    const OpenMp& runtime = openmp();
    return std::max(1, runtime.max_threads ? std::min(runtime.max_threads(), machine_limit()) : machine_limit());
}

void set_num_threads(int count) { requested_threads.store(std::max(0, count)); }

void set_executor(void (*function)(void*, int64_t, int32_t, void (*)(void*, int64_t), void*), void* user,
                  int32_t num_threads) {
    const std::lock_guard lock(host_mutex);
    host_executor = {function, user, std::max(1, num_threads)};
}

void parallel_for(int64_t count, const std::function<void(int64_t, int)>& body) {
    if (count <= 0) return;
    Job job{&body, count};
    // All threads or one: libgomp ends those that a smaller team leaves over, and a larger one then waits for new ones.
    const int threads = count > 1 ? max_threads() : 1;
    if (threads <= 1 || inside || serial_after_fork.load()) {
        for (int64_t index = 0; index < count; ++index) job.call(index, 0);
    } else if (const Host h = host(); h.function) {
        HostJob host_job{&job, std::vector<std::atomic<bool>>(static_cast<size_t>(h.num_threads))};
        h.function(h.user, count, static_cast<int32_t>(std::min<int64_t>(threads, count)), host_body, &host_job);
    } else {
        watch_forks();
        team_was_used.store(true);
        const OpenMp& runtime = openmp();
        if (runtime.parallel) {
            runtime.parallel(drain, &job, static_cast<unsigned>(threads), 0);
        } else if (!pool().try_run(threads, drain, &job)) {
            drain(&job);
        }
    }
    if (job.error) std::rethrow_exception(job.error);
}

const char* executor_name() {
    if (host().function) return "the host's parallel_for";
    const OpenMp& runtime = openmp();
    return runtime.parallel ? runtime.name.c_str() : "own threads (no OpenMP run time found)";
}

}  // namespace tilewise::cpu
