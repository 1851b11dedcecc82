// What a compiled kernel and the fake driver agree on: where a thread finds its own data, and whom it calls. Included
// by device text (device.hpp), so it includes nothing and declares nothing outside its namespace.
//
// Every OS thread that runs CTAs owns one region of kRegion bytes, aligned to its size: slot 0 holds the Cta and the
// Thread records, slot 1 + i is the stack of thread i. A thread finds its record from its stack pointer: two
// instructions, and nothing to save at a switch.
#pragma once

namespace tw_fake {

constexpr unsigned kAbi = 1;
constexpr unsigned kMaxThreads = 1024;  // of a CTA
constexpr unsigned kStackShift = 17;    // 128 KiB
constexpr unsigned long kStack = 1ul << kStackShift;
constexpr unsigned long kRegion = 1ul << 28;  // the power of two above (1 + kMaxThreads) * kStack
constexpr unsigned long kThreadsAt = kStack / 2;

struct Dim {
    unsigned x, y, z;
};

enum Reduce { kReduceNone, kReduceOr, kReduceAnd, kReduceCount };

// Runs once all lanes of a mask are there: lanes[i] is what lane i brought. Those outside `mask` are stale.
using Collective = void (*)(void* const* lanes, unsigned mask);

struct Runtime {
    int (*barrier)(int reduce, int value);
    void (*named_barrier)(int id, int count, bool wait);
    void (*collective)(unsigned mask, Collective body, void* mine);
    unsigned (*live_lanes)();
    void (*spin)(unsigned nanoseconds);
    void (*trap)(int code, const char* text);  // does not return
};

struct Kernel {  // the symbol <name>_tw_kernel beside each kernel
    unsigned abi;
    unsigned max_threads, num_params;
    const unsigned *sizes, *alignments;  // of the parameters
    void (*call)(void* const* params);
};

struct Cta {  // the part that kernels see
    const Runtime* runtime;
    Dim block, block_dim, grid_dim;
    unsigned char* dynamic_shared;
    unsigned dynamic_bytes;
};

struct alignas(64) Thread {
    Dim index;
    unsigned linear;
    void* stack_pointer;   // while it does not run
    unsigned state, mask;  // for reports
    unsigned polls;
};

inline char* stack_pointer() {
    char* sp;
#if defined(__x86_64__)
    asm("mov %%rsp, %0" : "=r"(sp));  // not volatile: one read serves a whole function
#elif defined(__aarch64__)
    asm("mov %0, sp" : "=r"(sp));
#else
    sp = static_cast<char*>(__builtin_frame_address(0));
#endif
    return sp;
}
inline unsigned long offset_in_region(char* sp) { return reinterpret_cast<unsigned long>(sp) & (kRegion - 1); }
inline Cta& cta() {
    char* sp = stack_pointer();
    return *reinterpret_cast<Cta*>(sp - offset_in_region(sp));
}
inline Thread& thread() {
    char* sp = stack_pointer();
    const unsigned long offset = offset_in_region(sp);
    return *reinterpret_cast<Thread*>(sp - offset + kThreadsAt + ((offset >> kStackShift) - 1) * sizeof(Thread));
}

}  // namespace tw_fake
