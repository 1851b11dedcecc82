// Level 5: warps share a tile by queries. The third idea of FlashAttention-2 (Dao 2023, section 3.3).
//
// Up to here a warp had all queries and a quarter of the keys, so that at every tile four warps had to agree on maxima
// and to add up four outputs, through shared memory and with barriers. Now a warp has all keys and a quarter of the
// queries. Whatever is said about a row of S is said inside one warp: a few shuffles, no barrier; o stays in the
// registers in which the products leave it.
//
// And because o exists once, not four times, a tile can have more queries: 128, 32 for each warp, so that what is read
// of K and V serves twice as many. (Level 4 would need 256 registers per thread for the parts of o alone.)
//
// scratch: none.

constexpr int kWarps = 4, kThreads = 32 * kWarps;

#include "tile.cuh"

constexpr int kTileQ = 128, kRows = kTileQ / kWarps;  // queries of a block, of a warp
constexpr int kMine = kRows / 4;                       // rows of a thread: a warp is 4 threads high, 8 wide
constexpr int kPitch = kRows + 4;                      // of P: 4 more, or writes of one column would meet in a few banks

struct Shared {
    float q[kDim * kTileQ], k[kDim * kTile], v[kTile * kDim];  // q and k transposed
    float p[kWarps][kTile * kPitch];                           // of each warp, transposed
};

// grid: tiles of queries, heads
extern "C" __global__ void __launch_bounds__(kThreads) attention(Problem p) {
    extern __shared__ __align__(16) float memory[];
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = lane % 4 * 4, column = lane / 4 * 4;  // fours that are 16 rows and 32 columns apart; in S and in o
    const long long first = static_cast<long long>(blockIdx.y) * p.seqlen;
    const int i0 = blockIdx.x * kTileQ;
    load_transposed<kTileQ>(shared.q, p.q + (first + i0) * kDim);

    float o[kMine][8] = {}, m[kMine], l[kMine];  // l of a thread's own columns only, until the end
#pragma unroll
    for (int i = 0; i < kMine; ++i) m[i] = kLowest, l[i] = 0;

    for (int j0 = 0; j0 < p.seqlen; j0 += kTile) {
        __syncthreads();  // the tile before has been read
        load_transposed(shared.k, p.k + (first + j0) * kDim);
        load(shared.v, p.v + (first + j0) * kDim);
        __syncthreads();  // from here to the next tile, no warp waits for another

        // S = Q K^T, for the rows of the warp
        float s[kMine][8] = {};
        multiply<16, 32, kTileQ>(s, shared.q + warp * kRows + row, shared.k + column, kDim);

        // m' = max(m, row maximum), P = exp(S - m'); l and o follow.
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            float highest = m[i];
#pragma unroll
            for (int j = 0; j < 8; ++j) s[i][j] *= kScale, highest = fmaxf(highest, s[i][j]);
#pragma unroll
            for (int step = 4; step < 32; step *= 2) highest = fmaxf(highest, __shfl_xor_sync(~0u, highest, step));
            const float factor = exp2f(m[i] - highest);
            m[i] = highest;
            l[i] *= factor;
#pragma unroll
            for (int j = 0; j < 8; ++j) s[i][j] = exp2f(s[i][j] - highest), l[i] += s[i][j], o[i][j] *= factor;
        }

        // o += P V. Threads need each other's P, but only those of a warp.
        float* const weights = shared.p[warp];
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            float* const to = weights + (column + j / 4 * 32 + j % 4) * kPitch + row;
#pragma unroll
            for (int i = 0; i < kMine; i += 4)
                four(to + 4 * i) = make_float4(s[i][j], s[i + 1][j], s[i + 2][j], s[i + 3][j]);
        }
        __syncwarp();
        multiply<16, 32, kPitch>(o, weights + row, shared.v + column, kTile);
    }

#pragma unroll
    for (int i = 0; i < kMine; ++i) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) l[i] += __shfl_xor_sync(~0u, l[i], step);
        const long long at = first + i0 + warp * kRows + row + i / 4 * 16 + i % 4;
        store(p.o + at * kDim + column, 1 / l[i] * four(o[i]));
        store(p.o + at * kDim + column + 32, 1 / l[i] * four(o[i] + 4));
        if (column == 0) p.lse[at] = (m[i] + log2f(l[i])) * kLn2;
    }
}
