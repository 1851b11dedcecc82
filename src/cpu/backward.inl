// The backward pass of one group of key blocks (FlashAttention-2): P is recomputed tile by tile from lse, never stored.
//
//   D_i  = sum_d o_id do_id                             once per row; delta = D - dlse
//   S    = Q K^T, options, mask                         (tile.inl, as in forward)
//   P    = exp(S - lse)        P' = keep P / keep_prob
//   dP   = dO V^T              dS = P (keep dP / keep_prob - delta), chained back through score_mod and softcap
//   dV  += P'^T dO             dK += dS^T Q             dQ += dS K             dK and dQ times the scale at the end
//
// Cost: five products of 2 M N head_dim FLOP per tile instead of forward's two; the passes over S and dP in between touch
// the same number of elements as forward's softmax, so they weigh less.
//
// One pass over the tiles makes all five products. An item owns the sums dK, dV of its key blocks and goes through all
// query rows of all heads of its KV head; what it adds to dQ goes into sums that belong to its group of key blocks, and
// sum_dq adds the groups up in order. Which keys form a group depends on the shape alone, so the bits do not depend on
// the number of threads, and nothing is shared, locked or atomic.
//
//   for each bundle of the item's key blocks              K, V packed; dK = dV = 0
//     for each head of the group
//       for each strip of kStripM rows that sees a block  Q, dO packed
//         for each block of the bundle                    S, dP, dS; dQ, dV, dK
//
// A key that a row does not see has P = dS = 0 by selection, whatever K, V and dO hold. The products multiply those
// zeros, and 0 * inf is NaN: so rows of Q, dO and K that are not finite ("hot") are 0 in the packed copies that the last
// three products read, and are added element by element where they are seen.
#pragma once

