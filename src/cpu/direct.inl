// The forward pass of a few query rows, kDirectRows at most, without packing (decode): every row of K and V is read
// once, where it lies. It is bound by memory, so the order of reading is all that matters.
//
//   for each tile of kTileN keys of the item
//     for each chunk of kDirectChunk keys      for each KV head of the item     s = Q K^T
//     for each KV head                         options, mask, softmax           (tile.inl, soften_tile)
//     for each chunk of kDirectChunk keys      for each KV head of the item     sum += s V
//     for each KV head                         o = o a + sum
//
// Where the rows of the KV heads lie side by side, [batch, tokens, heads, head_dim], one head alone would take a few
// hundred bytes from every page: a TLB entry for each, nothing for the hardware to look ahead in, and rows 4 KiB apart
// fall on the same few sets of a cache. The heads of an item are read together, chunk by chunk, so that a page is
// finished before the next one begins.
//
// The arithmetic is its own, and fixed: it depends neither on which heads are read together nor on the chunks.
#pragma once

namespace tilewise::cpu::TILEWISE_ISA {

// Asks for elements [d, d + count) of a row ahead of their use. The address may be past the end: a prefetch never
// faults.
template <class Element>
[[gnu::always_inline]] inline void prefetch(const Source& source, int64_t r, int64_t d, int64_t count) {
    constexpr int64_t kLine = 64 / sizeof(Element);
    // A number: there is no pointer to a place outside an array.
    const auto at = reinterpret_cast<uintptr_t>(source.data) +
                    static_cast<uintptr_t>(source.origin + r * source.row_stride + d) * sizeof(Element);
    for (int64_t n = 0; n < count; n += kLine) {
        // NOLINTNEXTLINE(performance-no-int-to-ptr): it is never followed
        __builtin_prefetch(reinterpret_cast<const void*>(at + static_cast<uintptr_t>(n) * sizeof(Element)), 0, 3);
    }
}

// s = Q K^T for keys [keys.begin, keys.end) of a tile.
template <class T, class Reader, int kRows>
void direct_scores(const Source& k, const Source& ahead, int64_t dim, const T* q, Range keys, T* s) {
    constexpr int n = kLanes<T>, kGroup = kRows <= 2 ? 4 : 2;  // independent chains to hide latency
    const int64_t q_length = padded<T>(dim), whole = k.dim_stride == 1 ? dim / n * n : 0;
    const auto dots = [&]<int kKeys>(int64_t key, std::integral_constant<int, kKeys>) {
        Vec<T> sum[kKeys][kRows];
#pragma GCC unroll 4
        for (int g = 0; g < kKeys; ++g) {
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) sum[g][r] = splat(T{0});
        }
        for (int g = 0; g < kKeys; ++g) prefetch<typename Reader::Element>(ahead, key + g, 0, dim);
        const int64_t at = k.origin + key * k.row_stride;
        for (int64_t d = 0; d < whole; d += n) {
#pragma GCC unroll 4
            for (int g = 0; g < kKeys; ++g) {
                const Vec<T> x = Reader::vector(k.data, at + g * k.row_stride + d);
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) sum[g][r] = fma(load(q + r * q_length + d), x, sum[g][r]);
            }
        }
        for (int64_t d = whole; d < dim; d += n) {
            for (int g = 0; g < kKeys; ++g) {
                const Vec<T> x = read_slowly<T, Reader>(k, at + g * k.row_stride + d * k.dim_stride, dim - d);
                for (int r = 0; r < kRows; ++r) sum[g][r] = fma(load(q + r * q_length + d), x, sum[g][r]);
            }
        }
#pragma GCC unroll 4
        for (int g = 0; g < kKeys; ++g) {
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) s[r * kTileN + key + g] = sum_of<T>(sum[g][r]);
        }
    };
    int64_t key = keys.begin;
    for (; key + kGroup <= keys.end; key += kGroup) dots(key, std::integral_constant<int, kGroup>{});
    for (; key < keys.end; ++key) dots(key, std::integral_constant<int, 1>{});
}

