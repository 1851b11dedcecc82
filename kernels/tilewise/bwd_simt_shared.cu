// Backward pass: gradients that more than one tile adds to.
//
//   bwd_simt_dbias   one tile of the bias, all (b, h, i, j) that it was broadcast to
//   bwd_simt_heads   slopes and sinks: sums the partial sums of bwd_simt.cu in order
//   bwd_simt_array   rounds the gradient of a captured array

#include "spec.cuh"
#include "gradient.cuh"

namespace tilewise {

TW_KERNEL(bwd_simt_dbias, Params, params) {
    TW_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const abi::Problem& p = params.call.problem;
    const abi::Grid& dbias = params.call.dbias;
    const bool one_row = dbias.shape[2] == 1, one_column = dbias.shape[3] == 1;
    const Int columns = one_column ? 1 : ceil_div(dbias.shape[3], kTile), rows = one_row ? 1 : ceil_div(dbias.shape[2], kTile);
    Int n = blockIdx.x;
    const Int tile_j = n % columns * kTile, tile_i = n / columns % rows * kTile;
    n /= columns * rows;
    const Int own_h = n % dbias.shape[1], own_b = n / dbias.shape[1];
    Real sums[4][4] = {};
    for (Int b = dbias.shape[0] == 1 ? 0 : own_b; b < (dbias.shape[0] == 1 ? p.batch : own_b + 1); ++b) {
        for (Int h = dbias.shape[1] == 1 ? 0 : own_h; h < (dbias.shape[1] == 1 ? p.num_heads_q : own_h + 1); ++h) {
            const Site site = make_site(p, b, h);
            const ScoreContext score(p, params.mask, site);
            const Int end_i = one_row ? site.q_len : minimum(tile_i + kTile, site.q_len);
            const Int end_j = one_column ? site.kv_len : minimum(tile_j + kTile, site.kv_len);
            for (Int i0 = tile_i; i0 < end_i; i0 += kTile) {
                const QueryTile queries = QueryTile::make(params.call, site, i0);
                for_each_tile(tile_j, end_j, shared, [&](Int j0) { return class_within(p, params.mask, site, i0, j0); },
                              [&](Int j0, int tile_class) {
                                  Real unused[4][4], dx[4][4], slope = 0;
                                  gradient_tile<kScoreGradient>(unused, dx, slope, params, score, queries,
                                                                KeyTile::make(p, site, j0), tile_class, shared);
#pragma unroll
                                  for (int a = 0; a < 4; ++a) {
#pragma unroll
                                      for (int c = 0; c < 4; ++c) sums[a][c] += dx[a][c];
                                  }
                              });
            }
        }
    }
    put_tile(sums, shared);
    __syncthreads();
    for (int e = threadIdx.x; e < kTile * kTile; e += kThreads) {
        const int r = e / kTile, c = e % kTile;
        if ((one_row ? r > 0 : tile_i + r >= dbias.shape[2]) || (one_column ? c > 0 : tile_j + c >= dbias.shape[3])) continue;
        Real sum = 0;
        for (int y = r; y < (one_row ? kTile : r + 1); ++y) {
            for (int x = c; x < (one_column ? kTile : c + 1); ++x) sum += shared.tile[y][x];
        }
        store_any(dbias.data, dbias.dtype,
                  own_b * dbias.stride[0] + own_h * dbias.stride[1] + (tile_i + r) * dbias.stride[2] +
                      (tile_j + c) * dbias.stride[3],
                  sum);
    }
}

// One block per head (and per sequence, where the slopes have a batch axis).
TW_KERNEL(bwd_simt_heads, Params, params) {
    TW_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const abi::Problem& p = params.call.problem;
    const Int h = blockIdx.x, tiles = params.call.q_tiles;
    const auto sum_of = [&](const void* partial, Int begin, Int end) {
        Real sum = 0;
        for (Int n = begin + threadIdx.x; n < end; n += kThreads) sum += static_cast<const Real*>(partial)[h * tiles + n];
        return block_sum(sum, shared);
    };
    if (kSinks && params.call.dsinks.data && blockIdx.y == 0) {
        const Real sum = sum_of(params.call.sink_partial, 0, tiles);
        if (threadIdx.x == 0) store_any(params.call.dsinks.data, params.call.dsinks.dtype, h * params.call.dsinks.head, sum);
    }
    if (kSlopes && params.call.dslopes.data) {
        Int begin = 0, end = tiles;
        const Int b = blockIdx.y;
        if (gridDim.y > 1) {
            if (p.sequences) {
                begin = p.sequences[b].q_tiles_before, end = p.sequences[b + 1].q_tiles_before;
            } else {
                begin = b * ceil_div(p.q_rows, kTile), end = (b + 1) * ceil_div(p.q_rows, kTile);
            }
        }
        const Real sum = sum_of(params.call.slope_partial, begin, end);
        if (threadIdx.x == 0) {
            store_any(params.call.dslopes.data, params.call.dslopes.dtype,
                      b * params.call.dslopes.batch + h * params.call.dslopes.head, sum);
        }
    }
}

TW_KERNEL(bwd_simt_array, abi::ArrayGradient, params) {
    Int size = 1;
    for (int d = 0; d < params.rank; ++d) size *= params.target.shape[d];
    for (Int n = Int(blockIdx.x) * kThreads + threadIdx.x; n < size; n += Int(gridDim.x) * kThreads) {
        Int offset = 0, rest = n;
        for (int d = int(params.rank) - 1; d >= 0; rest /= params.target.shape[d--]) {
            offset += rest % params.target.shape[d] * params.target.stride[d];
        }
        store_any(params.target.data, params.dtype, offset, params.sums ? static_cast<const Real*>(params.sums)[n] : Real(0));
    }
}

}  // namespace tilewise
