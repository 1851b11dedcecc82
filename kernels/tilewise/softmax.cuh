// Online softmax of the forward kernels (Milakov and Gimelshein 2018), with a reference in place of the running maximum: it
// follows only when scores have grown past it by kHeadroom powers of two, so that o is rescaled a few times per row and not
// once per tile.
//
// spec.cuh comes before this file: kMTiles, kTileKV, kColumns.
#pragma once

#include "mma.cuh"

namespace tilewise {

constexpr int kRowsPerThread = 2 * kMTiles;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kHeadroom = 8;

using Scores = float[kMTiles][kTileKV / 8][4];  // accumulator fragments: 16 kMTiles rows of a warp
using Output = float[kMTiles][kColumns / 8][4];

TW_DEVICE float highest_of(const Scores& s, int r) {  // of row r, in this thread's columns
    float highest = larger(s[r / 2][0][r % 2 * 2], s[r / 2][0][r % 2 * 2 + 1]);
#pragma unroll
    for (int n = 1; n < kTileKV / 8; ++n) highest = larger(highest, larger(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
    return highest;
}
// Of a row, from what the four threads that share it have.
TW_DEVICE float highest_in_row(float highest) {
    highest = larger(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
    return larger(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
}
TW_DEVICE float row_sum(float sum) {
    const float two = sum + __shfl_xor_sync(0xffffffffu, sum, 1);
    return two + __shfl_xor_sync(0xffffffffu, two, 2);
}

struct Shifts {  // what exponents are shifted by, per row
    float of[kRowsPerThread];
};

struct Softmax {
    float scale;                         // of what S holds after finish_scores, to powers of two
    float reference[kRowsPerThread];     // r, before that scale
    float sum[kRowsPerThread];           // l, of this thread's columns

    __device__ __forceinline__ explicit Softmax(float s) : scale(s) {
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) reference[r] = -Limits<float>::infinity(), sum[r] = 0;
    }

    __device__ __forceinline__ float power(int r) const { return reference[r] * scale; }

    // A row's first tile.
    __device__ __forceinline__ void start(const Scores& s) {
        *this = Softmax(scale);
        float factors[kRowsPerThread];
        follow(s, factors);
    }
    // Any tile. Whether some row of the warp has a new reference; then o is to be multiplied by the factors of its rows.
    __device__ __forceinline__ bool follow(const Scores& s, float (&factors)[kRowsPerThread]) {
        float highest[kRowsPerThread];
        const float headroom = kHeadroom / scale;
        bool grown = false;
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            highest[r] = highest_of(s, r);
            grown |= highest[r] > reference[r] + headroom;
        }
        if (!__any_sync(0xffffffffu, grown)) return false;
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            highest[r] = highest_in_row(highest[r]);
            // A row whose own scores did not grow stays as it is: its bits do not depend on its neighbours.
            factors[r] = 1;
            if (highest[r] > reference[r] + headroom) {
                factors[r] = exp2_fast((reference[r] - highest[r]) * scale);
                reference[r] = highest[r];
            }
            sum[r] *= factors[r];
        }
        return true;
    }

    __device__ __forceinline__ Shifts shifts() const {
        Shifts all;
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            // Nothing seen yet: any finite number serves, all exponentials are 0.
            all.of[r] = reference[r] == -Limits<float>::infinity() ? 0.0f : reference[r] * scale;
        }
        return all;
    }

    // A fragment of rows 2 m and 2 m + 1.
    __device__ __forceinline__ void exponentiate(float (&s)[4], const Shifts& shifts, int m) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[e] = exp2_fast(s[e] * scale - shifts.of[2 * m + e / 2]);
        sum[2 * m] += s[0] + s[1], sum[2 * m + 1] += s[2] + s[3];
    }
    __device__ __forceinline__ void exponentiate(Scores& s) {
        const Shifts by = shifts();
#pragma unroll
        for (int n = 0; n < kMTiles * (kTileKV / 8); ++n) exponentiate(s[n / (kTileKV / 8)][n % (kTileKV / 8)], by, n / (kTileKV / 8));
    }
};

