// Backward pass on the ordinary arithmetic units: every gradient, every option, every dtype. No sum is shared by two
// blocks (but for captured arrays, below), so two runs give the same bits.
//
//   bwd_simt_delta   D = sum of o * do, minus dlse, per row; what each tile of rows adds to the sinks' gradient
//   bwd_simt_dq      one tile of queries, all its keys:  dQ = scale * dS K;  partial sums for the slopes
//   bwd_simt_dkdv    one tile of keys, all query heads of its group:  dV = P'^T dO,  dK = scale * dS^T Q
//   bwd_simt_dbias   one tile of the bias, all (b, h, i, j) that it was broadcast to
//   bwd_simt_heads   slopes and sinks: sums the partial sums in order
//   bwd_simt_array   rounds the gradient of a captured array
//
// Each recomputes P = exp(x - lse) and dS = P (dP - D), dP = dO V^T, from q, k, v and lse (FlashAttention-2, Dao 2023).
// Captured arrays are indexed by what the score_mod computes: their gradients are added with atomics, in any order.

#include "spec.cuh"
#include "simt.cuh"

namespace tilewise {

struct Params {
    abi::Backward call;
    MaskData mask;
    GradientArrays gradients;
};

TW_DEVICE Real* row_at(const abi::Rows& rows, Int b, Int h, Int row) {
    return static_cast<Real*>(rows.data) + b * rows.batch + h * rows.head + row * rows.row;
}

// Rows of queries of one head.
struct QueryTile {
    Source q, d_o;
    Int i0, rows, first_row;  // first_row: of the tile, in q
    Int b_q, h;

    TW_DEVICE QueryTile make(const abi::Backward& call, const Site& site, Int i0) {
        const abi::Problem& p = call.problem;
        const Int rows = minimum(kTile, site.q_len - i0), row0 = site.q_row0 + i0, b = batch_of(p.packed_q, site.b);
        return {Source::make(p.q, b, row0, site.h, rows), Source::make(call.d_o, b, row0, site.h, rows), i0, rows, row0, b,
                site.h};
    }
};
struct KeyTile {
    Source k, v;
    Int j0, keys;

