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

    // Whether some row of the warp has a new reference; then o is to be multiplied by the factors of its rows.
    __device__ __forceinline__ bool raise_reference(const Scores& s, float (&factors)[kRowsPerThread]) {
        float highest[kRowsPerThread];
        const float headroom = kHeadroom / scale;
        bool grown = false;
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            highest[r] = larger(s[r / 2][0][r % 2 * 2], s[r / 2][0][r % 2 * 2 + 1]);
#pragma unroll
            for (int n = 1; n < kTileKV / 8; ++n) {
                highest[r] = larger(highest[r], larger(s[r / 2][n][r % 2 * 2], s[r / 2][n][r % 2 * 2 + 1]));
            }
            grown |= highest[r] > reference[r] + headroom;
        }
        if (!__any_sync(0xffffffffu, grown)) return false;
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
            highest[r] = larger(highest[r], __shfl_xor_sync(0xffffffffu, highest[r], 1));
            highest[r] = larger(highest[r], __shfl_xor_sync(0xffffffffu, highest[r], 2));
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
    static __device__ __forceinline__ void rescale(Output& o, const float (&factors)[kRowsPerThread]) {
#pragma unroll
        for (int r = 0; r < kRowsPerThread; ++r) {
#pragma unroll
            for (int n = 0; n < kColumns / 8; ++n) o[r / 2][n][r % 2 * 2] *= factors[r], o[r / 2][n][r % 2 * 2 + 1] *= factors[r];
        }
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

    __device__ __forceinline__ float row_sum(int r) const {
        const float two = sum[r] + __shfl_xor_sync(0xffffffffu, sum[r], 1);
        return two + __shfl_xor_sync(0xffffffffu, two, 2);
    }
};

}  // namespace tilewise
