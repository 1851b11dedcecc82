// Tensor cores as Turing and everything after it has them: mma.sync, ldmatrix, cp.async, and 16-bit tiles in shared
// memory. A fragment is what one thread of a warp holds of a 16 x 16 (A), 16 x 8 (B) or 16 x 8 (accumulator) matrix, as
// the PTX ISA lays it out: with g = lane / 4 and t = lane % 4, accumulator element 2 e + c lies in row g + 8 e and
// column 2 t + c.
//
// spec.cuh comes before this file: kThreads, kDTypeQ and whether the tensors take 16-byte copies.
#pragma once

#include "base.cuh"

namespace tilewise {

using Half = unsigned short;  // bits of fp16 or bf16

struct __align__(16) Chunk {
    Word words[4];
};

constexpr float kLog2E = 1.4426950408889634f;

// Bits [0, n) of a word; n may be below 0 and is at most 31.
TW_DEVICE Word bits_below(int n) { return n <= 0 ? 0u : (1u << n) - 1u; }

TW_DEVICE int lane_id() { return static_cast<int>(threadIdx.x) % 32; }
TW_DEVICE int warp_id() { return static_cast<int>(threadIdx.x) / 32; }

// ---------------------------------------------------------------------------------------------------------------------
// Instructions

#ifdef TILEWISE_FAKE_CUDA
TW_DEVICE float exp2_fast(float x) { return exp2f(x); }
TW_DEVICE float log2_fast(float x) { return log2f(x); }
TW_DEVICE float reciprocal_fast(float x) { return 1.0f / x; }
TW_DEVICE Word pack(float low, float high) {
    return kDTypeQ == kBF16 ? tw_float_to_bfloat16(low) | Word(tw_float_to_bfloat16(high)) << 16
                            : tw_float_to_half(low) | Word(tw_float_to_half(high)) << 16;
}
TW_DEVICE void mma(float (&d)[4], const Word (&a)[4], Word b0, Word b1) {
    const Word b[2] = {b0, b1};
    if constexpr (kDTypeQ == kBF16) tw_mma_m16n8k16_bf16(d, a, b, d);
    else tw_mma_m16n8k16_f16(d, a, b, d);
}
using SharedAddress = const Half*;
TW_DEVICE SharedAddress shared_address(const Half* p) { return p; }
TW_DEVICE void load_matrices(Word (&to)[4], SharedAddress row) { tw_ldmatrix<4>(to, row); }
TW_DEVICE void load_matrices_transposed(Word (&to)[4], SharedAddress row) { tw_ldmatrix<4, true>(to, row); }
TW_DEVICE void copy_async(Half* to, const Half* from) { tw_cp_async<16>(to, from); }
TW_DEVICE void copy_async(Half* to, const Half* from, int bytes) { tw_cp_async<16>(to, from, bytes); }
template <class T>
TW_DEVICE void copy_number_async(T* to, const T* from) {
    tw_cp_async<sizeof(T)>(to, from);
}
TW_DEVICE void commit_copies() {}
template <int kLeft>
TW_DEVICE void wait_for_copies() {}
#else
// To within 2 ulp; exp2 of -inf is 0. Inputs are scores, outputs are rounded to 16 bits or summed in fp32.
TW_DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
TW_DEVICE float log2_fast(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
TW_DEVICE float reciprocal_fast(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

TW_DEVICE Word pack(float low, float high) {  // two numbers of kDTypeQ in a register
    Word bits;
#if __CUDA_ARCH__ >= 800
    if constexpr (kDTypeQ == kBF16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
#else
    bits = float_to_half(low) | Word(float_to_half(high)) << 16;
#endif
    return bits;
}

// d += a b: 16 x 8, 16 deep
TW_DEVICE void mma(float (&d)[4], const Word (&a)[4], Word b0, Word b1) {
#if __CUDA_ARCH__ >= 800
    if constexpr (kDTypeQ == kBF16) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
#else  // Turing: half as deep
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

using SharedAddress = Word;
TW_DEVICE SharedAddress shared_address(const void* p) { return static_cast<Word>(__cvta_generic_to_shared(p)); }

// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8. Thread (g, t) gets elements 2 t, 2 t + 1 of
// row g, or of column g.
TW_DEVICE void load_matrices(Word (&to)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row));
}
TW_DEVICE void load_matrices_transposed(Word (&to)[4], SharedAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row));
}

TW_DEVICE void copy_async(Half* to, const Half* from) {  // 16 bytes to shared memory
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
#else
    *reinterpret_cast<Chunk*>(to) = *reinterpret_cast<const Chunk*>(from);
#endif
}
// 16 bytes to shared memory, of which the first `bytes` are read and the rest are zero.
TW_DEVICE void copy_async(Half* to, const Half* from, int bytes) {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
                 : "memory");
#else
    Chunk chunk{};
    if (bytes == 16) {
        chunk = *reinterpret_cast<const Chunk*>(from);
    } else {
        Half* const halves = reinterpret_cast<Half*>(&chunk);
        for (int n = 0; n < 8; ++n) halves[n] = 2 * n < bytes ? from[n] : Half(0);
    }
    *reinterpret_cast<Chunk*>(to) = chunk;
#endif
}
template <class T>
TW_DEVICE void copy_number_async(T* to, const T* from) {  // 4 or 8 bytes
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared_address(to)), "l"(from), "n"(sizeof(T)) : "memory");
#else
    *to = *from;
