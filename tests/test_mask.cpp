// The mask algebra against its definition, written down literally: every kind and random compositions of kinds over random
// problems (dense and packed, leftpad, negative offsets, empty sequences, every broadcast of every array, odd strides).
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/mask.hpp"
#include "core/mask_text.hpp"

namespace tilewise::core {
namespace {

using Rng = std::mt19937_64;
int64_t draw(Rng& rng, int64_t low, int64_t high) { return std::uniform_int_distribution<int64_t>(low, high)(rng); }
bool chance(Rng& rng, double p = 0.5) { return std::uniform_real_distribution<>(0, 1)(rng) < p; }
template <class T>
T pick(Rng& rng, std::initializer_list<T> from) {
    return *(from.begin() + draw(rng, 0, static_cast<int64_t>(from.size()) - 1));
}

int64_t floor_div(int64_t a, int64_t b) {
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
            for (size_t axis = shape.size(); axis-- > 0;) offset += rest % shape[axis] * a.stride[axis], rest /= shape[axis];
            char* at = static_cast<char*>(a.data) + offset * size_of(dtype);
            std::memcpy(at, &values[n], static_cast<size_t>(size_of(dtype)));  // little-endian, two's complement
        }
        p.arrays.push_back(a);
        return static_cast<int>(p.arrays.size()) - 1;
    }
};

