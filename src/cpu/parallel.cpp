#include "parallel.hpp"

#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "core/env.hpp"
#include "core/error.hpp"

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

long long number_in(const std::string& path) {
    long long number = -1;
    std::ifstream(path) >> number;
    return number;
}

// CPUs that the quota of one group pays for, 0 without quota.
int quota_of_group(const std::string& folder, bool version_2) {
    long long quota = 0, period = 0;
    if (version_2) {
        std::ifstream(folder + "/cpu.max") >> quota >> period;  // "max 100000" leaves both 0
    } else {
        quota = number_in(folder + "/cpu.cfs_quota_us"), period = number_in(folder + "/cpu.cfs_period_us");
    }
    return quota > 0 && period > 0 ? static_cast<int>(std::min(1LL << 20, (quota + period - 1) / period)) : 0;
}

// What the environment asks for, 0 if nothing.
int threads_by_environment() {
    const std::string text = core::env("TILEWISE_NUM_THREADS");
    int count = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
    if (!text.empty() && (error != std::errc{} || end != text.data() + text.size() || count < 0)) {
        core::refuse("TILEWISE_NUM_THREADS (environment)", "\"" + text + "\"",
                     "a number of threads, or 0 to follow OpenMP");
    }
    return count;
}

int machine_limit() {
    using Clock = std::chrono::steady_clock;
    static std::atomic<int> quota{-1};
    if (quota.load(std::memory_order_relaxed) < 0) quota.store(cgroup_quota());
    // Seldom asked again: the kernel's answer takes as long as attention of a few tokens.
    thread_local int affinity = 0;
    thread_local Clock::time_point asked;
    if (const auto now = Clock::now(); affinity == 0 || now - asked > std::chrono::milliseconds(10))
        affinity = threads_by_affinity(), asked = now;
    return quota > 0 ? std::min<int>(affinity, quota) : affinity;
}

// ---------------------------------------------------------------------------------------------------------------------
// The OpenMP run time: the one in the process, else the system's. Never linked, so none comes in a second time.

struct OpenMp {
    // libgomp's entry point, which LLVM's and Intel's run times offer too.
    void (*parallel)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags) = nullptr;
    int (*in_parallel)() = nullptr;
    int (*max_threads)() = nullptr;
    std::string name;
    std::string own;  // path of a run time that we loaded ourselves; gives way to one the host brings later
    std::unique_ptr<const OpenMp> previous{};  // never freed: a thread may still use it
};

struct Scan {
    std::vector<std::string> runtimes;
    std::string torch;
};

int rank_of(const char* path) {  // several in one process: the one that numerical libraries prefer
    const char* slash = std::strrchr(path, '/');
    const char* file = slash ? slash + 1 : path;
    if (std::strncmp(file, "libiomp5", 8) == 0) return 0;
    if (std::strncmp(file, "libomp", 6) == 0 && std::strncmp(file, "libompi", 7) != 0) return 1;
    if (std::strncmp(file, "libgomp", 7) == 0) return 2;
    return -1;
}

template <class F>
bool look_up(void* handle, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(handle, name));
    return function != nullptr;
}

bool open_runtime(const char* path, int flags, OpenMp& runtime) {
    void* handle = dlopen(path, RTLD_LAZY | flags);
    if (handle == nullptr) return false;
    runtime.name = path;
    if (look_up(handle, "GOMP_parallel", runtime.parallel) && look_up(handle, "omp_in_parallel", runtime.in_parallel) &&
        look_up(handle, "omp_get_max_threads", runtime.max_threads))
        return true;  // the handle stays open: threads live in that library
    runtime.parallel = nullptr;
    return false;
}

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

OpenMp find_runtime(const std::string& own) {
    Scan scan;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            Scan& found = *static_cast<Scan*>(data);
            const std::string path = info->dlpi_name ? info->dlpi_name : "";
            if (rank_of(path.c_str()) >= 0) found.runtimes.push_back(path);
            if (path.ends_with("/libtorch_cpu.so")) found.torch = path;
            return 0;
        },
        &scan);
    std::stable_sort(scan.runtimes.begin(), scan.runtimes.end(), [&](const std::string& a, const std::string& b) {
        const bool own_a = a == own, own_b = b == own;
        return own_a != own_b ? own_b : rank_of(a.c_str()) < rank_of(b.c_str());
    });
    OpenMp runtime;
    runtime.own = own;
    const bool in_process = std::any_of(scan.runtimes.begin(), scan.runtimes.end(), [&](const std::string& path) {
        return open_runtime(path.c_str(), RTLD_NOLOAD, runtime);
    });
    constexpr const char* kSystem[] = {"libgomp.so.1", "libomp.so.5", "libomp.so", "libiomp5.so"};
    if (!in_process && std::any_of(std::begin(kSystem), std::end(kSystem),
                                   [&](const char* file) { return open_runtime(file, 0, runtime); })) {
        Dl_info info;
        if (dladdr(reinterpret_cast<void*>(runtime.parallel), &info) && info.dli_fname) runtime.own = info.dli_fname;
    }
    // OpenMP keeps a number of threads per thread, and torch tells it torch's at the first operation in each.
    if (void* torch = scan.torch.empty() ? nullptr : dlopen(scan.torch.c_str(), RTLD_LAZY | RTLD_NOLOAD)) {
        int (*torch_threads)() = nullptr;
        if (look_up(torch, "_ZN2at15get_num_threadsEv", torch_threads)) runtime.max_threads = torch_threads;
    }
    return runtime;
}