namespace tilewise::cpu::TILEWISE_ISA {

using core::BackwardArgs;
using core::TileClass;

// ---------------------------------------------------------------------------------------------------------------------
// D - dlse

template <class T>
void delta_block(const BackwardCall& w, const RowBlock& block, std::byte* memory) {
    const core::Problem& p = *w.problem;
    const BackwardArgs& args = *w.args;
    BackwardScratch<T> f;
    BackwardScratch<T>::carve(p, w.score_mod, w.adjoint_program, w.bundle, memory, &f);
    const int64_t row0 = w.sequence(block.b).q_row0 + block.i0, dim = p.head_dim_v;
    T* const o = f.d_o[0];
    T* const d_o = f.d_o[1];
    pack_columns(rows_of(args.o, block.b, row0, block.h0), block.queries, dim, kTileM, kTileM, o);
    pack_columns(rows_of(args.d_o, block.b, row0, block.h0), block.queries, dim, kTileM, kTileM, d_o);
    T sums[kTileM];
    for (int r = 0; r < kTileM; r += kLanes<T>) {
        Vec<T> sum = splat(T{0});
        for (int64_t d = 0; d < dim; ++d) sum = fma(load(o + d * kTileM + r), load(d_o + d * kTileM + r), sum);
        store<T>(sums + r, sum);
    }
    const T* const lse = static_cast<const T*>(args.lse.data);
    T* const delta = w.delta_of<T>(block.b, block.h0, block.i0);
    for (int r = 0; r < block.queries; ++r) {
        const T row_lse = lse[args.lse.offset(block.b, block.h0, row0 + r)];
        T dlse = 0;
        if (args.dlse) dlse = static_cast<const T*>(args.dlse.data)[args.dlse.offset(block.b, block.h0, row0 + r)];
        // A row that sees nothing: do does not matter, and dlse only if there is a sink.
        bool empty = row_lse == -kInf<T>;
        if (!empty && p.sinks && row_lse == static_cast<T>(p.sink(block.h0))) {
            empty = true;
            for (int64_t d = 0; d < dim; ++d) empty = empty && o[d * kTileM + r] == 0;
            if (empty) sums[r] = 0;
            empty = false;
        }
        delta[r] = empty ? T{0} : sums[r] - dlse;
        if (p.sinks) w.refined_of<T>(block.b, block.h0, block.i0)[r] = delta[r];
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// P' and dS of a tile

// Where gradients of the scores go on the way back through the formula; null: nowhere.
struct Taps {
    double* slope = nullptr;              // sum of dx * -|t - j|
    double* bias = nullptr;               // sums of dx: element (r, k) at bias[r * bias_row + k * bias_key]
    int64_t bias_row = 0, bias_key = 0;
    bool bias_direct = false;             // written to dbias at once
    const core::Array* arrays = nullptr;  // sums for captured arrays
};

template <class T>
struct Evaluators {
    std::optional<core::RowEvaluator<T>> mod, adjoint;

    Evaluators(const BackwardCall& w, const BackwardScratch<T>& f) {
        const auto kernel = &core::TILEWISE_EXPR_NAMESPACE::evaluate_row<T>;
        if (w.score_mod) mod.emplace(*w.score_mod, kTileN, f.mod, kernel);
        if (w.adjoint_program) adjoint.emplace(*w.adjoint_program, kTileN, f.adjoint, kernel);
    }
};

// A block of rows against a tile of keys. Operands are packed by columns; s and ds come back as P' and dS, defined on
// columns [extent.begin, extent.end), with 0 where nothing is seen.
template <class T>
struct GradientTile {
    RowBlock block;
    Range j;
    const Extent& e;
    const T *q, *d_o, *k, *v;
    T *s, *ds;
    uint8_t* seen;
    bool note_seen;  // fill `seen` even if nothing here needs it
};

// What a row brings along.
template <class T>
struct RowSums {
    T lse, dlse;
    T delta;     // D - dlse, D from o and do
    T p_sink;    // exp(sink - lse); 0 without a sink
    T* refined;  // where a delta goes that is better than the one above; null: nowhere
};

// s = scores, ds = dP: s becomes P and ds becomes P (dP - delta); hidden keys (-inf) get 0 in both.
//
// If the row's whole probability lies in this tile, up to the rounding of lse, then D = sum of P dP is known here, with P
// normalised, and neither the rounding of o nor that of lse is in it. Such a row may be nearly one-hot: dP - D cancels
// then, and those roundings would be all that is left. (With lse and o merged from other sets of keys, as in ring
// attention, the test fails and D comes from o.)
template <class T>
inline void soften_row(T* s, T* ds, int begin, int end, T scale, const RowSums<T>& row) {
    constexpr T kEpsilon = sizeof(T) == 4 ? T{0x1p-23} : T{0x1p-52};
    const Vec<T> log2e = splat(static_cast<T>(kLog2E));
    Vec<T> sums = splat(T{0});
    for (int k = begin; k < end; k += kLanes<T>) {
        const Vec<T> x = load(s + k);
        const auto hidden = x == splat(-kInf<T>);
        // The scale is folded in with one rounding: x * scale and lse are large and nearly equal.
        const Vec<T> p = exp2<T>(fma(x, splat(scale), splat(-row.lse)) * log2e);
        sums += hidden ? splat(T{0}) : p;
        store<T>(s + k, hidden ? splat(T{-1}) : p);  // no probability is negative
    }
    const T sum = sum_of<T>(sums), missing = T{1} - row.p_sink - sum;
    const T tolerance = 16 * kEpsilon * (row.lse > 1 ? row.lse : row.lse < -1 ? -row.lse : T{1});
    T delta = row.delta;
    if (missing >= -tolerance && missing <= tolerance) {
        sums = splat(T{0});
        for (int k = begin; k < end; k += kLanes<T>) {
            const Vec<T> p = load(s + k);
            const auto hidden = p < splat(T{0});
            const Vec<T> exact = p / splat(sum) * splat(T{1} - row.p_sink);
            sums += hidden ? splat(T{0}) : exact * load(ds + k);
            store<T>(s + k, hidden ? p : exact);
        }
        delta = sum_of<T>(sums) - row.dlse;
        if (row.refined) *row.refined = delta;
    }
    for (int k = begin; k < end; k += kLanes<T>) {
        const Vec<T> p = load(s + k), d = p * (load(ds + k) - splat(delta));
        const auto hidden = p < splat(T{0});
        store<T>(s + k, hidden ? splat(T{0}) : p);
        store<T>(ds + k, hidden ? splat(T{0}) : d);
    }
}

template <class T>
inline void clear_row(T* row, int begin, int end) {
    for (int k = begin; k < end; ++k) row[k] = 0;
}

// dx back through score_mod: sums for captured arrays, then dx *= d score_mod / dx. Keys [from, hi) of row r.
template <class T>
void mod_gradient(const BackwardCall& w, const GradientTile<T>& t, int r, int from, int hi, const T* mod_input, T* dx,
                  const uint8_t* seen, Evaluators<T>& evaluate, int64_t* offsets, const Taps& taps) {
    const int64_t n = hi - from;
    evaluate.adjoint->evaluate_nodes(context_of(w, t.block.b, t.block.head(r)), t.block.query(r),
                                     {t.j.begin + from, t.j.begin + hi}, mod_input + from);
    for (const auto& gather : w.adjoint->gathers) {
        if (!taps.arrays || !taps.arrays[gather.array]) continue;
        const core::Array& sums = taps.arrays[gather.array];
        core::gather_offsets(*evaluate.adjoint, gather, sums, n, offsets);
        const auto factor = evaluate.adjoint->value(gather.adjoint_node);
        for (int64_t k = 0; k < n; ++k) {
            if (!seen[from + k] || offsets[k] < 0) continue;
            static_cast<double*>(sums.data)[offsets[k]] += static_cast<double>(dx[from + k] * factor.real_at(k));
        }
    }
    const auto factor = evaluate.adjoint->value(w.adjoint->dx_node);
    for (int64_t k = 0; k < n; ++k) dx[from + k] = seen[from + k] ? dx[from + k] * factor.real_at(k) : T{0};
}

// Sum of dx * -|t - j| over keys [from, hi) of a row; keys from hi to a whole vector are 0.
template <class T>
T slope_gradient(const BackwardCall& w, const GradientTile<T>& t, int r, int from, int hi, const T* dx) {
    Vec<T> sum = splat(T{0});
    const int64_t distance = t.block.query(r) + w.sequence(t.block.b).q_offset - t.j.begin;
    for (int k = from; k < hi; k += kLanes<T>) {
        const Vec<T> signed_distance = splat(static_cast<T>(distance - k)) - iota<T>(std::make_integer_sequence<int, kLanes<T>>{});
        sum = fma(larger(signed_distance, -signed_distance), load(dx + k), sum);
    }
    return -sum_of<T>(sum);
}

template <class T>
void write_bias(const BackwardCall& w, const GradientTile<T>& t, int r, int lo, int hi, const T* dx) {
    const core::Grid4& g = w.args->dbias;
    const int64_t at = g.offset(t.block.b, t.block.head(r), t.block.query(r), t.j.begin);
    if (sizeof(T) == 8 ? g.dtype == DType::f64 : g.dtype != DType::f64) {
        const core::Tensor4 row{g.data, g.dtype, 0, 0, 0, g.stride[3]};
        for (int k = lo; k < hi; k += kLanes<T>) write<T>(row, at, k, hi, load(dx + k));
    } else {
        for (int k = lo; k < hi; ++k) core::store_float(g.data, g.dtype, at + k * g.stride[3], static_cast<double>(dx[k]));
    }
}

// The row of a call with options or dropout.
template <class T>
void gradient_row(const BackwardCall& w, const GradientTile<T>& t, int r, const RowSums<T>& row, const BackwardScratch<T>& f,
                  Evaluators<T>& evaluate, const Taps& taps) {
    const core::Problem& p = *w.problem;
    const Extent& e = t.e;
    const int lo = e.lo[r], hi = e.hi[r], from = lo / kLanes<T> * kLanes<T>;
    T* const x = t.s + r * kTileN;
    T* const dx = t.ds + r * kTileN;
    uint8_t* const seen = t.seen + r * kTileN;
    for (int k = e.begin; k < e.end; ++k) seen[k] = x[k] != -kInf<T>;

    const bool dropout = p.dropout_threshold != 0;
    const T keep_inverse = T{1} / static_cast<T>(p.keep_prob());
    if (dropout) {
        core::dropout_row(p.seed, p.offset, t.block.b * p.num_heads_q + t.block.head(r), t.block.query(r),
                          {t.j.begin + lo, t.j.begin + hi}, p.dropout_threshold, f.keep + lo);
        for (int k = lo; k < hi; ++k) dx[k] = f.keep[k] ? dx[k] * keep_inverse : T{0};
    }
    soften_row(x, dx, e.begin, e.end, static_cast<T>(score_unit(w)), row);
    if (dropout) {
        for (int k = lo; k < hi; ++k) x[k] = f.keep[k] ? x[k] * keep_inverse : T{0};
    }
    if (evaluate.adjoint) mod_gradient(w, t, r, from, hi, f.mod_input + r * kTileN, dx, seen, evaluate, f.offsets, taps);
    if (taps.slope) *taps.slope += static_cast<double>(slope_gradient(w, t, r, from, hi, dx));
    if (taps.bias) {
        double* const sums = taps.bias + r * taps.bias_row;
        for (int k = lo; k < hi; ++k) sums[k * taps.bias_key] += static_cast<double>(dx[k]);
    }
    if (taps.bias_direct) write_bias(w, t, r, lo, hi, dx);
    if (p.softcap > 0) {
        const T inverse = T{1} / static_cast<T>(p.softcap);
        const T* const capped = f.capped + r * kTileN;
        for (int k = lo; k < hi; ++k) {
            const T tanh = capped[k] * inverse;
            dx[k] = seen[k] ? dx[k] * (T{1} - tanh * tanh) : T{0};
        }
    }
}

template <class T>
void gradient_tile(const BackwardCall& w, const GradientTile<T>& t, const BackwardScratch<T>& f, Evaluators<T>& evaluate,
                   const Taps& taps) {
    const core::Problem& p = *w.problem;
    const Extent& e = t.e;
    const int rows = t.block.rows();
    multiply_extent(t.q, t.k, p.head_dim_qk, e, rows, t.s);
    if (w.want_scores) multiply_extent(t.d_o, t.v, p.head_dim_v, e, rows, t.ds);
    finish_scores(w, t.block, t.j, e, t.s, ScoreScratch<T>{f.keep, evaluate.mod ? &*evaluate.mod : nullptr},
                  ScoreTrace<T>{p.softcap > 0 ? f.capped : nullptr, evaluate.mod ? f.mod_input : nullptr});

    const bool plain = w.plain() && p.dropout_threshold == 0;
    const int64_t row0 = w.sequence(t.block.b).q_row0 + t.block.i0;
    const core::Rows3 &lse = w.args->lse, &dlse = w.args->dlse;
    const double sink = p.sinks ? p.sink(t.block.h0) : -core::kInfinity;
    for (int r = 0; r < rows; ++r) {
        T* const x = t.s + r * kTileN;
        T* const dx = t.ds + r * kTileN;
        RowSums<T> row{};
        row.lse = static_cast<const T*>(lse.data)[lse.offset(t.block.b, t.block.h0, row0 + r)];
        if (dlse) row.dlse = static_cast<const T*>(dlse.data)[dlse.offset(t.block.b, t.block.h0, row0 + r)];
        row.delta = *w.delta_of<T>(t.block.b, t.block.h0, t.block.i0 + r);
        if (sink != -core::kInfinity) {
            row.p_sink = static_cast<T>(__builtin_exp(sink - static_cast<double>(row.lse)));
            row.refined = w.refined_of<T>(t.block.b, t.block.h0, t.block.i0 + r);
        }
        if (row.lse == -kInf<T> || e.lo[r] >= e.hi[r]) {
            clear_row(x, e.begin, e.end);
            clear_row(dx, e.begin, e.end);
            if (t.note_seen) __builtin_memset(t.seen + r * kTileN, 0, kTileN);
            continue;
        }
        if (!plain) {
            gradient_row(w, t, r, row, f, evaluate, taps);
            continue;
        }
        if (t.note_seen) {
            for (int k = e.begin; k < e.end; ++k) t.seen[r * kTileN + k] = x[k] != -kInf<T>;
        }
        soften_row(x, dx, e.begin, e.end, static_cast<T>(score_unit(w)), row);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// A strip of queries against a block of keys

// c += s^T B for the keys of the tile: row k of c gets sum_r s[r][k] * (row r of B). Rows [first, last) of s; extents of
// its blocks of kTileM rows, all with the same columns. Follows the edge of a band a few keys at a time.
template <class T>
void multiply_keys(const T* s, const Panels<T>& b, const Extent* e, Range rows, int keys, T* c, int64_t ldc) {
    constexpr int kStep = 4 * kTileRows;
    const auto seen_by = [&](int64_t begin, int64_t end) {
        const auto sees = [&](int64_t r) {
            const Extent& x = e[r / kTileM];
            const int lo = x.lo[r % kTileM], hi = x.hi[r % kTileM];
            return lo < end && hi > begin && lo < hi;
        };
        Range all = rows;
        while (all.begin < all.end && !sees(all.begin)) ++all.begin;
        while (all.end > all.begin && !sees(all.end - 1)) --all.end;
        return all;
    };
    const int64_t end = e[rows.begin / kTileM].end < keys ? e[rows.begin / kTileM].end : keys;
    for (int64_t first = e[rows.begin / kTileM].begin; first < end; ) {
        int64_t last = first + kStep < end ? first + kStep : end;
        const Range k = seen_by(first, last);
        while (last < end) {
            const int64_t next = last + kStep < end ? last + kStep : end;
            const Range more = seen_by(last, next);
            if (more.begin != k.begin || more.end != k.end) break;
            last = next;
        }
        if (!k.empty()) multiply<T, Order::by_columns>(s, kTileN, {first, last}, b, k, c, ldc, Epilogue::add);
        first = last;
    }
}

// Adds s[r][k] * (row r of the source) to row k of c, for the rows that are hot and the keys that they see.
template <class T>
void add_hot_rows(const Source& source, int64_t dim, const uint8_t* hot, Range columns, Range rows, const T* s,
                  const uint8_t* seen, T* c) {
    with_reader<T>(source.dtype, [&](auto reader) {
        using Reader = decltype(reader);
        for (int64_t r = rows.begin; r < rows.end; ++r) {
            if (!hot[1 + r]) continue;
            for (int64_t k = columns.begin; k < columns.end; ++k) {
                if (!seen[r * kTileN + k]) continue;
                T* const to = c + k * padded<T>(dim);
                const Vec<T> factor = splat(s[r * kTileN + k]);
                for (int64_t d = 0; d < dim; d += kLanes<T>) {
                    store<T>(to + d, fma(factor, read<T, Reader>(source, r, d, dim), load(to + d)));
                }
            }
        }
    });
}

// Query rows [i0, i0 + kStripM) of head h.
struct Strip {
    int64_t b, h, i0;
    int queries;

    [[nodiscard]] RowBlock block(int n) const {
        const int left = queries - n * kTileM;
        return {b, h, i0 + n * kTileM, 1, left < 0 ? 0 : left < kTileM ? left : kTileM};
    }
};

template <class T>
void pack_strip(const BackwardCall& w, const Strip& strip, const BackwardScratch<T>& f) {
    const core::Problem& p = *w.problem;
    const int64_t row0 = w.sequence(strip.b).q_row0 + strip.i0;
    const core::Tensor4& d_o = w.args->d_o;
    for (int n = 0; n < kStripBlocks; ++n) {
        const int rows = strip.block(n).queries;
        if (rows == 0) continue;
        const int64_t row = row0 + n * kTileM;
        pack_columns(rows_of(p.q, strip.b, row, strip.h), rows, p.head_dim_qk, kTileM, kTileM, f.q[n]);
        if (w.want_scores) pack_columns(rows_of(d_o, strip.b, row, strip.h), rows, p.head_dim_v, kTileM, kTileM, f.d_o[n]);
    }
    f.q_hot[0] = f.d_o_hot[0] = 0;
    if (w.args->dk) pack_rows(rows_of(p.q, strip.b, row0, strip.h), strip.queries, p.head_dim_qk, kStripM, f.q_rows, f.q_hot);
    if (w.args->dv) pack_rows(rows_of(d_o, strip.b, row0, strip.h), strip.queries, p.head_dim_v, kStripM, f.d_o_rows, f.d_o_hot);
}

template <class T>
void strip_against_block(const BackwardCall& w, const KeyItem& item, const Strip& strip, const TileClass* cls, Range j,
                         const KeyBlock<T>& keys, const BackwardScratch<T>& f, Evaluators<T>& evaluate) {
    const core::Problem& p = *w.problem;
    const BackwardArgs& args = *w.args;
    const int64_t dim_qk = p.head_dim_qk, dim_v = p.head_dim_v;

    // Both blocks of rows take the columns of the wider one, so that the products over all rows find everything defined.
    Extent e[kStripBlocks];
    Range rows{kStripM, 0}, columns{kTileN, 0};
    for (int n = 0; n < kStripBlocks; ++n) {
        if (cls[n] != TileClass::skip) find_extent<T>(w, strip.block(n), j, cls[n], e[n]);
        if (e[n].empty()) continue;
        if (rows.empty()) rows.begin = n * kTileM;
        rows.end = n * kTileM + strip.block(n).queries;
        if (e[n].begin < columns.begin) columns.begin = e[n].begin;
        if (e[n].end > columns.end) columns.end = e[n].end;
    }
    if (rows.empty()) return;

    const bool hot = keys.hot[0] || f.q_hot[0] || f.d_o_hot[0];
    Taps taps;
    if (w.slopes) taps.slope = w.slopes + (item.group * p.batch + strip.b) * p.num_heads_q + strip.h;
    taps.bias_direct = w.direct_bias;
    for (int n = 0; n < kStripBlocks; ++n) {
        if (e[n].empty()) continue;
        e[n].begin = static_cast<int>(columns.begin), e[n].end = static_cast<int>(columns.end);
        const RowBlock block = strip.block(n);
        const int64_t at = int64_t{n} * kTileM * kTileN;
        gradient_tile(w, GradientTile<T>{block, j, e[n], f.q[n], f.d_o[n], keys.k, keys.v, f.s + at, f.ds + at, f.seen + at, hot},
                      f, evaluate, taps);
        if (!args.dq) continue;
        T* const dq = w.dq_of<T>(item.group, strip.b, strip.h, block.i0);
        uint8_t* const touched = w.touched_of(item.group, strip.b, strip.h, block.i0);
        multiply_rows(f.ds + at, panels_of(keys.k_rows, kTileN, dim_qk), e[n], block.queries, dq, padded<T>(dim_qk),
                      *touched ? Epilogue::add : Epilogue::store);
        *touched = 1;
        if (keys.hot[0]) {
            const Source k = rows_of(p.k, strip.b, w.sequence(strip.b).kv_row0 + j.begin, item.head_kv);
            add_hot(k, dim_qk, keys.hot, e[n], block.queries, f.ds + at, f.seen + at, dq);
        }
    }

    const int num_keys = static_cast<int>(j.size());
    const int64_t row0 = w.sequence(strip.b).q_row0 + strip.i0;
    if (args.dv) {
        multiply_keys(f.s, panels_of(f.d_o_rows, kStripM, dim_v), e, rows, num_keys, keys.dv, padded<T>(dim_v));
        if (f.d_o_hot[0]) {
            add_hot_rows(rows_of(args.d_o, strip.b, row0, strip.h), dim_v, f.d_o_hot, columns, rows, f.s, f.seen, keys.dv);
        }
    }
    if (args.dk) {
        multiply_keys(f.ds, panels_of(f.q_rows, kStripM, dim_qk), e, rows, num_keys, keys.dk, padded<T>(dim_qk));
        if (f.q_hot[0]) {
            add_hot_rows(rows_of(p.q, strip.b, row0, strip.h), dim_qk, f.q_hot, columns, rows, f.ds, f.seen, keys.dk);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Items

inline Range keys_of(const BackwardCall& w, int64_t b, int64_t block) {
    const int64_t kv_len = w.sequence(b).kv_len, begin = block * kTileN;
    return {begin, begin + kTileN < kv_len ? begin + kTileN : kv_len};
}

template <class T>
void pack_keys(const BackwardCall& w, int64_t b, int64_t head_kv, Range j, const KeyBlock<T>& keys) {
    const core::Problem& p = *w.problem;
    const int64_t row0 = w.sequence(b).kv_row0 + j.begin, count = j.size();
    pack_columns(rows_of(p.k, b, row0, head_kv), count, p.head_dim_qk, kTileN, kPanel<T>, keys.k);
    if (w.want_scores) pack_columns(rows_of(p.v, b, row0, head_kv), count, p.head_dim_v, kTileN, kPanel<T>, keys.v);
    for (int k = 0; k <= kTileN; ++k) keys.hot[k] = 0;
    if (w.args->dq) pack_rows(rows_of(p.k, b, row0, head_kv), count, p.head_dim_qk, kTileN, keys.k_rows, keys.hot);
}

template <class T>
void write_rows(const core::Tensor4& t, int64_t b, int64_t row0, int64_t h, int64_t rows, int64_t dim, const T* sums, T scale) {
    if (!t) return;
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = t.offset(b, row0 + r, h);
        for (int64_t d = 0; d < dim; d += kLanes<T>) {
            write<T>(t, at, d, dim, load(sums + r * padded<T>(dim) + d) * splat(scale));
        }
    }
}

template <class T>
void key_item(const BackwardCall& w, const KeyItem& item, std::byte* memory) {
    const core::Problem& p = *w.problem;
    const core::Sequence& sequence = w.sequence(item.b);
    BackwardScratch<T> f;
    BackwardScratch<T>::carve(p, w.score_mod, w.adjoint_program, w.bundle, memory, &f);
    Evaluators<T> evaluate(w, f);

    const int64_t num_blocks = (sequence.kv_len + kTileN - 1) / kTileN;
    for (int64_t first = item.group; first < num_blocks; first += w.bundle * w.groups) {
        Range j[kMaxBundle];
        int count = 0;
        for (int64_t block = first; block < num_blocks && count < w.bundle; block += w.groups, ++count) {
            j[count] = keys_of(w, item.b, block);
            pack_keys(w, item.b, item.head_kv, j[count], f.keys[count]);
            __builtin_memset(f.keys[count].dk, 0, sizeof(T) * static_cast<size_t>(kTileN * padded<T>(p.head_dim_qk)));
            __builtin_memset(f.keys[count].dv, 0, sizeof(T) * static_cast<size_t>(kTileN * padded<T>(p.head_dim_v)));
        }
        for (int64_t h = item.head_kv * p.group(); h < (item.head_kv + 1) * p.group(); ++h) {
            std::span<const core::Tile> tiles[kMaxBundle];
            size_t next[kMaxBundle] = {};
            for (int n = 0; n < count; ++n) tiles[n] = query_tiles(w, item.b, h, j[n], n);
            for (;;) {
                int64_t i0 = sequence.q_len;  // of the first strip that some block still waits for
                for (int n = 0; n < count; ++n) {
                    if (next[n] == tiles[n].size()) continue;
                    const int64_t begin = tiles[n][next[n]].begin / kStripM * kStripM;
                    if (begin < i0) i0 = begin;
                }
                if (i0 == sequence.q_len) break;
                const int64_t left = sequence.q_len - i0;
                const Strip strip{item.b, h, i0, static_cast<int>(left < kStripM ? left : kStripM)};
                pack_strip(w, strip, f);
                for (int n = 0; n < count; ++n) {
                    TileClass cls[kStripBlocks] = {};
                    bool any = false;
                    for (; next[n] < tiles[n].size() && tiles[n][next[n]].begin < i0 + kStripM; ++next[n], any = true) {
                        cls[(tiles[n][next[n]].begin - i0) / kTileM] = tiles[n][next[n]].cls;
                    }
                    if (any) strip_against_block(w, item, strip, cls, j[n], f.keys[n], f, evaluate);
                }
            }
        }
        for (int n = 0; n < count; ++n) {
            const int64_t row0 = sequence.kv_row0 + j[n].begin, rows = j[n].size();
            write_rows(w.args->dk, item.b, row0, item.head_kv, rows, p.head_dim_qk, f.keys[n].dk, static_cast<T>(p.softmax_scale));
            write_rows(w.args->dv, item.b, row0, item.head_kv, rows, p.head_dim_v, f.keys[n].dv, T{1});
        }
    }
}

// dq of a block of rows of one head: the sums of the groups, in order.
template <class T>
void sum_dq(const BackwardCall& w, const RowBlock& block) {
    const core::Problem& p = *w.problem;
    const int64_t dim = p.head_dim_qk, row0 = w.sequence(block.b).q_row0 + block.i0;
    const T scale = static_cast<T>(p.softmax_scale);
    for (int r = 0; r < block.queries; ++r) {
        const int64_t at = w.args->dq.offset(block.b, row0 + r, block.h0);
        for (int64_t d = 0; d < dim; d += kLanes<T>) {
            Vec<T> sum = splat(T{0});
            for (int64_t group = 0; group < w.groups; ++group) {
                if (!*w.touched_of(group, block.b, block.h0, block.i0)) continue;
                sum += load(w.dq_of<T>(group, block.b, block.h0, block.i0 + r) + d);
            }
            write<T>(w.args->dq, at, d, dim, sum * splat(scale));
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Gradients that need the scores once more

// P' and dS of one block of rows against keys that are packed already, for the taps alone.
template <class T>
void recompute_tile(const BackwardCall& w, const RowBlock& block, Range j, TileClass cls, const BackwardScratch<T>& f,
                    Evaluators<T>& evaluate, const Taps& taps) {
    Extent e;
    find_extent<T>(w, block, j, cls, e);
    if (e.empty()) return;
    const core::Problem& p = *w.problem;
    const int64_t row0 = w.sequence(block.b).q_row0 + block.i0;
    pack_columns(rows_of(p.q, block.b, row0, block.h0), block.queries, p.head_dim_qk, kTileM, kTileM, f.q[0]);
    pack_columns(rows_of(w.args->d_o, block.b, row0, block.h0), block.queries, p.head_dim_v, kTileM, kTileM, f.d_o[0]);
    const GradientTile<T> tile{block, j, e, f.q[0], f.d_o[0], f.keys[0].k, f.keys[0].v, f.s, f.ds, f.seen, false};
    gradient_tile(w, tile, f, evaluate, taps);
}

template <class T>
void pack_keys_by_columns(const BackwardCall& w, int64_t b, int64_t head_kv, Range j, const KeyBlock<T>& keys) {
    const core::Problem& p = *w.problem;
    const int64_t row0 = w.sequence(b).kv_row0 + j.begin;
    pack_columns(rows_of(p.k, b, row0, head_kv), j.size(), p.head_dim_qk, kTileN, kPanel<T>, keys.k);
    pack_columns(rows_of(p.v, b, row0, head_kv), j.size(), p.head_dim_v, kTileN, kPanel<T>, keys.v);
}

template <class T>
void bias_item(const BackwardCall& w, const BiasItem& item, std::byte* memory) {
    const core::Problem& p = *w.problem;
    const core::Grid4& g = w.args->dbias;
    BackwardScratch<T> f;
    BackwardScratch<T>::carve(p, w.score_mod, w.adjoint_program, w.bundle, memory, &f);
    Evaluators<T> evaluate(w, f);
    const bool all_queries = g.shape[2] == 1, all_keys = g.shape[3] == 1;
    const int64_t sum_rows = all_queries ? 1 : item.i.size(), sum_keys = all_keys ? 1 : item.j.size();
    for (int64_t n = 0; n < sum_rows * kTileN; ++n) f.bias[n] = 0;

    for (int64_t b = item.b.begin; b < item.b.end; ++b) {
        const core::Sequence& s = w.sequence(b);
        const Range queries = all_queries ? Range{0, s.q_len} : Range{item.i.begin, item.i.end < s.q_len ? item.i.end : s.q_len};
        const Range keys = all_keys ? Range{0, s.kv_len} : Range{item.j.begin, item.j.end < s.kv_len ? item.j.end : s.kv_len};
        for (int64_t h = item.h.begin; h < item.h.end; ++h) {
            for (int64_t j0 = keys.begin; j0 < keys.end; j0 += kTileN) {
                const Range j{j0, j0 + kTileN < keys.end ? j0 + kTileN : keys.end};
                bool packed = false;
                for (int64_t i0 = queries.begin; i0 < queries.end; i0 += kTileM) {
                    const Range i{i0, i0 + kTileM < queries.end ? i0 + kTileM : queries.end};
                    const TileClass cls = w.mask->classify(b, h, i, j);
                    if (cls == TileClass::skip) continue;
                    if (!packed) pack_keys_by_columns(w, b, h / p.group(), j, f.keys[0]);
                    packed = true;
                    Taps taps;
                    taps.bias = f.bias + (all_queries ? 0 : (i0 - item.i.begin) * kTileN);
                    taps.bias_row = all_queries ? 0 : kTileN;
                    taps.bias_key = all_keys ? 0 : 1;
                    recompute_tile(w, RowBlock{b, h, i0, 1, static_cast<int>(i.size())}, j, cls, f, evaluate, taps);
                }
            }
        }
    }
    const int64_t b = g.shape[0] == 1 ? 0 : item.b.begin, h = g.shape[1] == 1 ? 0 : item.h.begin;
    for (int64_t i = 0; i < sum_rows; ++i) {
        for (int64_t j = 0; j < sum_keys; ++j) {
            const int64_t at = g.offset(b, h, all_queries ? 0 : item.i.begin + i, all_keys ? 0 : item.j.begin + j);
            core::store_float(g.data, g.dtype, at, f.bias[i * kTileN + j]);
        }
    }
}

template <class T>
void array_item(const BackwardCall& w, const ArrayItem& item, std::byte* memory) {
    const core::Problem& p = *w.problem;
    BackwardScratch<T> f;
    BackwardScratch<T>::carve(p, w.score_mod, w.adjoint_program, w.bundle, memory, &f);
    Evaluators<T> evaluate(w, f);
    Taps taps;
    taps.arrays = item.sums;
    const auto blocks_of = [&](int64_t b) { return (w.sequence(b).kv_len + kTileN - 1) / kTileN; };
    int64_t triples = 0;
    for (int64_t b = 0; b < p.batch; ++b) triples += p.num_heads_q * blocks_of(b);
    const Range mine{triples * item.chunk / item.num_chunks, triples * (item.chunk + 1) / item.num_chunks};

    int64_t before = 0;
    for (int64_t b = 0; b < p.batch; before += p.num_heads_q * blocks_of(b), ++b) {
        for (int64_t n = 0; n < p.num_heads_q * blocks_of(b); ++n) {
            if (before + n < mine.begin || before + n >= mine.end) continue;
            const int64_t h = n / blocks_of(b);
            const Range j = keys_of(w, b, n % blocks_of(b));
            const auto tiles = query_tiles(w, b, h, j, 0);
            if (!tiles.empty()) pack_keys_by_columns(w, b, h / p.group(), j, f.keys[0]);
            for (const core::Tile& tile : tiles) {
                const int64_t left = w.sequence(b).q_len - tile.begin;
                recompute_tile(w, RowBlock{b, h, tile.begin, 1, static_cast<int>(left < kTileM ? left : kTileM)}, j, tile.cls, f,
                               evaluate, taps);
            }
        }
    }
}

namespace {
template <class T>
constexpr BackwardKernelsOf<T> backward_kernels_of() {
    return {delta_block<T>, key_item<T>, sum_dq<T>, bias_item<T>, array_item<T>};
}
}  // namespace
inline constexpr BackwardKernels kBackwardKernels{backward_kernels_of<float>(), backward_kernels_of<double>()};

}  // namespace tilewise::cpu::TILEWISE_ISA
