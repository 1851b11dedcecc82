// CUDA's device language as ordinary C++: the fake NVRTC puts this header in front of a kernel's text and compiles both
// for the CPU. Every thread of a CTA is a fiber (engine.cpp); what makes threads wait for each other calls the fake
// driver, the rest is plain code. Like NVRTC it brings no standard library and declares no uint32_t.
//
// What a kernel text must do for it, all under #ifdef TILEWISE_FAKE_CUDA or through the two macros:
//   TW_KERNEL(name, Params, p) { ... }    an entry; p is a const Params&. kThreads must be in scope.
//   TW_DYNAMIC_SHARED(name);              the CTA's dynamic shared memory: unsigned char name[]
//   inline PTX has a stand-in             at the end of this file: tw_half_to_float, tw_load_acquire, tw_mma_...
// Ordinary `extern "C" __global__ void f(int* a, int n)` works at global scope.
#pragma once

#include "abi.hpp"

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef long clock_t;

// ------------------------------------------------------------------------------------------------------------ keywords
#define TW_FAKE_VISIBLE __attribute__((visibility("default")))
#define __global__ TW_FAKE_VISIBLE
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __shared__ static thread_local  // one CTA at a time on an OS thread
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define alignas(n) __attribute__((aligned(n)))  // may follow __shared__, as in CUDA
#define __builtin_assume(condition) ((condition) ? void() : tw_fake::trap("false __builtin_assume(" #condition ")"))
#define offsetof(type, member) __builtin_offsetof(type, member)
#define NULL 0

#define TW_EXPORT(name, threads)                                                                              \
    extern "C" TW_FAKE_VISIBLE const tw_fake::Kernel name##_tw_kernel = {tw_fake::kAbi,                       \
                                                                         unsigned(threads),                   \
                                                                         tw_fake::Launch<&name>::kCount,      \
                                                                         tw_fake::Launch<&name>::kSizes,      \
                                                                         tw_fake::Launch<&name>::kAlignments, \
                                                                         &tw_fake::Launch<&name>::call};
#define TW_KERNEL(name, Params, p)                         \
    extern "C" TW_FAKE_VISIBLE void name(const Params& p); \
    TW_EXPORT(name, kThreads)                              \
    extern "C" TW_FAKE_VISIBLE void name(const Params& p)
#define TW_DYNAMIC_SHARED(name) unsigned char* const name = tw_dynamic_shared()

// ------------------------------------------------------------------------------------------------- the emulation
// itself
namespace tw_fake {

[[noreturn]] inline void trap(const char* text, int code = 719) {
    cta().runtime->trap(code, text);
    __builtin_unreachable();
}
inline void poll() {  // called by what a waiting loop is made of; now and then the others get a turn
    Thread& self = thread();
    if (++self.polls % 16 == 0) cta().runtime->spin(0);
}
inline unsigned lane() { return thread().linear % 32; }
template <class T>
inline T poison() {
    T x;
    __builtin_memset(&x, 0xFF, sizeof x);
    return x;
}
template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}

template <class T>
struct Value {
    using type = T;
};
template <class T>
struct Value<const T&> {
    using type = const T;
};
template <unsigned... I>
struct Sequence {};
template <auto F>
struct Launch;
template <class... A, void (*F)(A...)>
struct Launch<F> {
    static constexpr unsigned kCount = sizeof...(A);
    static constexpr unsigned kSizes[] = {unsigned(sizeof(typename Value<A>::type))..., 0};
    static constexpr unsigned kAlignments[] = {unsigned(alignof(typename Value<A>::type))..., 0};
    template <unsigned... I>
    static void call(void* const* params, Sequence<I...>) {
        F(*static_cast<typename Value<A>::type*>(params[I])...);
    }
    static void call(void* const* params) { call(params, Sequence<__integer_pack(kCount)...>()); }
};

template <class T>
struct Shuffle {
    T value, result;
    unsigned source;
    static void body(void* const* lanes, unsigned mask) {
        for (unsigned rest = mask; rest; rest &= rest - 1) {
            Shuffle& mine = *static_cast<Shuffle*>(lanes[__builtin_ctz(rest)]);
            // A lane that takes no part has no value; NaN shows it.
            mine.result = mask >> mine.source & 1 ? static_cast<Shuffle*>(lanes[mine.source])->value : poison<T>();
        }
    }
};
template <class T>
inline T shuffle(unsigned mask, T value, unsigned source) {
    Shuffle<T> mine{value, value, source};
    cta().runtime->collective(mask, &Shuffle<T>::body, &mine);
    return mine.result;
}
inline unsigned source_index(unsigned index, int width) {
    return (lane() & ~unsigned(width - 1)) | (index & unsigned(width - 1));
}
inline unsigned source_up(unsigned delta, int width) {
    const unsigned l = lane(), first = l & ~unsigned(width - 1);
    return l >= first + delta ? l - delta : l;
}
inline unsigned source_down(unsigned delta, int width) {
    const unsigned l = lane(), last = l | unsigned(width - 1);
    return l + delta <= last ? l + delta : l;
}
inline unsigned source_xor(unsigned bits_of_lane, int width) {
    const unsigned l = lane(), last = l | unsigned(width - 1), source = l ^ bits_of_lane;
    return source <= last && source < 32 ? source : l;
}