// A thread in the loader holds locks of glibc's that stay shut in a child, so no fork happens meanwhile (see Forks).
std::mutex loader_mutex;

const OpenMp& openmp() {
    static const OpenMp* current = nullptr;
    static unsigned long long seen = 0;
    const std::lock_guard lock(loader_mutex);
    if (current == nullptr || seen != libraries_loaded()) {
        auto found = std::make_unique<OpenMp>(find_runtime(current ? current->own : ""));
        found->previous.reset(current);
        current = found.release();
        seen = libraries_loaded();
    }
    return *current;
}

// ---------------------------------------------------------------------------------------------------------------------
// One loop, and what its threads do

thread_local bool inside = false;

struct Job {
    const std::function<void(int64_t, int)>* body;
    int64_t count;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error{};
    std::mutex error_mutex{};
    std::atomic<int> slots{0}, finished{0};
    // The pool's, under its mutex.
    int helpers_wanted = 0, helpers_inside = 0;
    Job* next_job = nullptr;

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
    job.finished.fetch_add(1, std::memory_order_release);
}

// Written before OpenMP's team starts and read first by its threads, as Job::finished is written last by them and read
// after it: so the order of memory accesses hangs on nothing that a race detector cannot see, like libgomp's own means.
std::atomic<unsigned> teams_started{0};

void drain_in_team(void* data) {
    teams_started.load(std::memory_order_acquire);
    drain(data);
}

// ---------------------------------------------------------------------------------------------------------------------
// Where OpenMP's threads are not for us: a few that wait for work. Callers that come at the same time share them.

class Pool {
public:
    void run(int threads, Job& job) {
        {
            const std::lock_guard lock(mutex_);
            while (workers_ < threads - 1) {
                try {
                    std::thread([this] { work(); }).detach();
                } catch (const std::system_error&) {
                    break;  // the limit of the process or its group: fewer do as well
                }
                ++workers_;
            }
            job.helpers_wanted = threads - 1;
            job.next_job = jobs_;
            jobs_ = &job;
        }
        start_.notify_all();
        drain(&job);
        std::unique_lock lock(mutex_);
        Job** at = &jobs_;
        while (*at != &job) at = &(*at)->next_job;
        *at = job.next_job;
        done_.wait(lock, [&] { return job.helpers_inside == 0; });
    }

private:
    Job* job_in_need() const {
        Job* job = jobs_;
        while (job && (job->helpers_wanted == 0 || job->next.load() >= job->count)) job = job->next_job;
        return job;
    }

