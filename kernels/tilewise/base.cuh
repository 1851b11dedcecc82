// Vocabulary of all kernels: integers, dtypes, the macros that an emulated GPU redefines.
#pragma once

#include "abi.h"

#ifndef TILEWISE_FAKE_CUDA
// A kernel takes one struct by value. kThreads is the block size of the family, kBlocks how many share an SM.
#define TW_KERNEL(name, Params, p) \
    extern "C" __global__ void __launch_bounds__(kThreads, kBlocks) name(const __grid_constant__ Params p)
// Aligned as TMA and wgmma want tiles that are swizzled over 128 bytes.
#define TW_DYNAMIC_SHARED(name) extern __shared__ __align__(1024) unsigned char name[]
#endif
#define TW_DEVICE static __device__ __forceinline__

namespace tilewise {

using abi::Int;
using Word = unsigned int;
using Byte = unsigned char;

enum DType : int { kNone, kF64, kF32, kF16, kBF16, kI64, kI32, kI16, kI8, kU8, kBool, kU32 };

template <class A, class B>
struct SameType {
    static constexpr bool value = false;
};
template <class A>
struct SameType<A, A> {
    static constexpr bool value = true;
};

// The same number, of which the compiler knows nothing: what is made of it is made where it stands.
TW_DEVICE int as_unknown(int x) {
#ifndef TILEWISE_FAKE_CUDA
    asm volatile("" : "+r"(x));
#endif
    return x;
}

// A barrier for the `threads` of a block, at which its warps may stand at different places of the code: __syncthreads, and
// bar.sync too, promise that all are at one.
TW_DEVICE void await_block(int threads) {
#ifdef TILEWISE_FAKE_CUDA
    tw_barrier_sync(1, threads);
#else
    asm volatile("barrier.sync 1, %0;" ::"r"(threads) : "memory");
#endif
}

TW_DEVICE Int minimum(Int a, Int b) { return a < b ? a : b; }
TW_DEVICE Int maximum(Int a, Int b) { return a > b ? a : b; }
TW_DEVICE Int clamp(Int x, Int low, Int high) { return x < low ? low : x > high ? high : x; }
TW_DEVICE Int floor_div(Int a, Int b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }
// Of numbers that are not negative. Most have 32 bits, and a division of 64 takes hundreds of cycles.
TW_DEVICE Int quotient(Int a, Int b) { return (a | b) >> 31 == 0 ? static_cast<Word>(a) / static_cast<Word>(b) : a / b; }
TW_DEVICE Int remainder(Int a, Int b) { return a - quotient(a, b) * b; }
TW_DEVICE Int ceil_div(Int a, Int b) { return quotient(a + b - 1, b); }

// ---------------------------------------------------------------------------------------------------------------------
// Floats

#ifdef TILEWISE_FAKE_CUDA
TW_DEVICE float half_to_float(unsigned short bits) { return tw_half_to_float(bits); }
TW_DEVICE unsigned short float_to_half(float x) { return tw_float_to_half(x); }
#else
TW_DEVICE float half_to_float(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
TW_DEVICE unsigned short float_to_half(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
#endif
TW_DEVICE float bfloat_to_float(unsigned short bits) { return __uint_as_float(Word{bits} << 16); }
TW_DEVICE unsigned short float_to_bfloat(float x) {  // to nearest even, NaN stays NaN
    const Word bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<unsigned short>(bits >> 16 | 0x40u);
    return static_cast<unsigned short>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// How a float dtype is stored, and element access in the precision of a computation.
template <int kDType>
struct Float;
template <>
struct Float<kF64> {
    using Stored = double;
    template <class Real>
    TW_DEVICE Real load(double x) {
        return static_cast<Real>(x);
    }
    template <class Real>
    TW_DEVICE double store(Real x) {
        return x;
    }
};
template <>
struct Float<kF32> {
    using Stored = float;
    template <class Real>
    TW_DEVICE Real load(float x) {
        return x;
    }
    template <class Real>
    TW_DEVICE float store(Real x) {
        return static_cast<float>(x);
    }
};
template <>
struct Float<kF16> {
    using Stored = unsigned short;
    template <class Real>
    TW_DEVICE Real load(unsigned short x) {
        return half_to_float(x);
    }
    template <class Real>
    TW_DEVICE unsigned short store(Real x) {
        return float_to_half(static_cast<float>(x));
    }
};
template <>
struct Float<kBF16> {
    using Stored = unsigned short;
    template <class Real>
    TW_DEVICE Real load(unsigned short x) {
        return bfloat_to_float(x);
    }
    template <class Real>
    TW_DEVICE unsigned short store(Real x) {
        return float_to_bfloat(static_cast<float>(x));
    }
};

template <int kDType, class Real>
TW_DEVICE Real load_float(const void* data, Int offset) {
    return Float<kDType>::template load<Real>(static_cast<const typename Float<kDType>::Stored*>(data)[offset]);
}
template <int kDType, class Real>
TW_DEVICE void store_float(void* data, Int offset, Real x) {
    static_cast<typename Float<kDType>::Stored*>(data)[offset] = Float<kDType>::template store<Real>(x);
}

// For dtypes that are not worth a kernel of their own: bias, slopes, sinks.
template <class Real>
TW_DEVICE Real load_any(const void* data, Int dtype, Int offset) {
    switch (dtype) {
        case kF64: return load_float<kF64, Real>(data, offset);
        case kF32: return load_float<kF32, Real>(data, offset);
        case kF16: return load_float<kF16, Real>(data, offset);
        default: return load_float<kBF16, Real>(data, offset);
    }
}
template <class Real>
TW_DEVICE void store_any(void* data, Int dtype, Int offset, Real x) {
    switch (dtype) {
        case kF64: return store_float<kF64, Real>(data, offset, x);
        case kF32: return store_float<kF32, Real>(data, offset, x);
        case kF16: return store_float<kF16, Real>(data, offset, x);
        default: return store_float<kBF16, Real>(data, offset, x);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Integers and bools

TW_DEVICE Int load_integer(const void* data, Int dtype, Int offset) {
    switch (dtype) {
        case kI64: return static_cast<const Int*>(data)[offset];
        case kI32: return static_cast<const int*>(data)[offset];
        case kI16: return static_cast<const short*>(data)[offset];
        case kI8: return static_cast<const signed char*>(data)[offset];
        case kU32: return static_cast<const Word*>(data)[offset];
        case kBool: return static_cast<const Byte*>(data)[offset] != 0;
        default: return static_cast<const Byte*>(data)[offset];
    }
}

TW_DEVICE Int load_index(const abi::Index& index, Int n) {
    return index.is_64_bit ? static_cast<const Int*>(index.data)[n * index.stride]
                           : static_cast<const int*>(index.data)[n * index.stride];
}

// ---------------------------------------------------------------------------------------------------------------------
// Exact functions by precision. No fast-math variants: fp32 is true fp32.

TW_DEVICE float exponential(float x) { return expf(x); }
TW_DEVICE double exponential(double x) { return exp(x); }
TW_DEVICE float logarithm(float x) { return logf(x); }
TW_DEVICE double logarithm(double x) { return log(x); }
TW_DEVICE float hyperbolic_tangent(float x) { return tanhf(x); }
TW_DEVICE double hyperbolic_tangent(double x) { return tanh(x); }
TW_DEVICE float absolute(float x) { return fabsf(x); }
TW_DEVICE double absolute(double x) { return fabs(x); }
TW_DEVICE float larger(float a, float b) { return fmaxf(a, b); }  // of a NaN and a number, the number
TW_DEVICE double larger(double a, double b) { return fmax(a, b); }

template <class Real>
struct Limits;
template <>
struct Limits<float> {
    TW_DEVICE float infinity() { return __uint_as_float(0x7f800000u); }
};
template <>
struct Limits<double> {
    TW_DEVICE double infinity() { return __longlong_as_double(0x7ff0000000000000ll); }
};

// ---------------------------------------------------------------------------------------------------------------------
// Where a kernel is: one sequence and one query head

struct Site {
    Int b, h, head_kv;
    Int q_row0, q_len, kv_row0, kv_len;
    Int q_offset;          // position of query 0
    Int q_token, kv_token;  // index of query 0 and key 0 on the token axis of mask arrays
};

TW_DEVICE Site make_site(const abi::Problem& p, const abi::Sequence* sequences, Int b, Int h) {
    Site site{b, h, quotient(h, maximum(quotient(p.num_heads_q, p.num_heads_kv), 1)), 0, p.q_rows, 0, p.kv_rows, 0, 0, 0};
    if (sequences) {
        const abi::Sequence& s = sequences[b];
        site.b = s.b;
        site.q_row0 = s.q_row0, site.q_len = s.q_len, site.kv_row0 = s.kv_row0, site.kv_len = s.kv_len;
        site.q_offset = s.q_offset;
        if (p.packed_q) site.q_token = s.q_row0;
        if (p.packed_kv) site.kv_token = s.kv_first_row;
    } else {
        // tilewise_offset_mode without arrays: bottom right, top left, a value
        site.q_offset = p.q_offset_mode == 0 ? p.kv_rows - p.q_rows : p.q_offset_mode == 2 ? p.q_offset_value : 0;
    }
    return site;
}
TW_DEVICE Site make_site(const abi::Problem& p, Int b, Int h) { return make_site(p, p.sequences, b, h); }

// Tile number n of one head, counted over all sequences: which sequence, and which row it starts at. b < 0: no such.
struct Place {
    Int b, row;
};
TW_DEVICE Place place_of(const abi::Problem& p, Int n, bool query_side) {
    const Int tile = query_side ? p.q_tile : p.kv_tile;
    if (!p.sequences) {
        const Int tiles = ceil_div(query_side ? p.q_rows : p.kv_rows, tile);
        return {quotient(n, tiles), remainder(n, tiles) * tile};
    }
    const auto before = [&](Int b) {
        return query_side ? p.sequences[b].q_tiles_before : p.sequences[b].kv_tiles_before;
    };
    if (n >= before(p.batch)) return {-1, 0};
    Int low = 0, high = p.batch;  // before(low) <= n < before(high)
    while (high - low > 1) {
        const Int middle = (low + high) / 2;
        (before(middle) <= n ? low : high) = middle;
    }
    return {low, (n - before(low)) * tile};
}

TW_DEVICE Int batch_of(Int packed, Int b) { return packed ? 0 : b; }  // batch index into a tensor's memory

// ---------------------------------------------------------------------------------------------------------------------
// Dropout: Philox4x32 with 7 rounds, as docs/formula.md defines it

struct Philox {
    Word key0, key1, counter0, counter1;

    TW_DEVICE Philox make(const abi::Problem& p, const Site& site) {
        Int seed = p.seed, offset = p.offset;
        if (p.seed_offset.data) seed = load_index(p.seed_offset, 0), offset = load_index(p.seed_offset, 1);
        const unsigned long long s = static_cast<unsigned long long>(seed), o = static_cast<unsigned long long>(offset);
        return {static_cast<Word>(s), static_cast<Word>(s >> 32) ^ static_cast<Word>(o >> 32), static_cast<Word>(o),
                static_cast<Word>(site.b * p.num_heads_q + site.h)};
    }

    // What one call of Philox decides: rows i and i ^ 8, keys j, j ^ 8, j ^ 16 and j ^ 24.
    struct Draw {
        Word words[4];
        __device__ __forceinline__ bool keep(int row_bit3, int key_bit4, int key_bit3, Word threshold) const {
            const Word word = row_bit3 ? (key_bit4 ? words[3] : words[2]) : (key_bit4 ? words[1] : words[0]);
            return (word >> 16 * key_bit3 & 0xffffu) >= threshold;
        }
    };
    __device__ __forceinline__ Draw draw(Int i, Int j) const {
        Word c0 = counter0, c1 = counter1, c2 = static_cast<Word>(i) & ~8u, c3 = static_cast<Word>(j) & ~24u;
        Word k0 = key0, k1 = key1;
#pragma unroll
        for (int round = 0; round < 7; ++round) {
            const Word low0 = 0xD2511F53u * c0, high0 = __umulhi(0xD2511F53u, c0);
            const Word low1 = 0xCD9E8D57u * c2, high1 = __umulhi(0xCD9E8D57u, c2);
            c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        return {{c0, c1, c2, c3}};
    }
    __device__ __forceinline__ bool keep(Int i, Int j, Word threshold) const {
        return draw(i, j).keep(i >> 3 & 1, j >> 4 & 1, j >> 3 & 1, threshold);
    }
};

}  // namespace tilewise
