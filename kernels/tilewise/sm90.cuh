// What Hopper has and no GPU before it: barriers in shared memory that count arrivals and bytes (mbarrier), tiles that a
// copy engine brings (TMA), and products that a warpgroup of 128 threads starts and waits for later (wgmma).
//
// Operands of wgmma lie in shared memory in panels of 64 numbers, 128 bytes to a row, swizzled as Tile of mma.cuh swizzles
// them: that is also what the copy engine writes. The products themselves, whose instructions name every register, are
// in wgmma.cuh, which the host writes (src/jit/sm90_spec.cpp).
#pragma once

#include "mma.cuh"

namespace tilewise {

constexpr int kPanel = 64;  // numbers in a row of a panel

// The same place in shared memory, in a register: ptxas would rather find out anew what its address is, wherever it is needed.
#ifdef TILEWISE_FAKE_CUDA
TW_DEVICE unsigned char* as_unknown_place(unsigned char* p) { return p; }
#else
TW_DEVICE unsigned char* as_unknown_place(unsigned char* p) {
    Word address = shared_address(p);
    asm volatile("" : "+r"(address));
    return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
}
#endif

// With kDelays (TILEWISE_CONFIG=fwd_sm90:kDelays=1) every thread dawdles before it passes or tells a barrier: what works only
// because somebody is quick shows.
TW_DEVICE void dawdle() {
    if constexpr (kDelays) {
        const Word random = (static_cast<Word>(clock64()) ^ threadIdx.x * 0x9E3779B9u) * 0x85EBCA6Bu;
        __nanosleep(random >> 28 == 0 ? random % 4096u : random % 64u);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Barriers. One is in phase 0 at first, and in the next when all arrivals and bytes that it waits for have come.

#ifdef TILEWISE_FAKE_CUDA
struct Barrier {
    int count, missing, bytes, phase;

    __device__ void init(int arrivals) { count = missing = arrivals, bytes = phase = 0; }
    __device__ void arrive() { dawdle(), --missing, turn(); }
    __device__ void expect(int more) { bytes += more, arrive(); }
    __device__ void bring(int some) { bytes -= some, turn(); }
    __device__ void wait(Word parity) {  // until the phase of this parity is over
        while ((static_cast<Word>(phase) & 1u) == parity) __nanosleep(0);
        dawdle();
    }

private:
    __device__ void turn() {
        if (missing == 0 && bytes == 0) missing = count, ++phase;
    }
};
TW_DEVICE void publish_barriers() {}
#else
struct __align__(8) Barrier {
    unsigned long long state;

    __device__ __forceinline__ Word address() { return static_cast<Word>(__cvta_generic_to_shared(this)); }
    __device__ __forceinline__ void init(int arrivals) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address()), "r"(arrivals) : "memory");
    }
    __device__ __forceinline__ void arrive() {
        dawdle();
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(address()) : "memory");
    }
    __device__ __forceinline__ void expect(int bytes) {  // arrives, too
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address()), "r"(bytes) : "memory");
    }
    __device__ __forceinline__ void wait(Word parity) {  // until the phase of this parity is over
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "again:\n"
            "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
            "@!done bra again;\n"
            "}\n" ::"r"(address()),
            "r"(parity)
            : "memory");
        dawdle();
    }
};
TW_DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
#endif

// Which buffer of a ring is next, and the parity of the phase that its barriers are in.
template <int kSize>
struct Ring {
    int at = 0;
    Word phase = 0;

    __device__ __forceinline__ void advance() {
        if (++at == kSize) at = 0, phase ^= 1u;
    }
};

// ---------------------------------------------------------------------------------------------------------------------
// Copies. A tensor map has the axes number, row, head, batch; what lies outside reads as zero.

TW_DEVICE void copy_panel(Half* to, const abi::TensorMap& map, Barrier& barrier, int column, int row, int head, int batch) {
#ifdef TILEWISE_FAKE_CUDA
    const int coordinates[4] = {column, row, head, batch};
    barrier.bring(tw_copy_tensor(to, &map, coordinates));
#else
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(column), "r"(row), "r"(head), "r"(batch), "r"(barrier.address())
        : "memory");
#endif
}

// What this thread did to shared memory comes before what the copy engine is asked for after this.
#ifdef TILEWISE_FAKE_CUDA
TW_DEVICE void fence_copies() {}
#else
TW_DEVICE void fence_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
#endif

