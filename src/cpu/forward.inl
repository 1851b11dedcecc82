// The forward pass of one block of query rows: online softmax over tiles of keys (FlashAttention-2), in segments.
//
//   for each segment of kSegment keys, ascending                       m = -inf, l = 0
//     for each tile of kTileN keys that some row sees, ascending
//       s = Q K^T, options, mask                                       (tile.inl)
//       m' = max(m, row maximum of s)    a = exp(m - m')    s = exp(s - m')
//       l = l a + row sum of s           o = o a + s V                 one product, the rescale is its epilogue
//     merge the segment into the state of those before it              (m, l, o) + (m, l, o)
//   o / l, lse = m + ln l, with the sink
//
// One arithmetic. A tile's contribution depends only on the row's q and the keys and values it sees: a key that it does
// not see adds exp(-inf) = 0 to sums that run in key order from the start of the tile, a tile that it does not see
// multiplies by a = 1 and adds 0, and an empty segment is an exact identity of the merge. So bits do not depend on
// tiles skipped, on the other rows of the block, on padding, or on who computed a segment: prefill goes through all
// segments of a row, decode gives every segment to another thread and merges the same states in the same order.
// (`direct` items, a few rows without batch_invariant, have an arithmetic of their own, as fixed.)
//
// Odd values. The row maximum ignores NaN, so a NaN or +inf score makes its own p, and through l its own row, NaN, and
// no other row. While a row has seen nothing, m = -inf, and 0 is subtracted instead of it. Rows of V that are not
// finite are 0 in the packed copy; where such a key is visible, p * v is added element by element after the product.
#pragma once

