// Random problems and random masks for the tests of the mask algebra: each mask comes with its text and with its
// meaning, stated as literally as docs/masks.md states it.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "core/mask.hpp"
#include "core/problem.hpp"

namespace tilewise::core::mask_cases {

using Rng = std::mt19937_64;
inline int64_t draw(Rng& rng, int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(rng);
}
inline bool chance(Rng& rng, double p = 0.5) { return std::uniform_real_distribution<>(0, 1)(rng) < p; }
template <class T>
T pick(Rng& rng, std::initializer_list<T> from) {
    return *(from.begin() + draw(rng, 0, static_cast<int64_t>(from.size()) - 1));
}

inline int64_t floor_div(int64_t a, int64_t b) {
    int64_t q = a / b;
    while (q * b > a) --q;
    return q;
}

// A problem with the memory of its arrays.
struct World {
    Problem p;
    std::deque<std::vector<char>> memory;

    // An array of `shape` in a random memory layout (axes in any order, gaps, negative strides); returns its number.
    // values in row-major order.
    int add(Rng& rng, DType dtype, std::vector<int64_t> shape, const std::vector<int64_t>& values) {
        Array a;
        a.dtype = dtype;
        a.rank = static_cast<int32_t>(shape.size());
        std::vector<size_t> order(shape.size());
        for (size_t n = 0; n < order.size(); ++n) order[n] = n;
        if (chance(rng, 0.3)) std::shuffle(order.begin(), order.end(), rng);
        int64_t step = chance(rng, 0.3) ? 2 : 1, low = 0;
        for (size_t n = order.size(); n-- > 0;) {
            const size_t axis = order[n];
            const bool backwards = chance(rng, 0.1);
            a.shape[axis] = shape[axis];
            a.stride[axis] = backwards ? -step : step;
            if (backwards) low += std::max<int64_t>(shape[axis] - 1, 0) * step;
            step *= std::max<int64_t>(shape[axis], 1);
        }
        std::vector<char>& bytes = memory.emplace_back(static_cast<size_t>((step + 1) * size_of(dtype)), char{0x55});
        a.data = bytes.data() + low * size_of(dtype);
        for (size_t n = 0; n < values.size(); ++n) {
            int64_t rest = static_cast<int64_t>(n), offset = 0;
            for (size_t axis = shape.size(); axis-- > 0;)
                offset += rest % shape[axis] * a.stride[axis], rest /= shape[axis];
            char* at = static_cast<char*>(a.data) + offset * size_of(dtype);
            std::memcpy(at, &values[n], static_cast<size_t>(size_of(dtype)));  // little-endian, two's complement
        }
        p.arrays.push_back(a);
        return static_cast<int>(p.arrays.size()) - 1;
    }
};

inline World random_world(Rng& rng, int64_t longest) {
    World w;
    Problem& p = w.p;
    p.batch = draw(rng, 1, 3);
    p.num_heads_kv = draw(rng, 1, 2);
    p.num_heads_q = p.num_heads_kv * draw(rng, 1, 3);
    p.packed_q = chance(rng), p.packed_kv = chance(rng);
    p.dtype = chance(rng, 0.2) ? DType::f64 : DType::f32;
    p.sequences.resize(static_cast<size_t>(p.batch));
    const int64_t dense_q = draw(rng, 1, longest), dense_kv = draw(rng, 1, longest);
    const int offset_mode = static_cast<int>(draw(rng, 0, 2));
    int64_t total_q = chance(rng) ? draw(rng, 0, 9) : 0, total_kv = chance(rng) ? draw(rng, 0, 9) : 0;
    for (Sequence& s : p.sequences) {
        s.q_rows = p.packed_q ? (chance(rng, 0.1) ? 0 : draw(rng, 1, longest)) : dense_q;
        s.kv_rows = p.packed_kv ? (chance(rng, 0.1) ? 0 : draw(rng, 1, longest)) : dense_kv;
        s.q_row0 = p.packed_q ? total_q : 0;
        s.kv_first_row = p.packed_kv ? total_kv : 0;
        total_q += s.q_rows, total_kv += s.kv_rows;
        s.q_len = chance(rng, 0.3) ? draw(rng, 0, s.q_rows) : s.q_rows;
        const int64_t used = chance(rng, 0.3) ? draw(rng, 0, s.kv_rows) : s.kv_rows;
        const int64_t pad = chance(rng, 0.3) ? draw(rng, 0, used) : 0;
        s.kv_row0 = s.kv_first_row + pad;
        s.kv_len = used - pad;
        s.q_offset = offset_mode == 0 ? s.kv_len - s.q_len : offset_mode == 1 ? 0 : draw(rng, -longest, longest);
        p.max_seqlen_q = std::max(p.max_seqlen_q, s.q_len);
        p.max_seqlen_kv = std::max(p.max_seqlen_kv, s.kv_len);
    }
    p.q_rows = p.packed_q ? total_q + draw(rng, 0, 5) : dense_q;
    p.kv_rows = p.packed_kv ? total_kv + draw(rng, 0, 5) : dense_kv;
    return w;
}

// A mask: its text and its meaning.
using See = std::function<bool(int64_t b, int64_t h, int64_t i, int64_t j)>;
struct Meaning {
    std::string text;
    See see;
    bool by_head = false;  // may differ between heads
};

// Draws masks for one world; each function states a kind as the design does.
class Masks {
public:
    Masks(World& world, Rng& rng) : w_(world), p_(world.p), rng_(rng) {}

