// The kinds backed by arrays, bands, expressions, and the three ways to join them.
#include "mask_kinds.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <utility>

#include "summary.hpp"

namespace tilewise::core {
namespace {

constexpr int64_t kFar = int64_t{1} << 62;     // beyond every position
constexpr int64_t kBeyond = int64_t{1} << 61;  // a window or chunk of this size has no edge at any position
constexpr int64_t kMaxScan = kExactEdge * kExactEdge;
constexpr int32_t kNoRow = std::numeric_limits<int32_t>::max();

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }

// Class of two disjoint parts taken together.
TileClass join(TileClass a, TileClass b) { return a == b ? a : TileClass::partial; }

// ---------------------------------------------------------------------------------------------------------------------
// Where the entries of one (batch, head) lie in an array

// The leading axes: batch, heads, both or none; an axis of extent 1 is broadcast.
struct Planes {
    int64_t batch = 1, heads = 1, batch_stride = 0, head_stride = 0;
    int64_t queries_per_head = 1;  // query heads that share an entry of the heads axis

    // The last `tail` axes are not leading ones. A single leading axis is heads if heads_alone, else batch.
    Planes() = default;
    Planes(const Problem& p, const Array& a, int tail, bool heads_alone) {
        const int leading = a.rank - tail;
        if (leading == 2 || (leading == 1 && !heads_alone)) batch = a.shape[0], batch_stride = a.stride[0];
        if (leading == 2 || (leading == 1 && heads_alone)) {
            const size_t axis = static_cast<size_t>(leading - 1);
            heads = a.shape[axis], head_stride = a.stride[axis];
        }
        queries_per_head = heads == p.num_heads_q ? 1 : p.group();
    }
    [[nodiscard]] int64_t count() const { return batch * heads; }
    [[nodiscard]] int64_t of(const Place& place) const {
        return (batch == 1 ? 0 : place.b * heads) + (heads == 1 ? 0 : place.h / queries_per_head);
    }
    [[nodiscard]] int64_t offset(int64_t plane) const {
        return plane / heads * batch_stride + plane % heads * head_stride;
    }
};

// Index of query 0 and key 0 on the token axis of an array. Keys count from the first one after leftpad, except where
// the array is physical.
struct TokenOrigin {
    bool packed_q, packed_kv;

    explicit TokenOrigin(const Problem& p) : packed_q(p.packed_q), packed_kv(p.packed_kv) {}
    [[nodiscard]] int64_t q(const Sequence& s) const { return packed_q ? s.q_row0 : 0; }
    [[nodiscard]] int64_t kv(const Sequence& s) const { return packed_kv ? s.kv_first_row : 0; }
    [[nodiscard]] int64_t kv_physical(const Sequence& s) const { return kv(s) + s.kv_row0 - s.kv_first_row; }
};

// An array with one entry per token, copied to [plane][token]. `component` picks one of several numbers per token.
template <class T>
class PerToken {
public:
    PerToken() = default;
    template <class Convert>
    PerToken(const Problem& p, const Array& a, bool packed, const Convert& convert, int64_t component = -1) {
        const int tail = component < 0 ? 1 : 2;
        planes_ = Planes(p, a, tail, packed);
        const size_t axis = static_cast<size_t>(a.rank - tail);
        tokens_ = a.shape[axis];
        values_.resize(static_cast<size_t>(planes_.count() * tokens_));
        size_t n = 0;
        for (int64_t plane = 0; plane < planes_.count(); ++plane) {
            const int64_t start = planes_.offset(plane) + (component < 0 ? 0 : component * a.stride[axis + 1]);
            for (int64_t t = 0; t < tokens_; ++t) {
                values_[n++] = convert(load_int(a.data, a.dtype, start + t * a.stride[axis]));
            }
        }
    }