#endif
}
TW_DEVICE void commit_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
// Until at most kLeft of this thread's latest commits are under way.
template <int kLeft>
TW_DEVICE void wait_for_copies() {
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
#endif
}
#endif

TW_DEVICE float tanh_fast(float x) { return 1 - 2 * reciprocal_fast(exp2_fast(x * 2.8853900817779268f) + 1); }

// ---------------------------------------------------------------------------------------------------------------------
// Tiles in shared memory

// kRows rows of kWidth numbers, in chunks of 16 bytes, for accesses without bank conflicts. Rows of whole 128 bytes are
// swizzled: chunk c of row r is where chunk c ^ r % 8 would be, so that the same chunk of eight rows lies in all banks, and
// 128 bytes of a row, which a copy brings at a time, in all banks too. Other rows have a chunk of padding.
template <int kRows, int kWidth, bool kSwizzle = kWidth % 64 == 0>
struct __align__(128) Tile {
    static constexpr bool kSwizzled = kSwizzle;
    static constexpr int kPitch = kSwizzle ? kWidth : kWidth + 8;

    Half numbers[kRows * kPitch];

    TW_DEVICE int index(int r, int c) { return r * kPitch + (kSwizzle ? c ^ r % 8 * 8 : c); }
    __device__ __forceinline__ Half* at(int r, int c) { return numbers + index(r, c); }
    __device__ __forceinline__ const Half* at(int r, int c) const { return numbers + index(r, c); }
};

// Rows of one head in global memory, kWidth numbers of each; beyond `count` rows and `dims` numbers all is zero. The
// threads of a block share rows in chunks of 8 numbers.
template <int kWidth>
struct TileSource {
    static constexpr int kChunks = kWidth / 8;
    static constexpr bool kEven = kThreads % kChunks == 0;  // a thread stays in its columns
    static constexpr int kStep = kEven ? kThreads / kChunks : 1;  // rows from one of its chunks to the next
    // Its rows differ from the first in other bits than threads do, as far as swizzling goes.
    static constexpr bool kRegular = kStep % 8 == 0 || 8 % kStep == 0;

    const Half* data;
    Int row, dim;  // strides
    int count, dims;

    TW_DEVICE TileSource make(const abi::Tensor& t, Int b, Int row0, Int h, Int c0, Int count, Int dims) {
        const Half* const data = static_cast<const Half*>(t.data) + b * t.batch + row0 * t.row + h * t.head + c0 * t.dim;
        return {data, t.row, t.dim, static_cast<int>(count), static_cast<int>(dims - c0)};
    }
    // Where this thread's first chunk of row 0 is.
    __device__ __forceinline__ const Half* mine() const {
        const int thread = static_cast<int>(threadIdx.x);
        return data + thread / kChunks * row + thread % kChunks * 8;
    }
    template <class Tile>
    TW_DEVICE int my_offset() {
        const int thread = static_cast<int>(threadIdx.x);
        return Tile::index(thread / kChunks, thread % kChunks * 8);
    }
};

