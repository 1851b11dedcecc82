// Backward pass on the ordinary arithmetic units: every gradient, every option, every dtype. No sum is shared by two
// blocks (but for captured arrays, below), so two runs give the same bits.
//
//   bwd_simt_delta   in a file of its own: D, per row
//   bwd_simt_dq      one tile of queries, all its keys:  dQ = scale * dS K;  partial sums for the slopes
//   bwd_simt_dkdv    one tile of keys, all query heads of its group:  dV = P'^T dO,  dK = scale * dS^T Q
//
// Each recomputes P = exp(x - lse) and dS = P (dP - D), dP = dO V^T, from q, k, v and lse (gradient.cuh; FlashAttention-2,
// Dao 2023). Captured arrays are indexed by what the score_mod computes: their gradients are added with atomics, in any
// order. Gradients that many tiles share end in bwd_simt_shared.cu.

#include "spec.cuh"
#include "gradient.cuh"

namespace tilewise {

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
            constexpr int kExtra = kGradientArrays > 0 ? kArrays : kNothing;
            if (kExtra == kNothing || c0 == 0) {
                gradient_tile<kExtra>(unused, ds, slope_sum, params, score, rows, keys, tile_class, shared);
            } else if constexpr (kExtra != kNothing) {
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

}  // namespace tilewise