// So many threads come to a barrier, and wait there for each other or do not.
#ifdef TILEWISE_FAKE_CUDA
TW_DEVICE void await_threads(int id, int count) { tw_barrier_sync(id, count); }
TW_DEVICE void come_by(int id, int count) { tw_barrier_arrive(id, count); }
#else
TW_DEVICE void await_threads(int id, int count) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(count) : "memory"); }
TW_DEVICE void come_by(int id, int count) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(count) : "memory"); }
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Products

#ifdef TILEWISE_FAKE_CUDA
using Operand = const Half*;
TW_DEVICE Operand by_rows_of(const Half* panels) { return panels; }
TW_DEVICE Operand by_columns_of(const Half* panels, int) { return panels; }
TW_DEVICE void begin_products() {}
TW_DEVICE void commit_products() {}
template <int kLeft>
TW_DEVICE void wait_for_products() {}
template <int kRegisters>
TW_DEVICE void take_registers() {}
template <int kRegisters>
TW_DEVICE void give_registers() {}
#else
// What wgmma takes for a place in shared memory (PTX ISA, matrix descriptor): address, distances in units of 16 bytes, and
// the swizzle over 128 bytes.
using Operand = unsigned long long;
TW_DEVICE Operand descriptor(const Half* panels, int leading) {
    constexpr unsigned long long kEightRows = 1024 / 16, kSwizzle128 = 1ull << 62;
    return (shared_address(panels) & 0x3ffffu) >> 4 | static_cast<unsigned long long>(leading) << 16 | kEightRows << 32 | kSwizzle128;
}
// Rows of the operand are rows of the panels, with the depth along them; the next panel is for the next 64 of the depth.
TW_DEVICE Operand by_rows_of(const Half* panels) { return descriptor(panels, 1); }
// Columns of the operand are along the rows of the panels, which have so many; the next panel has the next 64 columns.
TW_DEVICE Operand by_columns_of(const Half* panels, int rows) { return descriptor(panels, rows * 2 * kPanel / 16); }
TW_DEVICE void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
TW_DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most kLeft of the latest groups are under way.
template <int kLeft>
TW_DEVICE void wait_for_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
}
// The registers of an SM go to the warpgroups that need them; all threads of one call it.
template <int kRegisters>
TW_DEVICE void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
TW_DEVICE void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// A kernel that is launched as dependent on the one before it (programmatic dependent launch) starts while that ends, and
// waits for it before it touches memory.

#ifdef TILEWISE_FAKE_CUDA
TW_DEVICE void await_kernel_before() {}
TW_DEVICE void let_next_kernel_start() {}
#else
TW_DEVICE void await_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
TW_DEVICE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Work for blocks that stay: each takes the next number when it is done with one.

#ifdef TILEWISE_FAKE_CUDA
TW_DEVICE Int load_acquire(const Int* p) { return tw_load_acquire(p); }
TW_DEVICE void store_release(Int* p, Int x) { tw_store_release(p, x); }
#else
TW_DEVICE Int load_acquire(const Int* p) {
    Int x;
    asm volatile("ld.acquire.gpu.global.b64 %0, [%1];" : "=l"(x) : "l"(p) : "memory");
    return x;
}
TW_DEVICE void store_release(Int* p, Int x) { asm volatile("st.release.gpu.global.b64 [%0], %1;" ::"l"(p), "l"(x) : "memory"); }
#endif

// Lies in the workspace, whose contents are unknown before a launch. Block 0, which starts first, clears it and signs with
// a number of this launch; the last block to leave takes the signature away, so that a graph can launch the same again.
class Queue {
public:
    TW_DEVICE void open(const abi::Queue& queue) {
        if (blockIdx.x > 0) return;
        Int* const words = static_cast<Int*>(queue.words);
        words[kNext] = gridDim.x, words[kLeft] = 0;
        store_release(words + kSignature, queue.signature);
    }
    TW_DEVICE int next(const abi::Queue& queue) {
        Int* const words = static_cast<Int*>(queue.words);
        while (load_acquire(words + kSignature) != queue.signature) __nanosleep(100);
        return static_cast<int>(atomicAdd(reinterpret_cast<unsigned long long*>(words + kNext), 1ull));
    }
    TW_DEVICE void leave(const abi::Queue& queue) {  // after this block's last next()
        Int* const words = static_cast<Int*>(queue.words);
        __threadfence();
        if (atomicAdd(reinterpret_cast<unsigned long long*>(words + kLeft), 1ull) == gridDim.x - 1)
            store_release(words + kSignature, 0);
    }

private:
    enum { kNext, kSignature, kLeft };  // the first takes no register for its address
};

}  // namespace tilewise