TW_DEVICE void rescale(Output& o, const float (&factors)[kRowsPerThread]) {
#pragma unroll
    for (int r = 0; r < kRowsPerThread; ++r) {
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) o[r / 2][n][r % 2 * 2] *= factors[r], o[r / 2][n][r % 2 * 2 + 1] *= factors[r];
    }
}

// The same without a maximum, but for a row's first tile. The reference lies kHeadroom above the largest score when it is
// chosen, so that exponents are negative until scores have grown past it: their signs tell, two of which cost an instruction
// where two maxima cost twice as many. Exponents are at hand when the reference is raised, so that scores need not be.
struct ShiftedSoftmax {
    float scale;
    float reference[kRowsPerThread];  // r, in powers of two; -inf: nothing seen yet
    float sum[kRowsPerThread];        // l, of this thread's columns

    __device__ __forceinline__ explicit ShiftedSoftmax(float s) : scale(s) {}
    __device__ __forceinline__ float power(int r) const { return reference[r]; }

    // A row's first tile: scores times scale become exponents.
    __device__ __forceinline__ void start(Scores& s) {
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            const float highest = highest_in_row(highest_of(s, r)) * scale;
            reference[r] = highest == -Limits<float>::infinity() ? highest : highest + kHeadroom, sum[r] = 0;
        }
        shift(s);
    }
    // Any later one. Whether some row of the warp has a new reference; then o is to be multiplied by the factors of its rows.
    __device__ __forceinline__ bool follow(Scores& s, float (&factors)[kRowsPerThread]) {
        const Word signs = shift(s);
        bool grown = static_cast<int>(signs) >= 0;
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) grown |= reference[r] == -Limits<float>::infinity();
        if (!__any_sync(0xffffffffu, grown)) return false;
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            const float highest = highest_in_row(highest_of(s, r));
            const bool is_first = reference[r] == -Limits<float>::infinity();
            // A row whose own scores did not grow stays as it is: its bits do not depend on its neighbours.
            factors[r] = 1;
            if (highest > 0 || (is_first && highest > -Limits<float>::infinity())) {
                const float by = highest + kHeadroom;
                factors[r] = is_first ? 0 : exp2_fast(-by);
                reference[r] = is_first ? by : reference[r] + by;
#pragma unroll
                for (int n = 0; n < kTileKV / 8; ++n) s[r / 2][n][r % 2 * 2] -= by, s[r / 2][n][r % 2 * 2 + 1] -= by;
            }
            sum[r] *= factors[r];
        }
        return true;
    }
    // Exponents become P.
    __device__ __forceinline__ void exponentiate(Scores& s) {
#pragma unroll
        for (int n = 0; n < kMTiles * (kTileKV / 8); ++n) {
            float(&four)[4] = s[n / (kTileKV / 8)][n % (kTileKV / 8)];
#pragma unroll
            for (int e = 0; e < 4; ++e) four[e] = exp2_fast(four[e]);
            const int m = n / (kTileKV / 8);
            sum[2 * m] += four[0] + four[1], sum[2 * m + 1] += four[2] + four[3];
        }
    }

private:
    // The sign of what is returned: that of all exponents is negative.
    __device__ __forceinline__ Word shift(Scores& s) {
        Word all = ~0u;
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            Word signs = ~0u;  // a chain for each row
            // Nothing seen yet: any finite number serves.
            const float by = reference[r] == -Limits<float>::infinity() ? 0.0f : reference[r];
#pragma unroll
            for (int n = 0; n < kTileKV / 8; ++n) {
                float &left = s[r / 2][n][r % 2 * 2], &right = s[r / 2][n][r % 2 * 2 + 1];
                left = left * scale - by, right = right * scale - by;
                signs &= __float_as_uint(left) & __float_as_uint(right);
            }
            all &= signs;
        }
        return all;
    }
};

template <bool kSigns>  // which of both
struct RowSoftmaxOf {
    using Type = ShiftedSoftmax;
};
template <>
struct RowSoftmaxOf<false> {
    using Type = Softmax;
};

}  // namespace tilewise
