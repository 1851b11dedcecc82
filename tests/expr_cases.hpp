// Random worlds of captured arrays and random expressions, for whatever evaluates expressions.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/expr.hpp"

namespace tilewise::core::expr_cases {

inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
inline constexpr std::array<double, 4> kSpecials{kNan, kInf, -kInf, 0.0};

// ---------------------------------------------------------------------------------------------------------------------
// Captured arrays of every dtype, rank and kind of stride

struct Storage {
    std::vector<std::byte> bytes;
    Array array;
};

struct World {
    std::vector<Storage> storage;
    std::vector<Array> arrays;
    std::vector<double> scalars{0.5, -3.0, 7.0, 1e10, kNan, -0.25};
};

// `reversed`: negative strides; `gap`: last stride 2.
inline Array make_array(World& world, DType dtype, std::vector<int64_t> shape, bool reversed, bool gap) {
    Storage s;
    Array& a = s.array;
    a.dtype = dtype;
    a.rank = static_cast<int32_t>(shape.size());
    int64_t step = gap ? 2 : 1, last = 0;
    for (size_t d = shape.size(); d-- > 0;) {
        a.shape[d] = shape[d];
        a.stride[d] = reversed ? -step : step;
        last += step * std::max<int64_t>(shape[d] - 1, 0);
        step *= shape[d];
    }
    s.bytes.resize(static_cast<size_t>((last + 1) * size_of(dtype)));
    a.data = s.bytes.data() + (reversed ? last * size_of(dtype) : 0);
    world.storage.push_back(std::move(s));
    world.arrays.push_back(world.storage.back().array);
    return world.arrays.back();
}

template <class F>
void for_each_element(const Array& a, F f) {
    std::array<int64_t, kMaxRank> at{};
    for (int64_t e = 0; e < a.size(); ++e) {
        int64_t offset = 0;
        for (int d = 0; d < a.rank; ++d) offset += at[static_cast<size_t>(d)] * a.stride[static_cast<size_t>(d)];
        f(at, offset);
        for (int d = a.rank; d-- > 0;) {
            if (++at[static_cast<size_t>(d)] < a.shape[static_cast<size_t>(d)]) break;
            at[static_cast<size_t>(d)] = 0;
        }
    }
}

inline void store_int(const Array& a, int64_t offset, int64_t value) {
    const int64_t bytes = size_of(a.dtype);
    std::memcpy(static_cast<std::byte*>(a.data) + offset * bytes, &value, static_cast<size_t>(bytes));
}

inline World make_world(uint32_t seed, bool specials) {
    World w;
    std::mt19937 rng(seed);
    const auto uniform = [&](int lo, int hi) { return std::uniform_int_distribution<int>(lo, hi)(rng); };
    make_array(w, DType::i32, {2, 200}, false, false);         // @0 document numbers, sorted
    make_array(w, DType::f32, {3, 40}, true, false);           // @1
    make_array(w, DType::boolean, {70}, false, true);          // @2
    make_array(w, DType::f16, {2, 2, 30}, false, true);        // @3
    make_array(w, DType::i64, {}, false, false);               // @4 rank 0
    make_array(w, DType::f64, {200}, false, false);            // @5
    make_array(w, DType::u8, {5, 7}, false, false);            // @6
    make_array(w, DType::bf16, {90}, true, true);              // @7
    make_array(w, DType::i16, {2, 3, 2, 3, 4}, false, false);  // @8
    make_array(w, DType::i8, {0}, false, false);               // @9 empty
    make_array(w, DType::u32, {30}, false, false);             // @10
    make_array(w, DType::f64, {150, 3}, false, false);         // @11
    for (size_t k = 0; k < w.arrays.size(); ++k) {
        const Array& a = w.arrays[k];
        int64_t document = 0;
        for_each_element(a, [&](const auto& at, int64_t offset) {
            if (is_float(a.dtype)) {
                double v = std::normal_distribution<double>(0, 2)(rng);
                if (specials && uniform(0, 40) == 0) v = kSpecials[static_cast<size_t>(uniform(0, 3))];
                store_float(a.data, a.dtype, offset, v);
            } else if (k == 0) {
                document = at[1] == 0 ? 0 : document + (uniform(0, 30) == 0);
                store_int(a, offset, document);
            } else if (a.dtype == DType::boolean) {
                store_int(a, offset, uniform(0, 2) == 0 ? 0 : uniform(1, 255));
            } else {
                store_int(a, offset, uniform(0, 20) == 0 ? int64_t{1} << uniform(20, 40) : uniform(-20, 20));
            }
        });
    }
    return w;
}

inline std::vector<ArraySummary> summaries(const World& w) { return {w.arrays.begin(), w.arrays.end()}; }

// ---------------------------------------------------------------------------------------------------------------------
// Random expressions

struct Tree {
    std::string word;  // operation or leaf as written
    std::vector<Tree> args;
    int array = -1;
};

inline std::string print(const Tree& t) {
    if (t.args.empty() && t.array < 0) return t.word;
    std::string out = t.word + "(" + (t.array >= 0 ? "@" + std::to_string(t.array) : "");
    for (size_t k = 0; k < t.args.size(); ++k) out += (k > 0 || t.array >= 0 ? "," : "") + print(t.args[k]);
    return out + ")";
}

class Generator {
public:
    Generator(uint32_t seed, const World& world) : rng_(seed), world_(world) {}

