// What the backward kernels share: P and dS of one tile of queries and keys, recomputed from q, k, v and lse.
// spec.cuh comes before this file.
#pragma once

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
    int rows;
    Int i0, first_row;  // first_row: of the tile, in q
    Int b_q, h;

    TW_DEVICE QueryTile make(const abi::Backward& call, const Site& site, Int i0) {
        const abi::Problem& p = call.problem;
        const int rows = static_cast<int>(minimum(kTile, site.q_len - i0));
        const Int row0 = site.q_row0 + i0, b = batch_of(p.packed_q, site.b);
        return {Source::make(p.q, b, row0, site.h, rows), Source::make(call.d_o, b, row0, site.h, rows), rows, i0, row0, b,
                site.h};
    }
};
struct KeyTile {
    Source k, v;
    Int j0;
    int keys;

    TW_DEVICE KeyTile make(const abi::Problem& p, const Site& site, Int j0) {
        const int keys = static_cast<int>(minimum(kTile, site.kv_len - j0));
        const Int row0 = site.kv_row0 + j0, b = batch_of(p.packed_kv, site.b);
        return {Source::make(p.k, b, row0, site.head_kv, keys), Source::make(p.v, b, row0, site.head_kv, keys), j0, keys};
    }
};

// What is wanted of a tile beside P and dS.
enum Extra : int {
    kNothing = 0,
    kScoreGradient = 1,  // the gradient before softcap, that of the bias, in place of dS
    kArrays = 2,         // adds to the gradients of captured arrays
    kProbabilities = 4,  // P without dropout in place of P, dP in place of dS
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
            const Real probability = exponential(x - lse);
            const Real kept = !kDropout ? Real(1)
                              : philox.keep(i, j, Word(p.dropout_threshold)) ? Real(p.keep_inverse) : Real(0);
            if constexpr (kExtra == kProbabilities) {
                first = probability, gradient = kept == 0 ? Real(0) : dprobability * kept;
                return;
            }
            const Real delta = *row_at(params.call.delta, rows.b_q, rows.h, row);
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

}  // namespace tilewise
