// Fibers, barriers, warp functions, and the OS threads below them. See engine.hpp.
#include "engine.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

// tw_fake_switch(save, load): leaves the stack pointer in *save and goes on where `load` was left. Callee-saved
// registers are on the stacks. A fault jumps to tw_fake_resume with the stack pointer set.
extern "C" void tw_fake_switch(void** save, void* load);
extern "C" void tw_fake_resume();
#if defined(__x86_64__)
asm(R"(
.text
.hidden tw_fake_switch
.globl tw_fake_switch
.type tw_fake_switch, @function
.hidden tw_fake_resume
.globl tw_fake_resume
.balign 16
tw_fake_switch:
    push %rbp
    push %rbx
    push %r12
    push %r13
    push %r14
    push %r15
    mov %rsp, (%rdi)
    mov %rsi, %rsp
tw_fake_resume:
    pop %r15
    pop %r14
    pop %r13
    pop %r12
    pop %rbx
    pop %rbp
    ret
.size tw_fake_switch, . - tw_fake_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.hidden tw_fake_switch
.globl tw_fake_switch
.type tw_fake_switch, %function
.hidden tw_fake_resume
.globl tw_fake_resume
.balign 16
tw_fake_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
tw_fake_resume:
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
.size tw_fake_switch, . - tw_fake_switch
)");
#else
#error "fake CUDA switches fibers on x86-64 and AArch64 only"
#endif

namespace tw_fake {
namespace {

using Clock = std::chrono::steady_clock;

enum State : unsigned { kRuns, kAtBarrier, kAtNamedBarrier, kAtWarp, kSpins, kReturned };
enum class Order { forward, reverse, random };
enum class Why { none, done, deadlock, trap, fault, timeout, cancelled, need_thread };

constexpr size_t kPage = 4096;
constexpr size_t kRedZone = 256;
constexpr unsigned char kRedByte = 0xFB;
constexpr size_t kSharedAt = (kMaxThreads + 2) * kStack;
constexpr unsigned kWarps = kMaxThreads / 32;
constexpr unsigned kMaxGuardedThreads = 16;  // OS threads; guard pages cost mappings, of which a process has 65,530

struct Job {
    const Grid& grid;
    uint64_t blocks;
    Order block_order = Order::forward, fiber_order = Order::forward;
    uint64_t seed = 0;
    std::vector<uint32_t> permutation;
    double timeout = 60;
    bool guards = true;
    std::atomic<uint64_t> next{0};
    std::atomic<bool> failed{false};
    std::mutex mutex;  // of what follows
    Outcome outcome;
    std::vector<std::thread> extra;
    int active = 0;

    explicit Job(const Grid& g) : grid(g), blocks(static_cast<uint64_t>(g.grid.x) * g.grid.y * g.grid.z) {}
    uint64_t block(uint64_t n) const {
        if (block_order == Order::reverse) return blocks - 1 - n;
        return permutation.empty() ? n : permutation[n];
    }
};

struct Warp {
    unsigned live, ready, spins, waiting;
    // Those that wait, as long as they agree.
    bool agree;
    unsigned mask;
    Collective body;
    void* mine[32];
    unsigned masks[32];
    Collective bodies[32];
};

struct NamedBarrier {
    int expected, arrived;
    unsigned waiting[kWarps];
};

struct Engine {
    Cta cta;  // first: this is what kernels see
    Job* job;
    Warp warps[kWarps];
    unsigned warps_ready, warps_spin, num_warps, current_warp;
    unsigned num_threads, live, arrived;
    int reduce, accumulator, result;
    NamedBarrier named[16];
    bool named_used;
    void* main_stack;
    Thread* running;
    Order order;
    unsigned ahead;
    uint64_t random;
    // How it ended
    Why why;
    int code;
    const char* text;
    const void* address;
    bool stack_overflow;
    // A CTA in which everybody spins
    unsigned idle_rounds;
    bool asked;
    int64_t idle_since, started;
    Dim laid_out_for;
    unsigned stacks, guarded;