    Meaning band() {
        const auto offset = [this](int64_t b) { return seq(b).q_offset; };
        const int64_t reach = std::max<int64_t>(p_.max_seqlen_kv, 4);
        switch (draw(rng_, 0, 2)) {
            case 0: return {"causal()", [=](int64_t b, int64_t, int64_t i, int64_t j) { return j <= i + offset(b); }};
            case 1: {
                const int64_t left = chance(rng_, 0.2) ? -1 : draw(rng_, 0, reach),
                              right = chance(rng_, 0.4) ? -1 : draw(rng_, 0, reach);
                return {"window(" + std::to_string(left) + "," + std::to_string(right) + ")",
                        [=](int64_t b, int64_t, int64_t i, int64_t j) {
                            const int64_t t = i + offset(b);
                            return (left == -1 || t - left <= j) && (right == -1 || j <= t + right);
                        }};
            }
            default: {
                const int64_t c = draw(rng_, 1, reach);
                return {"chunk(" + std::to_string(c) + ")", [=](int64_t b, int64_t, int64_t i, int64_t j) {
                            return floor_div(j, c) == floor_div(i + offset(b), c);
                        }};
            }
        }
    }

    Meaning key_padding() {
        const int64_t kept = draw(rng_, 0, 3);
        auto keep =
            per_token(false, {DType::boolean, DType::u8, DType::i32}, [=, this](int64_t, int64_t, int64_t) -> int64_t {
                return kept == 3 ? 1 : kept == 2 ? chance(rng_, 0.97) : kept == 1 ? chance(rng_) : chance(rng_, 0.03);
            });
        return {"key_padding(" + keep.name + ")",
                [=, this](int64_t b, int64_t h, int64_t, int64_t j) {
                    return keep.at(b, h, (p_.packed_kv ? seq(b).kv_row0 : seq(b).kv_row0 - seq(b).kv_first_row) + j) !=
                           0;
                },
                keep.by_head};
    }

    Meaning documents() {
        const int style = static_cast<int>(draw(rng_, 0, 4));  // sorted, two styles of unsorted, with padding, huge
        const auto ids = [=, this](int64_t plane_b, int64_t plane_h, int64_t t) -> int64_t {
            if (style == 0) return t / 37 + plane_b + plane_h;
            if (style == 1) return chance(rng_, 0.1) ? -draw(rng_, 1, 5) : (t / 50) * 2 + draw(rng_, 0, 1);
            if (style == 2) return draw(rng_, 0, 400);
            if (style == 3) return t % 90 > 70 ? -1 : t / 90;
            return (int64_t{1} << 40) + t / 64 * (int64_t{1} << 33);
        };
        const bool wide = style == 4;
        auto q = per_token(true, {wide ? DType::i64 : DType::i32, wide ? DType::i64 : DType::i16}, ids);
        auto k = per_token(false, {wide ? DType::i64 : DType::i32}, ids);
        return {"documents(" + q.name + "," + k.name + ")",
                [=, this](int64_t b, int64_t h, int64_t i, int64_t j) {
                    const int64_t a = q.at(b, h, q_token(b, i)), c = k.at(b, h, kv_token(b, j));
                    return a == c && a >= 0;
                },
                q.by_head || k.by_head};
    }

