// Forward pass on the ordinary arithmetic units: every option, every dtype, any head dim. The first kernel to read.
//
// One block works on 64 queries of one head and keeps, per row, the running maximum m, the running sum l and the
// running output o (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023). The tiles of 64 keys that its rows can
// see pass by:
//
//     S = Q K^T                                    score_product
//     x = score of the formula, -inf where hidden  ScoreContext
//     m' = max(m, row max of x); o, l *= exp(m - m')
//     P = exp(x - m'); l += row sum of P
//     o += dropout(P) V                            output_product
//
// and at the end o / l and lse = m + log l are written. grid.y cuts head_dim_v into pieces of kColumns; each piece
// computes the scores anew.

#include "spec.cuh"
#include "simt.cuh"

namespace tilewise {

struct Params {
    abi::Forward call;
    MaskData mask;
};

TW_KERNEL(fwd_simt, Params, params) {
    TW_DYNAMIC_SHARED(memory);
    Shared& shared = *reinterpret_cast<Shared*>(memory);
    const abi::Problem& p = params.call.problem;
    const int tx = thread_x(), ty = thread_y();
    const Int tiles = gridDim.x / p.num_heads_q;
    // The last rows of a causal mask see most; the blocks that start first get them.
    const Place place = place_of(p, tiles - 1 - blockIdx.x % tiles, true);
    if (place.b < 0) return;
    const Int h = blockIdx.x / tiles, i0 = place.row, c0 = Int(blockIdx.y) * kColumns;
    const Site site = make_site(p, place.b, h);
    const ScoreContext score(p, params.mask, site);
    const Philox philox = Philox::make(p, site);
    const Int b_q = batch_of(p.packed_q, site.b), b_kv = batch_of(p.packed_kv, site.b);
    const int rows = static_cast<int>(minimum(kTile, site.q_len - i0));
    const Source q = Source::make(p.q, b_q, site.q_row0 + i0, h, rows);

    Output o;
    clear(o);
    Real m[4], l[4];
#pragma unroll
    for (int a = 0; a < 4; ++a) m[a] = -Limits<Real>::infinity(), l[a] = 0;

    for_each_kv_tile(p, params.mask, site, i0, shared, [&](Int j0, int tile_class) {
        const int keys = static_cast<int>(minimum(kTile, site.kv_len - j0));
        Real s[4][4];
        score_product(s, q, Source::make(p.k, b_kv, site.kv_row0 + j0, site.head_kv, keys), p.head_dim_qk, shared);
        if (kPlainScore && tile_class == kFull) {
#pragma unroll
            for (int a = 0; a < 4; ++a) {
#pragma unroll
                for (int b = 0; b < 4; ++b) s[a][b] *= score.scale;
            }
            __syncthreads();  // the tile before has been read
        } else {
            __syncthreads();
            put_elements(s, shared.tile);
            for_each_element(0, 4, [&](int r, int c) {
                const Int i = i0 + r, j = j0 + c;
                Real capped, x = -Limits<Real>::infinity();
                if (score.sees(tile_class, i, j)) {
                    x = score.after_mod(score.before_mod(shared.tile[r][c], i, j, capped), i, j);
                }
                shared.tile[r][c] = x;
            });
            get_elements(s, shared.tile);
        }
#pragma unroll
        for (int a = 0; a < 4; ++a) {
            Real highest = s[a][0];
#pragma unroll
            for (int b = 1; b < 4; ++b) highest = larger(highest, s[a][b]);
            const Real before = m[a];
            m[a] = larger(before, row_max(highest));
            // Nothing seen yet: any finite number serves as the maximum, all exponentials are 0.
            const Real shift = m[a] == -Limits<Real>::infinity() ? Real(0) : m[a];
            const Real factor = exponential(before - shift);
            Real sum = 0;
#pragma unroll
            for (int b = 0; b < 4; ++b) {
                s[a][b] = exponential(s[a][b] - shift);
                sum += s[a][b];
            }
            l[a] = l[a] * factor + row_sum(sum);
#pragma unroll
            for (int g = 0; g < kGroups; ++g) {
#pragma unroll
                for (int n = 0; n < 4; ++n) o[a][g][n] *= factor;
            }
        }
        put_elements(s, shared.tile);
        if constexpr (kDropout) {
            for_each_element(0, 4, [&](int r, int c) {
                if (!philox.keep(i0 + r, j0 + c, Word(p.dropout_threshold))) shared.tile[r][c] = 0;
            });
        }
        output_product<false>(o, Source::make(p.v, b_kv, site.kv_row0 + j0, site.head_kv, keys), c0, p.head_dim_v,
                              shared);
    });

#pragma unroll
    for (int a = 0; a < 4; ++a) {
        const int r = 4 * ty + a;
        if (r >= rows) break;
        Real total = l[a], highest = m[a], scale = 1;
        if (kSinks) {
            const Real sink = load_any<Real>(p.sinks.data, p.sinks.dtype, h * p.sinks.head);
            highest = larger(m[a], sink);
            const Real shift = highest == -Limits<Real>::infinity() ? Real(0) : highest;
            scale = exponential(m[a] - shift);
            total = l[a] * scale + exponential(sink - shift);
        }
        const bool empty = total == 0;
        const Real factor = empty ? Real(0) : scale / total * (kDropout ? Real(p.keep_inverse) : Real(1));
        const Int row = site.q_row0 + i0 + r;
        store_row(params.call.o, b_q, row, h, o[a], factor, c0, p.head_dim_v);
        if (tx == 0 && blockIdx.y == 0 && params.call.lse.data) {
            const abi::Rows& lse = params.call.lse;
            static_cast<Real*>(lse.data)[b_q * lse.batch + h * lse.head + row * lse.row] =
                empty ? -Limits<Real>::infinity() : highest + logarithm(total);
        }
    }
}

}  // namespace tilewise
