// Level 3: fewer operations that are not products. The first idea of FlashAttention-2 (Dao 2023, section 3.1.1).
//
// Level 2 brings o into its final form at every tile, only to undo that at the next one. Here o stays what the products
// leave, the sum of exp(x - m) v, and the one division comes after the last tile:
//
//     m' = max(m, m~)
//     P  = exp(S - m')
//     l' = exp(m - m') l + row sum of P
//     o' = exp(m - m') o + P V              and at the end  o / l
//
// P is taken relative to m' at once, so P V needs no factor: of two multiplications per number of o and tile, one is
// left. Everything else is level 2.
//
// scratch: o before division [heads, seqlen, kDim], m [heads, seqlen], l [heads, seqlen].

constexpr int kWarps = 4, kThreads = 32 * kWarps;

#include "tile.cuh"

constexpr int kKeys = kTile / kWarps;  // of a tile, for one warp

struct Shared {
    float q[kDim * kTile], k[kDim * kTile], v[kTile * kDim];  // q and k transposed
    float part[kWarps][kTile * kDim];  // of each warp: its P, transposed; then what its keys give to P V
    float max[kWarps + 1][kTile];      // of each warp's keys, and m of the tiles before
    float sum[kWarps][kTile];          // of each warp's keys
    float factor[kTile], l[kTile];
};

// grid: heads
extern "C" __global__ void __launch_bounds__(kThreads) attention(Problem p) {
    extern __shared__ __align__(16) float memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long first = static_cast<long long>(blockIdx.x) * p.seqlen;  // row of this head among those of all heads
    const long long rows = static_cast<long long>(gridDim.x) * p.seqlen;
    float *const o = p.scratch + first * kDim, *const m = p.scratch + rows * kDim + first, *const l = m + rows;
    const auto new_max = [&](int r) {
        const float here = fmaxf(fmaxf(shared.max[0][r], shared.max[1][r]), fmaxf(shared.max[2][r], shared.max[3][r]));
        return fmaxf(here, shared.max[kWarps][r]);
    };
    const auto sum_of_parts = [&](int n) {
        return four(shared.part[0] + n) + four(shared.part[1] + n) + (four(shared.part[2] + n) + four(shared.part[3] + n));
    };

    for (int j0 = 0; j0 < p.seqlen; j0 += kTile) {  // keys outside
        load_transposed(shared.k, p.k + (first + j0) * kDim);
        load(shared.v, p.v + (first + j0) * kDim);
        for (int i0 = 0; i0 < p.seqlen; i0 += kTile) {  // queries inside
            load_transposed(shared.q, p.q + (first + i0) * kDim);
            if (threadIdx.x < kTile) shared.max[kWarps][threadIdx.x] = j0 == 0 ? kLowest : m[i0 + threadIdx.x];
            __syncthreads();

            // S = Q K^T. A thread has rows row ... row + 3 and 32 further down, of columns column ... column + 3.
            const int row = lane % 8 * 4, column = lane / 8 * 4;
            float s[8][4] = {};
            multiply<32, 64>(s, shared.q + row, shared.k + warp * kKeys + column, kDim);

            // Row maxima: over the 4 keys of a thread, the 16 of its warp, and (new_max) all that there were so far.
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float highest = kLowest;
#pragma unroll
                for (int j = 0; j < 4; ++j) s[i][j] *= kScale, highest = fmaxf(highest, s[i][j]);
                highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 8));
                highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 16));
                shared.max[warp][row + i / 4 * 32 + i % 4] = highest;
            }
            __syncthreads();

            // P = exp(S - m'), and its row sums over the warp's keys.
            float* const part = shared.part[warp];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int r = row + i / 4 * 32 + i % 4;
                const float highest = new_max(r);
                float sum = 0;
#pragma unroll
                for (int j = 0; j < 4; ++j) s[i][j] = exp2f(s[i][j] - highest), sum += s[i][j];
                sum += __shfl_xor_sync(~0u, sum, 8);
                sum += __shfl_xor_sync(~0u, sum, 16);
                shared.sum[warp][r] = sum;
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float* const to = part + (column + j) * kTile + row;
                four(to) = make_float4(s[0][j], s[1][j], s[2][j], s[3][j]);
                four(to + 32) = make_float4(s[4][j], s[5][j], s[6][j], s[7][j]);
            }
            __syncwarp();

            // P V, of the warp's keys: 64 x 64 numbers, in fours that are 16 rows and 32 columns apart.
            const int o_row = lane / 8 * 4, o_column = lane % 8 * 4;
            float pv[16][8] = {};
            multiply<16, 32>(pv, part + o_row, shared.v + warp * kKeys * kDim + o_column, kKeys);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                float* const to = part + (o_row + i / 4 * 16 + i % 4) * kDim + o_column;
                four(to) = four(pv[i]), four(to + 32) = four(pv[i] + 4);
            }
            __syncthreads();

            // The four parts are put together: m, l and the factor of a row by one thread, ...
            if (threadIdx.x < kTile) {
                const int r = threadIdx.x;
                const float old_l = j0 == 0 ? 0 : l[i0 + r], factor = exp2f(shared.max[kWarps][r] - new_max(r));
                shared.factor[r] = factor;
                shared.l[r] = factor * old_l + shared.sum[0][r] + shared.sum[1][r] + shared.sum[2][r] + shared.sum[3][r];
                m[i0 + r] = new_max(r), l[i0 + r] = shared.l[r];
                p.lse[first + i0 + r] = (new_max(r) + log2f(shared.l[r])) * kLn2;
            }
            __syncthreads();

            // ... o by all.
#pragma unroll
            for (int some = 0; some < kTile * kDim; some += kThreads * 4) {
                const int n = some + threadIdx.x * 4, r = n / kDim;
                float4 x = sum_of_parts(n);
                if (j0 != 0) x = x + shared.factor[r] * four(o + i0 * kDim + n);
                four(o + i0 * kDim + n) = x;
                if (j0 + kTile == p.seqlen) store(p.o + (first + i0) * kDim + n, 1 / shared.l[r] * x);
            }
        }
    }
}