    TW_DEVICE KeyTile make(const abi::Problem& p, const Site& site, Int j0) {
        const Int keys = minimum(kTile, site.kv_len - j0), row0 = site.kv_row0 + j0, b = batch_of(p.packed_kv, site.b);
        return {Source::make(p.k, b, row0, site.head_kv, keys), Source::make(p.v, b, row0, site.head_kv, keys), j0, keys};
    }
};

// What is wanted of a tile beside P and dS.
enum Extra : int {
    kNothing = 0,
    kScoreGradient = 1,  // the gradient before softcap, that of the bias, in place of dS
    kArrays = 2,         // adds to the gradients of captured arrays
};

// p: P with dropout; ds: gradient of q k^T * scale; slope_sum: gains what the tile adds to the slope's gradient.
template <int kExtra>
TW_DEVICE void gradient_tile(Real (&p_out)[4][4], Real (&ds_out)[4][4], Real& slope_sum, const Params& params,
                             const ScoreContext& score, const QueryTile& rows, const KeyTile& keys, int tile_class,
                             Shared& shared) {
    const abi::Problem& p = params.call.problem;
    const Site& site = score.site;
    const Philox philox = Philox::make(p, site);
    Real s[4][4], dp[4][4];
    score_product(s, rows.q, keys.k, p.head_dim_qk, shared);
    score_product(dp, rows.d_o, keys.v, p.head_dim_v, shared);
    __syncthreads();  // the tile and the stage before have been read
    put_elements(s, shared.tile);
    // The stage holds dP in the meantime: all of it, or in fp64 half of a thread's rows at a time.
    constexpr int kRows = sizeof(Real) == 8 ? 2 : 4;
    Real(&second)[kTile / 4 * kRows][kLead] = *reinterpret_cast<Real(*)[kTile / 4 * kRows][kLead]>(&shared.factors);
    const int tx = thread_x(), ty = thread_y();
#pragma unroll
    for (int half = 0; half < 4 / kRows; ++half) {
#pragma unroll
        for (int a = 0; a < kRows; ++a) {
#pragma unroll
            for (int b = 0; b < 4; ++b) second[kRows * ty + a][4 * tx + b] = dp[half * kRows + a][b];
        }
        for_each_element(half * kRows, kRows, [&](int r, int c) {
            const Int i = rows.i0 + r, j = keys.j0 + c, row = rows.first_row + r;
            Real& first = shared.tile[r][c];
            Real& gradient = second[kRows * ty + (r - 4 * ty - half * kRows)][c];
            const Real product = first, dprobability = gradient;
            first = gradient = 0;
            if (r >= rows.rows) return;
            const Real lse = *row_at(params.call.lse, rows.b_q, rows.h, row);
            if (lse == -Limits<Real>::infinity() || !score.sees(tile_class, i, j)) return;
            Real capped;
            const Real input = score.before_mod(product, i, j, capped), x = score.after_mod(input, i, j);
            if (x == -Limits<Real>::infinity()) return;
            const Real probability = exponential(x - lse), delta = *row_at(params.call.delta, rows.b_q, rows.h, row);
            const Real kept = !kDropout ? Real(1)
                              : philox.keep(i, j, Word(p.dropout_threshold)) ? Real(p.keep_inverse) : Real(0);
            first = kept == 0 ? Real(0) : probability * kept;
            Real dx = probability * ((kept == 0 ? Real(0) : dprobability * kept) - delta);
            if constexpr (kScoreMod) {
                if constexpr ((kExtra & kArrays) != 0 && kGradientArrays > 0) {
                    score_mod_gradient_arrays(site, params.mask, params.gradients, dx, input, i, j);
                }
                dx *= score_mod_gradient(site, params.mask, input, i, j);
            }
            if (kSlopes) slope_sum -= dx * score.distance(i, j);
            if (kSoftcap && (kExtra & kScoreGradient) == 0) {
                const Real tangent = capped / score.softcap;
                dx *= Real(1) - tangent * tangent;
            }
            gradient = dx;
        });
#pragma unroll
        for (int a = 0; a < kRows; ++a) {
#pragma unroll
            for (int b = 0; b < 4; ++b) ds_out[half * kRows + a][b] = second[kRows * ty + a][4 * tx + b];
        }
    }
    get_elements(p_out, shared.tile);
}

// A tile for output_product to read.
TW_DEVICE void put_tile(const Real (&values)[4][4], Shared& shared) {
    __syncthreads();  // whoever read the tile before is done
    put_elements(values, shared.tile);
}

// Sum over the block, the same for all threads; in a fixed order.
TW_DEVICE Real block_sum(Real x, Shared& shared) {
    Real* const sums = &shared.tile[0][0];
    __syncthreads();
    x = row_sum(x);
    if (thread_x() == 0) sums[thread_y()] = x;
    __syncthreads();
    Real total = 0;
    for (int n = 0; n < kThreads / 16; ++n) total += sums[n];
    __syncthreads();
    return total;
}

TW_KERNEL(bwd_simt_delta, Params, params) {
    TW_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const abi::Problem& p = params.call.problem;
    const Int tiles = gridDim.x / p.num_heads_q, n = blockIdx.x % tiles, h = blockIdx.x / tiles;
    const Place place = place_of(p, n, true);
    Real sink_sum = 0;
    if (place.b >= 0) {
        const Site site = make_site(p, place.b, h);
        const Int b_q = batch_of(p.packed_q, site.b);
        const int tx = thread_x();
        for (Int r = thread_y(); r < minimum(kTile, site.q_len - place.row); r += kThreads / 16) {
            const Int row = site.q_row0 + place.row + r;
            const Source o = Source::make(params.call.o, b_q, row, h, 1), d_o = Source::make(params.call.d_o, b_q, row, h, 1);
            Real sum = 0;
            for (Int d = tx; d < p.head_dim_v; d += 16) {
                const Real x = o.at(0, d);
                if (x != 0) sum += x * d_o.at(0, d);  // an empty row has no gradient, whatever do holds
            }
            // The 16 threads of a row go through this loop together; the other half of the warp may have left it.
            const Word half = 0xffffu << (threadIdx.x % 32 & 16u);
#pragma unroll
            for (int lane = 8; lane > 0; lane /= 2) sum += __shfl_xor_sync(half, sum, lane);
            const Real lse = *row_at(params.call.lse, b_q, h, row);
            // lse of a row that sees nothing does not depend on any score; dlse of it may hold anything.
            const Real dlse = params.call.dlse.data && lse != -Limits<Real>::infinity()
                                  ? *row_at(params.call.dlse, b_q, h, row)
                                  : Real(0);
            if (tx == 0) {
                *row_at(params.call.delta, b_q, h, row) = sum - dlse;
                if (kSinks && lse != -Limits<Real>::infinity()) {
                    const Real sink = load_any<Real>(p.sinks.data, p.sinks.dtype, h * p.sinks.head);
                    sink_sum += exponential(sink - lse) * (dlse - sum);
                }
            }
        }
    }
    if (kSinks && params.call.sink_partial) {
        const Real total = block_sum(sink_sum, shared);
        if (threadIdx.x == 0) static_cast<Real*>(params.call.sink_partial)[h * tiles + n] = total;
    }
}

TW_KERNEL(bwd_simt_dq, Params, params) {
    TW_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const abi::Problem& p = params.call.problem;
    const int ty = thread_y();
    const Int tiles = gridDim.x / p.num_heads_q, n = tiles - 1 - blockIdx.x % tiles, h = blockIdx.x / tiles;
    const Int c0 = Int(blockIdx.y) * kColumns;
    const bool slopes = kSlopes && params.call.slope_partial && c0 == 0;
    const Place place = place_of(p, n, true);
    Real slope_sum = 0;
    if (place.b >= 0) {
        const Site site = make_site(p, place.b, h);
        const ScoreContext score(p, params.mask, site);
        const QueryTile rows = QueryTile::make(params.call, site, place.row);
        Output dq;
        clear(dq);
        for_each_kv_tile(p, params.mask, site, place.row, shared, [&](Int j0, int tile_class) {
            const KeyTile keys = KeyTile::make(p, site, j0);
            Real unused[4][4], ds[4][4];
            // Pieces of head_dim beyond the first see the same tiles again; the arrays get their gradient once.
            if (kGradientArrays > 0 && c0 == 0) {
                gradient_tile<kArrays>(unused, ds, slope_sum, params, score, rows, keys, tile_class, shared);
            } else {
                gradient_tile<kNothing>(unused, ds, slope_sum, params, score, rows, keys, tile_class, shared);
            }
            put_tile(ds, shared);
            output_product<false>(dq, keys.k, c0, p.head_dim_qk, shared);
        });
        if (params.call.dq.data) {
#pragma unroll
            for (int a = 0; a < 4; ++a) {
                if (4 * ty + a < rows.rows) {
                    store_row(params.call.dq, rows.b_q, rows.first_row + 4 * ty + a, h, dq[a], score.scale, c0,
                              p.head_dim_qk);
                }
            }
        }
    }
    if (slopes) {
        const Real total = block_sum(slope_sum, shared);
        if (threadIdx.x == 0) static_cast<Real*>(params.call.slope_partial)[h * tiles + n] = total;
    }
}

TW_KERNEL(bwd_simt_dkdv, Params, params) {
    TW_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const abi::Problem& p = params.call.problem;
    const int ty = thread_y();
    const Int tiles = gridDim.x / p.num_heads_kv, head_kv = blockIdx.x / tiles, c0 = Int(blockIdx.y) * kColumns;
    const Place place = place_of(p, blockIdx.x % tiles, false);  // the first keys of a causal mask are seen by most rows
    if (place.b < 0) return;
    const bool want_dk = params.call.dk.data && c0 < p.head_dim_qk, want_dv = params.call.dv.data && c0 < p.head_dim_v;
    const Int group = p.num_heads_q / p.num_heads_kv, j0 = place.row;
    Site site = make_site(p, place.b, head_kv * group);
    const KeyTile keys = KeyTile::make(p, site, j0);
    Output dk, dv;
    clear(dk), clear(dv);
    for (site.h = head_kv * group; site.h < (head_kv + 1) * group; ++site.h) {
        const ScoreContext score(p, params.mask, site);
        for_each_q_tile(p, params.mask, site, j0, shared, [&](Int i0, int tile_class) {
            const QueryTile rows = QueryTile::make(params.call, site, i0);
            Real probabilities[4][4], ds[4][4], unused = 0;
            gradient_tile<kNothing>(probabilities, ds, unused, params, score, rows, keys, tile_class, shared);
            if (want_dv) {
                put_tile(probabilities, shared);
                output_product<true>(dv, rows.d_o, c0, p.head_dim_v, shared);
            }
            if (want_dk) {
                put_tile(ds, shared);
                output_product<true>(dk, rows.q, c0, p.head_dim_qk, shared);
            }
        });
    }
    const Int b = batch_of(p.packed_kv, site.b);
#pragma unroll
    for (int a = 0; a < 4; ++a) {
        const Int row = site.kv_row0 + j0 + 4 * ty + a;
        if (4 * ty + a >= keys.keys) break;
        if (want_dk) store_row(params.call.dk, b, row, head_kv, dk[a], Real(p.softmax_scale), c0, p.head_dim_qk);
        if (want_dv) store_row(params.call.dv, b, row, head_kv, dv[a], Real(1), c0, p.head_dim_v);
    }
}

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
