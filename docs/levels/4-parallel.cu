// Level 4: parallel over the sequence. The second idea of FlashAttention-2 (Dao 2023, section 3.2).
//
// The loops change places: queries outside, keys inside. Now nothing is carried from one tile of queries to the next, so
// each can have a block of its own, and a GPU is full even with one head of a long sequence. And since a block keeps its
// queries until it has seen all keys, o, m and l never leave the chip: what levels 2 and 3 read and wrote at every tile
// is a few registers of each thread. The formulas are those of level 3, and so is the way four warps share a tile.
//
// scratch: none.

constexpr int kWarps = 4, kThreads = 32 * kWarps;

#include "tile.cuh"

constexpr int kKeys = kTile / kWarps;  // of a tile, for one warp

struct Shared {
    float q[kDim * kTile], k[kDim * kTile], v[kTile * kDim];  // q and k transposed
    float part[kWarps][kTile * kDim];  // of each warp: its P, transposed; then what its keys give to P V
    float row[kWarps][kTile];          // of each warp's keys: row maxima, at the end row sums
};  // 113 KiB: two blocks fit on an SM of a Hopper GPU

// grid: tiles of queries (fewer blocks take several, one after the other), heads
extern "C" __global__ void __launch_bounds__(kThreads) attention(Problem p) {
    extern __shared__ __align__(16) float memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const long long first = static_cast<long long>(blockIdx.y) * p.seqlen;
    const auto max_of = [&](int r) {
        return fmaxf(fmaxf(shared.row[0][r], shared.row[1][r]), fmaxf(shared.row[2][r], shared.row[3][r]));
    };
    const auto sum_of_parts = [&](int n) {
        return four(shared.part[0] + n) + four(shared.part[1] + n) + (four(shared.part[2] + n) + four(shared.part[3] + n));
    };

    for (int i0 = blockIdx.x * kTile; i0 < p.seqlen; i0 += gridDim.x * kTile) {  // queries outside
        load_transposed(shared.q, p.q + (first + i0) * kDim);
        // Statistics of the 8 rows of S that a thread has; l of its own keys only, until the end.
        float m[8], l[8];
        // Output: fours, number threadIdx.x + 128 n of the tile. They lie in other rows, whose maxima are kept as well.
        float o_m[8];
        float4 o[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) m[n] = o_m[n] = kLowest, l[n] = 0, o[n] = make_float4(0, 0, 0, 0);

        for (int j0 = 0; j0 < p.seqlen; j0 += kTile) {  // keys inside
            load_transposed(shared.k, p.k + (first + j0) * kDim);
            load(shared.v, p.v + (first + j0) * kDim);
            __syncthreads();

            // S = Q K^T. A thread has rows row ... row + 3 and 32 further down, of columns column ... column + 3.
            const int row = lane % 8 * 4, column = lane / 8 * 4;
            float s[8][4] = {};
            multiply<32, 64>(s, shared.q + row, shared.k + warp * kKeys + column, kDim);

            // Row maxima: over the 4 keys of a thread, the 16 of its warp, and (max_of) all 64.
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                float highest = kLowest;
#pragma unroll
                for (int j = 0; j < 4; ++j) s[i][j] *= kScale, highest = fmaxf(highest, s[i][j]);
                highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 8));
                highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, 16));
                shared.row[warp][row + i / 4 * 32 + i % 4] = highest;
            }
            __syncthreads();

            // P = exp(S - m'), and its row sums.
            float* const part = shared.part[warp];
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float highest = fmaxf(m[i], max_of(row + i / 4 * 32 + i % 4));
                l[i] *= exp2f(m[i] - highest);
                m[i] = highest;
#pragma unroll
                for (int j = 0; j < 4; ++j) s[i][j] = exp2f(s[i][j] - highest), l[i] += s[i][j];
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

            // o' = exp(m - m') o + the four parts of P V.
#pragma unroll
            for (int n = 0; n < 8; ++n) {
                const int at = (threadIdx.x + n * kThreads) * 4;
                const float highest = fmaxf(o_m[n], max_of(at / kDim));
                o[n] = exp2f(o_m[n] - highest) * o[n] + sum_of_parts(at);
                o_m[n] = highest;
            }
        }

        // l: over the threads of a row, then over the warps.
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            l[i] += __shfl_xor_sync(~0u, l[i], 8);
            l[i] += __shfl_xor_sync(~0u, l[i], 16);
            shared.row[warp][lane % 8 * 4 + i / 4 * 32 + i % 4] = l[i];
        }
        __syncthreads();
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            const int at = (threadIdx.x + n * kThreads) * 4, r = at / kDim;
            const float sum = shared.row[0][r] + shared.row[1][r] + shared.row[2][r] + shared.row[3][r];
            store(p.o + (first + i0) * kDim + at, 1 / sum * o[n]);
            if (at % kDim == 0) p.lse[first + i0 + r] = (o_m[n] + log2f(sum)) * kLn2;
        }
    }
}