    bool allow_x = true;
    bool smooth = false;  // few ops whose values explode, so that finite differences mean something
    std::vector<int> real_arrays{1, 3, 5, 7, 11};

    int roll(int n) { return std::uniform_int_distribution<int>(0, n - 1)(rng_); }
    double normal() { return std::normal_distribution<double>()(rng_); }
    std::mt19937& rng() { return rng_; }

    Tree boolean(int depth) {
        if (depth <= 0) {
            if (roll(3) == 0) return gather(2, depth);
            return leaf(roll(2) ? "true" : "false");
        }
        static const char* kCompare[] = {"lt", "le", "gt", "ge", "eq", "ne"};
        switch (roll(8)) {
            case 0: return {"and", {boolean(depth - 1), boolean(depth - 1)}};
            case 1: return {"or", {boolean(depth - 1), boolean(depth - 1)}};
            case 2: return {"not", {boolean(depth - 1)}};
            case 3: return {"where", {boolean(depth - 1), boolean(depth - 1), boolean(depth - 1)}};
            case 4: return gather(2, depth);
            case 5: return {kCompare[roll(6)], {real(depth - 1), real(depth - 1)}};
            default: return {kCompare[roll(6)], {integer(depth - 1), integer(depth - 1)}};
        }
    }

    Tree integer(int depth) {
        static const char* kLeaves[] = {"b",        "h",         "i",        "j",       "i",   "j",   "i",   "j",
                                        "seqlen_q", "seqlen_kv", "q_offset", "head_kv", "$1i", "$2i", "$3i", "$4i"};
        if (depth <= 0 || roll(6) == 0) {
            switch (roll(12)) {
                case 0: return leaf(std::to_string(roll(2) ? INT32_MAX - roll(3) : INT32_MIN + roll(3)));
                case 1:
                case 2:
                case 3: return leaf(std::to_string(roll(200) - 60));
                case 4: return leaf(std::to_string(1 << roll(8)));
                default: return leaf(kLeaves[roll(16)]);
            }
        }
        static const char* kBinary[] = {"add", "sub", "mul", "min", "max", "floordiv", "mod"};
        switch (roll(12)) {
            case 0: return {"neg", {integer(depth - 1)}};
            case 1: return {"abs", {integer(depth - 1)}};
            case 2: return {"where", {boolean(depth - 1), integer(depth - 1), integer(depth - 1)}};
            case 3: return gather(std::array<int, 6>{0, 4, 6, 8, 9, 10}[static_cast<size_t>(roll(6))], depth);
            case 4: return {"add", {boolean(depth - 1), integer(depth - 1)}};
            case 5: return {"floordiv", {integer(depth - 1), leaf(std::to_string(1 + roll(70)))}};
            case 6: return {"mod", {integer(depth - 1), leaf(std::to_string(1 + roll(70)))}};
            default: return {kBinary[roll(7)], {integer(depth - 1), integer(depth - 1)}};
        }
    }

