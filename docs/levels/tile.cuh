// What levels 1 to 5 have in common, so that each of them shows nothing but its idea: the problem, bfloat16, how a tile
// gets into shared memory, and how two tiles are multiplied. The including kernel says how many kThreads a block has.
#pragma once

using Bfloat16 = unsigned short;  // its bits: the upper half of a float's

constexpr int kDim = 64;   // head_dim
constexpr int kTile = 64;  // queries, or keys, of a tile; a tile is 64 x 64 numbers, a row after the other
constexpr float kLog2E = 1.44269504f, kLn2 = 0.69314718f;
constexpr float kLowest = -3e38f;  // below every score, and exp of it is 0: a maximum before there is any
constexpr float kScale = 0.125f * kLog2E;  // 1 / sqrt(kDim); and log2(e), so that exp(x) is exp2(kLog2E x), one instruction

struct Problem {
    const Bfloat16 *q, *k, *v;  // [heads, seqlen, kDim]; batch and heads are one axis, since no head looks at another
    Bfloat16* o;                // the same
    float* lse;                 // [heads, seqlen]: log of the sum of exp(score); a backward pass would need it
    float* scratch;             // each level says for what
    int seqlen;                 // a multiple of 128, so that no tile has an edge
};

__device__ float low(unsigned two) { return __uint_as_float(two << 16); }
__device__ float high(unsigned two) { return __uint_as_float(two & 0xffff0000u); }
__device__ unsigned bfloat16(float x) {  // to the nearest, ties to even
    const unsigned bits = __float_as_uint(x);
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

__device__ float4 operator*(float a, float4 x) { return make_float4(a * x.x, a * x.y, a * x.z, a * x.w); }
__device__ float4 operator+(float4 x, float4 y) { return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w); }
__device__ float4& four(float* x) { return *reinterpret_cast<float4*>(x); }  // x[0] ... x[3], in one access
__device__ float4 four(const float* x) { return *reinterpret_cast<const float4*>(x); }
__device__ void store(Bfloat16* to, float4 x) {
    *reinterpret_cast<uint2*>(to) =
        make_uint2(bfloat16(x.x) | bfloat16(x.y) << 16, bfloat16(x.z) | bfloat16(x.w) << 16);
}

// kRows rows of a head to shared memory, as float.
template <int kRows = kTile>
__device__ void load(float* to, const Bfloat16* from) {
#pragma unroll 4
    for (int part = 0; part < kRows * kDim / 4; part += kThreads) {
        const int n = part + threadIdx.x;
        const uint2 x = reinterpret_cast<const uint2*>(from)[n];
        four(to + 4 * n) = make_float4(low(x.x), high(x.x), low(x.y), high(x.y));
    }
}
// The same, transposed: to[d][row].
template <int kRows = kTile>
__device__ void load_transposed(float* to, const Bfloat16* from) {
#pragma unroll 4
    for (int part = 0; part < kRows * kDim / 4; part += kThreads) {
        const int n = part + threadIdx.x, row = n % kRows, d = n / kRows * 4;
        const uint2 x = *reinterpret_cast<const uint2*>(from + row * kDim + d);
        float* const column = to + d * kRows + row;
        column[0] = low(x.x), column[kRows] = high(x.x), column[2 * kRows] = low(x.y), column[3 * kRows] = high(x.y);
    }
}

// acc += A B, as far as one thread has it: kRows rows and kColumns columns, in fours that are kRowStep and kColumnStep
// apart. Step n of the sum needs one number of each row of A and of each column of B. A is kept transposed, so that what
// a step needs lies side by side: from a + n kPitch on, and from b + n kTile on. For the kRows kColumns multiplications
// of a step only kRows + kColumns numbers are read, four at a time: shared memory would not keep up with less.
template <int kRowStep, int kColumnStep, int kPitch = kTile, int kRows, int kColumns>
__device__ void multiply(float (&acc)[kRows][kColumns], const float* a, const float* b, int steps) {
    constexpr int kAtOnce = 256 / (kRows * kColumns);  // steps: enough work to wait for the loads of the next ones
#pragma unroll kAtOnce
    for (int n = 0; n < steps; ++n, a += kPitch, b += kTile) {
        __align__(16) float x[kRows], y[kColumns];
#pragma unroll
        for (int i = 0; i < kRows; i += 4) four(x + i) = four(a + i / 4 * kRowStep);
#pragma unroll
        for (int j = 0; j < kColumns; j += 4) four(y + j) = four(b + j / 4 * kColumnStep);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
#pragma unroll
            for (int j = 0; j < kColumns; ++j) acc[i][j] += x[i] * y[j];
        }
    }
}