// sum = sum + p V (sum = p V if `first`) for keys [keys.begin, keys.end) of a tile.
template <class T, class Reader, int kRows>
void direct_output(const Source& v, const Source& ahead, int64_t dim, Range keys, const T* p, bool first, T* sums) {
    constexpr int n = kLanes<T>;
    const int64_t row_length = padded<T>(dim), whole = v.dim_stride == 1 ? dim / n * n : 0;
    const auto columns = [&]<int kColumns, bool kWhole>(int64_t d, std::integral_constant<int, kColumns>,
                                                        std::bool_constant<kWhole>) {
        Vec<T> sum[kRows][kColumns];
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int c = 0; c < kColumns; ++c)
                sum[r][c] = first ? splat(T{0}) : load(sums + r * row_length + d + c * n);
        }
        for (int64_t k = keys.begin; k < keys.end; ++k) {
            prefetch<typename Reader::Element>(ahead, k, d, kColumns * n);
            const int64_t at = v.origin + k * v.row_stride + d * v.dim_stride;
            Vec<T> row[kColumns];
#pragma GCC unroll 8
            for (int c = 0; c < kColumns; ++c) {
                row[c] = kWhole ? Reader::vector(v.data, at + c * n)
                                : read_slowly<T, Reader>(v, at + c * n * v.dim_stride, dim - d - c * n);
            }
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                const Vec<T> factor = splat(p[r * kTileN + k]);
#pragma GCC unroll 8
                for (int c = 0; c < kColumns; ++c) sum[r][c] = fma(factor, row[c], sum[r][c]);
            }
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
            for (int c = 0; c < kColumns; ++c) store<T>(sums + r * row_length + d + c * n, sum[r][c]);
        }
    };
    constexpr int kWide = kTileRows * kTileVectors / 6 * 4 / kRows;  // accumulators: half of the registers
    int64_t d = 0;
    for (; d + kWide * n <= whole; d += kWide * n) columns(d, std::integral_constant<int, kWide>{}, std::true_type{});
    if constexpr (kWide > 4) {
        for (; d + 4 * n <= whole; d += 4 * n) columns(d, std::integral_constant<int, 4>{}, std::true_type{});
    }
    for (; d + n <= whole; d += n) columns(d, std::integral_constant<int, 1>{}, std::true_type{});
    for (; d < dim; d += n) columns(d, std::integral_constant<int, 1>{}, std::false_type{});
}

// The same, leaving out hidden keys: x holds the scores, -inf where hidden. For values that are not finite.
template <class T, class Reader>
void careful_output(const Source& v, int64_t dim, Range keys, int rows, const T* p, const T* x, T* sums) {
    const int64_t row_length = padded<T>(dim);
    for (int r = 0; r < rows; ++r) {
        for (int64_t d = 0; d < dim; d += kLanes<T>) {
            Vec<T> sum = splat(T{0});
            for (int64_t k = keys.begin; k < keys.end; ++k) {
                if (x[r * kTileN + k] == -kInf<T>) continue;
                sum = fma(splat(p[r * kTileN + k]), read<T, Reader>(v, k, d, dim), sum);
            }
            store<T>(sums + r * row_length + d, sum);
        }
    }
}

template <class T>
bool all_finite(const T* sums, int rows, int64_t dim) {
    Vec<T> probe = splat(T{0});
    for (int r = 0; r < rows; ++r, sums += padded<T>(dim)) {
        for (int64_t d = 0; d < dim; d += kLanes<T>) probe = fma(load(sums + d), splat(T{0}), probe);
    }
    return sum_of<T>(probe) == 0;
}

// o = o * scale + sum (o = sum if `first`).
template <class T>
void add_sums(const T* sums, int rows, int64_t dim, bool first, const T* scale, T* o) {
    for (int r = 0; r < rows; ++r, sums += padded<T>(dim), o += padded<T>(dim)) {
        for (int64_t d = 0; d < dim; d += kLanes<T>) {
            store<T>(o + d, first ? load(sums + d) : fma(load(o + d), splat(scale[r]), load(sums + d)));
        }
    }
}

// Calls f with the reader of `dtype` and the number of rows as constants.
template <class T, class F>
void with_rows(DType dtype, int rows, F&& f) {
    static_assert(kDirectRows == 4);
    with_reader<T>(dtype, [&](auto reader) {
        switch (rows) {
            case 1: return f(reader, std::integral_constant<int, 1>{});
            case 2: return f(reader, std::integral_constant<int, 2>{});
            case 3: return f(reader, std::integral_constant<int, 3>{});
            default: return f(reader, std::integral_constant<int, 4>{});
        }
    });
}

inline Source rows_from(Source source, int64_t r) {
    source.origin += r * source.row_stride;
    return source;
}

template <class T>
void load_row(const Source& source, int64_t dim, T* out) {
    with_reader<T>(source.dtype, [&](auto reader) {
        for (int64_t d = 0; d < dim; d += kLanes<T>) store<T>(out + d, read<T, decltype(reader)>(source, 0, d, dim));
    });
}