// Starts the copy of 8 numbers of a row, from column c on.
TW_DEVICE void copy_chunk(Half* to, const Half* row, Int dim, int left) {
    if constexpr (kAligned) {
        copy_async(to, left > 0 ? row : nullptr, 2 * (left < 0 ? 0 : left > 8 ? 8 : left));
    } else {
        Chunk chunk{};
        Half* const halves = reinterpret_cast<Half*>(&chunk);
#pragma unroll
        for (int n = 0; n < 8; ++n) halves[n] = n < left ? row[n * dim] : Half(0);
        *reinterpret_cast<Chunk*>(to) = chunk;
    }
}

// kRows whole rows, kWidth wide, by all threads of the block; `at` is where this thread's first chunk is, and `offset` in
// elements where it goes.
template <int kWidth, int kRows, int kTileWidth>
TW_DEVICE void copy_whole_tile(Tile<kRows, kTileWidth>& to, int offset, const Half* at, Int row) {
    using To = Tile<kRows, kTileWidth>;
    constexpr int kStep = TileSource<kWidth>::kStep;
#pragma unroll
    for (int n = 0; n < kRows / kStep; ++n, at += kStep * row) {
        copy_async(to.numbers + n * kStep * To::kPitch + (To::kSwizzled ? offset ^ n * kStep % 8 * 8 : offset), at);
    }
}
// Whether tiles of so many rows of the source can be copied like that, as long as it has the rows.
template <int kWidth, int kRows>
TW_DEVICE bool copies_whole(const TileSource<kWidth>& from) {
    using Source = TileSource<kWidth>;
    return kAligned && Source::kEven && Source::kRegular && kRows % Source::kStep == 0 && from.dims >= kWidth;
}

// Rows [first, first + kRows) of any source.
template <int kWidth, int kRows, int kTileWidth>
TW_DEVICE void copy_tile(Tile<kRows, kTileWidth>& to, const TileSource<kWidth>& source, int first) {
    const TileSource<kWidth> from = source;
    constexpr int kChunks = kWidth / 8;
#pragma unroll 1
    for (int n = threadIdx.x; n < kRows * kChunks; n += kThreads) {
        const int r = n / kChunks, c = n % kChunks * 8;
        copy_chunk(to.at(r, c), from.data + (first + r) * from.row + c * from.dim, from.dim,
                   first + r < from.count ? from.dims - c : 0);
    }
}

// Where the lanes of a warp find rows of four 8 x 8 matrices, 16 rows and columns of a tile. What makes a thread's address
// is one number; the matrices of another row or column are a constant away from it.
template <class Tile>
class Matrices {
public:
    // Matrices in the order of an A operand, and of two B operands whose columns are the tile's rows. `row` is a multiple
    // of 8; all columns that are added to `column` differ from it in other bits.
    TW_DEVICE Matrices by_rows(const Tile& tile, int row, int column) {
        return Matrices(tile, row + lane_id() % 16, column + lane_id() / 16 * 8);
    }
    TW_DEVICE Matrices by_columns(const Tile& tile, int row, int column) {
        return Matrices(tile, row + lane_id() % 8 + lane_id() / 16 * 8, column + lane_id() / 8 % 2 * 8);
    }
    __device__ __forceinline__ void load(Word (&to)[4], int row, int column) const { load_matrices(to, at(row, column)); }
    __device__ __forceinline__ void load_transposed(Word (&to)[4], int row, int column) const {
        load_matrices_transposed(to, at(row, column));
    }

private:
#ifdef TILEWISE_FAKE_CUDA
    const Half* tile_;
    int index_;
    __device__ Matrices(const Tile& tile, int r, int c) : tile_(tile.numbers), index_(Tile::index(r, c)) {}
    __device__ const Half* at(int row, int column) const {
        return tile_ + row * Tile::kPitch + column / 64 * 64 + (Tile::kSwizzled ? index_ ^ column % 64 : index_ + column % 64);
    }
#else
    Word address_;
    __device__ __forceinline__ Matrices(const Tile& tile, int r, int c)
        : address_(shared_address(tile.numbers) + 2 * Tile::index(r, c)) {}
    __device__ __forceinline__ Word at(int row, int column) const {  // tiles start at multiples of 128 bytes
        const int constant = 2 * (row * Tile::kPitch + column / 64 * 64), within = 2 * (column % 64);
        return (Tile::kSwizzled ? address_ ^ within : address_ + within) + constant;
    }
#endif
};

}  // namespace tilewise
