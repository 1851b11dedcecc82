// Backward pass, first step: D = sum of o * do per row, minus dlse; and what each tile of rows adds to the gradients of
// the sinks.
//
// o carries a rounding of its dtype and lse one of fp32. A row with one dominant key feels both: dP - D cancels there, and
// they are all that is left. Where a tile of rows sees a single tile of keys, D = sum of P dP is known without them, P
// normalised. (Unless lse and o are those of more keys than these, merged, as in ring attention: the probabilities do not
// add up to 1 then.) Rows that see more keys are rarely that peaked.

#include "spec.cuh"
#include "gradient.cuh"

namespace tilewise {

// D of four rows of this thread from P and dP; what the 16 threads of a row return is the same.
TW_DEVICE void delta_from_tile(Real (&delta)[4], bool (&known)[4], const Params& params, const ScoreContext& score,
                               const QueryTile& rows, const KeyTile& keys, int tile_class, Shared& shared) {
    Real p[4][4], dp[4][4], unused = 0;
    gradient_tile<kProbabilities>(p, dp, unused, params, score, rows, keys, tile_class, shared);
    const int ty = thread_y();
#pragma unroll
    for (int a = 0; a < 4; ++a) {
        Real sum = 0, product = 0;
#pragma unroll
        for (int b = 0; b < 4; ++b) sum += p[a][b], product += p[a][b] * dp[a][b];
        sum = row_sum(sum), product = row_sum(product);
        if (4 * ty + a >= rows.rows) continue;
        const Real lse = *row_at(params.call.lse, rows.b_q, rows.h, rows.first_row + 4 * ty + a);
        Real seen = 1;  // what the keys have of the row, next to the sink
        if (kSinks) {
            const abi::PerHead& sinks = params.call.problem.sinks;
            seen -= exponential(load_any<Real>(sinks.data, sinks.dtype, rows.h * sinks.head) - lse);
        }
        const Real epsilon = sizeof(Real) == 8 ? Real(0x1p-52) : Real(0x1p-23f);
        const Real tolerance = 16 * epsilon * larger(Real(1), absolute(lse));
        // Where the sink has most of the row, `seen` is all rounding.
        if (sum >= Real(0.5) && absolute(seen - sum) <= tolerance) {
            known[a] = true;
            delta[a] = product / sum * seen;
        }
    }
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
        const QueryTile rows = QueryTile::make(params.call, site, place.row);
        const int tx = thread_x(), ty = thread_y();
        Real from_tile[4];
        bool known[4] = {};
        if (p.head_dim_v > 0) {
            int tiles_seen = 0, only_class = 0;
            Int only = 0;
            for_each_kv_tile(p, params.mask, site, place.row, shared, [&](Int j0, int tile_class) {
                ++tiles_seen, only = j0, only_class = tile_class;
            });
            if (tiles_seen == 1) {
                const ScoreContext score(p, params.mask, site);
                delta_from_tile(from_tile, known, params, score, rows, KeyTile::make(p, site, only), only_class, shared);
            }
        }
#pragma unroll
        for (int a = 0; a < 4; ++a) {
            const int r = 4 * ty + a;
            const bool exists = r < rows.rows;
            const Int row = rows.first_row + r;
            Real sum = 0;
            if (exists) {
                const Source o = Source::make(params.call.o, rows.b_q, row, h, 1),
                             d_o = Source::make(params.call.d_o, rows.b_q, row, h, 1);
#pragma unroll 1
                for (Int d = tx; d < p.head_dim_v; d += 16) {
                    const Real x = o.at(0, d);
                    if (x != 0) sum += x * d_o.at(0, d);  // an empty row has no gradient, whatever do holds
                }
            }
            sum = row_sum(sum);
            if (!exists || tx != 0) continue;
            // A delta that is not finite stays: a dropped key adds 0 * v to o, but nothing to the sum over the tile.
            if (known[a] && sum - sum == 0) sum = from_tile[a];
            const Real lse = *row_at(params.call.lse, rows.b_q, h, row);
            // lse of a row that sees nothing does not depend on any score; dlse of it may hold anything.
            const Real dlse = params.call.dlse.data && lse != -Limits<Real>::infinity()
                                  ? *row_at(params.call.dlse, rows.b_q, h, row)
                                  : Real(0);
            *row_at(params.call.delta, rows.b_q, h, row) = sum - dlse;
            if (kSinks && lse != -Limits<Real>::infinity()) {
                const Real sink = load_any<Real>(p.sinks.data, p.sinks.dtype, h * p.sinks.head);
                sink_sum += exponential(sink - lse) * (dlse - sum);
            }
        }
    }
    if (kSinks && params.call.sink_partial) {
        const Real total = block_sum(sink_sum, shared);
        if (threadIdx.x == 0) static_cast<Real*>(params.call.sink_partial)[h * tiles + n] = total;
    }
}

}  // namespace tilewise
