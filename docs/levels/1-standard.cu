// Level 1: standard attention, a kernel for each step of the textbook.
//
//     S = Q K^T / sqrt(d)           scores
//     P = softmax(S), row by row    softmax
//     O = P V                       output
//
// S and P are seqlen x seqlen numbers per head, and they live in memory: written twice, read twice. The levels that
// follow exist to avoid that. scratch: [heads, seqlen, seqlen], first S, then P.

constexpr int kThreads = 128, kSoftmaxThreads = 256;

#include "tile.cuh"

// A block multiplies 64 queries with 64 keys. grid: tiles of keys, tiles of queries, heads.
extern "C" __global__ void __launch_bounds__(kThreads) scores(Problem p) {
    __shared__ __align__(16) float q[kDim * kTile], k[kDim * kTile];  // transposed: a step of the product is one d
    const long long first = static_cast<long long>(blockIdx.z) * p.seqlen;
    const int i0 = blockIdx.y * kTile, j0 = blockIdx.x * kTile;
    load_transposed(q, p.q + (first + i0) * kDim);
    load_transposed(k, p.k + (first + j0) * kDim);
    __syncthreads();

    const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;  // four of each; four more rows 32 further down
    float s[8][4] = {};
    multiply<32, 64>(s, q + row, k + column, kDim);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float* const to = p.scratch + (first + i0 + row + i / 4 * 32 + i % 4) * p.seqlen + j0 + column;
        four(to) = kScale * four(s[i]);
    }
}

// A block works on one row: its maximum, its sum of exponentials, then P in the place of S. It reads S three times, but
// from memory only once, since a row stays in the cache. grid: rows, heads.
extern "C" __global__ void __launch_bounds__(kSoftmaxThreads) softmax(Problem p) {
    __shared__ float shared[kSoftmaxThreads];
    const long long row = static_cast<long long>(blockIdx.y) * p.seqlen + blockIdx.x;
    float* const s = p.scratch + row * p.seqlen;
    const int t = threadIdx.x;
    const auto of_all_threads = [&](float x, auto combine) {  // a tree
        shared[t] = x;
        for (int n = kSoftmaxThreads / 2; n > 0; n /= 2) {
            __syncthreads();
            if (t < n) shared[t] = combine(shared[t], shared[t + n]);
        }
        __syncthreads();
        x = shared[0];
        __syncthreads();
        return x;
    };
    // The maximum is subtracted so that no exponential overflows; it cancels in the quotient.
    float highest = kLowest, sum = 0;
    for (int j = t; j < p.seqlen; j += kSoftmaxThreads) highest = fmaxf(highest, s[j]);
    highest = of_all_threads(highest, [](float a, float b) { return fmaxf(a, b); });
    for (int j = t; j < p.seqlen; j += kSoftmaxThreads) sum += exp2f(s[j] - highest);
    sum = of_all_threads(sum, [](float a, float b) { return a + b; });
    const float factor = 1 / sum;
    for (int j = t; j < p.seqlen; j += kSoftmaxThreads) s[j] = exp2f(s[j] - highest) * factor;
    if (t == 0) p.lse[row] = (highest + log2f(sum)) * kLn2;
}

// A block multiplies 64 rows of P with all of V, 64 keys at a time. grid: tiles of queries, heads.
extern "C" __global__ void __launch_bounds__(kThreads) output(Problem p) {
    __shared__ __align__(16) float weights[kTile * kTile], v[kTile * kDim];  // P transposed: a step is one key
    const long long first = static_cast<long long>(blockIdx.y) * p.seqlen;
    const int i0 = blockIdx.x * kTile, row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
    float o[8][4] = {};
    for (int j0 = 0; j0 < p.seqlen; j0 += kTile) {
#pragma unroll 4
        for (int part = 0; part < kTile * kTile / 4; part += kThreads) {
            const int n = part + threadIdx.x, i = n % kTile, j = n / kTile * 4;
            const float4 x = four(p.scratch + (first + i0 + i) * p.seqlen + j0 + j);
            float* const to = weights + j * kTile + i;
            to[0] = x.x, to[kTile] = x.y, to[2 * kTile] = x.z, to[3 * kTile] = x.w;
        }
        load(v, p.v + (first + j0) * kDim);
        __syncthreads();
        multiply<32, 64>(o, weights + row, v + column, kTile);
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) store(p.o + (first + i0 + row + i / 4 * 32 + i % 4) * kDim + column, four(o[i]));
}
