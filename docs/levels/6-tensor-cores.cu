// Level 6: tensor cores. Level 5, with the products on the units that are made for them.
//
// mma.sync multiplies 16 x 16 with 16 x 8 numbers at once, in one warp. What a thread holds of each matrix, its fragment,
// is laid down by the PTX ISA: with g = lane / 4 and t = lane % 4, a 16 x 8 accumulator has in thread (g, t) the columns
// 2 t and 2 t + 1 of the rows g and g + 8. The left factor looks like two accumulators side by side: so P = exp(S - m')
// is in place for P V as it leaves the registers of S, and level 5's way through shared memory is gone.
//
// Tiles are bf16 now, as in memory. V is on its way while S is computed, the next K while P V is.
//
// scratch: none.

constexpr int kWarps = 4, kThreads = 32 * kWarps;

#include "tile.cuh"
#include "mma.cuh"

constexpr int kTileQ = 128, kRows = kTileQ / kWarps;  // queries of a block, of a warp
constexpr int kHigh = kRows / 16, kWide = kTile / 8;  // accumulators above and beside each other: of S, and of o
constexpr int kPitch = kDim + 8;  // of a tile: rows start 16 bytes apart modulo 128, so that 8 of them share no bank
constexpr bool kDivideAtEveryTile = false;  // o in its final form after each tile, as in level 2: to see what that costs

template <int kTileRows>
__device__ void copy_tile(Bfloat16 (&to)[kTileRows][kPitch], const Bfloat16* from) {
#pragma unroll
    for (int part = 0; part < kTileRows * kDim; part += kThreads * 8) {
        const int n = part + threadIdx.x * 8;
        copy_async(&to[n / kDim][n % kDim], from + n);
    }
}

// grid: tiles of queries, heads
extern "C" __global__ void __launch_bounds__(kThreads) attention(Problem p) {
    __shared__ __align__(16) Bfloat16 q[kTileQ][kPitch], k[kTile][kPitch], v[kTile][kPitch];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long first = static_cast<long long>(blockIdx.y) * p.seqlen;
    const int i0 = blockIdx.x * kTileQ;
    copy_tile(q, p.q + (first + i0) * kDim);
    copy_tile(k, p.k + first * kDim);

    unsigned queries[kDim / 16][kHigh][4];  // fragments of Q: read once, kept
    float o[kHigh][kWide][4] = {}, m[kHigh][2], l[kHigh][2] = {};  // l of a thread's own columns only, until the end
#pragma unroll
    for (int i = 0; i < kHigh; ++i) m[i][0] = m[i][1] = kLowest;

    for (int j0 = 0; j0 < p.seqlen; j0 += kTile) {
        wait_for_copies();
        __syncthreads();  // K is there, and the V before has been read
        copy_tile(v, p.v + (first + j0) * kDim);
        if (j0 == 0) {
#pragma unroll
            for (int d = 0; d < kDim / 16; ++d) {
#pragma unroll
                for (int i = 0; i < kHigh; ++i)
                    load_fragments(queries[d][i], &q[warp * kRows + i * 16 + lane % 16][d * 16 + lane / 16 * 8]);
            }
        }

        float s[kHigh][kWide][4] = {};  // S = Q K^T
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
#pragma unroll
            for (int j = 0; j < kWide; j += 2) {
                unsigned b[4];
                load_fragments(b, &k[j * 8 + lane % 8 + lane / 16 * 8][d * 16 + lane / 8 % 2 * 8]);
#pragma unroll
                for (int i = 0; i < kHigh; ++i) {
                    mma(s[i][j], queries[d][i], b[0], b[1]);
                    mma(s[i][j + 1], queries[d][i], b[2], b[3]);
                }
            }
        }
        wait_for_copies();
        __syncthreads();  // V is there, and K has been read
        if (j0 + kTile < p.seqlen) copy_tile(k, p.k + (first + j0 + kTile) * kDim);

        // m' = max(m, row maximum), P = exp(S - m'); l and o follow. The four threads of a row are neighbours.
#pragma unroll
        for (int n = 0; n < 2 * kHigh; ++n) {
            const int i = n / 2, half = n % 2;  // rows g and g + 8
            float highest = s[i][0][2 * half];
#pragma unroll
            for (int j = 0; j < kWide; ++j) highest = fmaxf(highest, fmaxf(s[i][j][2 * half], s[i][j][2 * half + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 2));
            highest = fmaxf(m[i][half], highest * kScale);
            float factor = exp2f(m[i][half] - highest), sum = 0;
            m[i][half] = highest;
#pragma unroll
            for (int j = 0; j < 2 * kWide; ++j) {
                float& x = s[i][j / 2][2 * half + j % 2];
                x = exp2f(x * kScale - highest);
                sum += x;
            }
            const float old_l = l[i][half] * factor;
            l[i][half] = old_l + sum;
            if (kDivideAtEveryTile) {
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                l[i][half] = old_l + sum;
                factor = old_l / l[i][half];
#pragma unroll
                for (int j = 0; j < 2 * kWide; ++j) s[i][j / 2][2 * half + j % 2] *= 1 / l[i][half];
            }
#pragma unroll
            for (int j = 0; j < 2 * kWide; ++j) o[i][j / 2][2 * half + j % 2] *= factor;
        }

#pragma unroll
        for (int j = 0; j < kTile / 16; ++j) {  // o += P V
            unsigned a[kHigh][4];
#pragma unroll
            for (int n = 0; n < 4 * kHigh; ++n) {
                const float(&x)[4] = s[n / 4][2 * j + n % 4 / 2];
                a[n / 4][n % 4] = n % 2 == 0 ? pack(x[0], x[1]) : pack(x[2], x[3]);
            }
#pragma unroll
            for (int d = 0; d < kWide; d += 2) {
                unsigned b[4];
                load_fragments_transposed(b, &v[j * 16 + lane % 16][d * 8 + lane / 16 * 8]);
#pragma unroll
                for (int i = 0; i < kHigh; ++i) {
                    mma(o[i][d], a[i], b[0], b[1]);
                    mma(o[i][d + 1], a[i], b[2], b[3]);
                }
            }
        }
    }

#pragma unroll
    for (int n = 0; n < 2 * kHigh; ++n) {
        const int i = n / 2, half = n % 2;
        float sum = l[i][half];
        if (!kDivideAtEveryTile) {
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
        }
        const long long row = first + i0 + warp * kRows + i * 16 + half * 8 + lane / 4;
        const float factor = kDivideAtEveryTile ? 1 : 1 / sum;
        if (lane % 4 == 0) p.lse[row] = (m[i][half] + log2f(sum)) * kLn2;
#pragma unroll
        for (int d = 0; d < kWide; ++d) {
            *reinterpret_cast<unsigned*>(p.o + row * kDim + d * 8 + lane % 4 * 2) =
                pack(o[i][d][2 * half] * factor, o[i][d][2 * half + 1] * factor);
        }
    }
}