template <class T>
void direct_block(const Call& call, const core::ForwardArgs& args, const ForwardItem& item, std::byte* memory) {
    const core::Problem& p = *call.problem;
    const core::Sequence& sequence = call.sequence(item.block.b);
    const int heads = item.heads_kv, rows = item.block.rows();
    const int64_t dim_qk = p.head_dim_qk, dim_v = p.head_dim_v, row_length = padded<T>(dim_v);

    ForwardScratch<T> f;
    ForwardScratch<T>::carve(p, call.score_mod, memory, &f);
    std::optional<core::RowEvaluator<T>> mod;
    if (call.score_mod) mod.emplace(*call.score_mod, kTileN, f.mod, &core::TILEWISE_EXPR_NAMESPACE::evaluate_row<T>);
    const ScoreScratch<T> score_scratch{f.bytes, mod ? &*mod : nullptr};

    struct Head {
        RowBlock block;
        Source k, v;
        State<T> state;
        T *q, *s, *x, *sums, *scale;  // x: scores as they were
    };
    Head head[kDirectHeads];
    for (int n = 0; n < heads; ++n) {
        Head& h = head[n];
        h.block = item.block;
        h.block.h0 += n * p.group();
        const int64_t head_kv = h.block.h0 / p.group();
        h.k = rows_of(p.k, h.block.b, sequence.kv_row0, head_kv);
        h.v = rows_of(p.v, h.block.b, sequence.kv_row0, head_kv);
        h.q = f.q + n * kDirectRows * padded<T>(dim_qk);
        h.s = f.s + 2 * n * kDirectRows * kTileN;
        h.x = h.s + kDirectRows * kTileN;
        h.scale = f.scale + n * kTileM;
        h.sums = f.segment.o + n * rows * row_length;
        h.state = item.partial ? State<T>::at(item.partial + n * item.partial_step, rows)
                               : State<T>{f.run.m + n * rows, f.run.l + n * rows, f.run.o + n * rows * row_length};
        reset(h.state, rows);
        for (int r = 0; r < rows; ++r) {
            const int64_t row = sequence.q_row0 + h.block.query(r);
            load_row(rows_of(p.q, h.block.b, row, h.block.head(r)), dim_qk, h.q + r * padded<T>(dim_qk));
        }
    }

    bool first = true;
    Extent e;
    for (const core::Tile& next : visible_tiles(call, item.block, item.keys)) {
        const Range j{next.begin, next.begin + kTileN < sequence.kv_len ? next.begin + kTileN : sequence.kv_len};
        find_extent<T>(call, item.block, j, next.cls, e);
        if (e.empty()) continue;
        const Range keys = e.columns(0, rows);
        const auto k_of = [&](int n) { return rows_from(head[n].k, j.begin); };
        const auto v_of = [&](int n) { return rows_from(head[n].v, j.begin); };
        // Calls body(head, its source, the source to read next, chunk) for all heads of a chunk, then for the next
        // chunk.
        const auto chunks = [&](const auto& source_of, const Source& after, const auto& body) {
            for (int64_t begin = keys.begin; begin < keys.end; begin += kDirectChunk) {
                const Range chunk{begin, begin + kDirectChunk < keys.end ? begin + kDirectChunk : keys.end};
                for (int n = 0; n < heads; ++n) {
                    const Source ahead = n + 1 < heads          ? source_of(n + 1)
                                         : chunk.end < keys.end ? rows_from(source_of(0), kDirectChunk)
                                                                : rows_from(after, keys.begin - begin);
                    body(head[n], source_of(n), ahead, chunk);
                }
            }
        };
        with_rows<T>(p.dtype, rows, [&](auto reader, auto count) {
            chunks(k_of, v_of(0), [&](const Head& h, const Source& k, const Source& ahead, Range chunk) {
                direct_scores<T, decltype(reader), count.value>(k, ahead, dim_qk, h.q, chunk, h.s);
            });
        });
        for (int n = 0; n < heads; ++n) {
            const Head& h = head[n];
            finish_scores(call, h.block, j, e, h.s, score_scratch);
            __builtin_memcpy(h.x, h.s, sizeof(T) * static_cast<size_t>(rows * kTileN));
            soften_tile(call, h.block, e, h.s, h.state, h.scale);
            drop_tile(call, h.block, j, e, h.s, f.bytes);
        }
        with_rows<T>(p.dtype, rows, [&](auto reader, auto count) {
            const Source after = rows_from(k_of(0), kTileN);
            chunks(v_of, after, [&](const Head& h, const Source& v, const Source& ahead, Range chunk) {
                const bool start = chunk.begin == keys.begin;
                direct_output<T, decltype(reader), count.value>(v, ahead, dim_v, chunk, h.s, start, h.sums);
            });
            // Hidden keys have added 0 * v so far. If that was not 0, once more without them.
            for (int n = 0; n < heads; ++n) {
                const Head& h = head[n];
                if (!all_finite(h.sums, rows, dim_v)) {
                    careful_output<T, decltype(reader)>(v_of(n), dim_v, keys, rows, h.s, h.x, h.sums);
                }
                add_sums(h.sums, rows, dim_v, first, h.scale, h.state.o);
            }
        });
        first = false;
    }
    if (item.partial) return;
    for (int n = 0; n < heads; ++n) finish(call, args, head[n].block, head[n].state);
}

}  // namespace tilewise::cpu::TILEWISE_ISA
