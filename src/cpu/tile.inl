// The stages of a tile that the forward and the backward pass share: packing, scores with every option of the formula,
// the mask, and the exponential. A tile is a block of at most kTileM query rows against kTileN keys; its scores s are
// row-major, [kTileM][kTileN], and are transformed in place.
//
// Cost per tile of M rows, N keys: 2 M N head_dim_qk FLOP for the scores, of which a causal or window mask computes
// only the panels that some row sees; then one pass over s that finds the row maximum and one that takes the
// exponential, both while the row is in L1. Options (softcap, bias, ALiBi, score_mod) add passes over the row and
// nothing when absent.
#pragma once

namespace tilewise::cpu::TILEWISE_ISA {

using core::DType;
using core::Range;

// ---------------------------------------------------------------------------------------------------------------------
// Reading and writing tensors: any float dtype, any stride

// Rows of one head: element (r, d) at origin + r * row_stride + d * dim_stride.
struct Source {
    const void* data;
    DType dtype;
    int64_t origin, row_stride, dim_stride;
};
inline Source rows_of(const core::Tensor4& t, int64_t b, int64_t row0, int64_t h) {
    return {t.data, t.dtype, t.offset(b, row0, h), t.row_stride, t.dim_stride};
}

template <class T>
struct ReadSame {
    using Element = T;
    static Vec<T> vector(const void* data, int64_t at) { return load(static_cast<const T*>(data) + at); }
};
struct ReadHalf {
    using Element = uint16_t;
    static f32v vector(const void* data, int64_t at) { return load_half(static_cast<const uint16_t*>(data) + at); }
};
struct ReadBfloat {
    using Element = uint16_t;
    static f32v vector(const void* data, int64_t at) { return load_bfloat(static_cast<const uint16_t*>(data) + at); }
};

// Calls f(reader) with the reader of a tensor's dtype; q, k, v, o of a T = double problem are float64, of a T = float
// problem anything smaller.
template <class T, class F>
inline void with_reader(DType dtype, F&& f) {
    if constexpr (sizeof(T) == 8) {
        f(ReadSame<double>{});
    } else {
        if (dtype == DType::f32) f(ReadSame<float>{});
        else if (dtype == DType::f16) f(ReadHalf{});
        else f(ReadBfloat{});
    }
}

// `count` elements at `at`, dim_stride apart, then zeros: the ends of rows, and strided rows. It does not call the
// conversions of core: those are baseline code, and SSE instructions in the middle of AVX code cost a transition each.
template <class T, class Reader>
[[gnu::noinline]] Vec<T> read_slowly(const Source& s, int64_t at, int64_t count) {
    using Element = typename Reader::Element;
    Element lane[kLanes<T>] = {};
    for (int64_t n = 0; n < kLanes<T> && n < count; ++n)
        lane[n] = static_cast<const Element*>(s.data)[at + n * s.dim_stride];
    return Reader::vector(lane, 0);
}

// Elements [d, d + kLanes) of row r; 0 from `dim` on.
template <class T, class Reader>
[[gnu::always_inline]] inline Vec<T> read(const Source& s, int64_t r, int64_t d, int64_t dim) {
    const int64_t at = s.origin + r * s.row_stride + d * s.dim_stride;
    if (s.dim_stride == 1 && d + kLanes<T> <= dim) [[likely]]
        return Reader::vector(s.data, at);
    return read_slowly<T, Reader>(s, at, dim - d);
}

// Elements [d, d + kLanes) of a row that starts at `at`, rounded to the tensor's dtype; nothing from `dim` on.
template <class T, class Element>
[[gnu::noinline]] void write_slowly(Element* to, int64_t stride, int64_t count, const Element* lane) {
    for (int64_t n = 0; n < kLanes<T> && n < count; ++n) to[n * stride] = lane[n];
}
template <class T>
inline void write(const core::Tensor4& t, int64_t at, int64_t d, int64_t dim, Vec<T> v) {
    const bool whole = t.dim_stride == 1 && d + kLanes<T> <= dim;
    at += d * t.dim_stride;
    if constexpr (sizeof(T) == 4) {
        if (t.dtype != DType::f32) {
            uint16_t* const to = static_cast<uint16_t*>(t.data) + at;
            uint16_t lane[kLanes<T>];
            uint16_t* const out = whole ? to : lane;
            if (t.dtype == DType::f16) store_half(out, v);
            else store_bfloat(out, v);
            if (!whole) write_slowly<T>(to, t.dim_stride, dim - d, lane);
            return;
        }
    }
    T* const to = static_cast<T*>(t.data) + at;
    if (whole) return store<T>(to, v);
    T lane[kLanes<T>];
    store<T>(lane, v);
    write_slowly<T>(to, t.dim_stride, dim - d, lane);
}

// ---------------------------------------------------------------------------------------------------------------------
// Packing

// By columns: element (r, d) goes to [r / width][d][r % width], columns = a multiple of width, itself a multiple of
// kLanes; rows past `rows` are 0. With width = kPanel this is the B operand of a product with the transpose (K for
// scores, V for dP); with width = columns = kTileM the A operand `by_columns` with lda = kTileM (Q, dO).
template <class T>
void pack_columns(const Source& source, int64_t rows, int64_t dim, int64_t columns, int64_t width, T* out) {
    constexpr int n = kLanes<T>;
    const int64_t whole = source.dim_stride == 1 ? dim / n * n : 0;
    with_reader<T>(source.dtype, [&](auto reader) {
        using Reader = decltype(reader);
        for (int64_t column = 0; column < columns; column += n) {
            T* const to = out + column / width * width * dim + column % width;
            int64_t d = 0;
            Vec<T> block[n];
            for (; d < whole && column + n <= rows; d += n) {
                const int64_t at = source.origin + column * source.row_stride + d;
#pragma GCC unroll 16
                for (int i = 0; i < n; ++i) block[i] = Reader::vector(source.data, at + i * source.row_stride);
                transpose<T>(block, std::make_integer_sequence<int, n>{});
#pragma GCC unroll 16
                for (int i = 0; i < n; ++i) store<T>(to + (d + i) * width, block[i]);
            }
            for (; d < dim; d += n) {
                for (int i = 0; i < n; ++i) {
                    block[i] = column + i < rows ? read<T, Reader>(source, column + i, d, dim) : splat(T{0});
                }
                transpose<T>(block, std::make_integer_sequence<int, n>{});
                for (int i = 0; i < n && d + i < dim; ++i) store<T>(to + (d + i) * width, block[i]);
            }
        }
    });
}

// By rows: element (r, d) goes to [d / kPanel][r][d % kPanel] with `depth` rows per panel; the last panel is one vector
// wide if that is enough (gemm.inl). Columns between dim and a whole vector are 0. This is the B operand of a product
// whose sum runs over the rows (V; in backward K, Q, dO).
//
// 0 * inf is NaN, so a row that nobody may see must not be in the product if it is not finite. hot[0] says whether the
// tile has rows that are not finite, hot[1 + r] whether row r is one; those are packed as 0, and whoever may see them
// adds them element by element afterwards.
template <class T>
void pack_rows(const Source& source, int64_t rows, int64_t dim, int64_t depth, T* out, uint8_t* hot) {
    constexpr int n = kLanes<T>;
    with_reader<T>(source.dtype, [&](auto reader) {
        using Reader = decltype(reader);
        const auto pack = [&](int64_t r, bool clear) {
            Vec<T> probe = splat(T{0}), other = probe;  // become NaN at the first element that is not finite
            const auto vector = [&](int64_t d, T* to, Vec<T>& probed) {
                const Vec<T> x = read<T, Reader>(source, r, d, dim);
                probed = fma(x, splat(T{0}), probed);
                store<T>(to, clear ? splat(T{0}) : x);
            };
            int64_t d = 0;
            for (; d + n < dim; d += 2 * n) {
                T* const to = out + d * depth + r * 2 * n;
                vector(d, to, probe), vector(d + n, to + n, other);
            }
            if (d < dim) vector(d, out + d * depth + r * n, probe);
            return probe + other;
        };
        Vec<T> probe = splat(T{0});
        for (int64_t r = 0; r < rows; ++r) probe += pack(r, false);
        hot[0] = sum_of<T>(probe) != 0;
        if (!hot[0]) return;
        for (int64_t r = 0; r < rows; ++r) {
            hot[1 + r] = sum_of<T>(pack(r, false)) != 0;
            if (hot[1 + r]) pack(r, true);
        }
    });
}
template <class T>
inline Panels<T> panels_of(const T* data, int64_t depth, int64_t dim) {
    return {data, depth, round_up(dim, kLanes<T>)};
}

// ---------------------------------------------------------------------------------------------------------------------
// Which part of a tile is computed

// Columns [lo[r], hi[r]) hold everything that row r sees; columns [begin, end), multiples of kPanel, everything that
// some row sees. Outside [begin, end) s is not defined and must not be read.
struct Extent {
    int begin = 0, end = 0;
    int lo[kTileM], hi[kTileM];
    bool band = false;     // rows differ in [lo, hi)
    bool partial = false;  // some row may not see some key of its [lo, hi): ask the mask

