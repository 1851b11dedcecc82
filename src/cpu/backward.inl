// The backward pass of one group of key blocks (FlashAttention-2): P is recomputed tile by tile from lse, never stored.
//
//   D_i  = sum_d o_id do_id                             once per row; delta = D - dlse
//   S    = Q K^T, options, mask                         (tile.inl, as in forward)
//   P    = exp(S - lse)        P' = keep P / keep_prob
//   dP   = dO V^T              dS = P (keep dP / keep_prob - delta), chained back through score_mod and softcap
//   dV  += P'^T dO             dK += dS^T Q             dQ += dS K             dK and dQ times the scale at the end
//
// Cost: five products of 2 M N head_dim FLOP per tile instead of forward's two; the passes over S and dP in between
// touch the same number of elements as forward's softmax, so they weigh less.
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
// zeros, and 0 * inf is NaN: so rows of Q, dO and K that are not finite ("hot") are 0 in the packed copies that the
// last three products read, and are added element by element where they are seen.
#pragma once

namespace tilewise::cpu::TILEWISE_ISA {

using core::BackwardArgs;
using core::TileClass;

// ---------------------------------------------------------------------------------------------------------------------
// A strip of queries against a block of keys

// c += s^T B for the keys of the tile: row k of c gets sum_r s[r][k] * (row r of B). Rows [first, last) of s; extents
// of its blocks of kTileM rows, all with the same columns. Follows the edge of a band a few keys at a time.
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
    for (int64_t first = e[rows.begin / kTileM].begin; first < end;) {
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
    // Rows first: that reads memory front to back.
    f.q_hot[0] = f.d_o_hot[0] = 0;
    if (w.args->dk)
        pack_rows(rows_of(p.q, strip.b, row0, strip.h), strip.queries, p.head_dim_qk, kStripM, f.q_rows, f.q_hot);
    if (w.args->dv)
        pack_rows(rows_of(d_o, strip.b, row0, strip.h), strip.queries, p.head_dim_v, kStripM, f.d_o_rows, f.d_o_hot);
    for (int n = 0; n < kStripBlocks; ++n) {
        const int rows = strip.block(n).queries;
        if (rows == 0) continue;
        const int64_t row = row0 + n * kTileM;
        pack_columns(rows_of(p.q, strip.b, row, strip.h), rows, p.head_dim_qk, kTileM, kTileM, f.q[n]);
        if (w.want_scores)
            pack_columns(rows_of(d_o, strip.b, row, strip.h), rows, p.head_dim_v, kTileM, kTileM, f.d_o[n]);
    }
}

template <class T>
void strip_against_block(const BackwardCall& w, const KeyItem& item, const Strip& strip, const TileClass* cls, Range j,
                         const KeyBlock<T>& keys, const BackwardScratch<T>& f, Evaluators<T>& evaluate) {
    const core::Problem& p = *w.problem;
    const BackwardArgs& args = *w.args;
    const int64_t dim_qk = p.head_dim_qk, dim_v = p.head_dim_v;

    // Both blocks of rows take the columns of the wider one, so that the products over all rows find everything
    // defined.
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
        gradient_tile(
            w, GradientTile<T>{block, j, e[n], f.q[n], f.d_o[n], keys.k, keys.v, f.s + at, f.ds + at, f.seen + at, hot},
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
            add_hot_rows(rows_of(args.d_o, strip.b, row0, strip.h), dim_v, f.d_o_hot, columns, rows, f.s, f.seen,
                         keys.dv);
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
    for (int k = 0; k <= kTileN; ++k) keys.hot[k] = 0;
    if (w.args->dq) pack_rows(rows_of(p.k, b, row0, head_kv), count, p.head_dim_qk, kTileN, keys.k_rows, keys.hot);
    pack_columns(rows_of(p.k, b, row0, head_kv), count, p.head_dim_qk, kTileN, kPanel<T>, keys.k);
    if (w.want_scores) pack_columns(rows_of(p.v, b, row0, head_kv), count, p.head_dim_v, kTileN, kPanel<T>, keys.v);
}

template <class T>
void write_rows(const core::Tensor4& t, int64_t b, int64_t row0, int64_t h, int64_t rows, int64_t dim, const T* sums,
                T scale) {
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
            write_rows(w.args->dk, item.b, row0, item.head_kv, rows, p.head_dim_qk, f.keys[n].dk,
                       static_cast<T>(p.softmax_scale));
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
        const Range queries =
            all_queries ? Range{0, s.q_len} : Range{item.i.begin, item.i.end < s.q_len ? item.i.end : s.q_len};
        const Range keys =
            all_keys ? Range{0, s.kv_len} : Range{item.j.begin, item.j.end < s.kv_len ? item.j.end : s.kv_len};
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
                recompute_tile(w, RowBlock{b, h, tile.begin, 1, static_cast<int>(left < kTileM ? left : kTileM)}, j,
                               tile.cls, f, evaluate, taps);
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