    Meaning prefix() {
        const auto see = [this](auto n) -> See {
            return [=, this](int64_t b, int64_t h, int64_t i, int64_t j) {
                return j < n(b, h) || j <= i + seq(b).q_offset;
            };
        };
        if (chance(rng_)) {
            const int64_t n = draw(rng_, 0, p_.max_seqlen_kv + 3);
            return {"prefix(" + std::to_string(n) + ")", see([=](int64_t, int64_t) { return n; })};
        }
        auto n = array({DType::i32, DType::i64}, leading(true, chance(rng_)),
                       [this](auto) { return draw(rng_, -2, p_.max_seqlen_kv + 3); });
        return {"prefix(" + n.name + ")", see([=](int64_t b, int64_t h) { return n.values[n.plane(b, h)]; }),
                n.by_head};
    }

    Meaning intervals() {
        const bool causal = chance(rng_);
        const int64_t c = causal ? draw(rng_, 1, 2) : 2 * draw(rng_, 1, 2);
        const int64_t rows = p_.max_seqlen_q;
        Axes axes = p_.packed_kv ? leading(false, chance(rng_)) : leading(true, true);
        axes.tail = {p_.kv_rows, c};
        const int style = static_cast<int>(draw(rng_, 0, 2));
        std::vector<int64_t> now(4);
        auto bounds = array({DType::i32, DType::i32, DType::i64}, axes, [&](int64_t n) {
            const int64_t part = n % c, column = n / c;
            if (style == 0) return draw(rng_, -3, rows + 3);                      // anything
            if (style == 1) return (column / 61 + part) * 61 + draw(rng_, 0, 1);  // about documents
            if (part == 0 && (column % 100 == 0 || n == 0)) {
                for (int64_t& x : now) x = draw(rng_, 0, rows + 1);                    // long runs of equal columns
                if (chance(rng_)) now = {0, now[1], now[1] + draw(rng_, 0, 1), rows};  // the two meet, or all but meet
            }
            return now[static_cast<size_t>(part)];
        });
        return {"intervals(" + bounds.name + (causal ? ",causal)" : ",full)"),
                [=, this](int64_t b, int64_t h, int64_t i, int64_t j) {
                    const int64_t* const column = &bounds.values[static_cast<size_t>(
                        (static_cast<int64_t>(bounds.plane(b, h)) * p_.kv_rows + kv_token(b, j)) * c)];
                    if (causal && j > i + seq(b).q_offset) return false;
                    if (c == 1) return !(i >= column[0]);
                    if (c == 2 && causal) return !(i >= column[0] && i < column[1]);
                    if (c == 2) return !(i >= column[0] || i < column[1]);
                    return !((i >= column[0] && i < column[1]) || (i >= column[2] && i < column[3]));
                },
                bounds.by_head};
    }

    Meaning row_intervals() {
        const int64_t keys = p_.max_seqlen_kv;
        const bool smooth = chance(rng_);
        auto start = per_token(true, {DType::i32, DType::i64}, [=, this](int64_t, int64_t, int64_t t) {
            return smooth ? t / 40 * 20 : draw(rng_, -3, keys + 3);
        });
        auto end = per_token(true, {DType::i32, DType::i64}, [=, this](int64_t, int64_t, int64_t t) {
            return smooth ? t / 40 * 20 + 150 : draw(rng_, -3, keys + 3);
        });
        return {"row_intervals(" + start.name + "," + end.name + ")",
                [=, this](int64_t b, int64_t h, int64_t i, int64_t j) {
                    return start.at(b, h, q_token(b, i)) <= j && j < end.at(b, h, q_token(b, i));
                },
                start.by_head || end.by_head};
    }