template <class T, class Op>
struct Fold {
    T value, result;
    static void body(void* const* lanes, unsigned mask) {
        unsigned rest = mask;
        T all = static_cast<Fold*>(lanes[__builtin_ctz(rest)])->value;
        for (rest &= rest - 1; rest; rest &= rest - 1)
            all = Op()(all, static_cast<Fold*>(lanes[__builtin_ctz(rest)])->value);
        for (rest = mask; rest; rest &= rest - 1) static_cast<Fold*>(lanes[__builtin_ctz(rest)])->result = all;
    }
};
template <class Op, class T>
inline T fold(unsigned mask, T value) {
    Fold<T, Op> mine{value, value};
    cta().runtime->collective(mask, &Fold<T, Op>::body, &mine);
    return mine.result;
}
struct Add {
    template <class T>
    T operator()(T a, T b) const {
        return a + b;
    }
};
struct Min {
    template <class T>
    T operator()(T a, T b) const {
        return b < a ? b : a;
    }
};
struct Max {
    template <class T>
    T operator()(T a, T b) const {
        return a < b ? b : a;
    }
};
struct And {
    template <class T>
    T operator()(T a, T b) const {
        return a & b;
    }
};
struct Or {
    template <class T>
    T operator()(T a, T b) const {
        return a | b;
    }
};
struct Xor {
    template <class T>
    T operator()(T a, T b) const {
        return a ^ b;
    }
};
inline void sync_body(void* const*, unsigned) {}

template <class T>
struct Match {
    T value;
    unsigned result;
    static void body(void* const* lanes, unsigned mask) {
        for (unsigned rest = mask; rest; rest &= rest - 1) {
            Match& mine = *static_cast<Match*>(lanes[__builtin_ctz(rest)]);
            mine.result = 0;
            for (unsigned other = mask; other; other &= other - 1) {
                const int l = __builtin_ctz(other);
                if (__builtin_memcmp(&static_cast<Match*>(lanes[l])->value, &mine.value, sizeof(T)) == 0)
                    mine.result |= 1u << l;
            }
        }
    }
};

