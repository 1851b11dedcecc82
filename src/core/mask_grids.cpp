// Kinds backed by an array with an axis of queries and an axis of keys: tree, blocks, dense. Running sums over 64 x 64
// blocks (of the map itself for blocks) classify a rectangle of any size in a few loads.
#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>
#include <vector>

#include "mask_arrays.hpp"
#include "mask_kinds.hpp"
#include "summary.hpp"

namespace tilewise::core {
namespace {

// The last n keys are the nodes of a tree of drafts: a bit per (query, node). All keys before them are visible.
class Tree final : public BoundKind {
public:
    Tree(const Problem& p, const Array& bits, PerHead n)
        : origin_(p), planes_(p, bits, 2, p.packed_q), n_(std::move(n)) {
        const size_t axis = static_cast<size_t>(bits.rank - 2);
        rows_ = bits.shape[axis], words_ = bits.shape[axis + 1];
        bits_.resize(static_cast<size_t>(planes_.count() * rows_ * words_));
        uint32_t* to = bits_.data();
        for (int64_t plane = 0; plane < planes_.count(); ++plane) {
            for (int64_t r = 0; r < rows_; ++r, to += words_) {
                for_each_integer(bits, planes_.offset(plane) + r * bits.stride[axis], bits.stride[axis + 1], words_,
                                 [&](int64_t w, int64_t value) { to[w] = static_cast<uint32_t>(value); });
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
                                           {std::max(j.begin, first) - first, j.end - first}, Count{this});
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
        return place.seq.kv_len - std::clamp<int64_t>(n_.at(place), 0, int64_t{1} << 61);
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
                refuse("mask blocks: map",
                       describe(map) + " for a sequence of " + std::to_string(s.q_len) + " queries and " +
                           std::to_string(s.kv_len) + " keys",
                       "at least [ceil(q / bq), ceil(kv / bkv)] = [" + std::to_string(ceil_div(s.q_len, bq)) + ", " +
                           std::to_string(ceil_div(s.kv_len, bkv)) + "]");
            }
        }
        map_.resize(static_cast<size_t>(planes_.count() * rows_ * columns_));
        uint8_t* to = map_.data();
        for (int64_t plane = 0; plane < planes_.count(); ++plane) {
            for (int64_t r = 0; r < rows_; ++r, to += columns_) {
                for_each_integer(map, planes_.offset(plane) + r * map.stride[axis], map.stride[axis + 1], columns_,
                                 [&](int64_t c, int64_t value) { to[c] = value != 0; });
            }
        }
        counts_ = BlockCounts(planes_.count(), rows_, columns_, 1, Count{this});
        varies_by_head = planes_.heads > 1;
    }
    TileClass classify(const Place& place, Range i, Range j) const override {
        return grid_class(counts_, planes_.of(place), {i.begin / bq_, ceil_div(i.end, bq_)},
                          {j.begin / bkv_, ceil_div(j.end, bkv_)}, Count{this});
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
        return grid_class(counts_, planes_.of(place), i, j, Count{this});
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

}  // namespace

std::unique_ptr<BoundKind> make_tree(const Problem& p, const Array& bits, const Array* n, int64_t value) {
    return std::make_unique<Tree>(p, bits, PerHead(p, n, value));
}
std::unique_ptr<BoundKind> make_blocks(const Problem& p, const Array& map, int64_t bq, int64_t bkv) {
    return std::make_unique<Blocks>(p, map, bq, bkv);
}
std::unique_ptr<BoundKind> make_dense(const Problem& p, const Array& array) {
    return std::make_unique<Dense>(p, array);
}

}  // namespace tilewise::core
