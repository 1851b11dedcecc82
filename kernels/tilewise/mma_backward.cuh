// What the backward pass on tensor cores needs beside mma.cuh: tiles that are cleaned, sums in global memory, and turns.
//
// A tile of the sums of dQ lies in the order in which threads hold it: fragment (m, n) of 16 rows and 8 columns, m rows
// first, is 128 numbers; kVectorAdd says whether the four of a thread lie side by side or the 32 of an element.
#pragma once

#include "mma.cuh"

namespace tilewise {

template <int kValue>
struct Number {
    static constexpr int value = kValue;
};

template <int kRows, int kColumns>
TW_DEVICE void fill(float (&x)[kRows][kColumns][4], const float value) {
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
#pragma unroll
            for (int e = 0; e < 4; ++e) x[m][n][e] = value;
        }
    }
}

// Two numbers of kDTypeQ, 0 in place of those that are not finite: 0 times them would be NaN.
TW_DEVICE Word only_finite(Word x) {
    constexpr Word kExponent = kDTypeQ == kBF16 ? 0x7f807f80u : 0x7c007c00u, kLast = kDTypeQ == kBF16 ? 0x00800080u : 0x04000400u;
    const Word above = ((x & kExponent) + kLast) & 0x80008000u;
    return x & ~((above >> 15) * 0xffffu);
}

template <int kRows, int kWidth>
TW_DEVICE void keep_finite(Tile<kRows, kWidth>& tile) {
    Word* const words = reinterpret_cast<Word*>(tile.numbers);
#pragma unroll 1
    for (int n = threadIdx.x; n < kRows * tile.kPitch / 2; n += kThreads) words[n] = only_finite(words[n]);
}

// kRows rows of kWidth numbers from global memory; zero beyond `count` rows and `dims` numbers.
template <int kWidth, int kRows>
TW_DEVICE void copy_rows(Tile<kRows, kWidth>& to, const Half* from, Int row, Int dim, int count, int dims) {
    constexpr int kChunks = kWidth / 8;
    if constexpr (kAligned && kThreads % kChunks == 0 && kRows % (kThreads / kChunks) == 0) {  // a thread stays in its columns
        if (count >= kRows && dims >= kWidth) {
            constexpr int kStep = kThreads / kChunks;
            const int c = static_cast<int>(threadIdx.x) % kChunks * 8, r = static_cast<int>(threadIdx.x) / kChunks;
            from += r * row + c;
#pragma unroll
            for (int n = 0; n < kRows / kStep; ++n, from += kStep * row) copy_async(to.at(r + n * kStep, c), from);
            return;
        }
    }
#pragma unroll 2
    for (int n = threadIdx.x; n < kRows * kChunks; n += kThreads) {
        const int r = n / kChunks, c = n % kChunks * 8;
        copy_chunk(to.at(r, c), from + r * row + c * dim, dim, r < count ? dims - c : 0);
    }
}

#if defined(TILEWISE_FAKE_CUDA) || __CUDA_ARCH__ >= 900
constexpr bool kVectorAdd = true;  // as in bwd_mma_finish.cu
#else
constexpr bool kVectorAdd = false;
#endif

// Adds a fragment to its 128 sums.
TW_DEVICE void add_fragment(float* sums, const float (&x)[4]) {
#if !defined(TILEWISE_FAKE_CUDA) && __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(sums + 4 * lane_id()), "f"(x[0]),
                 "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
#else
#pragma unroll
    for (int e = 0; e < 4; ++e) atomicAdd(sums + (kVectorAdd ? 4 * lane_id() + e : 32 * e + lane_id()), x[e]);
#endif
}

// For one thread of a block.
TW_DEVICE void wait_for(int* turns, int mine) {
#ifdef TILEWISE_FAKE_CUDA
    while (tw_load_acquire(turns) != mine) {}
#else
    int now;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turns) : "memory");
    } while (now != mine);
#endif
}

// What dropout keeps of a thread's scores, kRows x kKeys fragments.
template <int kRows, int kKeys>
struct KeepBits {
    Word words[kDropout ? (kRows * kKeys * 4 + 31) / 32 : 1];

    TW_DEVICE constexpr int element_of(int m, int n, int e) { return (m * kKeys + n) * 4 + e; }
    __device__ __forceinline__ bool operator[](int e) const { return !kDropout || (words[e / 32] >> e % 32 & 1u); }

    // i, j: of the first element. One draw serves the rows g, g + 8 and four fragments of keys.
    TW_DEVICE KeepBits make(const abi::Problem& p, const Site& site, int i, int j) {
        KeepBits keep{};
        if constexpr (kDropout) {
            const Philox philox = Philox::make(p, site);
            const Word threshold = static_cast<Word>(p.dropout_threshold);
#pragma unroll
            for (int m = 0; m < kRows; ++m) {
#pragma unroll
                for (int n = 0; n < kKeys; n += 4) {
#pragma unroll
                    for (int c = 0; c < 2; ++c) {
                        const auto draw = philox.draw(i + 16 * m, j + 8 * n + c);
#pragma unroll
                        for (int half = 0; half < 2; ++half) {
#pragma unroll
                            for (int f = 0; f < 4 && n + f < kKeys; ++f) {
                                const int e = element_of(m, n + f, 2 * half + c), key = j + 8 * (n + f) + c;
                                if (draw.keep(half, key >> 4 & 1, key >> 3 & 1, threshold)) keep.words[e / 32] |= 1u << e % 32;
                            }
                        }
                    }
                }
            }
        }
        return keep;
    }
};

}  // namespace tilewise
