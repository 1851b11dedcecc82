// Kinds backed by one or a few numbers per token: key_padding, documents, prefix, intervals, row_intervals.
#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include "mask_arrays.hpp"
#include "mask_kinds.hpp"
#include "summary.hpp"

namespace tilewise::core {
namespace {

constexpr int32_t kNoRow = std::numeric_limits<int32_t>::max();

class KeyPadding final : public BoundKind {
public:
    KeyPadding(const Problem& p, const Array& keep)
        : origin_(p),
          keep_(p, keep, p.packed_kv, [](int64_t x) { return static_cast<uint8_t>(x != 0); }),
          tokens_(keep.shape[static_cast<size_t>(keep.rank - 1)]),
          counts_(keep_.planes().count(), 1, tokens_, kSummaryBlock, Count{this}) {
        varies_by_head = keep_.planes().heads > 1;
    }
    TileClass classify(const Place& place, Range, Range j) const override {
        const int64_t first = origin_.kv_physical(place.seq);
        return grid_class(counts_, keep_.planes().of(place), {0, 1}, {first + j.begin, first + j.end}, Count{this});
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
        const bool one = !q.padding && !k.padding && q.low == static_cast<uint32_t>(q.high) &&
                         k.low == static_cast<uint32_t>(k.high);
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
            return PerToken<int32_t>(
                p, bounds, p.packed_kv,
                [](int64_t x) {
                    return static_cast<int32_t>(std::clamp<int64_t>(x, std::numeric_limits<int32_t>::min(), kNoRow));
                },
                n);
        };
        for (const Sequence& s : p.sequences) {
            if (s.q_len >= kNoRow)
                refuse("mask intervals", std::to_string(s.q_len) + " queries in a sequence", "fewer than 2^31 - 1");
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
        if (all.first.covers(i) || (two_ && (all.second.covers(i) || all.first.covers_with(all.second, i) ||
                                             all.second.covers_with(all.first, i)))) {
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
        : origin_(p),
          start_(p, start, p.packed_q, [](int64_t x) { return x; }),
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

}  // namespace

std::unique_ptr<BoundKind> make_key_padding(const Problem& p, const Array& keep) {
    return std::make_unique<KeyPadding>(p, keep);
}
std::unique_ptr<BoundKind> make_documents(const Problem& p, const Array& q_ids, const Array& kv_ids) {
    return std::make_unique<Documents>(p, q_ids, kv_ids);
}
std::unique_ptr<BoundKind> make_prefix(const Problem& p, const Array* n, int64_t value) {
    return std::make_unique<Prefix>(PerHead(p, n, value));
}
std::unique_ptr<BoundKind> make_intervals(const Problem& p, const Array& bounds, bool causal) {
    return std::make_unique<Intervals>(p, bounds, causal);
}
std::unique_ptr<BoundKind> make_row_intervals(const Problem& p, const Array& start, const Array& end) {
    return std::make_unique<RowIntervals>(p, start, end);
}

}  // namespace tilewise::core