    Meaning tree() {
        const bool per_sequence = chance(rng_);
        const int64_t most = draw(rng_, 0, 200);
        Handle n;
        if (per_sequence)
            n = array({DType::i32}, leading(true, false), [=, this](auto) { return draw(rng_, -1, most); });
        const int64_t words = (most + 31) / 32 + draw(rng_, per_sequence ? -1 : 0, 1);
        Axes axes = leading(!p_.packed_q && chance(rng_), false);
        if (chance(rng_) && (axes.batch > 0 || p_.packed_q)) axes = leading(!p_.packed_q, true);
        axes.tail = {p_.q_rows, std::max<int64_t>(words, 0)};
        const int style = static_cast<int>(draw(rng_, 0, 2));
        auto bits = array({DType::u32, DType::i32}, axes, [=, this](int64_t k) -> int64_t {
            if (style == 0) return draw(rng_, 0, 0xffffffff);
            return (k / 3) % 2 == 0 ? 0 : style == 1 ? 0xffffffff : 0x0000ffff;
        });
        return {"tree(" + bits.name + "," + (per_sequence ? n.name : std::to_string(most)) + ")",
                [=, this](int64_t b, int64_t h, int64_t i, int64_t j) {
                    const int64_t nodes = std::max<int64_t>(per_sequence ? n.values[n.plane(b, h)] : most, 0);
                    const int64_t node = j - (seq(b).kv_len - nodes);
                    if (node < 0) return true;
                    if (node / 32 >= axes.tail[1]) return false;
                    const int64_t row = static_cast<int64_t>(bits.plane(b, h)) * p_.q_rows + q_token(b, i);
                    return (static_cast<uint32_t>(bits.values[static_cast<size_t>(row * axes.tail[1] + node / 32)]) >>
                                (node % 32) &
                            1u) != 0;
                },
                bits.by_head};
    }

    Meaning blocks() {
        const int64_t bq = draw(rng_, 1, 100), bkv = draw(rng_, 1, 100);
        Axes axes = chance(rng_) ? leading(true, true) : leading(false, false);
        axes.tail = {(p_.max_seqlen_q + bq - 1) / bq + draw(rng_, 0, 1),
                     (p_.max_seqlen_kv + bkv - 1) / bkv + draw(rng_, 0, 1)};
        auto map = array({DType::boolean, DType::u8, DType::i32}, axes,
                         [this](auto) { return static_cast<int64_t>(chance(rng_, 0.6)); });
        return {"blocks(" + map.name + "," + std::to_string(bq) + "," + std::to_string(bkv) + ")",
                [=](int64_t b, int64_t h, int64_t i, int64_t j) {
                    const int64_t row = static_cast<int64_t>(map.plane(b, h)) * axes.tail[0] + i / bq;
                    return map.values[static_cast<size_t>(row * axes.tail[1] + j / bkv)] != 0;
                },
                map.by_head};
    }

    Meaning dense() {
        const int rank = static_cast<int>(draw(rng_, 0, 4));
        std::vector<int64_t> shape{chance(rng_) ? p_.batch : 1, heads(),
                                   p_.packed_q ? p_.max_seqlen_q + draw(rng_, 0, 2) : p_.q_rows,
                                   p_.packed_kv ? p_.max_seqlen_kv + draw(rng_, 0, 2) : p_.kv_rows};
        for (int64_t& n : shape) n = chance(rng_, 0.15) ? 1 : n;
        for (int n = 0; n < 4 - rank; ++n) shape[static_cast<size_t>(n)] = 1;
        int64_t size = 1;
        for (const int64_t n : shape) size *= n;
        std::vector<int64_t> values(static_cast<size_t>(size));
        const int style = static_cast<int>(draw(rng_, 0, 2));
        for (size_t n = 0; n < values.size(); ++n) {
            const int64_t column = static_cast<int64_t>(n) % shape[3],
                          row = static_cast<int64_t>(n) / shape[3] % shape[2];
            values[n] = style == 0   ? chance(rng_)
                        : style == 1 ? row / 70 != column / 70
                                     : column <= row + 20 || column % 97 == 5;
        }
        std::vector<int64_t> given(shape.end() - rank, shape.end());
        const int k = w_.add(rng_, pick(rng_, {DType::boolean, DType::u8, DType::i16, DType::i64}), given, values);
        const int64_t group = shape[1] == p_.num_heads_q ? 1 : p_.group();
        return {
            "dense(@" + std::to_string(k) + ")",
            [=](int64_t b, int64_t h, int64_t i, int64_t j) {
                const auto on = [](int64_t n, int64_t index) { return n == 1 ? 0 : index; };
                const int64_t plane = on(shape[0], b) * shape[1] + on(shape[1], h / group);
                return values[static_cast<size_t>((plane * shape[2] + on(shape[2], i)) * shape[3] + on(shape[3], j))] !=
                       0;
            },
            shape[1] > 1};
    }