    Thread* threads() { return reinterpret_cast<Thread*>(reinterpret_cast<char*>(this) + kThreadsAt); }
    char* stack_end(unsigned i) { return reinterpret_cast<char*>(this) + (i + 2) * kStack; }
    unsigned char* shared() { return reinterpret_cast<unsigned char*>(this) + kSharedAt; }
};
static_assert(sizeof(Engine) <= kThreadsAt);
static_assert(sizeof(Thread) == 64 && kThreadsAt + kMaxThreads * sizeof(Thread) <= kStack);
static_assert(kSharedAt + kMaxDynamicShared + kPage <= kRegion);

Engine& engine() { return static_cast<Engine&>(reinterpret_cast<Engine&>(cta())); }
int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

// ---------------------------------------------------------------------------------------------------------------------
// Who runs next

uint64_t draw(Engine& e) {
    e.random ^= e.random << 13;
    e.random ^= e.random >> 7;
    return e.random ^= e.random << 17;
}

unsigned choose(Engine& e, unsigned set) {  // a bit of the set
    if (e.order == Order::forward) return static_cast<unsigned>(__builtin_ctz(set));
    if (e.order == Order::reverse) return 31u - static_cast<unsigned>(__builtin_clz(set));
    const unsigned turn = draw(e) >> 32 & 31;
    const unsigned rotated = set >> turn | set << (32 - turn) % 32;
    return (static_cast<unsigned>(__builtin_ctz(rotated)) + turn) & 31;
}

[[noreturn]] void leave(Engine& e, Why why) {
    e.why = why;
    void* nowhere;
    tw_fake_switch(&nowhere, e.main_stack);
    __builtin_unreachable();
}

[[gnu::noinline]] void idle(Engine& e, Thread& self) {  // nobody is ready
    if (!e.warps_spin) leave(e, Why::deadlock);
    if (++e.idle_rounds == 1) e.idle_since = now_ns();
    if (e.idle_rounds > 8) {
        sched_yield();
        if (e.job->failed.load(std::memory_order_relaxed)) leave(e, Why::cancelled);
        if (e.idle_rounds % 16 == 0) {
            const int64_t waited = now_ns() - e.idle_since;
            if (static_cast<double>(waited) * 1e-9 > e.job->timeout) leave(e, Why::timeout);
            if (waited > 2'000'000 && !e.asked) {
                // All wait for another CTA, which may not have an OS thread yet.
                e.asked = true;
                e.why = Why::need_thread;
                tw_fake_switch(&self.stack_pointer, e.main_stack);
            }
        }
    }
    for (unsigned w = 0; w < e.num_warps; ++w) {
        e.warps[w].ready |= e.warps[w].spins;
        e.warps[w].spins = 0;
    }
    e.warps_ready |= e.warps_spin;
    e.warps_spin = 0;
}

Thread& pick(Engine& e, Thread& self) {
    unsigned w = e.current_warp;
    if (!e.warps[w].ready || e.order == Order::random) {
        while (!e.warps_ready) idle(e, self);
        e.current_warp = w = choose(e, e.warps_ready);
    }
    Warp& warp = e.warps[w];
    const unsigned lane = choose(e, warp.ready);
    warp.ready &= ~(1u << lane);
    if (!warp.ready) e.warps_ready &= ~(1u << w);
    const unsigned i = w * 32 + lane;
    // The stack of two turns ahead, or it would come from the second cache when it is needed.
    const char* soon = static_cast<const char*>(e.threads()[(i + e.ahead) % kMaxThreads].stack_pointer);
    __builtin_prefetch(soon);
    __builtin_prefetch(soon + 64);
    return e.threads()[i];
}

void next(Engine& e, Thread& self) {
    Thread& other = pick(e, self);
    e.running = &other;
    if (&other != &self) tw_fake_switch(&self.stack_pointer, other.stack_pointer);
}

void make_ready(Engine& e, unsigned w, unsigned lanes) {
    if (!lanes) return;
    e.warps[w].ready |= lanes;
    e.warps_ready |= 1u << w;
}

[[noreturn]] void fail(Engine& e, int code, const char* text) {
    e.code = code;
    e.text = text;
    leave(e, Why::trap);
}

// ---------------------------------------------------------------------------------------------------------------------
// What kernels call

void release_barrier(Engine& e) {
    e.arrived = 0;
    e.idle_rounds = 0;
    e.result = e.accumulator;
    for (unsigned w = 0; w < e.num_warps; ++w) make_ready(e, w, e.warps[w].live);
    if (e.warps_ready) e.current_warp = choose(e, e.warps_ready);
}

int barrier(int reduce, int value) {
    Engine& e = engine();
    Thread& self = thread();
    if (e.arrived++ == 0) {
        e.reduce = reduce;
        e.accumulator = reduce == kReduceAnd;
    }
    if (e.reduce != reduce) fail(e, 719, "threads meet at different kinds of __syncthreads");
    if (reduce == kReduceOr) e.accumulator |= value != 0;
    if (reduce == kReduceAnd) e.accumulator &= value != 0;
    if (reduce == kReduceCount) e.accumulator += value != 0;
    self.state = kAtBarrier;
    if (e.arrived == e.live) release_barrier(e);
    next(e, self);
    self.state = kRuns;
    return e.result;
}

void named_barrier(int id, int count, bool wait) {
    Engine& e = engine();
    Thread& self = thread();
    if (id < 0 || id >= 16) fail(e, 719, "there are 16 named barriers");
    if (count <= 0 || count % 32 != 0 || count > 1024) fail(e, 719, "a named barrier takes a multiple of 32 threads");
    NamedBarrier& b = e.named[id];
    e.named_used = true;
    if (b.arrived++ == 0) b.expected = count;
    if (b.expected != count) fail(e, 719, "threads meet at a named barrier with different counts");
    if (wait) b.waiting[self.linear / 32] |= 1u << self.linear % 32;
    if (b.arrived == b.expected) {
        b.arrived = 0;
        e.idle_rounds = 0;
        for (unsigned w = 0; w < e.num_warps; ++w) {
            make_ready(e, w, b.waiting[w]);
            b.waiting[w] = 0;
        }
    }
    if (!wait) return;
    self.state = kAtNamedBarrier;
    self.mask = static_cast<unsigned>(id);
    next(e, self);
    self.state = kRuns;
}

// True if all lanes of the mask that have not returned are there; they are ready then.
bool complete(Engine& e, unsigned w, unsigned mask) {
    Warp& warp = e.warps[w];
    const unsigned needed = mask & warp.live;
    if ((warp.waiting & needed) != needed) return false;
    const auto first = static_cast<unsigned>(__builtin_ctz(needed));
    Collective body = warp.bodies[first];
    if (!warp.agree) {
        for (unsigned rest = needed; rest; rest &= rest - 1) {
            const auto lane = static_cast<unsigned>(__builtin_ctz(rest));
            if (warp.masks[lane] != mask) return false;
            if (warp.bodies[lane] != body) fail(e, 719, "lanes meet in different warp functions");
        }
    }
    warp.waiting &= ~needed;
    e.idle_rounds = 0;
    body(warp.mine, needed);
    make_ready(e, w, needed);
    return true;
}

void collective(unsigned mask, Collective body, void* mine) {
    Engine& e = engine();
    Thread& self = thread();
    const unsigned w = self.linear / 32, lane = self.linear % 32, bit = 1u << lane;
    if (!(mask & bit)) fail(e, 719, "the mask of a warp function does not name the lane that calls it");
    Warp& warp = e.warps[w];
    if (!warp.waiting) {
        warp.agree = true;
        warp.mask = mask;
        warp.body = body;
    } else if (warp.mask != mask || warp.body != body) {
        warp.agree = false;
    }
    warp.mine[lane] = mine;
    warp.masks[lane] = mask;
    warp.bodies[lane] = body;
    warp.waiting |= bit;
    if (complete(e, w, mask) && e.order != Order::random) {  // the last one goes on
        warp.ready &= ~bit;
        if (!warp.ready) e.warps_ready &= ~(1u << w);
        return;
    }
    self.state = kAtWarp;
    self.mask = mask;
    next(e, self);
    self.state = kRuns;
}

unsigned live_lanes() { return engine().warps[thread().linear / 32].live; }

void spin(unsigned) {
    Engine& e = engine();
    Thread& self = thread();
    const unsigned w = self.linear / 32;
    e.warps[w].spins |= 1u << self.linear % 32;
    e.warps_spin |= 1u << w;
    self.state = kSpins;
    next(e, self);
    self.state = kRuns;
}

void trap(int code, const char* text) { fail(engine(), code, text); }

const Runtime kRuntime = {barrier, named_barrier, collective, live_lanes, spin, trap};

[[noreturn]] void thread_main() {
    {
        const Grid& grid = engine().job->grid;
        grid.kernel->call(grid.params);
    }
    Engine& e = engine();
    Thread& self = thread();
    const unsigned w = self.linear / 32;
    Warp& warp = e.warps[w];
    self.state = kReturned;
    warp.live &= ~(1u << self.linear % 32);
    e.idle_rounds = 0;
    if (--e.live == 0) leave(e, Why::done);
    if (e.arrived == e.live) release_barrier(e);
    for (unsigned rest = warp.waiting; rest;) {  // somebody may have waited for this lane only
        const auto lane = static_cast<unsigned>(__builtin_ctz(rest));
        rest = complete(e, w, warp.masks[lane]) ? warp.waiting : rest & (rest - 1);
    }
    next(e, self);
    __builtin_unreachable();
}

// ---------------------------------------------------------------------------------------------------------------------
// Faults of kernels end the launch and not the process

[[gnu::tls_model("initial-exec")]] thread_local Engine* in_kernel = nullptr;
struct sigaction chained[NSIG];
constexpr int kAlarm = SIGXCPU;  // a kernel that runs for too long

void on_fault(int signal, siginfo_t* info, void* context_) {
    Engine* e = in_kernel;
    if (!e) {
        if (signal == kAlarm && info->si_code == SI_TKILL && info->si_pid == getpid()) return;  // the CTA just ended
        const struct sigaction& old = chained[signal];
        if (old.sa_flags & SA_SIGINFO) return old.sa_sigaction(signal, info, context_);
        if (old.sa_handler == SIG_IGN) return;
        if (old.sa_handler != SIG_DFL) return old.sa_handler(signal);
        sigaction(signal, &old, nullptr);  // the instruction faults again, or the signal is sent again
        if (signal == kAlarm) raise(signal);
        return;
    }
    in_kernel = nullptr;
    e->address = info->si_addr;
    const auto address = reinterpret_cast<uintptr_t>(info->si_addr), base = reinterpret_cast<uintptr_t>(e);
    e->stack_overflow = false;
    switch (signal) {
        case SIGSEGV:
        case SIGBUS:
            e->code = 700;
            e->text = "illegal address";
            e->stack_overflow = address >= base + kStack && address < base + kSharedAt - kStack;
            break;
        case SIGFPE: e->code = 719, e->text = "integer division by zero"; break;
        case SIGILL: e->code = 716, e->text = "misaligned address (or __builtin_trap)"; break;
        default: e->code = 702, e->text = "the CTA runs for longer than TILEWISE_FAKE_TIMEOUT"; break;
    }
    e->why = Why::fault;
    auto* context = static_cast<ucontext_t*>(context_);
#if defined(__x86_64__)
    context->uc_mcontext.gregs[REG_RSP] = reinterpret_cast<greg_t>(e->main_stack);
    context->uc_mcontext.gregs[REG_RIP] = reinterpret_cast<greg_t>(&tw_fake_resume);
#else
    context->uc_mcontext.sp = reinterpret_cast<uintptr_t>(e->main_stack);
    context->uc_mcontext.pc = reinterpret_cast<uintptr_t>(&tw_fake_resume);
#endif
}

void catch_faults() {
    static std::once_flag once;
    std::call_once(once, [] {
        for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, kAlarm}) {
            struct sigaction action = {};
            action.sa_sigaction = on_fault;
            action.sa_flags = SA_SIGINFO | SA_ONSTACK;
            sigemptyset(&action.sa_mask);
            sigaction(signal, &action, &chained[signal]);
        }
    });
}