template <class T, class F>
inline T atomic_update(T* address, F f) {
    T old, fresh;
    __atomic_load(address, &old, __ATOMIC_SEQ_CST);
    do fresh = f(old);
    while (!__atomic_compare_exchange(address, &old, &fresh, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}

template <class To, class From>
inline To saturate(From x) {  // conversions of a GPU clamp, and NaN is 0
    constexpr bool is_signed = To(-1) < To(0);
    constexpr int digits = sizeof(To) * 8 - (is_signed ? 1 : 0);
    constexpr To last = To(is_signed ? ~(1ull << (sizeof(To) * 8 - 1)) : ~0ull),
                 first = To(is_signed ? To(~last) : To(0));
    const From limit = From(1ull << (digits - 1)) * 2;
    if (x != x) return 0;
    if (x >= limit) return last;
    if (x < (is_signed ? -limit : From(0))) return first;
    return To(x);
}

}  // namespace tw_fake

inline unsigned char* tw_dynamic_shared() { return tw_fake::cta().dynamic_shared; }
// Allocates the module's __shared__ variables on this OS thread; the driver poisons them before each CTA.
// Aligned, because LeakSanitizer takes a block 16 bytes into a page for one with a header.
alignas(64) static thread_local char tw_fake_shared_anchor;
extern "C" TW_FAKE_VISIBLE void* tw_fake_shared() { return &tw_fake_shared_anchor; }

// -------------------------------------------------------------------------------------------------------------- types
#define TW_FAKE_VECTORS(name, type, a2, a4)                                     \
    struct name##1 { type x; };                                                 \
    struct __align__(a2) name##2 { type x, y; };                                \
    struct name##3 { type x, y, z; };                                           \
    struct __align__(a4) name##4 { type x, y, z, w; };                          \
    inline name##1 make_##name##1(type x) { return {x}; }                       \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }            \
    inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
TW_FAKE_VECTORS(char, signed char, 2, 4)
TW_FAKE_VECTORS(uchar, unsigned char, 2, 4)
TW_FAKE_VECTORS(short, short, 4, 8)
TW_FAKE_VECTORS(ushort, unsigned short, 4, 8)
TW_FAKE_VECTORS(int, int, 8, 16)
TW_FAKE_VECTORS(uint, unsigned, 8, 16)
TW_FAKE_VECTORS(long, long, 16, 16)
TW_FAKE_VECTORS(ulong, unsigned long, 16, 16)
TW_FAKE_VECTORS(longlong, long long, 16, 16)
TW_FAKE_VECTORS(ulonglong, unsigned long long, 16, 16)
TW_FAKE_VECTORS(float, float, 8, 16)
TW_FAKE_VECTORS(double, double, 16, 16)
#undef TW_FAKE_VECTORS
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

#define threadIdx (static_cast<const tw_fake::Dim&>(tw_fake::thread().index))
#define blockIdx (static_cast<const tw_fake::Dim&>(tw_fake::cta().block))
#define blockDim (static_cast<const tw_fake::Dim&>(tw_fake::cta().block_dim))
#define gridDim (static_cast<const tw_fake::Dim&>(tw_fake::cta().grid_dim))
constexpr int warpSize = 32;

// ------------------------------------------------------------------------------------------------------------ barriers
inline void __syncthreads() { tw_fake::cta().runtime->barrier(tw_fake::kReduceNone, 0); }
inline int __syncthreads_or(int x) { return tw_fake::cta().runtime->barrier(tw_fake::kReduceOr, x); }
inline int __syncthreads_and(int x) { return tw_fake::cta().runtime->barrier(tw_fake::kReduceAnd, x); }
inline int __syncthreads_count(int x) { return tw_fake::cta().runtime->barrier(tw_fake::kReduceCount, x); }
inline void __syncwarp(unsigned mask = ~0u) { tw_fake::cta().runtime->collective(mask, &tw_fake::sync_body, nullptr); }
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __nanosleep(unsigned nanoseconds) { tw_fake::cta().runtime->spin(nanoseconds); }
inline unsigned __activemask() { return tw_fake::cta().runtime->live_lanes(); }
inline void __trap() { tw_fake::trap("__trap()"); }
inline void __brkpt() {}
#if defined(__x86_64__)
inline long long clock64() { return static_cast<long long>(__builtin_ia32_rdtsc()); }
#else
inline long long clock64() {
    static long long ticks;
    return __atomic_add_fetch(&ticks, 1, __ATOMIC_RELAXED);
}
#endif
inline clock_t clock() { return clock_t(clock64()); }

// -------------------------------------------------------------------------------------------------------- warp
// functions
#define TW_FAKE_SHUFFLES(T)                                                               \
    inline T __shfl_sync(unsigned mask, T x, int source, int width = 32) {                \
        return tw_fake::shuffle(mask, x, tw_fake::source_index(unsigned(source), width)); \
    }                                                                                     \
    inline T __shfl_up_sync(unsigned mask, T x, unsigned delta, int width = 32) {         \
        return tw_fake::shuffle(mask, x, tw_fake::source_up(delta, width));               \
    }                                                                                     \
    inline T __shfl_down_sync(unsigned mask, T x, unsigned delta, int width = 32) {       \
        return tw_fake::shuffle(mask, x, tw_fake::source_down(delta, width));             \
    }                                                                                     \
    inline T __shfl_xor_sync(unsigned mask, T x, int lanes, int width = 32) {             \
        return tw_fake::shuffle(mask, x, tw_fake::source_xor(unsigned(lanes), width));    \
    }                                                                                     \
    inline unsigned __match_any_sync(unsigned mask, T x) {                                \
        tw_fake::Match<T> mine{x, 0};                                                     \
        tw_fake::cta().runtime->collective(mask, &tw_fake::Match<T>::body, &mine);        \
        return mine.result;                                                               \
    }                                                                                     \
    inline unsigned __match_all_sync(unsigned mask, T x, int* all) {                      \
        *all = __match_any_sync(mask, x) == mask;                                         \
        return *all ? mask : 0;                                                           \
    }
TW_FAKE_SHUFFLES(int)
TW_FAKE_SHUFFLES(unsigned)
TW_FAKE_SHUFFLES(long)
TW_FAKE_SHUFFLES(unsigned long)
TW_FAKE_SHUFFLES(long long)
TW_FAKE_SHUFFLES(unsigned long long)
TW_FAKE_SHUFFLES(float)
TW_FAKE_SHUFFLES(double)
#undef TW_FAKE_SHUFFLES
inline unsigned __ballot_sync(unsigned mask, int x) {
    return tw_fake::fold<tw_fake::Or>(mask, x ? 1u << tw_fake::lane() : 0u);
}
inline int __any_sync(unsigned mask, int x) { return tw_fake::fold<tw_fake::Or>(mask, int(x != 0)); }
inline int __all_sync(unsigned mask, int x) { return tw_fake::fold<tw_fake::And>(mask, int(x != 0)); }
inline unsigned __reduce_add_sync(unsigned mask, unsigned x) { return tw_fake::fold<tw_fake::Add>(mask, x); }
inline int __reduce_add_sync(unsigned mask, int x) { return int(tw_fake::fold<tw_fake::Add>(mask, unsigned(x))); }
inline unsigned __reduce_min_sync(unsigned mask, unsigned x) { return tw_fake::fold<tw_fake::Min>(mask, x); }
inline int __reduce_min_sync(unsigned mask, int x) { return tw_fake::fold<tw_fake::Min>(mask, x); }
inline unsigned __reduce_max_sync(unsigned mask, unsigned x) { return tw_fake::fold<tw_fake::Max>(mask, x); }
inline int __reduce_max_sync(unsigned mask, int x) { return tw_fake::fold<tw_fake::Max>(mask, x); }
inline unsigned __reduce_and_sync(unsigned mask, unsigned x) { return tw_fake::fold<tw_fake::And>(mask, x); }
inline unsigned __reduce_or_sync(unsigned mask, unsigned x) { return tw_fake::fold<tw_fake::Or>(mask, x); }
inline unsigned __reduce_xor_sync(unsigned mask, unsigned x) { return tw_fake::fold<tw_fake::Xor>(mask, x); }

// --------------------------------------------------------------------------------------------------------------
// atomics
#define TW_FAKE_ATOMICS(T)                                                                \
    inline T atomicAdd(T* p, T x) {                                                       \
        if (x == 0) tw_fake::poll();                                                      \
        return tw_fake::atomic_update(p, [=](T old) { return static_cast<T>(old + x); }); \
    }                                                                                     \
    inline T atomicExch(T* p, T x) {                                                      \
        tw_fake::poll();                                                                  \
        return tw_fake::atomic_update(p, [=](T) { return x; });                           \
    }                                                                                     \
    inline T atomicMin(T* p, T x) {                                                       \
        return tw_fake::atomic_update(p, [=](T old) { return x < old ? x : old; });       \
    }                                                                                     \
    inline T atomicMax(T* p, T x) {                                                       \
        return tw_fake::atomic_update(p, [=](T old) { return old < x ? x : old; });       \
    }
#define TW_FAKE_INTEGER_ATOMICS(T)                                                               \
    TW_FAKE_ATOMICS(T)                                                                           \
    inline T atomicSub(T* p, T x) { return __atomic_fetch_sub(p, x, __ATOMIC_SEQ_CST); }         \
    inline T atomicAnd(T* p, T x) { return __atomic_fetch_and(p, x, __ATOMIC_SEQ_CST); }         \
    inline T atomicXor(T* p, T x) { return __atomic_fetch_xor(p, x, __ATOMIC_SEQ_CST); }         \
    inline T atomicOr(T* p, T x) {                                                               \
        if (x == 0) tw_fake::poll();                                                             \
        return __atomic_fetch_or(p, x, __ATOMIC_SEQ_CST);                                        \
    }                                                                                            \
    inline T atomicCAS(T* p, T expected, T x) {                                                  \
        tw_fake::poll();                                                                         \
        __atomic_compare_exchange_n(p, &expected, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST); \
        return expected;                                                                         \
    }
TW_FAKE_INTEGER_ATOMICS(int)
TW_FAKE_INTEGER_ATOMICS(unsigned)
TW_FAKE_INTEGER_ATOMICS(long long)
TW_FAKE_INTEGER_ATOMICS(unsigned long long)
TW_FAKE_ATOMICS(float)
TW_FAKE_ATOMICS(double)
#undef TW_FAKE_ATOMICS
#undef TW_FAKE_INTEGER_ATOMICS
inline unsigned atomicInc(unsigned* p, unsigned last) {
    return tw_fake::atomic_update(p, [=](unsigned old) { return old >= last ? 0 : old + 1; });
}
inline unsigned atomicDec(unsigned* p, unsigned last) {
    return tw_fake::atomic_update(p, [=](unsigned old) { return old == 0 || old > last ? last : old - 1; });
}

template <class T>
inline T __ldg(const T* p) {
    return *p;
}
template <class T>
inline T __ldcg(const T* p) {
    return *p;
}
template <class T>
inline T __ldca(const T* p) {
    return *p;
}
template <class T>
inline T __ldcs(const T* p) {
    return *p;
}
template <class T>
inline T __ldlu(const T* p) {
    return *p;
}
template <class T>
inline T __ldcv(const T* p) {
    return *p;
}
template <class T>
inline void __stcg(T* p, T x) {
    *p = x;
}
template <class T>
inline void __stcs(T* p, T x) {
    *p = x;
}
template <class T>
inline void __stwb(T* p, T x) {
    *p = x;
}
template <class T>
inline void __stwt(T* p, T x) {
    *p = x;
}
inline size_t __cvta_generic_to_shared(const void* p) { return reinterpret_cast<size_t>(p); }
inline size_t __cvta_generic_to_global(const void* p) { return reinterpret_cast<size_t>(p); }

// -------------------------------------------------------------------------------------------------------------
// integers
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(static_cast<unsigned long long>(x)) : 64; }
inline unsigned __brev(unsigned x) {
    x = __builtin_bswap32(x);
    x = (x & 0x0F0F0F0Fu) << 4 | (x >> 4 & 0x0F0F0F0Fu);
    x = (x & 0x33333333u) << 2 | (x >> 2 & 0x33333333u);
    return (x & 0x55555555u) << 1 | (x >> 1 & 0x55555555u);
}
inline unsigned long long __brevll(unsigned long long x) {
    return static_cast<unsigned long long>(__brev(unsigned(x))) << 32 | __brev(unsigned(x >> 32));
}
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(static_cast<unsigned long long>(a) * b >> 32); }
inline int __mulhi(int a, int b) { return int(static_cast<long long>(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline long long __mul64hi(long long a, long long b) {
    return static_cast<long long>(static_cast<__int128>(a) * b >> 64);
}
inline int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
    unsigned result = 0;
    for (unsigned i = 0; i < 4; ++i) {
        const unsigned s = selector >> 4 * i;
        unsigned byte = unsigned(both >> 8 * (s & 7)) & 0xFF;
        if (s & 8) byte = byte & 0x80 ? 0xFF : 0;
        result |= byte << 8 * i;
    }
    return result;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
    return unsigned((static_cast<unsigned long long>(high) << 32 | low) << (n & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
    return unsigned((static_cast<unsigned long long>(high) << 32 | low) >> (n & 31));
}
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) c += static_cast<signed char>(a >> i) * static_cast<signed char>(b >> i);
    return c;
}
inline int abs(int x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }
inline long long abs(long long x) { return x < 0 ? -x : x; }
inline long long llabs(long long x) { return x < 0 ? -x : x; }

#define TW_FAKE_MINMAX(A, B, R) \
    inline R min(A a_, B b_) {  \
        const R a = a_, b = b_; \
        return b < a ? b : a;   \
    }                           \
    inline R max(A a_, B b_) {  \
        const R a = a_, b = b_; \
        return a < b ? b : a;   \
    }
TW_FAKE_MINMAX(int, int, int)
TW_FAKE_MINMAX(unsigned, unsigned, unsigned)
TW_FAKE_MINMAX(int, unsigned, unsigned)
TW_FAKE_MINMAX(unsigned, int, unsigned)
TW_FAKE_MINMAX(long, long, long)
TW_FAKE_MINMAX(unsigned long, unsigned long, unsigned long)
TW_FAKE_MINMAX(long, unsigned long, unsigned long)
TW_FAKE_MINMAX(unsigned long, long, unsigned long)
TW_FAKE_MINMAX(long long, long long, long long)
TW_FAKE_MINMAX(unsigned long long, unsigned long long, unsigned long long)
TW_FAKE_MINMAX(long long, unsigned long long, unsigned long long)
TW_FAKE_MINMAX(unsigned long long, long long, unsigned long long)
#undef TW_FAKE_MINMAX

// ----------------------------------------------------------------------------------------------------------------
// memory
extern "C" {
void* memcpy(void*, const void*, size_t) noexcept;
void* memmove(void*, const void*, size_t) noexcept;
void* memset(void*, int, size_t) noexcept;
int memcmp(const void*, const void*, size_t) noexcept;
int printf(const char*, ...);
}
#ifdef NDEBUG
#define assert(condition) void()
#else
#define assert(condition) ((condition) ? void() : tw_fake::trap("assertion failed: " #condition, 710))
#endif

// ------------------------------------------------------------------------------------------------------------------
// math
#define TW_FAKE_MATH1(name)                   \
    extern "C" double name(double) noexcept;  \
    extern "C" float name##f(float) noexcept; \
    inline float name(float x) { return name##f(x); }
#define TW_FAKE_MATH2(name)                          \
    extern "C" double name(double, double) noexcept; \
    extern "C" float name##f(float, float) noexcept; \
    inline float name(float x, float y) { return name##f(x, y); }
TW_FAKE_MATH1(exp)
TW_FAKE_MATH1(exp2)
TW_FAKE_MATH1(exp10)
TW_FAKE_MATH1(expm1)
TW_FAKE_MATH1(log)
TW_FAKE_MATH1(log2)
TW_FAKE_MATH1(log10)
TW_FAKE_MATH1(log1p)
TW_FAKE_MATH1(logb)
TW_FAKE_MATH1(sqrt)
TW_FAKE_MATH1(cbrt)
TW_FAKE_MATH1(sin)
TW_FAKE_MATH1(cos)
TW_FAKE_MATH1(tan)
TW_FAKE_MATH1(asin)
TW_FAKE_MATH1(acos)
TW_FAKE_MATH1(atan)
TW_FAKE_MATH1(sinh)
TW_FAKE_MATH1(cosh)
TW_FAKE_MATH1(tanh)
TW_FAKE_MATH1(asinh)
TW_FAKE_MATH1(acosh)
TW_FAKE_MATH1(atanh)
TW_FAKE_MATH1(erf)
TW_FAKE_MATH1(erfc)
TW_FAKE_MATH1(tgamma)
TW_FAKE_MATH1(lgamma)
TW_FAKE_MATH1(fabs)
TW_FAKE_MATH1(floor)
TW_FAKE_MATH1(ceil)
TW_FAKE_MATH1(trunc)
TW_FAKE_MATH1(round)
TW_FAKE_MATH1(rint)
TW_FAKE_MATH1(nearbyint)
TW_FAKE_MATH2(pow)
TW_FAKE_MATH2(atan2)
TW_FAKE_MATH2(fmod)
TW_FAKE_MATH2(remainder)
TW_FAKE_MATH2(fmin)
TW_FAKE_MATH2(fmax)
TW_FAKE_MATH2(fdim)
TW_FAKE_MATH2(hypot)
TW_FAKE_MATH2(copysign)
TW_FAKE_MATH2(nextafter)
#undef TW_FAKE_MATH1
#undef TW_FAKE_MATH2
extern "C" {
double fma(double, double, double) noexcept;
float fmaf(float, float, float) noexcept;
double ldexp(double, int) noexcept;
float ldexpf(float, int) noexcept;
double scalbn(double, int) noexcept;
float scalbnf(float, int) noexcept;
double frexp(double, int*) noexcept;
float frexpf(float, int*) noexcept;
double modf(double, double*) noexcept;
float modff(float, float*) noexcept;
int ilogb(double) noexcept;
int ilogbf(float) noexcept;
long lrint(double) noexcept;
long lrintf(float) noexcept;
long long llrint(double) noexcept;
long long llrintf(float) noexcept;
}
inline float fma(float a, float b, float c) { return fmaf(a, b, c); }
inline float ldexp(float x, int n) { return ldexpf(x, n); }
inline float abs(float x) { return fabsf(x); }
inline double abs(double x) { return fabs(x); }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline double min(float a, double b) { return fmin(double(a), b); }
inline double max(float a, double b) { return fmax(double(a), b); }
inline double min(double a, float b) { return fmin(a, double(b)); }
inline double max(double a, float b) { return fmax(a, double(b)); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float rcbrtf(float x) { return 1.0f / cbrtf(x); }
inline float fdividef(float x, float y) { return x / y; }
inline float sinpif(float x) { return float(sin(double(x) * 3.14159265358979323846)); }
inline float cospif(float x) { return float(cos(double(x) * 3.14159265358979323846)); }
inline void sincosf(float x, float* s, float* c) { *s = sinf(x), *c = cosf(x); }
inline void sincos(double x, double* s, double* c) { *s = sin(x), *c = cos(x); }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isnan(double x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isinf(double x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
inline bool isfinite(double x) { return __builtin_isfinite(x); }
inline bool signbit(float x) { return __builtin_signbit(x); }
inline bool signbit(double x) { return __builtin_signbit(x); }

inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return exp10f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return float(1.0 / sqrt(double(x))); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline double __drcp_rn(double x) { return 1.0 / x; }
inline double __dsqrt_rn(double x) { return sqrt(x); }

inline int __float_as_int(float x) { return tw_fake::bits<int>(x); }
inline unsigned __float_as_uint(float x) { return tw_fake::bits<unsigned>(x); }
inline float __int_as_float(int x) { return tw_fake::bits<float>(x); }
inline float __uint_as_float(unsigned x) { return tw_fake::bits<float>(x); }
inline long long __double_as_longlong(double x) { return tw_fake::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return tw_fake::bits<double>(x); }
inline int __double2hiint(double x) { return int(tw_fake::bits<long long>(x) >> 32); }
inline int __double2loint(double x) { return int(tw_fake::bits<long long>(x)); }
inline double __hiloint2double(int high, int low) {
    return tw_fake::bits<double>(static_cast<unsigned long long>(unsigned(high)) << 32 | unsigned(low));
}
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __ll2float_rn(long long x) { return float(x); }
inline float __ull2float_rn(unsigned long long x) { return float(x); }
inline double __int2double_rn(int x) { return x; }
inline double __uint2double_rn(unsigned x) { return x; }
inline double __ll2double_rn(long long x) { return double(x); }
inline float __double2float_rn(double x) { return float(x); }
#define TW_FAKE_CONVERSIONS(from, name, to)                                     \
    inline to __##name##_rn(from x) { return tw_fake::saturate<to>(rint(x)); }  \
    inline to __##name##_rz(from x) { return tw_fake::saturate<to>(trunc(x)); } \
    inline to __##name##_rd(from x) { return tw_fake::saturate<to>(floor(x)); } \
    inline to __##name##_ru(from x) { return tw_fake::saturate<to>(ceil(x)); }
TW_FAKE_CONVERSIONS(float, float2int, int)
TW_FAKE_CONVERSIONS(float, float2uint, unsigned)
TW_FAKE_CONVERSIONS(float, float2ll, long long)
TW_FAKE_CONVERSIONS(float, float2ull, unsigned long long)
TW_FAKE_CONVERSIONS(double, double2int, int)
TW_FAKE_CONVERSIONS(double, double2uint, unsigned)
TW_FAKE_CONVERSIONS(double, double2ll, long long)
TW_FAKE_CONVERSIONS(double, double2ull, unsigned long long)
#undef TW_FAKE_CONVERSIONS

// ------------------------------------------------------------------------------------------------- instead of inline
// PTX cvt.f32.f16, cvt.rn.f16.f32; cvt.rn.bf16.f32
inline float tw_half_to_float(unsigned short h) {
    const unsigned sign = (h & 0x8000u) << 16, rest = h & 0x7FFFu;
    if (rest >= 0x7C00) return tw_fake::bits<float>(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
    // The exponent moves by 112, which also makes subnormal numbers normal.
    return tw_fake::bits<float>(sign | tw_fake::bits<unsigned>(tw_fake::bits<float>(rest << 13) * 0x1p112f));
}
inline unsigned short tw_float_to_half(float x) {
    unsigned u = tw_fake::bits<unsigned>(x);
    const unsigned sign = u >> 16 & 0x8000u;
    u &= 0x7FFFFFFFu;
    if (u > 0x7F800000u) return 0x7FFF;
    if (u >= 0x47800000u) return static_cast<unsigned short>(sign | 0x7C00u);
    if (u < 0x38800000u) {  // subnormal: the addition rounds at the right bit
        u = tw_fake::bits<unsigned>(tw_fake::bits<float>(u) + 0.5f) - 0x3F000000u;
        return static_cast<unsigned short>(sign | u);
    }
    return static_cast<unsigned short>(sign | (u - 0x38000000u + 0xFFFu + (u >> 13 & 1u)) >> 13);
}
inline float tw_bfloat16_to_float(unsigned short h) { return tw_fake::bits<float>(static_cast<unsigned>(h) << 16); }
inline unsigned short tw_float_to_bfloat16(float x) {
    const unsigned u = tw_fake::bits<unsigned>(x);
    if ((u & 0x7FFFFFFFu) > 0x7F800000u) return 0x7FFF;
    return static_cast<unsigned short>((u + 0x7FFFu + (u >> 16 & 1u)) >> 16);
}
// ld.acquire, ld.volatile, ld.relaxed; st.release; red.release. A loop that waits must be made of these, of atomics or
// of __nanosleep: a loop over a plain load never lets another thread run.
template <class T>
inline T tw_load_acquire(const T* p) {
    tw_fake::poll();
    T x;
    __atomic_load(p, &x, __ATOMIC_ACQUIRE);
    return x;
}
template <class T>
inline void tw_store_release(T* p, T x) {
    __atomic_store(p, &x, __ATOMIC_RELEASE);
}
template <class T>
inline T tw_add_release(T* p, T x) {
    return __atomic_fetch_add(p, x, __ATOMIC_ACQ_REL);
}
// bar.sync id, threads; bar.arrive id, threads (16 barriers; 0 is not that of __syncthreads here)
inline void tw_barrier_sync(int id, int threads) { tw_fake::cta().runtime->named_barrier(id, threads, true); }
inline void tw_barrier_arrive(int id, int threads) { tw_fake::cta().runtime->named_barrier(id, threads, false); }

namespace tw_fake {

inline float from_half(unsigned h) { return tw_half_to_float(static_cast<unsigned short>(h)); }
inline float from_bfloat16(unsigned h) { return tw_bfloat16_to_float(static_cast<unsigned short>(h)); }

// d = a b + c of a warp: 16 rows, 8 columns, K deep; fragments as PTX lays them out. Sums are rounded once.
template <int K, float (*Convert)(unsigned)>
struct Mma16 {
    float* d;
    const unsigned *a, *b;
    const float* c;
    static void body(void* const* lanes, unsigned mask) {
        if (mask != ~0u) trap("mma needs all lanes of the warp");
        float a[16][K], b[K][8];
        for (int l = 0; l < 32; ++l) {
            const Mma16& lane = *static_cast<Mma16*>(lanes[l]);
            const int row = l / 4, k = l % 4 * 2;
            for (int i = 0; i < K / 2; ++i) {  // two elements to a register
                const int half = i % 2, reg = i / 2;
                a[row + reg % 2 * 8][k + reg / 2 * 8 + half] = Convert(lane.a[reg] >> 16 * half & 0xFFFF);
                if (reg < K / 8) b[k + reg * 8 + half][row] = Convert(lane.b[reg] >> 16 * half & 0xFFFF);
            }
        }
        multiply(lanes, a, b);
    }
    static void multiply(void* const* lanes, const float (&a)[16][K], const float (&b)[K][8]) {
        for (int l = 0; l < 32; ++l) {
            const Mma16& lane = *static_cast<Mma16*>(lanes[l]);
            for (int i = 0; i < 4; ++i) {
                double sum = lane.c[i];
                for (int k = 0; k < K; ++k) sum += double(a[l / 4 + i / 2 * 8][k]) * double(b[k][l % 4 * 2 + i % 2]);
                lane.d[i] = float(sum);
            }
        }
    }
};
struct MmaTf32 {
    float* d;
    const unsigned *a, *b;
    const float* c;
    static float convert(unsigned x) { return bits<float>(x & 0xFFFFE000u); }  // the unit does not see the low bits
    static void body(void* const* lanes, unsigned mask) {
        if (mask != ~0u) trap("mma needs all lanes of the warp");
        float a[16][8], b[8][8];
        for (int l = 0; l < 32; ++l) {
            const MmaTf32& lane = *static_cast<MmaTf32*>(lanes[l]);
            for (int i = 0; i < 4; ++i) a[l / 4 + i % 2 * 8][l % 4 + i / 2 * 4] = convert(lane.a[i]);
            for (int i = 0; i < 2; ++i) b[l % 4 + i * 4][l / 4] = convert(lane.b[i]);
        }
        Mma16<8, from_half>::multiply(lanes, a, b);
    }
};
static_assert(sizeof(MmaTf32) == sizeof(Mma16<8, from_half>));
template <class M>
inline void mma(float* d, const unsigned* a, const unsigned* b, const float* c) {
    M mine{d, a, b, c};
    cta().runtime->collective(~0u, &M::body, &mine);
}

template <int N, bool Transposed>
struct LoadMatrix {
    unsigned* to;
    const unsigned short* row;
    static void body(void* const* lanes, unsigned mask) {
        if (mask != ~0u) trap("ldmatrix needs all lanes of the warp");
        for (int m = 0; m < N; ++m) {
            const unsigned short* rows[8];
            for (int r = 0; r < 8; ++r) {
                rows[r] = static_cast<LoadMatrix*>(lanes[m * 8 + r])->row;
                if (reinterpret_cast<size_t>(rows[r]) % 16)
                    trap("ldmatrix from an address that 16 does not divide", 716);
            }
            for (int l = 0; l < 32; ++l) {
                const int x = l / 4, y = l % 4 * 2;
                const unsigned low = Transposed ? rows[y][x] : rows[x][y],
                               high = Transposed ? rows[y + 1][x] : rows[x][y + 1];
                static_cast<LoadMatrix*>(lanes[l])->to[m] = low | high << 16;
            }
        }
    }
};

}  // namespace tw_fake

// mma.sync.aligned.m16n8k<K>.row.col.f32.<type>.<type>.f32; d may be c
inline void tw_mma_m16n8k16_f16(float* d, const unsigned* a, const unsigned* b, const float* c) {
    tw_fake::mma<tw_fake::Mma16<16, tw_fake::from_half>>(d, a, b, c);
}
inline void tw_mma_m16n8k16_bf16(float* d, const unsigned* a, const unsigned* b, const float* c) {
    tw_fake::mma<tw_fake::Mma16<16, tw_fake::from_bfloat16>>(d, a, b, c);
}
inline void tw_mma_m16n8k8_f16(float* d, const unsigned* a, const unsigned* b, const float* c) {
    tw_fake::mma<tw_fake::Mma16<8, tw_fake::from_half>>(d, a, b, c);
}
inline void tw_mma_m16n8k8_tf32(float* d, const unsigned* a, const unsigned* b, const float* c) {
    tw_fake::mma<tw_fake::MmaTf32>(d, a, b, c);
}
// ldmatrix.sync.aligned.m8n8.x<N>[.trans].shared.b16; `row` is an ordinary pointer
template <int N, bool Transposed = false>
inline void tw_ldmatrix(unsigned* to, const void* row) {
    using Load = tw_fake::LoadMatrix<N, Transposed>;
    Load mine{to, static_cast<const unsigned short*>(row)};
    tw_fake::cta().runtime->collective(~0u, &Load::body, &mine);
}
// cp.async.c{a,g}.shared.global: `bytes` of 4, 8 or 16 come from `from`, the rest is zero. Done at once, so that waits
// need no stand-in; and a missing one does not show.
template <int Size>
inline void tw_cp_async(void* to, const void* from, int bytes = Size) {
    static_assert(Size == 4 || Size == 8 || Size == 16);
    if ((reinterpret_cast<size_t>(to) | (bytes ? reinterpret_cast<size_t>(from) : 0)) % Size) {
        tw_fake::trap("cp.async at an address that its size does not divide", 716);
    }
    __builtin_memset(to, 0, Size);
    __builtin_memcpy(to, from, static_cast<size_t>(bytes));
}
// cp.async.bulk.tensor: a tile of the tensor to shared memory, with zeros for what lies outside, swizzled over 128
// bytes. Done at once; returns the number of bytes. `map` is as this driver's cuTensorMapEncodeTiled leaves it.
inline int tw_copy_tensor(void* to, const void* map, const int* coordinates) {
    const unsigned* const words = static_cast<const unsigned*>(map);
    const unsigned rank = words[3], size = words[5], *const box = words + 8, *const extent = words + 16;
    if (words[4] != 3) tw_fake::trap("a tensor map whose swizzle is not emulated");
    if (reinterpret_cast<size_t>(to) % 128) tw_fake::trap("a tile at an address that 128 does not divide", 716);
    const char* data;
    __builtin_memcpy(&data, words, sizeof data);
    unsigned long strides[4] = {};
    __builtin_memcpy(strides, words + 24, (rank - 1) * sizeof *strides);
    unsigned total = 1;
    for (unsigned d = 0; d < rank; ++d) total *= box[d];
    for (unsigned n = 0; n < total; ++n) {
        unsigned rest = n;
        const char* from = data;
        bool inside = true;
        for (unsigned d = 0; d < rank; ++d) {
            const long at = long(coordinates[d]) + rest % box[d];
            rest /= box[d];
            inside = inside && at >= 0 && at < long(extent[d]);
            from += at * long(d ? strides[d - 1] : size);
        }
        const unsigned row = n * size / 128, byte = n * size % 128;
        char* const place = static_cast<char*>(to) + row * 128 + (byte ^ row % 8 * 16);
        if (inside) __builtin_memcpy(place, from, size);
        else __builtin_memset(place, 0, size);
    }
    return int(total * size);
}