    Meaning mod() {
        switch (draw(rng_, 0, 3)) {
            case 0:
                return {"mod(lt(abs(sub(i,j)),40))",
                        [](int64_t, int64_t, int64_t i, int64_t j) { return std::abs(i - j) < 40; }};
            case 1:
                return {"mod(eq(mod(add(j,h),3),mod(i,3)))",
                        [](int64_t, int64_t h, int64_t i, int64_t j) { return (j + h) % 3 == i % 3; }, true};
            case 2:
                return {"mod(or(lt(j,add(i,q_offset)),ge(j,sub(seqlen_kv,5))))",
                        [this](int64_t b, int64_t, int64_t i, int64_t j) {
                            return j < i + seq(b).q_offset || j >= seq(b).kv_len - 5;
                        }};
            default: {
                Axes axes;
                axes.tail = {draw(rng_, 1, 300)};
                auto ids = array({DType::i32}, axes, [](int64_t n) { return n / 45; });
                return {"mod(eq(gather(" + ids.name + ",i),gather(" + ids.name + ",j)))",
                        [=](int64_t, int64_t, int64_t i, int64_t j) {
                            const auto at = [&](int64_t n) {
                                return n < axes.tail[0] ? ids.values[static_cast<size_t>(n)] : 0;
                            };
                            return at(i) == at(j);
                        }};
            }
        }
    }

    static constexpr int kTightKinds = 9;
    Meaning tight(int kind) {
        switch (kind) {
            case 0: return band();
            case 1: return key_padding();
            case 2: return documents();
            case 3: return prefix();
            case 4: return intervals();
            case 5: return row_intervals();
            case 6: return tree();
            case 7: return blocks();
            default: return dense();
        }
    }

    Meaning any(int depth) {
        const int64_t what = draw(rng_, 0, depth > 0 ? 5 : 1);
        if (what <= 1) {
            const int64_t kind = draw(rng_, 0, kTightKinds + 1);
            // A prefix cut by a right bound is refused, which has its own test.
            return kind > kTightKinds - 1 ? mod() : kind == 3 ? row_intervals() : tight(static_cast<int>(kind));
        }
        if (what == 2) {
            Meaning part = any(depth - 1);
            return {"not(" + part.text + ")", [=](auto... at) { return !part.see(at...); }, part.by_head};
        }
        const bool both = what <= 4;
        Meaning all = any(depth - 1);
        std::string text = (both ? "and(" : "or(") + all.text;
        const int64_t more = draw(rng_, 1, 2);
        for (int64_t n = 0; n < more; ++n) {
            Meaning part = any(depth - 1);
            text += "," + part.text;
            all = {"", both ? See([=](auto... at) { return all.see(at...) && part.see(at...); }) : See([=](auto... at) {
                       return all.see(at...) || part.see(at...);
                   }),
                   all.by_head || part.by_head};
        }
        all.text = text + ")";
        return all;
    }

private:
    struct Axes {
        int64_t batch = 0, heads = 0;  // extents, 0 = no such axis
        std::vector<int64_t> tail;
    };
    struct Handle {
        std::string name;
        std::vector<int64_t> values;  // row-major
        int64_t batch = 1, heads = 1, group = 1, tokens = 1;
        bool by_head = false;
        [[nodiscard]] size_t plane(int64_t b, int64_t h) const {
            return static_cast<size_t>((batch == 1 ? 0 : b) * heads + (heads == 1 ? 0 : h / group));
        }
        [[nodiscard]] int64_t at(int64_t b, int64_t h, int64_t t) const {
            return values[plane(b, h) * static_cast<size_t>(tokens) + static_cast<size_t>(t)];
        }
    };

    [[nodiscard]] const Sequence& seq(int64_t b) const { return p_.sequences[static_cast<size_t>(b)]; }
    [[nodiscard]] int64_t q_token(int64_t b, int64_t i) const { return p_.packed_q ? seq(b).q_row0 + i : i; }
    [[nodiscard]] int64_t kv_token(int64_t b, int64_t j) const { return p_.packed_kv ? seq(b).kv_first_row + j : j; }