    Tree real(int depth) {
        static const char* kNumbers[] = {"0.1", "1.0", "0.0", "2.5", "-1.5", "3.0"};
        static const char* kUnusual[] = {"$0", "$1", "$4", "inf", "-inf", "1e-06"};
        if (depth <= 0 || roll(6) == 0) {
            switch (roll(smooth ? 4 : 6)) {
                case 0:
                case 1: return allow_x ? leaf("x") : leaf("0.5");
                case 2: return leaf(kNumbers[roll(6)]);
                case 3: {
                    const int count = static_cast<int>(real_arrays.size());
                    return gather(real_arrays[static_cast<size_t>(roll(count))], depth);
                }
                case 4: return leaf(kUnusual[roll(6)]);
                default: return integer(0);
            }
        }
        static const char* kBinary[] = {"add", "sub", "mul", "div", "min", "max", "floordiv", "mod", "add", "mul"};
        static const char* kUnary[] = {"neg", "abs", "tanh", "exp", "log", "sqrt"};
        switch (roll(10)) {
            case 0: return {"where", {boolean(depth - 1), real(depth - 1), real(depth - 1)}};
            case 1: return {"float", {roll(2) ? boolean(depth - 1) : integer(depth - 1)}};
            case 2:
            case 3:
            case 4: return {kUnary[roll(6)], {real(depth - 1)}};
            case 5: return {"where", {boolean(depth - 1), real(depth - 1), leaf("-inf")}};
            default: return {kBinary[roll(10)], {real(depth - 1), real(depth - 1)}};
        }
    }

private:
    static Tree leaf(std::string word) { return {std::move(word), {}, -1}; }

    Tree gather(int array, int depth) {
        Tree t{"gather", {}, array};
        const Array& a = world_.arrays[static_cast<size_t>(array)];
        for (int d = 0; d < a.rank; ++d) {
            const std::string extent = std::to_string(a.shape[static_cast<size_t>(d)]);
            switch (roll(6)) {
                case 0: t.args.push_back(integer(depth - 1)); break;
                case 1: t.args.push_back({"mod", {integer(depth - 1), leaf(extent)}}); break;
                case 2: t.args.push_back({"sub", {leaf("i"), leaf("j")}}); break;
                case 3: t.args.push_back(leaf(roll(2) ? "b" : "1")); break;
                default: t.args.push_back(leaf(roll(2) ? "j" : "i"));
            }
        }
        return t;
    }

    std::mt19937 rng_;
    const World& world_;
};

inline ExprContext random_context(Generator& g, const World& w) {
    ExprContext c;
    c.b = g.roll(2);
    c.h = g.roll(8);
    c.head_kv = c.h / 2;
    c.seqlen_q = g.roll(300);
    c.seqlen_kv = g.roll(300);
    c.q_offset = g.roll(100) - 50;
    c.arrays = w.arrays;
    c.scalars = w.scalars;
    return c;
}

inline Expr parse_mask(const std::string& text, const World& w) {
    return Expr::parse(text, Role::mask_mod, w.arrays, static_cast<int>(w.scalars.size()));
}
inline Expr parse_score(const std::string& text, const World& w) {
    return Expr::parse(text, Role::score_mod, w.arrays, static_cast<int>(w.scalars.size()));
}

template <class T>
bool same(T a, T b) {
    return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

}  // namespace tilewise::core::expr_cases