    void work() {
        std::unique_lock lock(mutex_);
        for (;;) {
            Job* job = nullptr;
            start_.wait(lock, [&] { return (job = job_in_need()) != nullptr; });
            --job->helpers_wanted, ++job->helpers_inside;
            lock.unlock();
            drain(job);
            lock.lock();
            if (--job->helpers_inside == 0) done_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable start_, done_;
    int workers_ = 0;
    Job* jobs_ = nullptr;
};

// Never destroyed: its threads wait in it until the process ends.
Pool& pool = *new Pool;

// ---------------------------------------------------------------------------------------------------------------------
// Forks

// Whether this process came of fork, and not of exec, already when the library was loaded. Then the thread that it
// began with may believe in a team of libgomp that stayed in the parent (torch's, say), and would wait for it forever.
bool began_by_fork() {
    constexpr unsigned kForkedNoExec = 0x40;  // PF_FORKNOEXEC, since Linux 2.6
    std::string stat;
    std::getline(std::ifstream("/proc/self/stat"), stat);
    unsigned flags = 0;  // the ninth field; the second one may hold spaces, but ends with the last parenthesis
    const size_t name_end = stat.rfind(')');
    if (name_end == std::string::npos ||
        std::sscanf(stat.c_str() + name_end, ") %*c %*d %*d %*d %*d %*d %u", &flags) != 1)
        return false;
    return (flags & kForkedNoExec) != 0;
}

// A child has none of its parent's threads. It gets a pool of its own, and leaves OpenMP's team alone: libgomp believes
// in its threads still.
std::atomic<bool> forked{began_by_fork()};
[[maybe_unused]] const int fork_watch = pthread_atfork([] { loader_mutex.lock(); }, [] { loader_mutex.unlock(); },
                                                       [] {
                                                           loader_mutex.unlock();
                                                           forked.store(true);
                                                           new (&pool) Pool;
                                                       });

// ---------------------------------------------------------------------------------------------------------------------
// Settings and the loop

std::atomic<int> requested_threads{0};
thread_local int granted = 0;  // what max_threads() told this thread last

struct Host {
    void (*function)(void*, int64_t, int32_t, void (*)(void*, int64_t), void*) = nullptr;
    void* user = nullptr;
    int32_t num_threads = 1;
    const Host* previous = nullptr;  // never freed: a thread may still use it
};
std::atomic<const Host*> host_executor{nullptr};

const Host* host() {
    const Host* const host = host_executor.load(std::memory_order_acquire);
    return host && host->function ? host : nullptr;
}

// libgomp starts a team for every thread that asks for one. So one thread, the first to come, has OpenMP's team for as
// long as it lives (in most programs the one that torch works in, too), and all others share the pool.
bool has_team() {
    static std::atomic<bool> taken{false};
    struct Claim {
        bool holds = false;
        Claim() = default;
        Claim(const Claim&) = delete;
        Claim& operator=(const Claim&) = delete;
        ~Claim() {
            if (holds) taken.store(false);
        }
    };
    thread_local Claim claim;
    return claim.holds || (claim.holds = !taken.exchange(true));
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

int threads_now() {
    if (inside) return 1;
    if (const Host* const h = host()) return h->num_threads;
    const OpenMp& runtime = openmp();
    if (runtime.parallel && runtime.in_parallel()) return 1;  // the team of a host at work: its other threads call, too
    if (const int requested = requested_threads.load()) return requested;
    if (const int from_env = threads_by_environment()) return from_env;
    return runtime.max_threads ? std::max(1, std::min(runtime.max_threads(), machine_limit())) : machine_limit();
}

}  // namespace

int cgroup_quota(const std::string& root) {
    int least = 0;
    std::ifstream groups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) {
        // "0::/path" of version 2, "4:cpu,cpuacct:/path" of version 1
        const size_t first = line.find(':'), second = line.find(":/", first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        const bool version_2 = controllers == ",,";
        if (!version_2 && controllers.find(",cpu,") == std::string::npos) continue;
        // A group's parents limit it too. In a container the group may be mounted as the root, whatever its path.
        std::string path = line.substr(second + 1);
        const std::string mount = root + "/sys/fs/cgroup" + (version_2 ? "" : "/cpu");
        for (;; path.erase(path.rfind('/'))) {
            const int quota = quota_of_group(mount + path, version_2);
            if (quota > 0) least = least > 0 ? std::min(least, quota) : quota;
            if (path.empty()) break;
        }
    }
    return least;
}

int max_threads() { return granted = threads_now(); }

void set_num_threads(int count) { requested_threads.store(std::max(0, count)); }

void set_executor(void (*function)(void*, int64_t, int32_t, void (*)(void*, int64_t), void*), void* user,
                  int32_t num_threads) {
    auto* const next = new Host{function, user, std::max(1, num_threads), host_executor.load()};
    while (!host_executor.compare_exchange_weak(next->previous, next)) {
    }
}

void parallel_for(int64_t count, const std::function<void(int64_t, int)>& body) {
    if (count <= 0) return;
    Job job{&body, count};
    // All threads or one: libgomp ends those that a smaller team leaves over, and a larger one then waits for new ones.
    const int threads = count == 1 || inside ? 1 : granted > 0 ? granted : max_threads();
    if (threads <= 1) {
        for (int64_t index = 0; index < count; ++index) job.call(index, 0);
    } else if (const Host* const h = host()) {
        HostJob host_job{&job, std::vector<std::atomic<bool>>(static_cast<size_t>(threads))};
        h->function(h->user, count, static_cast<int32_t>(std::min<int64_t>(threads, count)), host_body, &host_job);
    } else if (const OpenMp& runtime = openmp(); runtime.parallel && !forked.load() && has_team()) {
        teams_started.fetch_add(1, std::memory_order_release);
        runtime.parallel(drain_in_team, &job, static_cast<unsigned>(threads), 0);
        job.finished.load(std::memory_order_acquire);
    } else {
        pool.run(threads, job);
    }
    if (job.error) std::rethrow_exception(job.error);
}

const char* executor_name() {
    if (host()) return "the host's parallel_for";
    if (forked.load()) return "own threads (OpenMP's stay in the process that was forked)";
    const OpenMp& runtime = openmp();
    return runtime.parallel ? runtime.name.c_str() : "own threads (no OpenMP run time found)";
}

}  // namespace tilewise::cpu