// ---------------------------------------------------------------------------------------------------------------------
// Memory of an OS thread

struct Region {
    Engine* engine = nullptr;
    void* signal_stack = nullptr;
    static constexpr size_t kSignalStack = size_t{64} << 10;

    Region() = default;
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;
    ~Region() {
        if (signal_stack) {
            stack_t off = {};
            off.ss_flags = SS_DISABLE;
            sigaltstack(&off, nullptr);
            munmap(signal_stack, kSignalStack);
        }
        if (engine) munmap(engine, kRegion);
    }

    bool make() {
        if (engine) return true;
        void* wide = mmap(nullptr, 2 * kRegion, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (wide == MAP_FAILED) return false;
        auto* first = static_cast<char*>(wide);
        const size_t before = -reinterpret_cast<uintptr_t>(wide) % kRegion;
        if (before) munmap(wide, before);
        first += before;
        munmap(first + kRegion, kRegion - before);
        if (mprotect(first, kStack, PROT_READ | PROT_WRITE) != 0) return false;
        if (mprotect(first + kSharedAt - kPage, kMaxDynamicShared + 2 * kPage, PROT_READ | PROT_WRITE) != 0)
            return false;
        engine = reinterpret_cast<Engine*>(first);
        engine->cta.runtime = &kRuntime;
        stack_t old = {};
        if (sigaltstack(nullptr, &old) == 0 && (old.ss_flags & SS_DISABLE)) {
            void* memory = mmap(nullptr, kSignalStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            if (memory != MAP_FAILED) {
                signal_stack = memory;
                stack_t stack = {};
                stack.ss_sp = memory;
                stack.ss_size = kSignalStack;
                sigaltstack(&stack, nullptr);
            }
        }
        return true;
    }

    bool lay_out(const Dim& block, bool guards) {  // thread records and stacks for CTAs of this shape
        Engine& e = *engine;
        const unsigned n = block.x * block.y * block.z;
        for (; e.stacks < n; ++e.stacks) {
            char* stack = e.stack_end(e.stacks) - kStack;
            const size_t guard = guards ? kPage : 0;
            if (mprotect(stack + guard, kStack - guard, PROT_READ | PROT_WRITE) != 0) return false;
        }
        if (std::memcmp(&e.laid_out_for, &block, sizeof block) == 0) return true;
        e.laid_out_for = block;
        for (unsigned i = 0; i < n; ++i) {
            e.threads()[i].linear = i;
            e.threads()[i].index = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
        }
        return true;
    }
};
alignas(64) thread_local Region region;  // for LeakSanitizer, see device.hpp

// ---------------------------------------------------------------------------------------------------------------------
// A CTA

const char* name_of(State state) {
    switch (state) {
        case kRuns: return "ready";
        case kAtBarrier: return "at __syncthreads";
        case kAtNamedBarrier: return "at named barrier";
        case kAtWarp: return "in a warp function";
        case kSpins: return "spinning";
        case kReturned: return "returned";
    }
    return "?";
}

std::string describe_threads(Engine& e) {
    std::string text;
    char line[128];
    int lines = 0;
    const Thread* running = e.why == Why::deadlock ? nullptr : e.running;
    for (unsigned i = 0, j; i < e.num_threads; i = j) {
        const Thread& t = e.threads()[i];
        const bool detail = t.state == kAtNamedBarrier || t.state == kAtWarp;
        for (j = i + 1; j < e.num_threads; ++j) {
            const Thread& u = e.threads()[j];
            if (u.state != t.state || (detail && u.mask != t.mask) || &t == running || &u == running) break;
        }
        if (++lines > 24) return text + "\n    ...";
        const char* what = &t == running ? "running" : name_of(State(t.state));
        if (j == i + 1) std::snprintf(line, sizeof line, "\n    thread %u: %s", i, what);
        else std::snprintf(line, sizeof line, "\n    threads %u-%u: %s", i, j - 1, what);
        text += line;
        if (t.state == kAtWarp) std::snprintf(line, sizeof line, ", mask 0x%08x", t.mask);
        if (t.state == kAtNamedBarrier) {
            const NamedBarrier& b = e.named[t.mask & 15];
            std::snprintf(line, sizeof line, " %u, %d of %d arrived", t.mask, b.arrived, b.expected);
        }
        if (detail) text += line;
    }
    return text;
}

void report(Engine& e) {
    Job& job = *e.job;
    const std::lock_guard lock(job.mutex);
    if (job.failed.exchange(true)) return;
    char where[256];
    std::snprintf(where, sizeof where, "kernel '%s', block (%u, %u, %u) of (%u, %u, %u): ", job.grid.name,
                  e.cta.block.x, e.cta.block.y, e.cta.block.z, e.cta.grid_dim.x, e.cta.grid_dim.y, e.cta.grid_dim.z);
    Outcome& out = job.outcome;
    out.text = where;
    char number[64];
    switch (e.why) {
        case Why::deadlock:
            out.code = 719;
            out.text += "deadlock, no thread can go on";
            break;
        case Why::timeout:
            out.code = 719;
            out.text += "all threads spin or wait for longer than TILEWISE_FAKE_TIMEOUT";
            break;
        default:
            out.code = e.code;
            out.text += e.text;
            std::snprintf(number, sizeof number, " in thread (%u, %u, %u)", e.running->index.x, e.running->index.y,
                          e.running->index.z);
            out.text += number;
            if (e.why == Why::fault && e.code == 700) {
                std::snprintf(number, sizeof number, ": %p", e.address);
                out.text += number;
                if (e.stack_overflow) out.text += ", its stack: overflow";
                else if (job.grid.describe) out.text += job.grid.describe(e.address);
            }
    }
    out.text += describe_threads(e);
}

void report_overrun(Engine& e) {
    e.code = 700;
    e.text = "wrote outside the dynamic shared memory; seen after the CTA, last";
    e.why = Why::trap;
    report(e);
}

void work(Job& job);

void run_block(Engine& e, Job& job, uint64_t linear, void* shared) {
    const Grid& grid = job.grid;
    e.cta.block = {static_cast<unsigned>(linear % grid.grid.x),
                   static_cast<unsigned>(linear / grid.grid.x % grid.grid.y),
                   static_cast<unsigned>(linear / grid.grid.x / grid.grid.y)};
    e.random = (job.seed + 1) * 0x9E3779B97F4A7C15ull ^ (linear + 1) * 0xBF58476D1CE4E5B9ull;
    e.live = e.num_threads;
    e.arrived = 0;
    e.warps_spin = 0;
    e.idle_rounds = 0;
    e.asked = false;
    e.current_warp = e.order == Order::reverse ? e.num_warps - 1 : 0;
    if (e.named_used) {
        std::memset(e.named, 0, sizeof e.named);
        e.named_used = false;
    }
    for (unsigned w = 0; w < e.num_warps; ++w) {
        const unsigned lanes = std::min(32u, e.num_threads - w * 32);
        Warp& warp = e.warps[w];
        warp.live = warp.ready = lanes == 32 ? ~0u : (1u << lanes) - 1;
        warp.spins = warp.waiting = 0;
    }
    e.warps_ready = e.num_warps == 32 ? ~0u : (1u << e.num_warps) - 1;
    for (unsigned i = 0; i < e.num_threads; ++i) {
        // Tops of stacks differ in their low bits, or all would fall into the same sets of the caches.
        char* top = e.stack_end(i) - i * 13 * 64 % (size_t{32} << 10);
#if defined(__x86_64__)
        auto* frame = reinterpret_cast<void**>(top - 64);
        frame[6] = reinterpret_cast<void*>(&thread_main);
#else
        auto* frame = reinterpret_cast<void**>(top - 160);
        frame[11] = reinterpret_cast<void*>(&thread_main);
#endif
        Thread& t = e.threads()[i];
        t.stack_pointer = static_cast<void*>(frame);
        t.state = kRuns;
        t.polls = 0;
    }
    // What nobody wrote reads as NaN.
    std::memset(e.shared(), 0xFF, grid.dynamic_bytes);
    std::memset(e.shared() - kRedZone, kRedByte, kRedZone);
    std::memset(e.shared() + grid.dynamic_bytes, kRedByte, kRedZone);
    if (shared) std::memset(shared, 0xFF, grid.shared_bytes);

    __atomic_store_n(&e.started, now_ns(), __ATOMIC_RELAXED);
    e.running = &pick(e, e.threads()[0]);
    for (;;) {
        e.why = Why::none;
        in_kernel = &e;
        tw_fake_switch(&e.main_stack, e.running->stack_pointer);
        in_kernel = nullptr;
        if (e.why != Why::need_thread) break;
        const std::lock_guard lock(job.mutex);
        if (job.extra.size() < 256) job.extra.emplace_back([&job] { work(job); });
    }
    __atomic_store_n(&e.started, int64_t{0}, __ATOMIC_RELAXED);
    if (e.why == Why::cancelled) return;
    if (e.why != Why::done) return report(e);
    const auto is_red = [](unsigned char byte) { return byte == kRedByte; };
    const unsigned char* end = e.shared() + grid.dynamic_bytes;
    if (!std::all_of(e.shared() - kRedZone, e.shared(), is_red) || !std::all_of(end, end + kRedZone, is_red)) {
        report_overrun(e);
    }
}

// CTAs that run for too long, wherever they hang, are ended by a signal.
struct Watched {
    pthread_t thread;
    Engine* engine;
    double timeout;
};
std::mutex watched_mutex;
std::vector<Watched>& watched() {
    static auto* list = new std::vector<Watched>;  // never destroyed: the watchdog outlives main
    return *list;
}
void watch() {
    static pid_t watchdog_of = 0;
    if (watchdog_of == getpid()) return;
    watchdog_of = getpid();
    std::thread([] {
        for (;;) {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            const std::lock_guard lock(watched_mutex);
            for (const Watched& w : watched()) {
                const int64_t started = __atomic_load_n(&w.engine->started, __ATOMIC_RELAXED);
                if (started && static_cast<double>(now_ns() - started) * 1e-9 > w.timeout * 1.5 + 0.2) {
                    __atomic_store_n(&w.engine->started, int64_t{0}, __ATOMIC_RELAXED);
                    pthread_kill(w.thread, kAlarm);
                }
            }
        }
    }).detach();
}

void work(Job& job) {
    const Grid& grid = job.grid;
    if (!region.make() || !region.lay_out(grid.block, job.guards)) {
        const std::lock_guard lock(job.mutex);
        if (!job.failed.exchange(true)) job.outcome = {2, "no memory for the stacks of the threads"};
        return;
    }
    Engine& e = *region.engine;
    e.job = &job;
    e.cta.block_dim = grid.block;
    e.cta.grid_dim = grid.grid;
    e.cta.dynamic_bytes = grid.dynamic_bytes;
    e.cta.dynamic_shared = e.shared();
    e.num_threads = grid.block.x * grid.block.y * grid.block.z;
    e.num_warps = (e.num_threads + 31) / 32;
    e.order = job.fiber_order;
    e.ahead = e.order == Order::reverse ? ~1u : 2;
    e.started = 0;
    void* shared = grid.shared_bytes ? grid.shared(grid.module) : nullptr;
    {
        const std::lock_guard lock(watched_mutex);
        watched().push_back({pthread_self(), &e, job.timeout});
        watch();
    }
    for (uint64_t n; !job.failed.load(std::memory_order_relaxed) && (n = job.next.fetch_add(1)) < job.blocks;) {
        run_block(e, job, job.block(n), shared);
    }
    const std::lock_guard lock(watched_mutex);
    std::erase_if(watched(), [&](const Watched& w) { return w.engine == &e; });
}

// ---------------------------------------------------------------------------------------------------------------------
// OS threads. They wait for work until the process ends.

struct Pool {
    std::mutex mutex;
    std::condition_variable wake, done;
    Job* job = nullptr;
    unsigned wanted = 0, threads = 0;
    bool busy = false;
    pid_t pid = getpid();

    void loop() {
        std::unique_lock lock(mutex);
        for (;;) {
            wake.wait(lock, [&] { return job && wanted > 0; });
            --wanted;
            Job* mine = job;
            ++mine->active;
            lock.unlock();
            work(*mine);
            lock.lock();
            if (--mine->active == 0) done.notify_all();
        }
    }
    bool start(Job& new_job, unsigned helpers) {
        const std::lock_guard lock(mutex);
        if (busy) return false;  // a launch of another thread: this one does without
        busy = true;
        for (; threads < helpers; ++threads) std::thread([this] { loop(); }).detach();
        job = &new_job;
        wanted = helpers;
        wake.notify_all();
        return true;
    }
    void finish(Job& old_job) {
        std::unique_lock lock(mutex);
        job = nullptr;
        wanted = 0;
        done.wait(lock, [&] { return old_job.active == 0; });
        busy = false;
    }
};

Pool& pool() {
    static std::mutex mutex;
    static Pool* one = nullptr;  // never destroyed: its threads never end
    const std::lock_guard lock(mutex);
    if (!one || one->pid != getpid()) one = new Pool;  // a fork has no threads
    return *one;
}

Order order_of(const char* text, uint64_t& seed) {
    if (std::strcmp(text, "reverse") == 0) return Order::reverse;
    if (std::strncmp(text, "random", 6) != 0) return Order::forward;
    if (text[6] == ':') seed = std::strtoull(text + 7, nullptr, 0);
    return Order::random;
}

}  // namespace

Outcome run(const Grid& grid) {
    catch_faults();
    Job job(grid);
    if (const char* text = std::getenv("TILEWISE_FAKE_ORDER"))
        job.block_order = job.fiber_order = order_of(text, job.seed);
    if (const char* text = std::getenv("TILEWISE_FAKE_FIBER_ORDER")) job.fiber_order = order_of(text, job.seed);
    if (const char* text = std::getenv("TILEWISE_FAKE_TIMEOUT")) job.timeout = std::strtod(text, nullptr);
    if (job.block_order == Order::random && job.blocks < (1u << 24)) {
        job.permutation.resize(job.blocks);
        std::iota(job.permutation.begin(), job.permutation.end(), 0u);
        std::shuffle(job.permutation.begin(), job.permutation.end(), std::mt19937_64(job.seed));
    }
    uint64_t threads = std::max(1u, std::thread::hardware_concurrency());
    if (const char* text = std::getenv("TILEWISE_FAKE_THREADS"))
        threads = std::max(1ul, std::strtoul(text, nullptr, 10));
    threads = std::min({threads, job.blocks, uint64_t{256}});
    job.guards = threads <= kMaxGuardedThreads;

    Pool& helpers = pool();
    const bool helped = threads > 1 && helpers.start(job, static_cast<unsigned>(threads - 1));
    work(job);
    if (helped) helpers.finish(job);
    for (;;) {  // those may ask for more
        std::vector<std::thread> extra;
        {
            const std::lock_guard lock(job.mutex);
            extra.swap(job.extra);
        }
        if (extra.empty()) break;
        for (std::thread& thread : extra) thread.join();
    }
    return job.outcome;
}

}  // namespace tw_fake
