// How mask arrays are addressed: broadcast axes, packed tokens, one number per head. Shared by the kinds backed by
// arrays.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "mask_kinds.hpp"
#include "problem.hpp"
#include "summary.hpp"

namespace tilewise::core {

inline constexpr int64_t kMaxScan = kExactEdge * kExactEdge;  // entries read to classify one rectangle

// Class of two disjoint parts taken together.
inline TileClass join(TileClass a, TileClass b) { return a == b ? a : TileClass::partial; }

// Where the entries of one (batch, head) lie in an array. Its leading axes are batch, heads, both or none; one of
// extent 1 is broadcast.
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

// function(n, value) for n elements of an integer or bool array, from an offset on.
template <class Function>
void for_each_integer(const Array& a, int64_t offset, int64_t stride, int64_t n, const Function& function) {
    const auto run = [&]<class T>(const T* p) {
        for (int64_t k = 0; k < n; ++k) function(k, static_cast<int64_t>(p[k * stride]));
    };
    switch (a.dtype) {
        case DType::i64: return run(static_cast<const int64_t*>(a.data) + offset);
        case DType::i32: return run(static_cast<const int32_t*>(a.data) + offset);
        case DType::u32: return run(static_cast<const uint32_t*>(a.data) + offset);
        case DType::i16: return run(static_cast<const int16_t*>(a.data) + offset);
        case DType::i8: return run(static_cast<const int8_t*>(a.data) + offset);
        default: return run(static_cast<const uint8_t*>(a.data) + offset);
    }
}

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
        for (int64_t plane = 0; plane < planes_.count(); ++plane) {
            const int64_t start = planes_.offset(plane) + (component < 0 ? 0 : component * a.stride[axis + 1]);
            T* const row_values = values_.data() + plane * tokens_;
            for_each_integer(a, start, a.stride[axis], tokens_,
                             [&](int64_t t, int64_t value) { row_values[t] = convert(value); });
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

// Class of any rectangle of a grid of set and clear entries; outside of the grid all is clear. Exact on tiles.
template <class Count>
TileClass grid_class(const BlockCounts& counts, int64_t plane, Range row, Range column, const Count& count) {
    const int64_t rows = counts.rows(), columns = counts.columns();
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

}  // namespace tilewise::core
