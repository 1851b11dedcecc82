// P' and dS of a tile, the part of the backward pass that is not a product: D, the softmax and the way back through the
// options of the formula. backward.inl, which comes after this file, tells the whole story.
#pragma once

namespace tilewise::cpu::TILEWISE_ISA {

// ---------------------------------------------------------------------------------------------------------------------
// D - dlse

template <class T>
void delta_block(const BackwardCall& w, const RowBlock& block, std::byte* memory) {
    const core::Problem& p = *w.problem;
    const core::BackwardArgs& args = *w.args;
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
    *w.whole_of(block.b, block.h0, block.i0) = num_key_tiles(w, block) <= 1;
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
    double* slope = nullptr;  // sum of dx * -|t - j|
    double* bias = nullptr;   // sums of dx: element (r, k) at bias[r * bias_row + k * bias_key]
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
    bool whole;  // sees no key of another tile
};

// P of one vector of scores. The scale is folded in with one rounding: x * scale and lse are large and nearly equal.
template <class T>
[[gnu::always_inline]] inline Vec<T> probability(Vec<T> x, T scale, T lse) {
    return exp2<T>(fma(x, splat(scale), splat(-lse)) * splat(static_cast<T>(kLog2E)));
}

// s = scores, ds = dP: s becomes P and ds becomes P (dP - delta); hidden keys (-inf) get 0 in both.
template <class T>
inline void soften_row(T* s, T* ds, int begin, int end, T scale, T lse, T delta) {
    for (int k = begin; k < end; k += kLanes<T>) {
        const Vec<T> x = load(s + k), p = probability(x, scale, lse), d = p * (load(ds + k) - splat(delta));
        const auto hidden = x == splat(-kInf<T>);
        store<T>(s + k, hidden ? splat(T{0}) : p);
        store<T>(ds + k, hidden ? splat(T{0}) : d);
    }
}

// The same for a row that sees no key of another tile: D = sum of P dP is known here, with P normalised, and neither
// the rounding of o nor that of lse is in it. Such a row may be nearly one-hot: dP - D cancels then, and those
// roundings would be all that is left. But lse and o may be those of more keys than these, merged, as in ring
// attention; the probabilities do not add up to 1 then, and D comes from o.
template <class T>
void soften_whole_row(T* s, T* ds, int begin, int end, T scale, const RowSums<T>& row) {
    constexpr T kEpsilon = sizeof(T) == 4 ? T{0x1p-23} : T{0x1p-52};
    Vec<T> sums = splat(T{0});
    for (int k = begin; k < end; k += kLanes<T>) {
        const Vec<T> x = load(s + k);
        sums += x == splat(-kInf<T>) ? splat(T{0}) : probability(x, scale, row.lse);
    }
    const T sum = sum_of<T>(sums), missing = T{1} - row.p_sink - sum;
    const T tolerance = 16 * kEpsilon * (row.lse > 1 ? row.lse : row.lse < -1 ? -row.lse : T{1});
    // Where the sink has most of the row, 1 - p_sink is all rounding, or sum is 0. And a delta that is not finite
    // stays: a dropped key adds 0 * v to o, but nothing to the sum below.
    if (!(sum >= T{0.5} && missing >= -tolerance && missing <= tolerance && row.delta - row.delta == 0)) {
        return soften_row(s, ds, begin, end, scale, row.lse, row.delta);
    }
    sums = splat(T{0});
    for (int k = begin; k < end; k += kLanes<T>) {
        const Vec<T> x = load(s + k), p = probability(x, scale, row.lse) / splat(sum) * splat(T{1} - row.p_sink);
        const auto hidden = x == splat(-kInf<T>);
        sums += hidden ? splat(T{0}) : p * load(ds + k);
        store<T>(s + k, hidden ? splat(T{-1}) : p);  // no probability is negative
    }
    const T delta = sum_of<T>(sums) - row.dlse;
    if (row.refined) *row.refined = delta;
    for (int k = begin; k < end; k += kLanes<T>) {
        const Vec<T> p = load(s + k), d = p * (load(ds + k) - splat(delta));
        const auto hidden = p < splat(T{0});
        store<T>(s + k, hidden ? splat(T{0}) : p);
        store<T>(ds + k, hidden ? splat(T{0}) : d);
    }
}

template <class T>
inline void soften(T* s, T* ds, const Extent& e, T scale, const RowSums<T>& row) {
    if (row.whole) soften_whole_row(s, ds, e.begin, e.end, scale, row);
    else soften_row(s, ds, e.begin, e.end, scale, row.lse, row.delta);
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
        const Vec<T> signed_distance =
            splat(static_cast<T>(distance - k)) - iota<T>(std::make_integer_sequence<int, kLanes<T>>{});
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
        for (int k = lo; k < hi; ++k)
            core::store_float(g.data, g.dtype, at + k * g.stride[3], static_cast<double>(dx[k]));
    }
}

// The row of a call with options or dropout.
template <class T>
void gradient_row(const BackwardCall& w, const GradientTile<T>& t, int r, const RowSums<T>& row,
                  const BackwardScratch<T>& f, Evaluators<T>& evaluate, const Taps& taps) {
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
    soften(x, dx, e, static_cast<T>(score_unit(w)), row);
    if (dropout) {
        for (int k = lo; k < hi; ++k) x[k] = f.keep[k] ? x[k] * keep_inverse : T{0};
    }
    if (evaluate.adjoint)
        mod_gradient(w, t, r, from, hi, f.mod_input + r * kTileN, dx, seen, evaluate, f.offsets, taps);
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
void gradient_tile(const BackwardCall& w, const GradientTile<T>& t, const BackwardScratch<T>& f,
                   Evaluators<T>& evaluate, const Taps& taps) {
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
    const bool whole_block = *w.whole_of(t.block.b, t.block.h0, t.block.i0), band = w.mask->is_band();
    const double sink = p.sinks ? p.sink(t.block.h0) : -core::kInfinity;
    for (int r = 0; r < rows; ++r) {
        T* const x = t.s + r * kTileN;
        T* const dx = t.ds + r * kTileN;
        RowSums<T> row{};
        row.lse = static_cast<const T*>(lse.data)[lse.offset(t.block.b, t.block.h0, row0 + r)];
        if (dlse) row.dlse = static_cast<const T*>(dlse.data)[dlse.offset(t.block.b, t.block.h0, row0 + r)];
        row.delta = *w.delta_of<T>(t.block.b, t.block.h0, t.block.i0 + r);
        row.whole = whole_block;
        if (band && !whole_block) {
            const Range seen = w.mask->row_range(t.block.b, t.block.i0 + r);
            row.whole = seen.begin >= t.j.begin && seen.end <= t.j.end;
        }
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
        soften(x, dx, e, static_cast<T>(score_unit(w)), row);
    }
}

}  // namespace tilewise::cpu::TILEWISE_ISA