    [[nodiscard]] bool empty() const { return begin >= end; }
    // Union over rows [first, last).
    [[nodiscard]] Range columns(int first, int last) const {
        Range all{kTileN, 0};
        for (int r = first; r < last; ++r) {
            if (lo[r] >= hi[r]) continue;
            if (lo[r] < all.begin) all.begin = lo[r];
            if (hi[r] > all.end) all.end = hi[r];
        }
        return all.begin < all.end ? all : Range{0, 0};
    }
};

// For keys `j`, at most kTileN of them.
template <class T>
void find_extent(const Call& call, const RowBlock& block, Range j, core::TileClass cls, Extent& e) {
    const int keys = static_cast<int>(j.size()), rows = block.rows();
    e.band = cls == core::TileClass::partial && call.mask->is_band();
    e.partial = cls == core::TileClass::partial && !e.band;
    for (int r = 0; r < rows; ++r) {
        e.lo[r] = 0, e.hi[r] = keys;
        if (!e.band) continue;
        if (r >= block.queries) {  // the next head: the same queries again
            e.lo[r] = e.lo[r - block.queries], e.hi[r] = e.hi[r - block.queries];
            continue;
        }
        const Range seen = call.mask->row_range(block.b, block.query(r));
        const int64_t lo = seen.begin - j.begin, hi = seen.end - j.begin;
        e.lo[r] = static_cast<int>(lo < 0 ? 0 : lo > keys ? keys : lo);
        e.hi[r] = static_cast<int>(hi < e.lo[r] ? e.lo[r] : hi > keys ? keys : hi);
    }
    const Range all = e.columns(0, rows);
    e.begin = static_cast<int>(all.begin / kPanel<T> * kPanel<T>);
    e.end = static_cast<int>(round_up(all.end, kPanel<T>));
}

// s = A B^T over the extent: A by columns with lda = kTileM, B packed by columns. Used for Q K^T and dO V^T. Each panel
// is computed from the first to the last row that sees any of it.
template <class T>
void multiply_extent(const T* a, const T* b, int64_t dim, const Extent& e, int rows, T* s) {
    for (int column = e.begin; column < e.end; column += kPanel<T>) {
        int first = 0, last = rows;
        if (e.band) {
            const auto sees = [&](int r) {
                return e.lo[r] < column + kPanel<T> && e.hi[r] > column && e.lo[r] < e.hi[r];
            };
            while (first < last && !sees(first)) ++first;
            while (last > first && !sees(last - 1)) --last;
        }
        const Product<T> p{a, kTileM, b + column * dim, 0, dim, s + column, kTileN, Epilogue::store, nullptr};
        multiply_panel<T, Order::by_columns>(p, {first, last}, kTileVectors);
    }
}

// c (+)= s * B over the extent, row block by row block: B packed by rows. Used for P V and dS K. Left-out columns hold
// 0 in s, so leaving them out changes no bits.
template <class T>
void multiply_rows(const T* s, const Panels<T>& b, const Extent& e, int rows, T* c, int64_t ldc, Epilogue epilogue,
                   const T* scale = nullptr) {
    for (int first = 0; first < rows;) {
        // Full height where all columns are used anyway; otherwise a register tile at a time follows the band's edge.
        int last = first + kTileRows < rows ? first + kTileRows : rows;
        const Range k = e.columns(first, last);
        while (last < rows && e.columns(last, last + 1).begin == k.begin && e.columns(last, last + 1).end == k.end)
            ++last;
        multiply<T, Order::by_rows>(s, 0, {first, last}, b, k, c, ldc, epilogue, scale);
        first = last;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Scores

// What one thread needs to finish scores.
template <class T>
struct ScoreScratch {
    uint8_t* bytes;              // [kTileN]
    core::RowEvaluator<T>* mod;  // null: no score_mod
};

// Intermediate values that the derivative needs, as tiles [kTileM][kTileN]; null: not kept.
template <class T>
struct ScoreTrace {
    T* capped = nullptr;     // after the softcap: d/dx = 1 - (capped / softcap)^2
    T* mod_input = nullptr;  // before score_mod
};

template <class T, int... kLane>
[[gnu::always_inline]] inline Vec<T> iota(std::integer_sequence<int, kLane...>) {
    return Vec<T>{static_cast<T>(kLane)...};
}

inline core::ExprContext context_of(const Call& call, int64_t b, int64_t h) {
    const core::Problem& p = *call.problem;
    const core::Sequence& s = call.sequence(b);
    return {b, h, h / p.group(), s.q_len, s.kv_len, s.q_offset, p.arrays, p.scalars};
}

// Row (b, h, i) against keys j: raw dot products in x become scores, but for the mask.
template <class T>
void score_row(const Call& call, int64_t b, int64_t h, int64_t i, Range j, T* x, const ScoreScratch<T>& scratch,
               T* capped, T* mod_input) {
    constexpr int n = kLanes<T>;
    const core::Problem& p = *call.problem;
    const int64_t keys = j.size();
    const Vec<T> scale = splat(static_cast<T>(p.softmax_scale));
    for (int64_t k = 0; k < keys; k += n) store<T>(x + k, load(x + k) * scale);
    if (p.softcap > 0) {
        const Vec<T> cap = splat(static_cast<T>(p.softcap));
        for (int64_t k = 0; k < keys; k += n) store<T>(x + k, cap * tanh<T>(load(x + k) / cap));
        if (capped) __builtin_memcpy(capped, x, static_cast<size_t>(keys) * sizeof(T));
    }
    if (p.bias) {
        const core::Grid4& g = p.bias;
        const int64_t at = g.offset(b, h, i, j.begin);
        const bool same_width = sizeof(T) == 8 ? g.dtype == DType::f64 : g.dtype != DType::f64;
        if (same_width) {
            const Source source{g.data, g.dtype, at, 0, g.stride[3]};
            with_reader<T>(g.dtype, [&](auto reader) {
                using Reader = decltype(reader);
                for (int64_t k = 0; k < keys; k += n)
                    store<T>(x + k, load(x + k) + read<T, Reader>(source, 0, k, keys));
            });
        } else {
            for (int64_t k = 0; k < keys; ++k)
                x[k] += static_cast<T>(core::load_float(g.data, g.dtype, at + k * g.stride[3]));
        }
    }
    if (p.alibi_slopes) {
        const T slope = static_cast<T>(p.slope(b, h));
        const int64_t from = i + call.sequence(b).q_offset - j.begin;  // t - j of the first key
        constexpr int64_t kExact = sizeof(T) == 4 ? int64_t{1} << 23 : int64_t{1} << 52;
        if (from > -kExact && from < kExact) {
            Vec<T> distance = splat(static_cast<T>(from)) - iota<T>(std::make_integer_sequence<int, n>{});
            for (int64_t k = 0; k < keys; k += n, distance -= splat(T{n})) {
                const Vec<T> size = larger(distance, -distance);
                store<T>(x + k, fma(splat(-slope), size, load(x + k)));
            }
        } else {
            for (int64_t k = 0; k < keys; ++k) x[k] -= slope * static_cast<T>(from - k < 0 ? k - from : from - k);
        }
    }
    if (scratch.mod) {
        if (mod_input) __builtin_memcpy(mod_input, x, static_cast<size_t>(keys) * sizeof(T));
        scratch.mod->real(context_of(call, b, h), i, j, x, x);
    }
}

// Finishes the raw products of a tile: options, then -inf on everything hidden, by selection, so that whatever an
// unseen key produced is gone. Afterwards columns [e.begin, e.end) of every row are defined.
template <class T>
void finish_scores(const Call& call, const RowBlock& block, Range j, const Extent& e, T* s,
                   const ScoreScratch<T>& scratch, const ScoreTrace<T>& trace = {}) {
    const bool plain = call.plain();
    for (int r = 0; r < block.rows(); ++r) {
        T* const x = s + r * kTileN;
        const int lo = e.lo[r], hi = e.hi[r];
        if (!plain && lo < hi) {
            const int from = lo / kLanes<T> * kLanes<T>;  // whole vectors
            score_row(call, block.b, block.head(r), block.query(r), {j.begin + from, j.begin + hi}, x + from, scratch,
                      trace.capped ? trace.capped + r * kTileN + from : nullptr,
                      trace.mod_input ? trace.mod_input + r * kTileN + from : nullptr);
        }
        for (int k = e.begin; k < lo && k < e.end; ++k) x[k] = -kInf<T>;
        for (int k = hi > e.begin ? hi : e.begin; k < e.end; ++k) x[k] = -kInf<T>;
        if (e.partial) {
            call.mask->visible(block.b, block.head(r), block.query(r), {j.begin + lo, j.begin + hi}, scratch.bytes);
            for (int k = lo; k < hi; ++k) x[k] = scratch.bytes[k - lo] ? x[k] : -kInf<T>;
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Softmax

// exp(x - shift) is 2^((x - shift) * factor): factor = log2 e for finished scores, and with log2 e * scale the raw
// products of a plain call need no pass of their own. The subtraction comes first, so that the maximum itself gives
// exactly 1 and scores near the end of the float range do not overflow.
template <class T>
inline T score_factor(const Call& call) {
    return static_cast<T>(call.plain() ? call.problem->softmax_scale * kLog2E : kLog2E);
}
// Unit of x in natural logarithms: lse = unit * m + ln l.
inline double score_unit(const Call& call) { return call.plain() ? call.problem->softmax_scale : 1.0; }

// Maximum of x[begin, end), whole panels; NaN does not count.
template <class T>
inline T row_max(const T* x, int begin, int end) {
    constexpr int n = kLanes<T>;
    Vec<T> even = splat(-kInf<T>), odd = even;
    for (int k = begin; k < end; k += 2 * n) {
        even = larger(load(x + k), even);
        odd = larger(load(x + k + n), odd);
    }
    return max_of<T>(larger(even, odd));
}

// x = 2^((x - shift) * factor) over [begin, end), whole panels; returns the sum. Hidden keys (-inf) give exactly 0 as
// long as shift is not -inf. Every place in a panel has its own sum in the order of k, so bits do not depend on begin
// and end.
template <class T>
inline T exp_row(T* x, int begin, int end, T shift, T factor) {
    constexpr int n = kLanes<T>;
    const Exp2Scaled<T> power(factor);
    Vec<T> even = splat(T{0}), odd = even;
    for (int k = begin; k < end; k += 2 * n) {
        const Vec<T> p = power(load(x + k) - splat(shift)), q = power(load(x + k + n) - splat(shift));
        store<T>(x + k, p), store<T>(x + k + n, q);
        even += p, odd += q;
    }
    return sum_of<T>(even + odd);
}

// Dropout of a tile: 0 where (b, h, i, j) is dropped. The factor 1 / keep_prob is left to the caller.
template <class T>
void drop_tile(const Call& call, const RowBlock& block, Range j, const Extent& e, T* s, uint8_t* bytes) {
    const core::Problem& p = *call.problem;
    if (p.dropout_threshold == 0) return;
    for (int r = 0; r < block.rows(); ++r) {
        T* const x = s + r * kTileN;
        const int lo = e.lo[r], hi = e.hi[r];
        core::dropout_row(p.seed, p.offset, block.b * p.num_heads_q + block.head(r), block.query(r),
                          {j.begin + lo, j.begin + hi}, p.dropout_threshold, bytes);
        for (int k = lo; k < hi; ++k) x[k] = bytes[k - lo] ? x[k] : T{0};
    }
}

}  // namespace tilewise::cpu::TILEWISE_ISA