World random_world(Rng& rng, int64_t longest) {
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
                const int64_t left = chance(rng_, 0.2) ? -1 : draw(rng_, 0, reach), right = chance(rng_, 0.4) ? -1 : draw(rng_, 0, reach);
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
        auto keep = per_token(false, {DType::boolean, DType::u8, DType::i32}, [=, this](int64_t, int64_t, int64_t) -> int64_t {
            return kept == 3 ? 1 : kept == 2 ? chance(rng_, 0.97) : kept == 1 ? chance(rng_) : chance(rng_, 0.03);
        });
        return {"key_padding(" + keep.name + ")", [=, this](int64_t b, int64_t h, int64_t, int64_t j) {
                    return keep.at(b, h, (p_.packed_kv ? seq(b).kv_row0 : seq(b).kv_row0 - seq(b).kv_first_row) + j) != 0;
                }, keep.by_head};
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
        return {"documents(" + q.name + "," + k.name + ")", [=, this](int64_t b, int64_t h, int64_t i, int64_t j) {
                    const int64_t a = q.at(b, h, q_token(b, i)), c = k.at(b, h, kv_token(b, j));
                    return a == c && a >= 0;
                }, q.by_head || k.by_head};
    }

    Meaning prefix() {
        const auto see = [this](auto n) -> See {
            return [=, this](int64_t b, int64_t h, int64_t i, int64_t j) { return j < n(b, h) || j <= i + seq(b).q_offset; };
        };
        if (chance(rng_)) {
            const int64_t n = draw(rng_, 0, p_.max_seqlen_kv + 3);
            return {"prefix(" + std::to_string(n) + ")", see([=](int64_t, int64_t) { return n; })};
        }
        auto n = array({DType::i32, DType::i64}, leading(true, chance(rng_)), [this](auto) { return draw(rng_, -2, p_.max_seqlen_kv + 3); });
        return {"prefix(" + n.name + ")", see([=](int64_t b, int64_t h) { return n.values[n.plane(b, h)]; }), n.by_head};
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
            if (style == 0) return draw(rng_, -3, rows + 3);                                        // anything
            if (style == 1) return (column / 61 + part) * 61 + draw(rng_, 0, 1);                    // about documents
            if (part == 0 && (column % 100 == 0 || n == 0)) {
                for (int64_t& x : now) x = draw(rng_, 0, rows + 1);  // long runs of equal columns
                if (chance(rng_)) now = {0, now[1], now[1] + draw(rng_, 0, 1), rows};  // the two meet, or all but meet
            }
            return now[static_cast<size_t>(part)];
        });
        return {"intervals(" + bounds.name + (causal ? ",causal)" : ",full)"),
                [=, this](int64_t b, int64_t h, int64_t i, int64_t j) {
                    const int64_t* const column = &bounds.values[static_cast<size_t>((static_cast<int64_t>(bounds.plane(b, h)) * p_.kv_rows + kv_token(b, j)) * c)];
                    if (causal && j > i + seq(b).q_offset) return false;
                    if (c == 1) return !(i >= column[0]);
                    if (c == 2 && causal) return !(i >= column[0] && i < column[1]);
                    if (c == 2) return !(i >= column[0] || i < column[1]);
                    return !((i >= column[0] && i < column[1]) || (i >= column[2] && i < column[3]));
                }, bounds.by_head};
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
        return {"row_intervals(" + start.name + "," + end.name + ")", [=, this](int64_t b, int64_t h, int64_t i, int64_t j) {
                    return start.at(b, h, q_token(b, i)) <= j && j < end.at(b, h, q_token(b, i));
                }, start.by_head || end.by_head};
    }

    Meaning tree() {
        const bool per_sequence = chance(rng_);
        const int64_t most = draw(rng_, 0, 200);
        Handle n;
        if (per_sequence) n = array({DType::i32}, leading(true, false), [=, this](auto) { return draw(rng_, -1, most); });
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
                    return (static_cast<uint32_t>(bits.values[static_cast<size_t>(row * axes.tail[1] + node / 32)]) >> (node % 32) & 1u) != 0;
                }, bits.by_head};
    }

    Meaning blocks() {
        const int64_t bq = draw(rng_, 1, 100), bkv = draw(rng_, 1, 100);
        Axes axes = chance(rng_) ? leading(true, true) : leading(false, false);
        axes.tail = {(p_.max_seqlen_q + bq - 1) / bq + draw(rng_, 0, 1), (p_.max_seqlen_kv + bkv - 1) / bkv + draw(rng_, 0, 1)};
        auto map = array({DType::boolean, DType::u8, DType::i32}, axes, [this](auto) { return static_cast<int64_t>(chance(rng_, 0.6)); });
        return {"blocks(" + map.name + "," + std::to_string(bq) + "," + std::to_string(bkv) + ")",
                [=](int64_t b, int64_t h, int64_t i, int64_t j) {
                    const int64_t row = static_cast<int64_t>(map.plane(b, h)) * axes.tail[0] + i / bq;
                    return map.values[static_cast<size_t>(row * axes.tail[1] + j / bkv)] != 0;
                }, map.by_head};
    }

    Meaning dense() {
        const int rank = static_cast<int>(draw(rng_, 0, 4));
        std::vector<int64_t> shape{chance(rng_) ? p_.batch : 1, heads(), p_.packed_q ? p_.max_seqlen_q + draw(rng_, 0, 2) : p_.q_rows,
                                   p_.packed_kv ? p_.max_seqlen_kv + draw(rng_, 0, 2) : p_.kv_rows};
        for (int64_t& n : shape) n = chance(rng_, 0.15) ? 1 : n;
        for (int n = 0; n < 4 - rank; ++n) shape[static_cast<size_t>(n)] = 1;
        int64_t size = 1;
        for (const int64_t n : shape) size *= n;
        std::vector<int64_t> values(static_cast<size_t>(size));
        const int style = static_cast<int>(draw(rng_, 0, 2));
        for (size_t n = 0; n < values.size(); ++n) {
            const int64_t column = static_cast<int64_t>(n) % shape[3], row = static_cast<int64_t>(n) / shape[3] % shape[2];
            values[n] = style == 0 ? chance(rng_) : style == 1 ? row / 70 != column / 70 : column <= row + 20 || column % 97 == 5;
        }
        std::vector<int64_t> given(shape.end() - rank, shape.end());
        const int k = w_.add(rng_, pick(rng_, {DType::boolean, DType::u8, DType::i16, DType::i64}), given, values);
        const int64_t group = shape[1] == p_.num_heads_q ? 1 : p_.group();
        return {"dense(@" + std::to_string(k) + ")", [=](int64_t b, int64_t h, int64_t i, int64_t j) {
                    const auto on = [](int64_t n, int64_t index) { return n == 1 ? 0 : index; };
                    const int64_t plane = on(shape[0], b) * shape[1] + on(shape[1], h / group);
                    return values[static_cast<size_t>((plane * shape[2] + on(shape[2], i)) * shape[3] + on(shape[3], j))] != 0;
                }, shape[1] > 1};
    }

    Meaning mod() {
        switch (draw(rng_, 0, 3)) {
            case 0: return {"mod(lt(abs(sub(i,j)),40))", [](int64_t, int64_t, int64_t i, int64_t j) { return std::abs(i - j) < 40; }};
            case 1:
                return {"mod(eq(mod(add(j,h),3),mod(i,3)))", [](int64_t, int64_t h, int64_t i, int64_t j) { return (j + h) % 3 == i % 3; }, true};
            case 2:
                return {"mod(or(lt(j,add(i,q_offset)),ge(j,sub(seqlen_kv,5))))", [this](int64_t b, int64_t, int64_t i, int64_t j) {
                            return j < i + seq(b).q_offset || j >= seq(b).kv_len - 5;
                        }};
            default: {
                Axes axes;
                axes.tail = {draw(rng_, 1, 300)};
                auto ids = array({DType::i32}, axes, [](int64_t n) { return n / 45; });
                return {"mod(eq(gather(" + ids.name + ",i),gather(" + ids.name + ",j)))", [=](int64_t, int64_t, int64_t i, int64_t j) {
                            const auto at = [&](int64_t n) { return n < axes.tail[0] ? ids.values[static_cast<size_t>(n)] : 0; };
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
            all = {"", both ? See([=](auto... at) { return all.see(at...) && part.see(at...); })
                            : See([=](auto... at) { return all.see(at...) || part.see(at...); }), all.by_head || part.by_head};
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
        return array(dtypes, axes, [&](int64_t n) { return value(n / tokens / std::max<int64_t>(axes.heads, 1), n / tokens % std::max<int64_t>(axes.heads, 1), n % tokens); });
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
    [[nodiscard]] bool sees(int64_t i, int64_t j) const { return i < q_ && j < kv_ && seen_[static_cast<size_t>(i * kv_ + j)]; }
    [[nodiscard]] int64_t count(Range i, Range j) {
        const auto q = [&](int64_t n) { return std::clamp<int64_t>(n, 0, q_); };
        const auto k = [&](int64_t n) { return std::clamp<int64_t>(n, 0, kv_); };
        return sum(q(i.end), k(j.end)) - sum(q(i.begin), k(j.end)) - sum(q(i.end), k(j.begin)) + sum(q(i.begin), k(j.begin));
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

Range random_range(Rng& rng, int64_t length, int64_t longest) {
    const int64_t begin = draw(rng, 0, std::max<int64_t>(length - 1, 0));
    return {begin, begin + draw(rng, 1, longest)};
}

constexpr int64_t kAnySize = 1 << 20;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSanitized = true;
#else
constexpr bool kSanitized = false;
#endif

// Everything that is promised about a mask. `tight`: rectangles with edges up to this are classified exactly.
void check(const World& w, const Meaning& meaning, Rng& rng, int64_t tight) {
    const Problem& p = w.p;
    SCOPED_TRACE(p.mask + (p.packed_q ? " packed_q" : "") + (p.packed_kv ? " packed_kv" : ""));
    const BoundMask mask(p);
    EXPECT_EQ(mask.varies_by_head(), meaning.by_head);
    for (int64_t b = 0; b < p.batch; ++b) {
        const Sequence& seq = p.sequences[static_cast<size_t>(b)];
        for (int64_t h = 0; h < p.num_heads_q; ++h) {
            if (h > 0 && chance(rng)) continue;
            const auto band = [&](int64_t i, int64_t j) {
                const int64_t t = i + seq.q_offset;
                return (!p.causal || j <= t) && (p.window_left < 0 || t - p.window_left <= j) && (p.window_right < 0 || j <= t + p.window_right) &&
                       (p.chunk == 0 || floor_div(j, p.chunk) == floor_div(t, p.chunk));
            };
            Truths truths(seq, [&](int64_t i, int64_t j) { return band(i, j) && (!meaning.see || meaning.see(b, h, i, j)); });

            // visible(), in pieces of any size, beyond the end too
            std::vector<uint8_t> row(static_cast<size_t>(seq.kv_len + 40));
            for (int64_t i = 0; i < seq.q_len; ++i) {
                const Range j = random_range(rng, seq.kv_len, seq.kv_len + 30);
                row.resize(static_cast<size_t>(j.size()));
                std::fill(row.begin(), row.end(), uint8_t{7});
                mask.visible(b, h, i, j, row.data());
                for (int64_t n = 0; n < j.size(); ++n) {
                    ASSERT_EQ(row[static_cast<size_t>(n)], truths.sees(i, j.begin + n)) << "b" << b << " h" << h << " i" << i << " j" << j.begin + n;
                }
                if (mask.is_band()) {
                    const Range r = mask.row_range(b, i);
                    const int64_t n = truths.count({i, i + 1}, {0, seq.kv_len});
                    ASSERT_EQ(r.size(), n);
                    ASSERT_EQ(truths.count({i, i + 1}, r), n);
                }
            }

            for (int n = 0; n < 60; ++n) {
                const int64_t most = n % 2 ? 128 : 2 * std::max(seq.q_len, seq.kv_len) + 1;
                const Range i = random_range(rng, seq.q_len, most), j = random_range(rng, seq.kv_len, most);
                const TileClass real = truths.classify(i, j), said = mask.classify(b, h, i, j);
                if (said != TileClass::partial || (i.size() <= tight && j.size() <= tight)) {
                    ASSERT_EQ(said, real) << "b" << b << " h" << h << " i" << i.begin << ":" << i.end << " j" << j.begin << ":" << j.end;
                }
            }

            for (int n = 0; n < 6; ++n) {
                const int64_t size = pick(rng, {int64_t{16}, int64_t{64}, int64_t{128}, draw(rng, 1, 150)});
                const bool kv = n % 2 == 0;
                const int64_t along = kv ? seq.kv_len : seq.q_len, across = kv ? seq.q_len : seq.kv_len;
                const Range fixed = random_range(rng, across, 128);
                std::vector<Tile> tiles{{-77, TileClass::full}};  // appended to
                if (kv) {
                    mask.kv_tiles(b, h, fixed, size, tiles);
                } else {
                    mask.q_tiles(b, h, fixed, size, tiles);
                }
                ASSERT_EQ(tiles[0].begin, -77);
                size_t next = 1;
                for (int64_t begin = 0; begin < along; begin += size) {
                    const Range tile{begin, begin + size};
                    const Range i = kv ? fixed : tile, j = kv ? tile : fixed;
                    const TileClass want = mask.classify(b, h, i, j);
                    const bool listed = next < tiles.size() && tiles[next].begin == begin;
                    ASSERT_EQ(listed ? tiles[next].cls : TileClass::skip, want)
                        << (kv ? "kv" : "q") << " tile " << begin << " of " << size << " b" << b << " h" << h << " across " << fixed.begin << ":" << fixed.end;
                    next += listed;
                }
                ASSERT_EQ(next, tiles.size());
            }
        }
    }
}

TEST(mask, bands_are_exact_at_any_size) {
    Rng rng(1);
    for (int n = 0; n < 300; ++n) {
        World w = random_world(rng, 300);
        w.p.causal = chance(rng, 0.3);
        if (chance(rng, 0.4)) w.p.window_left = draw(rng, 0, 100);
        if (chance(rng, 0.4)) w.p.window_right = draw(rng, 0, 100);
        if (chance(rng, 0.4)) w.p.chunk = draw(rng, 1, 90);
        Meaning meaning;
        Masks masks(w, rng);
        if (chance(rng)) {
            const Meaning one = masks.band(), other = masks.band();
            meaning = {"and(" + one.text + "," + other.text + ")", [=](auto... at) { return one.see(at...) && other.see(at...); }};
            w.p.mask = canonical_mask(meaning.text, w.p);
        }
        ASSERT_TRUE(BoundMask(w.p).is_band());
        check(w, meaning, rng, kAnySize);
        if (HasFatalFailure()) return;
    }
}

TEST(mask, every_kind_alone_is_exact_on_tiles) {
    Rng rng(2);
    for (int n = 0; n < 60; ++n) {
        for (int kind = 0; kind < Masks::kTightKinds; ++kind) {
            World w = random_world(rng, 400);
            Masks masks(w, rng);  // meanings refer to it
            const Meaning meaning = masks.tight(kind);
            w.p.mask = canonical_mask(meaning.text, w.p);
            const bool one_number_per_axis = kind == 0 || kind == 1 || kind == 3 || kind == 7;  // exact at any size
            check(w, meaning, rng, one_number_per_axis ? kAnySize : 128);
            if (HasFatalFailure()) return;
        }
    }
}

TEST(mask, compositions_are_sound) {
    Rng rng(3);
    for (int n = 0; n < 400; ++n) {
        World w = random_world(rng, 260);
        if (chance(rng, 0.2)) w.p.causal = true;
        if (chance(rng, 0.2)) w.p.window_left = draw(rng, 0, 100);
        if (chance(rng, 0.1)) w.p.chunk = draw(rng, 1, 90);
        Masks masks(w, rng);
        const Meaning meaning = masks.any(3);
        w.p.mask = canonical_mask(meaning.text, w.p);
        EXPECT_EQ(canonical_mask(w.p.mask, w.p), w.p.mask);
        check(w, meaning, rng, 0);
        if (HasFatalFailure()) return;
    }
}

Problem one_sequence(int64_t q, int64_t kv) {
    Problem p;
    p.batch = p.num_heads_q = p.num_heads_kv = 1;
    p.q_rows = p.max_seqlen_q = q;
    p.kv_rows = p.max_seqlen_kv = kv;
    p.sequences.resize(1);
    p.sequences[0].q_len = p.sequences[0].q_rows = q;
    p.sequences[0].kv_len = p.sequences[0].kv_rows = kv;
    p.sequences[0].q_offset = kv - q;
    return p;
}

Array vector_of(std::vector<int32_t>& values) {
    Array a;
    a.data = values.data(), a.dtype = DType::i32, a.rank = 1;
    a.shape[0] = static_cast<int64_t>(values.size()), a.stride[0] = 1;
    return a;
}

TEST(mask, extreme_positions_do_not_overflow) {
    constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
    for (const int64_t offset : {-kHuge - 1, kHuge, int64_t{1} << 52, -(int64_t{1} << 52), int64_t{0}}) {
        for (const int64_t size : {kHuge, kHuge / 2, int64_t{1} << 53, int64_t{3}}) {
            Problem p = one_sequence(100, 90);
            p.sequences[0].q_offset = offset;
            p.window_left = p.window_right = size;
            p.chunk = size;
            const BoundMask mask(p);
            const bool in_range = std::abs(static_cast<double>(offset)) <= 0x1p52;  // what problems may ask for
            const bool near = offset == 0 || (size >= (int64_t{1} << 53) && offset == int64_t{1} << 52);
            std::vector<Tile> tiles;
            mask.kv_tiles(0, 0, {0, 64}, 32, tiles);
            if (in_range) {
                EXPECT_EQ(tiles.size(), near ? 3u : 0u) << offset << " " << size;
            }
            tiles.clear();
            mask.q_tiles(0, 0, {0, 64}, 32, tiles);
            if (in_range) {
                EXPECT_EQ(tiles.size(), near ? (size == 3 ? 3u : 4u) : 0u) << offset << " " << size;
            }
        }
    }
}

TEST(mask, score_mod_that_hides_a_tile_skips_it) {
    Problem p = one_sequence(256, 256);
    p.score_mod = "where(lt(j,100),-inf,x)";
    const BoundMask mask(p);
    EXPECT_TRUE(mask.is_band());
    EXPECT_FALSE(mask.varies_by_head());
    EXPECT_EQ(mask.classify(0, 0, {0, 64}, {0, 64}), TileClass::skip);
    EXPECT_EQ(mask.classify(0, 0, {0, 64}, {64, 128}), TileClass::full);  // the kernels hide single keys
    std::vector<Tile> tiles;
    mask.kv_tiles(0, 0, {0, 64}, 64, tiles);
    ASSERT_EQ(tiles.size(), 3u);
    EXPECT_EQ(tiles[0].begin, 64);
    EXPECT_EQ(tiles[0].cls, TileClass::full);
    tiles.clear();
    mask.q_tiles(0, 0, {0, 64}, 64, tiles);
    EXPECT_TRUE(tiles.empty());

    // Many keys, few hidden: what is not hidden is not looked at tile by tile.
    Problem large = one_sequence(64, 1 << 20);
    large.score_mod = "where(and(ge(j,1000),lt(j,2000)),-inf,add(x,j))";
    const BoundMask large_mask(large);
    tiles.clear();
    const int64_t before = mask_rectangles_looked_at();
    large_mask.kv_tiles(0, 0, {0, 64}, 64, tiles);
    EXPECT_EQ(tiles.size(), (1u << 14) - 15u);  // keys 1024 to 1983
    EXPECT_LE(mask_rectangles_looked_at() - before, 100);

    p.score_mod = "where(eq(h,0),x,-inf)";
    EXPECT_TRUE(BoundMask(p).varies_by_head());
}

TEST(mask, intervals_that_meet_hide_a_column_together) {
    Rng rng(7);
    for (const int64_t gap : {0, 1}) {
        World w;
        w.p = one_sequence(300, 300);
        std::vector<int64_t> bounds;
        for (int64_t j = 0; j < 300; ++j) bounds.insert(bounds.end(), {0, 150, 150 + gap, 300});
        w.add(rng, DType::i32, {1, 1, 300, 4}, bounds);
        w.p.mask = canonical_mask("intervals(@0,full)", w.p);
        const BoundMask mask(w.p);
        EXPECT_EQ(mask.classify(0, 0, {0, 300}, {0, 300}), gap ? TileClass::partial : TileClass::skip);
        EXPECT_EQ(mask.classify(0, 0, {140, 160}, {7, 90}), gap ? TileClass::partial : TileClass::skip);
        EXPECT_EQ(mask.classify(0, 0, {151, 160}, {7, 90}), TileClass::skip);
    }
}

// A million tokens in about a thousand documents, as ids and as an expression.
class MillionTokens : public testing::TestWithParam<const char*> {};
TEST_P(MillionTokens, cost_what_is_visible) {
    constexpr int64_t kTokens = 1 << 20, kTile = 128;
    Rng rng(4);
    std::vector<int32_t> ids(kTokens);
    std::vector<int64_t> starts;
    for (int64_t t = 0, id = 0; t < kTokens; ++id) {
        starts.push_back(t);
        for (int64_t end = std::min(kTokens, t + draw(rng, 1, 2000)); t < end; ++t) ids[static_cast<size_t>(t)] = static_cast<int32_t>(id);
    }
    starts.push_back(kTokens);
    Problem p = one_sequence(kTokens, kTokens);
    p.arrays.push_back(vector_of(ids));
    p.mask = canonical_mask(GetParam(), p);

    const std::clock_t begin = std::clock();
    const BoundMask mask(p);
    const int64_t before = mask_rectangles_looked_at();
    int64_t visible = 0;
    std::vector<Tile> tiles;
    for (int64_t i = 0; i < kTokens; i += kTile) {
        tiles.clear();
        mask.kv_tiles(0, 0, {i, i + kTile}, kTile, tiles);
        // Documents are runs: the keys of a tile of queries are the documents of its first to its last query.
        const int64_t first = starts[static_cast<size_t>(ids[static_cast<size_t>(i)])];
        const int64_t last = starts[static_cast<size_t>(ids[static_cast<size_t>(i + kTile - 1)]) + 1];
        ASSERT_EQ(static_cast<int64_t>(tiles.size()), (last + kTile - 1) / kTile - first / kTile);
        ASSERT_EQ(tiles.front().begin, first / kTile * kTile);
        visible += static_cast<int64_t>(tiles.size());
    }
    const int64_t kv_order = mask_rectangles_looked_at();
    const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;  // of this process, not of its neighbours
    int64_t visible_other_order = 0;
    for (int64_t j = 0; j < kTokens; j += kTile) {
        tiles.clear();
        mask.q_tiles(0, 0, {j, j + kTile}, kTile, tiles);
        visible_other_order += static_cast<int64_t>(tiles.size());
    }
    EXPECT_EQ(visible, visible_other_order);
    // 13 levels of halving down each edge of what is visible, and a little around every visible tile.
    const int64_t bound = 2 * 2 * 14 * (kTokens / kTile) + 2 * visible;
    EXPECT_LE(kv_order - before, bound);
    EXPECT_LE(mask_rectangles_looked_at() - kv_order, bound);
    RecordProperty("microseconds", static_cast<int>(seconds * 1e6));
    EXPECT_LT(seconds, kSanitized ? 20.0 : 1.0) << visible << " visible tiles, " << kv_order - before << " rectangles";
}
INSTANTIATE_TEST_SUITE_P(mask, MillionTokens, testing::Values("documents(@0,@0)", "mod(eq(gather(@0,i),gather(@0,j)))",
                                                              "or(documents(@0,@0),not(window(2000000,-1)))"));

TEST(mask, bound_masks_are_shared_by_threads) {
    Problem p = one_sequence(200, 300);
    p.mask = canonical_mask("and(mod(lt(mod(mul(i,j),7),4)),not(mod(eq(mod(add(i,j),5),0))))", p);
    const BoundMask mask(p);
    std::vector<std::thread> threads;
    std::vector<int> wrong(4);
    for (size_t n = 0; n < wrong.size(); ++n) {
        threads.emplace_back([&, n] {
            std::vector<uint8_t> row(300);
            for (int64_t i = 0; i < 200; ++i) {
                mask.visible(0, 0, i, {0, 300}, row.data());
                for (int64_t j = 0; j < 300; ++j) wrong[n] += row[static_cast<size_t>(j)] != (i * j % 7 < 4 && (i + j) % 5 != 0);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(wrong, std::vector<int>(4));
}

TEST(mask, text_is_canonical) {
    Problem p = one_sequence(8, 8);
    std::vector<int32_t> ids(8);
    p.arrays.assign(2, vector_of(ids));
    const auto canonical = [&](const char* text) { return canonical_mask(text, p); };
    EXPECT_EQ(canonical(" and ( causal( ) , and(window(-1, 3),chunk( 7)))"), "and(causal(),window(-1,3),chunk(7))");
    EXPECT_EQ(canonical("or(or(causal()),not(not(chunk(2))))"), "or(causal(),chunk(2))");
    EXPECT_EQ(canonical("not(and(documents(@0,@1),row_intervals(@1,@0)))"), "not(and(documents(@0,@1),row_intervals(@1,@0)))");
    EXPECT_EQ(canonical("mod( lt( i , add(j,1) ) )"), "mod(lt(i,add(j,1)))");
    EXPECT_EQ(canonical("prefix(3)"), "prefix(3)");
}

TEST(mask, refusals_say_what_is_wrong) {
    World w;
    w.p = one_sequence(8, 9);
    w.p.batch = 2, w.p.num_heads_q = 4, w.p.num_heads_kv = 2;
    w.p.sequences.push_back(w.p.sequences[0]);
    Rng rng(5);
    const auto zeros = [](int64_t n) { return std::vector<int64_t>(static_cast<size_t>(n)); };
    w.add(rng, DType::i32, {8}, zeros(8));              // @0
    w.add(rng, DType::f32, {9}, zeros(9));              // @1
    w.add(rng, DType::i32, {2, 3, 9}, zeros(54));       // @2
    w.add(rng, DType::i32, {1, 1, 9, 3}, zeros(27));    // @3
    w.add(rng, DType::boolean, {9, 8}, zeros(72));      // @4
    w.add(rng, DType::u32, {8, 1}, zeros(8));           // @5
    w.add(rng, DType::boolean, {9}, zeros(9));          // @6
    w.add(rng, DType::i32, {1, 1, 9, 1}, zeros(9));     // @7
    w.add(rng, DType::boolean, {1, 1, 1, 1, 1}, {1});   // @8
    struct Refusal {
        const char* text;
        std::vector<const char*> says;
    };
    const std::vector<Refusal> refusals = {
        {"", {"mask", "the end of the text", "causal", "documents"}},
        {"casual()", {"'casual()'", "causal"}},
        {"causal", {"causal()", "'('"}},
        {"causal() chunk(3)", {"'chunk(3)'", "and(...)"}},
        {"window(-2,0)", {"window", "left", "-2", "-1"}},
        {"window(1)", {"window(left, right)", "','"}},
        {"window(99999999999999999999,0)", {"64"}},
        {"chunk(0)", {"chunk", "at least 1"}},
        {"documents(@0,@1)", {"documents", "kv_ids (@1)", "float32 [9]", "int32"}},
        {"documents(@0,@0)", {"documents", "kv_ids (@0)", "int32 [8]", "[seqlen_kv]", "seqlen_kv is 9"}},
        {"documents(@0,@2)", {"documents", "kv_ids (@2)", "int32 [2, 3, 9]", "heads is 1, 2 or 4"}},
        {"documents(@0,@9)", {"@9 with 9 arrays", "@0 to @8"}},
        {"documents(@0,0)", {"documents", "'0)'", "@0"}},
        {"documents(@0,@6)", {"kv_ids", "bool [9]", "integer"}},
        {"key_padding(@0)", {"key_padding", "keep", "seqlen_kv is 9"}},
        {"prefix(-1)", {"prefix", "n", "-1"}},
        {"prefix(@1)", {"prefix", "float32"}},
        {"intervals(@3,causal)", {"intervals", "startend_row_indices", "[1, 1, 9, 3]", "bounds is 1 or 2"}},
        {"intervals(@7,full)", {"intervals", "bounds is 2 or 4"}},
        {"intervals(@7,fully)", {"causal or full"}},
        {"row_intervals(@0,@1)", {"row_intervals", "end (@1)"}},
        {"tree(@5,33)", {"tree", "bits (@5)", "uint32 [8, 1]", "words is at least 2"}},
        {"tree(@0,3)", {"tree", "bits"}},
        {"blocks(@4,0,1)", {"blocks", "bq"}},
        {"blocks(@4,1,1)", {"blocks", "map", "bool [9, 8]", "at least 9"}},
        {"dense(@4)", {"dense", "bool [9, 8]", "seqlen_q is 8"}},
        {"dense(@1)", {"dense", "float32", "bool"}},
        {"dense(@8)", {"dense", "[1, 1, 1, 1, 1]"}},
        {"mod(lt(i,))", {"mod"}},
        {"mod(lt(i,j)", {"the end of the text"}},
        {"and(prefix(2),window(3,0))", {"prefix", "contains causal"}},
        {"and(causal(),or(chunk(2),prefix(2)))", {"prefix", "causal()"}},
    };
    for (const Refusal& refusal : refusals) {
        try {
            canonical_mask(refusal.text, w.p);
            ADD_FAILURE() << "accepted: " << refusal.text;
        } catch (const Error& error) {
            EXPECT_EQ(error.status(), Status::invalid_argument);
            for (const char* part : refusal.says) {
                EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << refusal.text << "\n says: " << error.what() << "\n not: " << part;
            }
        }
    }
    w.p.causal = true;
    EXPECT_THROW(canonical_mask("prefix(2)", w.p), Error);
    w.p.causal = false, w.p.window_right = 4;
    EXPECT_THROW(canonical_mask("prefix(2)", w.p), Error);
    w.p.window_right = -1, w.p.window_left = 4;
    EXPECT_EQ(canonical_mask("prefix(2)", w.p), "prefix(2)");

    // Without data: the text is checked, binding is refused.
    for (Array& a : w.p.arrays) a.data = nullptr;
    w.p.mask = canonical_mask("key_padding(@6)", w.p);
    try {
        const BoundMask mask(w.p);
        ADD_FAILURE() << "bound without data";
    } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("@6"), std::string::npos);
    }
}

TEST(mask, any_bytes_give_a_mask_or_an_error) {
    Rng rng(6);
    Problem p = one_sequence(8, 8);
    std::vector<int32_t> ids(8);
    p.arrays.assign(2, vector_of(ids));
    const std::vector<std::string> seeds = {
        "and(causal(),or(documents(@0,@1),not(window(-1,3))),chunk(7),mod(lt(i,add(j,1))))",
        "or(prefix(3),prefix(@0),intervals(@0,causal),intervals(@1,full),tree(@0,3),tree(@0,@1),blocks(@0,2,3),dense(@0))",
        "not(row_intervals(@0,@1))", std::string(100000, '('),
    };
    std::string nested = "causal()";
    for (int n = 0; n < 500; ++n) nested = "not(" + nested + ")";
    std::string wide = "or(causal()";
    for (int n = 0; n < 500; ++n) wide += ",causal()";
    EXPECT_THROW(canonical_mask(nested, p), Error);
    EXPECT_THROW(canonical_mask(wide + ")", p), Error);
    EXPECT_THROW(canonical_mask(std::string(size_t{1} << 20, ' '), p), Error);
    int accepted = 0;
    for (int n = 0; n < 20000; ++n) {
        std::string text = seeds[static_cast<size_t>(draw(rng, 0, 2))];
        for (int64_t edits = draw(rng, 1, 6); edits > 0 && !text.empty(); --edits) {
            const size_t at = static_cast<size_t>(draw(rng, 0, static_cast<int64_t>(text.size()) - 1));
            const std::string& from = seeds[static_cast<size_t>(draw(rng, 0, 2))];
            const size_t piece = static_cast<size_t>(draw(rng, 0, static_cast<int64_t>(from.size()) - 1));
            switch (draw(rng, 0, 3)) {
                case 0: text[at] = static_cast<char>(draw(rng, 0, 255)); break;
                case 1: text.erase(at, static_cast<size_t>(draw(rng, 1, 12))); break;
                case 2: text.insert(at, from.substr(piece, static_cast<size_t>(draw(rng, 1, 20)))); break;
                default: text.insert(at, 1, pick(rng, {'(', ')', ',', '@', '-', '9', ' ', '\0'}));
            }
        }
        try {
            const std::string canonical = canonical_mask(text, p);
            EXPECT_EQ(canonical_mask(canonical, p), canonical) << text;
            ++accepted;
        } catch (const Error& error) {
            EXPECT_GT(std::string(error.what()).size(), 20u);
        }
    }
    EXPECT_GT(accepted, 20);  // the edits are not so wild that nothing is left to test
}

}  // namespace
}  // namespace tilewise::core