    int64_t heads() { return pick(rng_, {int64_t{1}, p_.num_heads_kv, p_.num_heads_q}); }
    Axes leading(bool with_batch, bool with_heads) {
        return {with_batch ? (chance(rng_) ? p_.batch : 1) : 0, with_heads ? heads() : 0, {}};
    }
    template <class Value>
    Handle array(std::initializer_list<DType> dtypes, const Axes& axes, const Value& value) {
        std::vector<int64_t> shape;
        if (axes.batch > 0) shape.push_back(axes.batch);
        if (axes.heads > 0) shape.push_back(axes.heads);
        shape.insert(shape.end(), axes.tail.begin(), axes.tail.end());
        int64_t size = 1;
        for (const int64_t n : shape) size *= n;
        Handle handle;
        for (int64_t n = 0; n < size; ++n) handle.values.push_back(value(n));
        handle.name = "@" + std::to_string(w_.add(rng_, pick(rng_, dtypes), shape, handle.values));
        handle.batch = std::max<int64_t>(axes.batch, 1), handle.heads = std::max<int64_t>(axes.heads, 1);
        handle.group = handle.heads == p_.num_heads_q ? 1 : p_.group();
        handle.tokens = axes.tail.empty() ? 1 : axes.tail[0];
        handle.by_head = handle.heads > 1;
        return handle;
    }
    template <class Value>
    Handle per_token(bool q_side, std::initializer_list<DType> dtypes, const Value& value) {
        const bool packed = q_side ? p_.packed_q : p_.packed_kv;
        const int64_t rank = draw(rng_, 1, packed ? 2 : 3), tokens = q_side ? p_.q_rows : p_.kv_rows;
        Axes axes = packed ? leading(false, rank == 2) : leading(rank >= 2, rank == 3);
        axes.tail = {tokens};
        return array(dtypes, axes, [&](int64_t n) {
            return value(n / tokens / std::max<int64_t>(axes.heads, 1), n / tokens % std::max<int64_t>(axes.heads, 1),
                         n % tokens);
        });
    }

    World& w_;
    Problem& p_;
    Rng& rng_;
};

// What one (batch, head) really sees, with sums so that any rectangle can be judged.
class Truths {
public:
    Truths(const Sequence& seq, const std::function<bool(int64_t, int64_t)>& see) : q_(seq.q_len), kv_(seq.kv_len) {
        seen_.resize(static_cast<size_t>(q_ * kv_));
        sums_.resize(static_cast<size_t>((q_ + 1) * (kv_ + 1)));
        for (int64_t i = 0; i < q_; ++i) {
            for (int64_t j = 0; j < kv_; ++j) {
                seen_[static_cast<size_t>(i * kv_ + j)] = see(i, j);
                sum(i + 1, j + 1) = sum(i, j + 1) + sum(i + 1, j) - sum(i, j) + seen_[static_cast<size_t>(i * kv_ + j)];
            }
        }
    }
    [[nodiscard]] bool sees(int64_t i, int64_t j) const {
        return i < q_ && j < kv_ && seen_[static_cast<size_t>(i * kv_ + j)];
    }
    [[nodiscard]] int64_t count(Range i, Range j) {
        const auto q = [&](int64_t n) { return std::clamp<int64_t>(n, 0, q_); };
        const auto k = [&](int64_t n) { return std::clamp<int64_t>(n, 0, kv_); };
        return sum(q(i.end), k(j.end)) - sum(q(i.begin), k(j.end)) - sum(q(i.end), k(j.begin)) +
               sum(q(i.begin), k(j.begin));
    }
    [[nodiscard]] TileClass classify(Range i, Range j) {
        const int64_t n = count(i, j);
        return n == 0 ? TileClass::skip : n == i.size() * j.size() ? TileClass::full : TileClass::partial;
    }

private:
    int64_t& sum(int64_t i, int64_t j) { return sums_[static_cast<size_t>(i * (kv_ + 1) + j)]; }
    int64_t q_, kv_;
    std::vector<uint8_t> seen_;
    std::vector<int64_t> sums_;
};

}  // namespace tilewise::core::mask_cases