namespace tilewise::cpu::TILEWISE_ISA {

// ---------------------------------------------------------------------------------------------------------------------
// States

// exp((a - b) * factor) for one number; 1 exactly if a == b.
template <class T>
inline T exp_difference(T a, T b, T factor) {
    return a == b ? T{1} : exp2<T>(splat((a - b) * factor))[0];
}

template <class T>
void reset(const State<T>& state, int rows) {
    for (int r = 0; r < rows; ++r) state.m[r] = -kInf<T>, state.l[r] = 0;
}

// into = into + from. The state of a row that has seen nothing is m = -inf, l = 0; its o is not read.
template <class T>
void merge(const State<T>& into, const State<T>& from, int rows, int64_t row_length, T factor) {
    constexpr int n = kLanes<T>;
    for (int r = 0; r < rows; ++r) {
        if (from.l[r] == 0) continue;
        T* const o = into.o + r * row_length;
        const T* const other = from.o + r * row_length;
        if (into.l[r] == 0) {
            into.m[r] = from.m[r], into.l[r] = from.l[r];
            __builtin_memcpy(o, other, static_cast<size_t>(row_length) * sizeof(T));
            continue;
        }
        const T m = into.m[r] > from.m[r] ? into.m[r] : from.m[r];
        const T a = exp_difference(into.m[r], m, factor), b = exp_difference(from.m[r], m, factor);
        into.m[r] = m;
        into.l[r] = into.l[r] * a + from.l[r] * b;
        for (int64_t d = 0; d < row_length; d += n)
            store<T>(o + d, fma(load(o + d), splat(a), load(other + d) * splat(b)));
    }
}

// Divides, applies the sink, writes o and lse.
template <class T>
void finish(const Call& call, const core::ForwardArgs& args, const RowBlock& block, const State<T>& state) {
    const core::Problem& p = *call.problem;
    const int64_t dim = p.head_dim_v, row_length = padded<T>(dim), row0 = call.sequence(block.b).q_row0;
    const double unit = score_unit(call);
    for (int r = 0; r < block.rows(); ++r) {
        const int64_t h = block.head(r), row = row0 + block.query(r);
        const bool empty = state.l[r] == 0;
        // In double: one row costs as much as a fraction of one key, and the sink may be far from m.
        double m = empty ? -__builtin_inf() : unit * static_cast<double>(state.m[r]);
        double l = static_cast<double>(state.l[r]), share = 1;
        if (p.sinks) {
            const double sink = p.sink(h);
            if (empty) {
                m = sink, l = 1;
            } else {
                const double top = sink > m ? sink : m;
                share = __builtin_exp(m - top);
                l = l * share + __builtin_exp(sink - top);
                m = top;
            }
        }
        const T factor = static_cast<T>(empty ? 0 : share / (l * static_cast<double>(p.keep_prob())));
        const int64_t at = args.o.offset(block.b, row, h);
        for (int64_t d = 0; d < dim; d += kLanes<T>) {
            const Vec<T> o = empty ? splat(T{0}) : load(state.o + r * row_length + d) * splat(factor);
            write<T>(args.o, at, d, dim, o);
        }
        if (!args.lse) continue;
        const double lse = l == 0 ? m : m + __builtin_log(l);
        static_cast<T*>(args.lse.data)[args.lse.offset(block.b, h, row)] = static_cast<T>(lse);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Softmax of a tile

// Scores become probabilities relative to the new maximum; scale[r] = what the row's o must be multiplied with. All
// maxima come first: then no row's exponentials wait for the end of a chain of dependent instructions.
template <class T>
void soften_tile(const Call& call, const RowBlock& block, const Extent& e, T* s, const State<T>& state, T* scale) {
    constexpr int n = kLanes<T>;
    const T factor = score_factor<T>(call);
    const int rows = block.rows();
    T shift[kTileM];
    for (int r = 0; r < rows; ++r) {
        const T top = row_max(s + r * kTileN, e.begin, e.end), before = state.m[r];
        const T m = top > before ? top : before;
        state.m[r] = m;
        shift[r] = m == -kInf<T> ? T{0} : m;
        scale[r] = m == before ? T{0} : before - m;  // inf - inf would be NaN
    }
    for (int r = rows; r < kTileM; ++r) scale[r] = 0;
    for (int r = 0; r < kTileM; r += n) store<T>(scale + r, exp2<T>(load(scale + r) * splat(factor)));
    for (int r = 0; r < rows; ++r) {
        state.l[r] = state.l[r] * scale[r] + exp_row(s + r * kTileN, e.begin, e.end, shift[r], factor);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Products with packed tiles

// Notes which rows see which keys whose V is not finite: afterwards an underflow to 0 could not be told from hidden.
template <class T>
void note_hot(const uint8_t* hot, const Extent& e, int rows, const T* s, uint8_t* seen) {
    for (int k = e.begin; k < e.end; ++k) {
        if (!hot[1 + k]) continue;
        for (int r = 0; r < rows; ++r) seen[r * kTileN + k] = s[r * kTileN + k] != -kInf<T>;
    }
}

template <class T>
void add_hot(const Source& v, int64_t dim, const uint8_t* hot, const Extent& e, int rows, const T* s,
             const uint8_t* seen, T* o) {
    const int64_t row_length = padded<T>(dim);
    with_reader<T>(v.dtype, [&](auto reader) {
        using Reader = decltype(reader);
        for (int k = e.begin; k < e.end; ++k) {
            if (!hot[1 + k]) continue;
            for (int r = 0; r < rows; ++r) {
                if (!seen[r * kTileN + k]) continue;
                T* const to = o + r * row_length;
                const Vec<T> p = splat(s[r * kTileN + k]);
                for (int64_t d = 0; d < dim; d += kLanes<T>) {
                    store<T>(to + d, fma(p, read<T, Reader>(v, k, d, dim), load(to + d)));
                }
            }
        }
    });
}

template <class T>
void pack_tile(const Call& call, int64_t b, int64_t head_kv, int64_t j0, const KvTile<T>& tile) {
    const core::Problem& p = *call.problem;
    const core::Sequence& sequence = call.sequence(b);
    const int64_t keys = sequence.kv_len - j0 < kTileN ? sequence.kv_len - j0 : kTileN, row0 = sequence.kv_row0 + j0;
    for (int k = 0; k <= kTileN; ++k) tile.hot[k] = 0;
    pack_columns(rows_of(p.k, b, row0, head_kv), keys, p.head_dim_qk, kTileN, kPanel<T>, tile.k);
    pack_rows(rows_of(p.v, b, row0, head_kv), keys, p.head_dim_v, kTileN, tile.v, tile.hot);
}

// ---------------------------------------------------------------------------------------------------------------------
// A block

template <class T>
void load_queries(const Call& call, const RowBlock& block, T* q) {
    const core::Problem& p = *call.problem;
    const int64_t row0 = call.sequence(block.b).q_row0 + block.i0;
    if (block.heads == 1) {
        return pack_columns(rows_of(p.q, block.b, row0, block.h0), block.queries, p.head_dim_qk, kTileM, kTileM, q);
    }
    // Few rows of several heads. Rows past the block's are not initialised: no kernel reads them.
    for (int r = 0; r < block.rows(); ++r) {
        const Source source = rows_of(p.q, block.b, call.sequence(block.b).q_row0 + block.query(r), block.head(r));
        with_reader<T>(source.dtype, [&](auto reader) {
            using Reader = decltype(reader);
            for (int64_t d = 0; d < p.head_dim_qk; d += kLanes<T>) {
                const Vec<T> x = read<T, Reader>(source, 0, d, p.head_dim_qk);
                for (int n = 0; n < kLanes<T> && d + n < p.head_dim_qk; ++n) q[(d + n) * kTileM + r] = x[n];
            }
        });
    }
}

template <class T>
void forward_block(const Call& call, const core::ForwardArgs& args, const ForwardItem& item, std::byte* memory) {
    const core::Problem& p = *call.problem;
    const RowBlock& block = item.block;
    const core::Sequence& sequence = call.sequence(block.b);
    const int rows = block.rows();
    const int64_t dim_qk = p.head_dim_qk, dim_v = p.head_dim_v, row_length = padded<T>(dim_v);
    const int64_t head_kv = block.h0 / p.group();
    const T factor = score_factor<T>(call);

    ForwardScratch<T> f;
    ForwardScratch<T>::carve(p, call.score_mod, memory, &f);
    std::optional<core::RowEvaluator<T>> mod;
    if (call.score_mod) mod.emplace(*call.score_mod, kTileN, f.mod, &core::TILEWISE_EXPR_NAMESPACE::evaluate_row<T>);
    const ScoreScratch<T> score_scratch{f.bytes, mod ? &*mod : nullptr};

    // The first segment with a visible tile is worked on in place of the total, later ones beside it.
    const State<T> total = item.partial ? State<T>::at(item.partial, rows) : f.run;
    State<T> state = total;
    int64_t segment = -1;
    bool first = true;  // tile of its segment
    Extent e;
    reset(total, rows);
    load_queries(call, block, f.q);

    for (const core::Tile& next : visible_tiles(call, block, item.keys)) {
        const Range j{next.begin, next.begin + kTileN < sequence.kv_len ? next.begin + kTileN : sequence.kv_len};
        find_extent<T>(call, block, j, next.cls, e);
        if (e.empty()) continue;
        if (next.begin / kSegment != segment) {
            if (segment >= 0) {
                if (state.o != total.o) merge(total, state, rows, row_length, factor);
                state = f.segment;
                reset(state, rows);
            }
            segment = next.begin / kSegment;
            first = true;
        }

        KvTile<T> tile = f.tile;
        if (item.packed) tile = KvTile<T>::at(item.packed + next.begin / kTileN * KvTile<T>::bytes(p), p);
        else pack_tile(call, block.b, head_kv, j.begin, tile);
        multiply_extent(f.q, tile.k, dim_qk, e, rows, f.s);
        finish_scores(call, block, j, e, f.s, score_scratch);
        if (tile.hot[0]) note_hot(tile.hot, e, rows, f.s, f.seen);
        soften_tile(call, block, e, f.s, state, f.scale);
        drop_tile(call, block, j, e, f.s, f.bytes);
        multiply_rows(f.s, panels_of(tile.v, kTileN, dim_v), e, rows, state.o, row_length,
                      first ? Epilogue::store : Epilogue::scale_add, f.scale);
        if (tile.hot[0]) {
            const Source v = rows_of(p.v, block.b, sequence.kv_row0 + j.begin, head_kv);
            add_hot(v, dim_v, tile.hot, e, rows, f.s, f.seen, state.o);
        }
        first = false;
    }
    if (state.o != total.o) merge(total, state, rows, row_length, factor);
    if (!item.partial) finish(call, args, block, total);
}

template <class T>
void merge_partials(const Call& call, const core::ForwardArgs& args, const RowBlock& block, std::byte* partials,
                    int64_t count, int64_t stride) {
    const State<T> total = State<T>::at(partials, block.rows());
    for (int64_t n = 1; n < count; ++n) {
        merge(total, State<T>::at(partials + n * stride, block.rows()), block.rows(),
              padded<T>(call.problem->head_dim_v), score_factor<T>(call));
    }
    finish(call, args, block, total);
}

}  // namespace tilewise::cpu::TILEWISE_ISA