    [[nodiscard]] const Planes& planes() const { return planes_; }
    [[nodiscard]] int64_t size() const { return static_cast<int64_t>(values_.size()); }
    [[nodiscard]] const T* data() const { return values_.data(); }
    [[nodiscard]] T* data() { return values_.data(); }
    [[nodiscard]] int64_t row(const Place& place) const { return planes_.of(place) * tokens_; }

private:
    Planes planes_;
    int64_t tokens_ = 0;
    std::vector<T> values_;
};

const Array& array_of(const MaskNode& node, size_t n, const Problem& p) {
    const Array& a = p.arrays[static_cast<size_t>(node.array[n])];
    if (a.data == nullptr && a.size() > 0) {
        refuse("mask: @" + std::to_string(node.array[n]), "a null pointer", "a pointer to the elements of " + describe(a));
    }
    return a;
}

// A grid of set and clear entries with an exact-where-cheap answer for any rectangle; outside of it all is clear.
template <class Count>
TileClass grid_class(const BlockCounts& counts, int64_t plane, Range row, Range column, int64_t rows, int64_t columns,
                     const Count& count) {
    const Range r{row.begin, std::min(row.end, rows)}, c{column.begin, std::min(column.end, columns)};
    if (r.empty() || c.empty()) return TileClass::skip;
    TileClass inside = TileClass::partial;
    switch (counts.ask(plane, r, c, kMaxScan, count)) {
        case BlockCounts::Answer::none: inside = TileClass::skip; break;
        case BlockCounts::Answer::all: inside = TileClass::full; break;
        case BlockCounts::Answer::some:
        case BlockCounts::Answer::unknown: break;
    }
    return r.end == row.end && c.end == column.end ? inside : join(inside, TileClass::skip);
}

// Elements of a bool or integer array along one axis: non-zero is set.
template <class T>
int64_t count_set(const T* p, int64_t stride, int64_t n) {
    int64_t set = 0;
    if (stride == 1) {
        for (int64_t k = 0; k < n; ++k) set += p[k] != 0;
    } else {
        for (int64_t k = 0; k < n; ++k) set += p[k * stride] != 0;
    }
    return set;
}
template <class T>
void copy_set(const T* p, int64_t stride, int64_t n, uint8_t* out) {
    if (stride == 1) {
        for (int64_t k = 0; k < n; ++k) out[k] = p[k] != 0;
    } else {
        for (int64_t k = 0; k < n; ++k) out[k] = p[k * stride] != 0;
    }
}
// Only whether an element is zero matters, so its width says enough of its dtype.
template <class Function>
auto with_elements(const Array& a, int64_t offset, const Function& function) {
    switch (size_of(a.dtype)) {
        case 8: return function(static_cast<const uint64_t*>(a.data) + offset);
        case 4: return function(static_cast<const uint32_t*>(a.data) + offset);
        case 2: return function(static_cast<const uint16_t*>(a.data) + offset);
        default: return function(static_cast<const uint8_t*>(a.data) + offset);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Kinds

class BandKind final : public BoundKind {
public:
    explicit BandKind(Band band) : band_(std::move(band)) {}
    TileClass classify(const Place& place, Range i, Range j) const override { return band_.classify(place.seq, i, j); }
    void visible(const Place& place, int64_t i, Range j, uint8_t* out) const override {
        const Range keys = band_.keys(i + Band::offset(place.seq));
        const int64_t begin = std::clamp(keys.begin, j.begin, j.end), end = std::clamp(keys.end, begin, j.end);
        std::memset(out, 0, static_cast<size_t>(j.size()));
        std::memset(out + (begin - j.begin), 1, static_cast<size_t>(end - begin));
    }

private:
    Band band_;
};

class KeyPadding final : public BoundKind {
public:
    KeyPadding(const Problem& p, const Array& keep)
        : origin_(p), keep_(p, keep, p.packed_kv, [](int64_t x) { return static_cast<uint8_t>(x != 0); }),
          tokens_(keep.shape[static_cast<size_t>(keep.rank - 1)]),
          counts_(keep_.planes().count(), 1, tokens_, kSummaryBlock, Count{this}) {
        varies_by_head = keep_.planes().heads > 1;
    }
    TileClass classify(const Place& place, Range, Range j) const override {
        const int64_t first = origin_.kv_physical(place.seq);
        return grid_class(counts_, keep_.planes().of(place), {0, 1}, {first + j.begin, first + j.end}, 1, tokens_, Count{this});
    }
    void visible(const Place& place, int64_t, Range j, uint8_t* out) const override {
        const uint8_t* const row = keep_.data() + keep_.row(place) + origin_.kv_physical(place.seq);
        std::memcpy(out, row + j.begin, static_cast<size_t>(j.size()));
    }

private:
    struct Count {
        const KeyPadding* self;
        int64_t operator()(int64_t plane, int64_t, int64_t begin, int64_t end) const {
            return count_set(self->keep_.data() + plane * self->tokens_ + begin, 1, end - begin);
        }
    };
    TokenOrigin origin_;
    PerToken<uint8_t> keep_;
    int64_t tokens_;
    BlockCounts counts_;
};

class Documents final : public BoundKind {
public:
    Documents(const Problem& p, const Array& q_ids, const Array& kv_ids) : origin_(p) {
        // Ids that need 64 bits become ranks, which are equal and ordered alike; all negative ids mean the same.
        const auto keep = [](int64_t id) { return std::max<int64_t>(id, -1); };
        PerToken<int64_t> q(p, q_ids, p.packed_q, keep), kv(p, kv_ids, p.packed_kv, keep);
        std::vector<int64_t> ranked;
        const auto wide = [](const PerToken<int64_t>& ids) {
            return std::any_of(ids.data(), ids.data() + ids.size(), [](int64_t id) { return id > kNoRow; });
        };
        if (wide(q) || wide(kv)) {
            ranked.assign(q.data(), q.data() + q.size());
            ranked.insert(ranked.end(), kv.data(), kv.data() + kv.size());
            std::sort(ranked.begin(), ranked.end());
            ranked.erase(std::unique(ranked.begin(), ranked.end()), ranked.end());
        }
        const auto narrow = [&](int64_t id) {
            if (id < 0) return -1;
            if (ranked.empty()) return static_cast<int>(id);
            return static_cast<int>(std::lower_bound(ranked.begin(), ranked.end(), id) - ranked.begin());
        };
        q_.assign(p, q_ids, p.packed_q, narrow);
        kv_.assign(p, kv_ids, p.packed_kv, narrow);
        varies_by_head = q_.ids.planes().heads > 1 || kv_.ids.planes().heads > 1;
    }

    TileClass classify(const Place& place, Range i, Range j) const override {
        const Range qr = shifted(i, q_.ids.row(place) + origin_.q(place.seq));
        const Range kr = shifted(j, kv_.ids.row(place) + origin_.kv(place.seq));
        const Ids q = q_.query(qr), k = kv_.query(kr);
        if (q.high < 0 || k.high < 0) return TileClass::skip;  // padding only
        if (q.low > static_cast<uint32_t>(k.high) || k.low > static_cast<uint32_t>(q.high)) return TileClass::skip;
        const bool one = !q.padding && !k.padding && q.low == static_cast<uint32_t>(q.high) && k.low == static_cast<uint32_t>(k.high);
        if (one) return TileClass::full;  // the ranges overlap, so it is the same id
        if (i.size() > kExactEdge || j.size() > kExactEdge) return TileClass::partial;
        // Ids out of order, or gaps between them: do the two sets meet?
        std::array<int32_t, kExactEdge> qs, ks;
        const int32_t* const q_end = distinct(q_.ids.data() + qr.begin, i.size(), qs.data());
        const int32_t* const k_end = distinct(kv_.ids.data() + kr.begin, j.size(), ks.data());
        const int32_t *a = qs.data(), *b = ks.data();
        while (a != q_end && b != k_end && *a != *b) ++(*a < *b ? a : b);
        return a != q_end && b != k_end ? TileClass::partial : TileClass::skip;
    }

    void visible(const Place& place, int64_t i, Range j, uint8_t* out) const override {
        const int32_t id = q_.ids.data()[q_.ids.row(place) + origin_.q(place.seq) + i];
        const int32_t* const ids = kv_.ids.data() + kv_.ids.row(place) + origin_.kv(place.seq) + j.begin;
        const int64_t n = j.size();
        if (id < 0) {
            std::memset(out, 0, static_cast<size_t>(n));
        } else {
            for (int64_t k = 0; k < n; ++k) out[k] = ids[k] == id;
        }
    }

private:
    // Padding is -1: the largest number when read as unsigned, so `low` is the smallest id of a document.
    struct Ids {
        uint32_t low = std::numeric_limits<uint32_t>::max();
        int32_t high = -1;
        bool padding = false;
        void merge(const Ids& other) {
            low = std::min(low, other.low);
            high = std::max(high, other.high);
            padding |= other.padding;
        }
    };
    struct Side {
        PerToken<int32_t> ids;
        BlockTree<Ids> tree;

        template <class Convert>
        void assign(const Problem& p, const Array& a, bool packed, const Convert& convert) {
            ids = PerToken<int32_t>(p, a, packed, convert);
            tree = BlockTree<Ids>(ids.size(), [&](int64_t begin, int64_t end) { return scan(begin, end); });
        }
        [[nodiscard]] Ids scan(int64_t begin, int64_t end) const {
            Ids result;
            int32_t lowest = 0;
            const int32_t* const p = ids.data();
            for (int64_t n = begin; n < end; ++n) {
                result.low = std::min(result.low, static_cast<uint32_t>(p[n]));
                result.high = std::max(result.high, p[n]);
                lowest = std::min(lowest, p[n]);
            }
            result.padding = lowest < 0;
            return result;
        }
        [[nodiscard]] Ids query(Range tokens) const {
            return tree.query(tokens.begin, tokens.end, [&](int64_t begin, int64_t end) { return scan(begin, end); });
        }
    };
    static Range shifted(Range r, int64_t by) { return {r.begin + by, r.end + by}; }
    // Sorted, without padding; returns the end. Runs are collapsed first: sorted ids have few.
    static const int32_t* distinct(const int32_t* ids, int64_t n, int32_t* out) {
        int32_t* end = out;
        for (int64_t k = 0; k < n; ++k) {
            if (ids[k] >= 0 && (end == out || end[-1] != ids[k])) *end++ = ids[k];
        }
        std::sort(out, end);
        return std::unique(out, end);
    }

    TokenOrigin origin_;
    Side q_, kv_;
};

// A number per (batch, head), or the same for all.
class PerHead {
public:
    PerHead(const Problem& p, const Array* a, int64_t value) {
        if (a == nullptr) {
            values_.push_back(value);
            return;
        }
        planes_ = Planes(p, *a, 0, false);
        for (int64_t plane = 0; plane < planes_.count(); ++plane) {
            values_.push_back(load_int(a->data, a->dtype, planes_.offset(plane)));
        }
    }
    [[nodiscard]] bool varies_by_head() const { return planes_.heads > 1; }
    [[nodiscard]] int64_t at(const Place& place) const { return values_[static_cast<size_t>(planes_.of(place))]; }

private:
    Planes planes_;
    std::vector<int64_t> values_;
};

// The visible keys of query i are [0, max(n, t + 1)).
class Prefix final : public BoundKind {
public:
    explicit Prefix(PerHead n) : n_(std::move(n)) { varies_by_head = n_.varies_by_head(); }
    TileClass classify(const Place& place, Range i, Range j) const override {
        if (end(place, i.end - 1) <= j.begin) return TileClass::skip;
        return end(place, i.begin) >= j.end ? TileClass::full : TileClass::partial;
    }
    void visible(const Place& place, int64_t i, Range j, uint8_t* out) const override {
        const int64_t seen = std::clamp(end(place, i), j.begin, j.end) - j.begin;
        std::memset(out, 1, static_cast<size_t>(seen));
        std::memset(out + seen, 0, static_cast<size_t>(j.size() - seen));
    }

private:
    [[nodiscard]] int64_t end(const Place& place, int64_t i) const {
        return std::max(n_.at(place), i + Band::offset(place.seq) + 1);
    }
    PerHead n_;
};

// FlashMask: rows [s1, e1) and [s2, e2) of a key column are hidden, and with `causal` those before the diagonal.
class Intervals final : public BoundKind {
public:
    Intervals(const Problem& p, const Array& bounds, bool causal) : origin_(p), causal_(causal) {
        const int64_t c = bounds.shape[static_cast<size_t>(bounds.rank - 1)];
        // Rows are below 2^31 here, so bounds of int64 lose nothing by being clamped to int32.
        const auto component = [&](int64_t n) {
            return PerToken<int32_t>(p, bounds, p.packed_kv, [](int64_t x) {
                return static_cast<int32_t>(std::clamp<int64_t>(x, std::numeric_limits<int32_t>::min(), kNoRow));
            }, n);
        };
        for (const Sequence& s : p.sequences) {
            if (s.q_len >= kNoRow) refuse("mask intervals", std::to_string(s.q_len) + " queries in a sequence", "fewer than 2^31 - 1");
        }
        s1_ = component(0);
        e1_ = c == 1 || (c == 2 && !causal) ? constant(kNoRow) : component(1);
        two_ = !causal;
        if (two_) s2_ = c == 4 ? component(2) : constant(0), e2_ = component(c - 1);
        tidy(s1_, e1_);
        if (two_) tidy(s2_, e2_);
        tree_ = BlockTree<Bounds>(s1_.size(), Scan{this});
        varies_by_head = s1_.planes().heads > 1;
        if (causal) band_.add_causal();
    }

    TileClass classify(const Place& place, Range i, Range j) const override {
        const TileClass diagonal = causal_ ? band_.classify(place.seq, i, j) : TileClass::full;
        if (diagonal == TileClass::skip) return diagonal;
        const int64_t row = s1_.row(place) + origin_.kv(place.seq);
        const Range columns{row + j.begin, row + j.end};
        const Bounds all = tree_.query(columns.begin, columns.end, Scan{this});
        const bool clear = all.first.clear(i) && (!two_ || all.second.clear(i));
        if (clear) return diagonal;
        if (all.first.covers(i) || (two_ && (all.second.covers(i) || all.first.covers_with(all.second, i) || all.second.covers_with(all.first, i)))) {
            return TileClass::skip;
        }
        if (j.size() > kExactEdge) return TileClass::partial;
        bool seen = false, hidden = false;
        for (int64_t n = columns.begin; n < columns.end && !(seen && hidden); ++n) {
            int64_t from = i.begin;  // the first row that is not hidden; hops over at most two intervals
            if (causal_) from = std::max(from, j.begin + (n - columns.begin) - Band::offset(place.seq));
            hidden |= from > i.begin || meets(s1_, e1_, n, i) || (two_ && meets(s2_, e2_, n, i));
            from = hop(s1_, e1_, n, from);
            if (two_) from = hop(s1_, e1_, n, hop(s2_, e2_, n, from));
            seen |= from < i.end;
        }
        return seen ? (hidden ? TileClass::partial : TileClass::full) : TileClass::skip;
    }

    void visible(const Place& place, int64_t i, Range j, uint8_t* out) const override {
        const int64_t first = s1_.row(place) + origin_.kv(place.seq) + j.begin, n = j.size();
        const int32_t row = static_cast<int32_t>(i);
        const int32_t *s = s1_.data() + first, *e = e1_.data() + first;
        for (int64_t k = 0; k < n; ++k) out[k] = static_cast<uint8_t>((row < s[k]) | (row >= e[k]));
        if (two_) {
            s = s2_.data() + first, e = e2_.data() + first;
            for (int64_t k = 0; k < n; ++k) out[k] &= static_cast<uint8_t>((row < s[k]) | (row >= e[k]));
        }
        if (causal_) {
            const int64_t seen = std::clamp(i + Band::offset(place.seq) + 1, j.begin, j.end) - j.begin;
            std::memset(out + seen, 0, static_cast<size_t>(n - seen));
        }
    }

private:
    // Extremes of the bounds of many columns. An empty interval is [kNoRow, lowest): it covers nothing.
    struct Extremes {
        int32_t min_s = kNoRow, max_s = std::numeric_limits<int32_t>::min();
        int32_t min_e = kNoRow, max_e = std::numeric_limits<int32_t>::min();
        void merge(const Extremes& other) {
            min_s = std::min(min_s, other.min_s), max_s = std::max(max_s, other.max_s);
            min_e = std::min(min_e, other.min_e), max_e = std::max(max_e, other.max_e);
        }
        [[nodiscard]] bool clear(Range i) const { return min_s >= i.end || max_e <= i.begin; }  // no column hides a row
        [[nodiscard]] bool covers(Range i) const { return max_s <= i.begin && min_e >= i.end; }
        [[nodiscard]] bool covers_with(const Extremes& next, Range i) const {
            return max_s <= i.begin && min_e >= next.max_s && next.min_e >= i.end;
        }
    };
    struct Bounds {
        Extremes first, second;
        void merge(const Bounds& other) { first.merge(other.first), second.merge(other.second); }
    };
    struct Scan {
        const Intervals* self;
        Bounds operator()(int64_t begin, int64_t end) const {
            Bounds result;
            result.first = of(self->s1_, self->e1_, begin, end);
            if (self->two_) result.second = of(self->s2_, self->e2_, begin, end);
            return result;
        }
        static Extremes of(const PerToken<int32_t>& s, const PerToken<int32_t>& e, int64_t begin, int64_t end) {
            Extremes x;
            for (int64_t n = begin; n < end; ++n) {
                x.min_s = std::min(x.min_s, s.data()[n]), x.max_s = std::max(x.max_s, s.data()[n]);
                x.min_e = std::min(x.min_e, e.data()[n]), x.max_e = std::max(x.max_e, e.data()[n]);
            }
            return x;
        }
    };
    PerToken<int32_t> constant(int32_t value) const {
        PerToken<int32_t> copy = s1_;
        std::fill_n(copy.data(), copy.size(), value);
        return copy;
    }
    static void tidy(PerToken<int32_t>& s, PerToken<int32_t>& e) {
        for (int64_t n = 0; n < s.size(); ++n) {
            if (s.data()[n] >= e.data()[n]) s.data()[n] = kNoRow, e.data()[n] = std::numeric_limits<int32_t>::min();
        }
    }
    static bool meets(const PerToken<int32_t>& s, const PerToken<int32_t>& e, int64_t n, Range i) {
        return std::max<int64_t>(s.data()[n], i.begin) < std::min<int64_t>(e.data()[n], i.end);
    }
    static int64_t hop(const PerToken<int32_t>& s, const PerToken<int32_t>& e, int64_t n, int64_t row) {
        return s.data()[n] <= row && row < e.data()[n] ? e.data()[n] : row;
    }

    TokenOrigin origin_;
    bool causal_, two_ = false;
    Band band_;
    PerToken<int32_t> s1_, e1_, s2_, e2_;
    BlockTree<Bounds> tree_;
};

// Query i sees keys [start, end) of its own.
class RowIntervals final : public BoundKind {
public:
    RowIntervals(const Problem& p, const Array& start, const Array& end)
        : origin_(p), start_(p, start, p.packed_q, [](int64_t x) { return x; }),
          end_(p, end, p.packed_q, [](int64_t x) { return x; }) {
        // Planes of the two may differ (one broadcast, one not), so each has its own tree and neither is rewritten.
        start_tree_ = BlockTree<Extremes>(start_.size(), Scan{&start_});
        end_tree_ = BlockTree<Extremes>(end_.size(), Scan{&end_});
        varies_by_head = start_.planes().heads > 1 || end_.planes().heads > 1;
    }
    TileClass classify(const Place& place, Range i, Range j) const override {
        const int64_t q0 = origin_.q(place.seq);
        const int64_t s0 = start_.row(place) + q0, e0 = end_.row(place) + q0;
        const Extremes s = start_tree_.query(s0 + i.begin, s0 + i.end, Scan{&start_});
        const Extremes e = end_tree_.query(e0 + i.begin, e0 + i.end, Scan{&end_});
        if (s.high <= j.begin && e.low >= j.end) return TileClass::full;
        if (s.low >= j.end || e.high <= j.begin) return TileClass::skip;
        if (i.size() > kExactEdge) return TileClass::partial;
        bool seen = false;
        for (int64_t n = i.begin; n < i.end; ++n) {
            seen |= std::max(start_.data()[s0 + n], j.begin) < std::min(end_.data()[e0 + n], j.end);
        }
        return seen ? TileClass::partial : TileClass::skip;
    }
    void visible(const Place& place, int64_t i, Range j, uint8_t* out) const override {
        const int64_t n = origin_.q(place.seq) + i;
        const int64_t begin = std::clamp(start_.data()[start_.row(place) + n], j.begin, j.end);
        const int64_t end = std::clamp(end_.data()[end_.row(place) + n], begin, j.end);
        std::memset(out, 0, static_cast<size_t>(j.size()));
        std::memset(out + (begin - j.begin), 1, static_cast<size_t>(end - begin));
    }

private:
    struct Extremes {
        int64_t low = std::numeric_limits<int64_t>::max(), high = std::numeric_limits<int64_t>::min();
        void merge(const Extremes& other) { low = std::min(low, other.low), high = std::max(high, other.high); }
    };
    struct Scan {
        const PerToken<int64_t>* values;
        Extremes operator()(int64_t begin, int64_t end) const {
            Extremes x;
            for (int64_t n = begin; n < end; ++n) {
                x.low = std::min(x.low, values->data()[n]), x.high = std::max(x.high, values->data()[n]);
            }
            return x;
        }
    };
    TokenOrigin origin_;
    PerToken<int64_t> start_, end_;
    BlockTree<Extremes> start_tree_, end_tree_;
};

// The last n keys are the nodes of a tree of drafts: a bit per (query, node). All keys before them are visible.
class Tree final : public BoundKind {
public:
    Tree(const Problem& p, const Array& bits, PerHead n)
        : origin_(p), planes_(p, bits, 2, p.packed_q), n_(std::move(n)) {
        const size_t axis = static_cast<size_t>(bits.rank - 2);
        rows_ = bits.shape[axis], words_ = bits.shape[axis + 1];
        bits_.reserve(static_cast<size_t>(planes_.count() * rows_ * words_));
        for (int64_t plane = 0; plane < planes_.count(); ++plane) {
            for (int64_t r = 0; r < rows_; ++r) {
                for (int64_t w = 0; w < words_; ++w) {
                    const int64_t offset = planes_.offset(plane) + r * bits.stride[axis] + w * bits.stride[axis + 1];
                    bits_.push_back(static_cast<uint32_t>(load_int(bits.data, bits.dtype, offset)));
                }
            }
        }
        counts_ = BlockCounts(planes_.count(), rows_, 32 * words_, kSummaryBlock, Count{this});
        varies_by_head = planes_.heads > 1;
    }
    TileClass classify(const Place& place, Range i, Range j) const override {
        const int64_t first = first_node(place);  // key of node 0; negative if there are more nodes than keys
        if (j.end <= first) return TileClass::full;
        const int64_t q0 = origin_.q(place.seq);
        const TileClass nodes = grid_class(counts_, planes_.of(place), {q0 + i.begin, q0 + i.end},
                                           {std::max(j.begin, first) - first, j.end - first}, rows_, 32 * words_, Count{this});
        return j.begin < first ? join(TileClass::full, nodes) : nodes;
    }
    void visible(const Place& place, int64_t i, Range j, uint8_t* out) const override {
        const int64_t first = first_node(place), n = j.size();
        const int64_t before = std::clamp<int64_t>(first - j.begin, 0, n);
        std::memset(out, 1, static_cast<size_t>(before));
        const uint32_t* const row = bits_.data() + (planes_.of(place) * rows_ + origin_.q(place.seq) + i) * words_;
        const int64_t from = j.begin - first;  // node of out[0]
        const int64_t known = std::clamp<int64_t>(32 * words_ - from, before, n);
        for (int64_t k = before; k < known; ++k) {
            out[k] = static_cast<uint8_t>(row[(from + k) / 32] >> ((from + k) % 32) & 1u);
        }
        std::memset(out + known, 0, static_cast<size_t>(n - known));
    }

private:
    struct Count {
        const Tree* self;
        int64_t operator()(int64_t plane, int64_t r, int64_t begin, int64_t end) const {
            const uint32_t* const row = self->bits_.data() + (plane * self->rows_ + r) * self->words_;
            int64_t set = 0;
            for (int64_t at = begin; at < end;) {
                const int64_t stop = std::min(end, (at / 32 + 1) * 32);
                const uint32_t mask = stop - at == 32 ? ~0u : ((1u << (stop - at)) - 1u) << (at % 32);
                set += std::popcount(row[at / 32] & mask);
                at = stop;
            }
            return set;
        }
    };
    [[nodiscard]] int64_t first_node(const Place& place) const {
        return place.seq.kv_len - std::clamp<int64_t>(n_.at(place), 0, kBeyond);
    }
    TokenOrigin origin_;
    Planes planes_;
    PerHead n_;
    int64_t rows_ = 0, words_ = 0;
    std::vector<uint32_t> bits_;
    BlockCounts counts_;
};

// map[i / bq, j / bkv] says all about its block.
class Blocks final : public BoundKind {
public:
    Blocks(const Problem& p, const Array& map, int64_t bq, int64_t bkv)
        : planes_(p, map, 2, false), bq_(bq), bkv_(bkv) {
        const size_t axis = static_cast<size_t>(map.rank - 2);
        rows_ = map.shape[axis], columns_ = map.shape[axis + 1];
        for (const Sequence& s : p.sequences) {
            if (ceil_div(s.q_len, bq) > rows_ || ceil_div(s.kv_len, bkv) > columns_) {
                refuse("mask blocks: map", describe(map) + " for a sequence of " + std::to_string(s.q_len) + " queries and " +
                       std::to_string(s.kv_len) + " keys", "at least [ceil(q / bq), ceil(kv / bkv)] = [" +
                       std::to_string(ceil_div(s.q_len, bq)) + ", " + std::to_string(ceil_div(s.kv_len, bkv)) + "]");
            }
        }
        map_.reserve(static_cast<size_t>(planes_.count() * rows_ * columns_));
        for (int64_t plane = 0; plane < planes_.count(); ++plane) {
            for (int64_t r = 0; r < rows_; ++r) {
                for (int64_t c = 0; c < columns_; ++c) {
                    const int64_t offset = planes_.offset(plane) + r * map.stride[axis] + c * map.stride[axis + 1];
                    map_.push_back(load_int(map.data, map.dtype, offset) != 0);
                }
            }
        }
        counts_ = BlockCounts(planes_.count(), rows_, columns_, 1, Count{this});
        varies_by_head = planes_.heads > 1;
    }
    TileClass classify(const Place& place, Range i, Range j) const override {
        return grid_class(counts_, planes_.of(place), {i.begin / bq_, ceil_div(i.end, bq_)},
                          {j.begin / bkv_, ceil_div(j.end, bkv_)}, rows_, columns_, Count{this});
    }
    void visible(const Place& place, int64_t i, Range j, uint8_t* out) const override {
        const uint8_t* const row = map_.data() + (planes_.of(place) * rows_ + i / bq_) * columns_;
        for (int64_t at = j.begin; at < j.end;) {
            const int64_t stop = at / bkv_ == j.end / bkv_ ? j.end : (at / bkv_ + 1) * bkv_;
            std::memset(out + (at - j.begin), row[at / bkv_], static_cast<size_t>(stop - at));
            at = stop;
        }
    }

private:
    struct Count {
        const Blocks* self;
        int64_t operator()(int64_t plane, int64_t r, int64_t begin, int64_t end) const {
            return count_set(self->map_.data() + (plane * self->rows_ + r) * self->columns_ + begin, 1, end - begin);
        }
    };
    Planes planes_;
    int64_t bq_, bkv_, rows_ = 0, columns_ = 0;
    std::vector<uint8_t> map_;
    BlockCounts counts_;
};

// The array stays where it is: it may be as large as the scores.
class Dense final : public BoundKind {
public:
    Dense(const Problem& p, const Array& array) {
        Array padded = array;  // to rank 4; axes of one element have stride 0
        padded.rank = 4;
        for (size_t n = 0; n < 4; ++n) {
            const int64_t axis = static_cast<int64_t>(n) - (4 - array.rank);
            padded.shape[n] = axis < 0 ? 1 : array.shape[static_cast<size_t>(axis)];
            padded.stride[n] = padded.shape[n] == 1 ? 0 : array.stride[static_cast<size_t>(axis)];
        }
        array_ = padded;
        planes_ = Planes(p, array_, 2, false);
        // A single query or key is not broadcast: that would differ only in coordinates that do not exist.
        counts_ = BlockCounts(planes_.count(), array_.shape[2], array_.shape[3], kSummaryBlock, Count{this});
        varies_by_head = planes_.heads > 1;
    }
    TileClass classify(const Place& place, Range i, Range j) const override {
        if (array_.shape[2] == 1) i = {0, 1};
        if (array_.shape[3] == 1) j = {0, 1};
        return grid_class(counts_, planes_.of(place), i, j, array_.shape[2], array_.shape[3], Count{this});
    }
    void visible(const Place& place, int64_t i, Range j, uint8_t* out) const override {
        // Broadcast axes have no end; beyond the end of others nothing is visible.
        const bool row_exists = array_.shape[2] == 1 || i < array_.shape[2];
        const int64_t columns = array_.shape[3] == 1 ? j.end : array_.shape[3];
        const int64_t n = row_exists ? std::clamp<int64_t>(columns - j.begin, 0, j.size()) : 0;
        const int64_t offset = planes_.offset(planes_.of(place)) + i * array_.stride[2] + j.begin * array_.stride[3];
        if (n > 0) with_elements(array_, offset, [&](const auto* p) { copy_set(p, array_.stride[3], n, out); });
        std::memset(out + n, 0, static_cast<size_t>(j.size() - n));
    }

private:
    struct Count {
        const Dense* self;
        int64_t operator()(int64_t plane, int64_t r, int64_t begin, int64_t end) const {
            const Array& a = self->array_;
            const int64_t offset = self->planes_.offset(plane) + r * a.stride[2] + begin * a.stride[3];
            return with_elements(a, offset, [&](const auto* p) { return count_set(p, a.stride[3], end - begin); });
        }
    };
    Array array_;
    Planes planes_;
    BlockCounts counts_;
};

// ---------------------------------------------------------------------------------------------------------------------
// Expressions

ExprContext context_of(const Problem& p, const Place& place) {
    return {place.b, place.h, place.h / p.group(), place.seq.q_len, place.seq.kv_len, place.seq.q_offset, p.arrays, p.scalars};
}

bool uses_head(const Expr& expr) { return expr.uses(Variable::h) || expr.uses(Variable::head_kv); }

// Evaluators hold scratch, so every thread keeps a few of its own. Ids are never reused: an evaluator of a mask that is
// gone is replaced, not called.
template <class T>
RowEvaluator<T>& evaluator_of(uint64_t id, const RowProgram& program) {
    struct Slot {
        uint64_t id = 0;
        std::vector<std::byte> scratch;
        std::optional<RowEvaluator<T>> evaluator;
    };
    thread_local std::array<Slot, 8> slots;
    Slot& slot = slots[id % slots.size()];
    if (slot.id != id) {
        constexpr size_t kAlign = 64;
        const size_t bytes = static_cast<size_t>(program.scratch_bytes(kMaskPiece, sizeof(T)));
        slot.evaluator.reset();
        if (slot.scratch.size() < bytes + kAlign) slot.scratch.resize(bytes + kAlign);
        void* aligned = slot.scratch.data();
        size_t space = slot.scratch.size();
        std::align(kAlign, bytes, aligned, space);
        slot.evaluator.emplace(program, kMaskPiece, aligned);
        slot.id = id;
    }
    return *slot.evaluator;
}

class Mod final : public BoundKind {
public:
    Mod(const Problem& p, const Expr& expr, const ArraySummaries& summaries)
        : problem_(p), program_(expr), summaries_(summaries.all()) {
        static std::atomic<uint64_t> next{1};
        id_ = next.fetch_add(1, std::memory_order_relaxed);
        varies_by_head = uses_head(expr);
    }
    TileClass classify(const Place& place, Range i, Range j) const override {
        const ExprContext context = context_of(problem_, place);
        const Truth t = problem_.dtype == DType::f64 ? truth<double>(program_.expr(), context, i, j, summaries_)
                                                     : truth<float>(program_.expr(), context, i, j, summaries_);
        return t == Truth::no ? TileClass::skip : t == Truth::yes ? TileClass::full : TileClass::partial;
    }
    void visible(const Place& place, int64_t i, Range j, uint8_t* out) const override {
        const ExprContext context = context_of(problem_, place);
        if (problem_.dtype == DType::f64) {
            evaluator_of<double>(id_, program_).boolean(context, i, j, out);
        } else {
            evaluator_of<float>(id_, program_).boolean(context, i, j, out);
        }
    }

private:
    const Problem& problem_;
    RowProgram program_;
    std::span<const ArraySummary> summaries_;
    uint64_t id_;
};

class ScoreMod final : public BoundKind {
public:
    ScoreMod(const Problem& p, Expr expr, const ArraySummaries& summaries)
        : problem_(p), expr_(std::move(expr)), summaries_(summaries.all()) {
        varies_by_head = uses_head(expr_);
    }
    TileClass classify(const Place& place, Range i, Range j) const override {
        const ExprContext context = context_of(problem_, place);
        const bool hides = problem_.dtype == DType::f64 ? hides_all<double>(expr_, context, i, j, summaries_)
                                                        : hides_all<float>(expr_, context, i, j, summaries_);
        return hides ? TileClass::skip : TileClass::full;
    }
    void visible(const Place&, int64_t, Range j, uint8_t* out) const override {
        std::memset(out, 1, static_cast<size_t>(j.size()));
    }

private:
    const Problem& problem_;
    Expr expr_;
    std::span<const ArraySummary> summaries_;
};

// ---------------------------------------------------------------------------------------------------------------------
// or, not

class AnyOf final : public BoundKind {
public:
    void add(std::unique_ptr<BoundKind> part) {
        varies_by_head |= part->varies_by_head;
        parts_.push_back(std::move(part));
    }
    TileClass classify(const Place& place, Range i, Range j) const override {
        TileClass best = TileClass::skip;
        for (const auto& part : parts_) {
            best = std::max(best, part->classify(place, i, j));
            if (best == TileClass::full) break;
        }
        return best;
    }
    void visible(const Place& place, int64_t i, Range j, uint8_t* out) const override {
        std::array<uint8_t, kMaskPiece> other;
        parts_[0]->visible(place, i, j, out);
        for (size_t n = 1; n < parts_.size(); ++n) {
            parts_[n]->visible(place, i, j, other.data());
            for (int64_t k = 0; k < j.size(); ++k) out[k] |= other[static_cast<size_t>(k)];
        }
    }

private:
    std::vector<std::unique_ptr<BoundKind>> parts_;
};

class Negation final : public BoundKind {
public:
    explicit Negation(std::unique_ptr<BoundKind> part) : part_(std::move(part)) { varies_by_head = part_->varies_by_head; }
    TileClass classify(const Place& place, Range i, Range j) const override {
        const TileClass c = part_->classify(place, i, j);
        return c == TileClass::skip ? TileClass::full : c == TileClass::full ? TileClass::skip : c;
    }
    void visible(const Place& place, int64_t i, Range j, uint8_t* out) const override {
        part_->visible(place, i, j, out);
        for (int64_t k = 0; k < j.size(); ++k) out[k] ^= 1;
    }

private:
    std::unique_ptr<BoundKind> part_;
};

// A mask by itself, as a part of or(...) and not(...).
std::unique_ptr<BoundKind> bind_alone(const MaskNode& node, const Problem& p, ArraySummaries& summaries) {
    auto all = std::make_unique<AllOf>();
    bind_mask(node, p, summaries, *all);
    if (all->only_band()) return std::make_unique<BandKind>(all->band);
    return all;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Bands and `and`

void Band::add_window(int64_t left, int64_t right) {
    const auto tighten = [](int64_t& bound, int64_t value) {
        if (value >= 0 && value < kBeyond && (bound < 0 || value < bound)) bound = value;
    };
    tighten(left_, left);
    tighten(right_, right);
}

void Band::add_chunk(int64_t c) {
    c = std::min(c, kBeyond);
    if (std::find(chunks_.begin(), chunks_.end(), c) == chunks_.end()) chunks_.push_back(c);
}

int64_t Band::offset(const Sequence& seq) {
    constexpr int64_t kLimit = int64_t{1} << 60;
    return std::clamp(seq.q_offset, -kLimit, kLimit);
}

Range Band::keys(int64_t t) const {
    Range seen{left_ < 0 ? -kFar : t - left_, right_ < 0 ? kFar : t + right_ + 1};
    for (const int64_t c : chunks_) {
        const int64_t first = floor_div(t, c) * c;
        seen.begin = std::max(seen.begin, first);
        seen.end = std::min(seen.end, first + c);
    }
    return seen;
}

Range Band::positions(Range j) const {
    // The first position whose range ends after j.begin, and the first whose range begins at or after j.end.
    Range seen{right_ < 0 ? -kFar : j.begin - right_, left_ < 0 ? kFar : j.end + left_};
    for (const int64_t c : chunks_) {
        seen.begin = std::max(seen.begin, floor_div(j.begin, c) * c);
        seen.end = std::min(seen.end, (floor_div(j.end - 1, c) + 1) * c);
    }
    return seen;
}

TileClass Band::classify(const Sequence& seq, Range i, Range j) const {
    const int64_t first = i.begin + offset(seq), last = i.end - 1 + offset(seq);
    const Range interested = positions(j);
    if (interested.begin > last || interested.end <= first) return TileClass::skip;
    return keys(last).begin <= j.begin && keys(first).end >= j.end ? TileClass::full : TileClass::partial;
}

void AllOf::add(std::unique_ptr<BoundKind> part) {
    varies_by_head |= part->varies_by_head;
    parts_.push_back(std::move(part));
}

TileClass AllOf::classify(const Place& place, Range i, Range j) const {
    TileClass worst = band.classify(place.seq, i, j);
    for (size_t n = 0; n < parts_.size() && worst != TileClass::skip; ++n) {
        worst = std::min(worst, parts_[n]->classify(place, i, j));
    }
    return worst;
}

void AllOf::visible(const Place& place, int64_t i, Range j, uint8_t* out) const {
    // Parts are only asked inside the band.
    const Range keys = band.keys(i + Band::offset(place.seq));
    const int64_t begin = std::clamp(keys.begin, j.begin, j.end), end = std::clamp(keys.end, begin, j.end);
    const Range seen{begin, end};
    std::memset(out, 0, static_cast<size_t>(begin - j.begin));
    std::memset(out + (end - j.begin), 0, static_cast<size_t>(j.end - end));
    if (seen.empty()) return;
    out += begin - j.begin;
    if (parts_.empty()) {
        std::memset(out, 1, static_cast<size_t>(seen.size()));
        return;
    }
    std::array<uint8_t, kMaskPiece> other;
    parts_[0]->visible(place, i, seen, out);
    for (size_t n = 1; n < parts_.size(); ++n) {
        parts_[n]->visible(place, i, seen, other.data());
        for (int64_t k = 0; k < seen.size(); ++k) out[k] &= other[static_cast<size_t>(k)];
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// From the tree of the text

void ArraySummaries::need(const Expr& expr) {
    for (const int k : expr.arrays()) {
        const size_t n = static_cast<size_t>(k);
        const Array& a = problem_.arrays[n];
        if (a.data == nullptr && a.size() > 0) {
            refuse("mask mod, score_mod: @" + std::to_string(k), "a null pointer", "a pointer to the elements of " + describe(a));
        }
        if (!summaries_[n]) summaries_[n] = ArraySummary(a);
    }
}

void bind_mask(const MaskNode& node, const Problem& p, ArraySummaries& summaries, AllOf& into) {
    const auto array = [&](size_t n) -> const Array& { return array_of(node, n, p); };
    const auto per_head = [&](size_t n, int64_t value) { return PerHead(p, node.array[n] < 0 ? nullptr : &array(n), value); };
    switch (node.op) {
        case MaskOp::all_of:
            for (const MaskNode& part : node.parts) bind_mask(part, p, summaries, into);
            break;
        case MaskOp::any_of: {
            auto any = std::make_unique<AnyOf>();
            for (const MaskNode& part : node.parts) any->add(bind_alone(part, p, summaries));
            into.add(std::move(any));
            break;
        }
        case MaskOp::negate: into.add(std::make_unique<Negation>(bind_alone(node.parts[0], p, summaries))); break;
        case MaskOp::causal: into.band.add_causal(); break;
        case MaskOp::window: into.band.add_window(node.number[0], node.number[1]); break;
        case MaskOp::chunk: into.band.add_chunk(node.number[0]); break;
        case MaskOp::key_padding: into.add(std::make_unique<KeyPadding>(p, array(0))); break;
        case MaskOp::documents: into.add(std::make_unique<Documents>(p, array(0), array(1))); break;
        case MaskOp::prefix: into.add(std::make_unique<Prefix>(per_head(0, node.number[0]))); break;
        case MaskOp::intervals:
            // The kind itself knows the diagonal, to be exact with it; the band knows it too, to bound the descent.
            if (node.causal) into.band.add_causal();
            into.add(std::make_unique<Intervals>(p, array(0), node.causal));
            break;
        case MaskOp::row_intervals: into.add(std::make_unique<RowIntervals>(p, array(0), array(1))); break;
        case MaskOp::tree: into.add(std::make_unique<Tree>(p, array(0), per_head(1, node.number[0]))); break;
        case MaskOp::blocks: into.add(std::make_unique<Blocks>(p, array(0), node.number[0], node.number[1])); break;
        case MaskOp::dense: into.add(std::make_unique<Dense>(p, array(0))); break;
        case MaskOp::mod:
            summaries.need(node.expr);
            into.add(std::make_unique<Mod>(p, node.expr, summaries));
            break;
    }
}

std::unique_ptr<BoundKind> bind_score_mod(const Problem& p, ArraySummaries& summaries) {
    if (p.score_mod.empty()) return nullptr;
    const Expr expr = Expr::parse(p.score_mod, Role::score_mod, p.arrays, static_cast<int>(p.scalars.size()));
    // -inf for every score needs something that can be infinite by itself; most score_mods have nothing of the kind and
    // are spared one evaluation per tile.
    const auto nodes = expr.nodes();
    const bool can_hide = std::any_of(nodes.begin(), nodes.end(), [&](const Node& node) {
        switch (node.op) {
            case Op::literal: return node.kind == Kind::real && std::isinf(node.real);
            case Op::scalar: return node.kind == Kind::real;
            case Op::gather: return is_float(p.arrays[static_cast<size_t>(node.index)].dtype);
            case Op::log:
            case Op::div: return true;
            default: return false;
        }
    });
    if (!can_hide) return nullptr;
    summaries.need(expr);
    return std::make_unique<ScoreMod>(p, expr, summaries);
}

}  // namespace tilewise::core
