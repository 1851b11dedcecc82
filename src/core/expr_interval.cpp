// Bounds of an expression over a tile: interval arithmetic, node by node, and min/max summaries of captured arrays.
//
// Every bound is computed with the rounding of the evaluation itself: rounding is monotone, so the rounded operation at
// the ends of its operands bounds the rounded operation in between, exactly. Only exp, log and tanh get some slack,
// because their implementations (host and GPU) are neither correctly rounded nor monotone.
#include "expr.hpp"

#include <algorithm>
#include <cmath>

namespace tilewise::core {

namespace {

constexpr Interval kAllIntegers{static_cast<double>(INT32_MIN), static_cast<double>(INT32_MAX), false};
constexpr Interval kEitherBool{0, 1, false};
constexpr Interval kOnlyNan{kInfinity, -kInfinity, true};  // lo > hi: no numbers; only inside ArraySummary

Interval hull(const Interval& a, const Interval& b) {
    return {std::min(a.lo, b.lo), std::max(a.hi, b.hi), a.maybe_nan || b.maybe_nan};
}
bool contains(const Interval& a, double v) { return a.lo <= v && v <= a.hi; }
bool has_infinity(const Interval& a) { return a.lo == -kInfinity || a.hi == kInfinity; }
int64_t whole(double v) { return static_cast<int64_t>(v); }

// ---------------------------------------------------------------------------------------------------------------------
// Integers: [lo, hi] of exact values, wrapped to int32

Interval wrapped(int64_t lo, int64_t hi) {
    // A run of values that does not cross a wrap-around stays a run.
    const int32_t low = static_cast<int32_t>(lo), high = static_cast<int32_t>(hi);
    if (hi - lo <= int64_t{UINT32_MAX} && low <= high) return {static_cast<double>(low), static_cast<double>(high)};
    return kAllIntegers;
}

Interval integer_product(const Interval& a, const Interval& b) {
    const int64_t corners[] = {whole(a.lo) * whole(b.lo), whole(a.lo) * whole(b.hi), whole(a.hi) * whole(b.lo),
                               whole(a.hi) * whole(b.hi)};
    return wrapped(*std::min_element(corners, corners + 4), *std::max_element(corners, corners + 4));
}

Interval integer_negation(const Interval& a) { return wrapped(-whole(a.hi), -whole(a.lo)); }

int64_t floor_quotient(int64_t a, int64_t b) { return a / b - ((a % b != 0 && (a < 0) != (b < 0)) ? 1 : 0); }

// The parts of b: negative, zero (where the result is 0) and positive.
template <class Positive>
Interval by_sign_of_divisor(const Interval& a, const Interval& b, bool negate_result, Positive positive) {
    Interval sum{kInfinity, -kInfinity, false};
    const auto join = [&](const Interval& part) { sum = hull(sum, part); };
    if (b.hi >= 1) join(positive(a, Interval{std::max(b.lo, 1.0), b.hi}));
    if (contains(b, 0)) join({0, 0});
    if (b.lo <= -1) {
        // a / b == -a / -b and a mod b == -(-a mod -b), in exact integers.
        const Interval part = positive(Interval{-a.hi, -a.lo}, Interval{-std::min(b.hi, -1.0), -b.lo});
        join(negate_result ? Interval{-part.hi, -part.lo} : part);
    }
    return wrapped(whole(sum.lo), whole(sum.hi));
}

Interval integer_floordiv(const Interval& a, const Interval& b) {
    return by_sign_of_divisor(a, b, false, [](const Interval& n, const Interval& d) {
        const int64_t lo = whole(n.lo), hi = whole(n.hi);
        return Interval{static_cast<double>(floor_quotient(lo, whole(lo < 0 ? d.lo : d.hi))),
                        static_cast<double>(floor_quotient(hi, whole(hi < 0 ? d.hi : d.lo)))};
    });
}

Interval integer_mod(const Interval& a, const Interval& b) {
    return by_sign_of_divisor(a, b, true, [](const Interval& n, const Interval& d) -> Interval {
        if (n.lo >= 0 && n.hi < d.lo) return n;
        if (d.lo == d.hi) {
            const int64_t period = whole(d.lo), lo = whole(n.lo), hi = whole(n.hi);
            const int64_t first = floor_quotient(lo, period);
            if (first == floor_quotient(hi, period)) {
                return {static_cast<double>(lo - first * period), static_cast<double>(hi - first * period)};
            }
        }
        return {0, n.lo >= 0 ? std::min(n.hi, d.hi - 1) : d.hi - 1};
    });
}

Interval integer_abs(const Interval& a) {
    if (a.lo >= 0) return a;
    if (a.hi <= 0) return wrapped(-whole(a.hi), -whole(a.lo));  // -INT_MIN wraps to itself
    return wrapped(0, std::max(-whole(a.lo), whole(a.hi)));
}

// ---------------------------------------------------------------------------------------------------------------------
// Reals of type T

// An operation on floats done in double and rounded again gives the float operation's result: 53 >= 2 * 24 + 2 bits.
template <class T>
double rounded(double v) {
    return static_cast<double>(static_cast<T>(v));
}

template <class T>
Interval sum(const Interval& a, const Interval& b) {
    Interval out{rounded<T>(a.lo + b.lo), rounded<T>(a.hi + b.hi), a.maybe_nan || b.maybe_nan};
    if ((a.lo == -kInfinity && b.hi == kInfinity) || (a.hi == kInfinity && b.lo == -kInfinity)) out.maybe_nan = true;
    // inf + -inf at one end: apart from that NaN, the sum is the infinity that every value of one operand has.
    if (std::isnan(out.lo)) out.lo = kInfinity;
    if (std::isnan(out.hi)) out.hi = -kInfinity;
    return out.lo <= out.hi ? out : kAnything;
}

Interval negation(const Interval& a) { return {-a.hi, -a.lo, a.maybe_nan}; }

template <class T>
Interval product(const Interval& a, const Interval& b) {
    Interval out{kInfinity, -kInfinity, a.maybe_nan || b.maybe_nan};
    if ((contains(a, 0) && has_infinity(b)) || (has_infinity(a) && contains(b, 0))) out.maybe_nan = true;
    for (const double u : {a.lo, a.hi}) {
        for (const double v : {b.lo, b.hi}) {
            const double p = u == 0 || v == 0 ? 0 : rounded<T>(u * v);  // 0 * finite; 0 * inf is the NaN above
            out.lo = std::min(out.lo, p);
            out.hi = std::max(out.hi, p);
        }
    }
    return out;
}

template <class T>
Interval quotient(const Interval& a, const Interval& b) {
    if (has_infinity(a) && has_infinity(b)) return kAnything;
    if (contains(b, 0)) return {-kInfinity, kInfinity, a.maybe_nan || b.maybe_nan || contains(a, 0)};
    Interval out{kInfinity, -kInfinity, a.maybe_nan || b.maybe_nan};
    for (const double u : {a.lo, a.hi}) {
        for (const double v : {b.lo, b.hi}) {
            const double q = static_cast<double>(static_cast<T>(u) / static_cast<T>(v));
            out.lo = std::min(out.lo, q);
            out.hi = std::max(out.hi, q);
        }
    }
    return out;
}

template <class T>
Interval floor_of(const Interval& a) {
    return {std::floor(a.lo), std::floor(a.hi), a.maybe_nan};
}

template <class T>
double real_mod(double a, double b) {
    const T r = std::fmod(static_cast<T>(a), static_cast<T>(b));
    return static_cast<double>(r != 0 && (r < 0) != (b < 0) ? r + static_cast<T>(b) : r);
}

template <class T>
Interval mod(const Interval& a, const Interval& b) {
    const bool nan = a.maybe_nan || b.maybe_nan || has_infinity(a) || contains(b, 0);
    if (b.lo > 0) {
        if (a.lo >= 0 && a.hi < b.lo) return {a.lo, a.hi, nan};
        if (b.lo == b.hi && !has_infinity(a) && !has_infinity(b)) {
            // Ends less than a period apart whose remainders are in order lie in one period, where mod is monotone.
            const double lo = real_mod<T>(a.lo, b.lo), hi = real_mod<T>(a.hi, b.lo);
            if (a.lo == a.hi || (rounded<T>(a.hi - a.lo) < b.lo && lo < hi)) return {lo, hi, nan};
        }
        return {0, b.hi, nan};  // b.hi: a tiny negative remainder plus b rounds to b
    }
    return {std::min(b.lo, 0.0), std::max(b.hi, 0.0), nan};
}

template <class T>
Interval absolute(const Interval& a) {
    if (a.lo >= 0) return a;
    if (a.hi <= 0) return negation(a);
    return {0, std::max(-a.lo, a.hi), a.maybe_nan};
}

// Room for inexact functions: relative 2^-10 covers tanh.approx, the worst of them.
double below(double v) { return v - std::fabs(v) * 0x1p-10; }
double above(double v) { return v + std::fabs(v) * 0x1p-10; }
double finite_or_same(double v, double moved) { return std::isinf(v) ? v : moved; }

template <class T>
Interval exponential(const Interval& a) {
    // Below the smallest normal number a device may flush to zero; where this overflows, an implementation may not.
    constexpr double kSmallest = std::numeric_limits<T>::min(), kLargest = std::numeric_limits<T>::max();
    const double lo = std::exp(a.lo), hi = std::exp(a.hi);
    return {lo < 2 * kSmallest ? 0 : rounded<T>(below(std::min(lo, kLargest))),
            a.hi == -kInfinity ? 0 : rounded<T>(finite_or_same(hi, above(hi) + kSmallest)), a.maybe_nan};
}

template <class T>
Interval logarithm(const Interval& a) {
    if (a.hi < 0) return kAnything;  // only NaN
    const double lo = std::log(std::max(a.lo, 0.0)), hi = std::log(a.hi);
    return {rounded<T>(finite_or_same(lo, below(lo) - 0x1p-20)), rounded<T>(finite_or_same(hi, above(hi) + 0x1p-20)),
            a.maybe_nan || a.lo < 0};
}

template <class T>
Interval hyperbolic_tangent(const Interval& a) {
    return {std::max(-1.0, rounded<T>(below(std::tanh(a.lo)))), std::min(1.0, rounded<T>(above(std::tanh(a.hi)))),
            a.maybe_nan};
}

template <class T>
Interval square_root(const Interval& a) {
    if (a.hi < 0) return kAnything;
    return {static_cast<double>(std::sqrt(static_cast<T>(std::max(a.lo, 0.0)))),
            static_cast<double>(std::sqrt(static_cast<T>(a.hi))), a.maybe_nan || a.lo < 0};
}

// ---------------------------------------------------------------------------------------------------------------------
// Truth as an interval of 0 and 1

Interval from(bool can_be_false, bool can_be_true) { return {can_be_false ? 0.0 : 1.0, can_be_true ? 1.0 : 0.0}; }

// NaN makes every comparison false, except ne.
Interval less(const Interval& a, const Interval& b) {
    return from(a.hi >= b.lo || a.maybe_nan || b.maybe_nan, a.lo < b.hi);
}
Interval less_or_equal(const Interval& a, const Interval& b) {
    return from(a.hi > b.lo || a.maybe_nan || b.maybe_nan, a.lo <= b.hi);
}
Interval equal(const Interval& a, const Interval& b) {
    return from(!(a.point() && b.point() && a.lo == b.lo), a.lo <= b.hi && b.lo <= a.hi);
}
Interval opposite(const Interval& a) { return {1 - a.hi, 1 - a.lo}; }

// ---------------------------------------------------------------------------------------------------------------------
// The walk over the nodes

template <class T>
class Walk {
public:
    Walk(const Expr& expr, const ExprContext& context, Range i, Range j, std::span<const ArraySummary> summaries,
         const Interval& x)
        : nodes_(expr.nodes()), context_(context), i_(i), j_(j), summaries_(summaries), x_(x) {}

    Interval run(int result) {
        // Most expressions are small; only large ones pay for memory.
        std::array<Interval, 96> few;
        std::vector<Interval> many;
        values_ = few.data();
        if (static_cast<size_t>(result) >= few.size()) {
            many.resize(static_cast<size_t>(result) + 1);
            values_ = many.data();
        }
        for (int id = 0; id <= result; ++id) values_[id] = evaluate(nodes_[static_cast<size_t>(id)]);
        return values_[result];
    }

private:
    Interval evaluate(const Node& node) const {
        const Interval& a = values_[node.args[0]];
        const Interval& b = values_[node.args[1]];
        const bool real = node.kind == Kind::real;
        switch (node.op) {
            case Op::literal: return point(real ? rounded<T>(node.real) : node.integer);
            case Op::variable: return variable(static_cast<Variable>(node.index));
            case Op::scalar: return scalar(context_.scalars[static_cast<size_t>(node.index)], real);
            case Op::gather: return gather(node);
            case Op::promote:
            case Op::to_real: return real ? Interval{rounded<T>(a.lo), rounded<T>(a.hi)} : a;
            case Op::add: return real ? sum<T>(a, b) : wrapped(whole(a.lo) + whole(b.lo), whole(a.hi) + whole(b.hi));
            case Op::sub:
                return real ? sum<T>(a, negation(b)) : wrapped(whole(a.lo) - whole(b.hi), whole(a.hi) - whole(b.lo));
            case Op::mul: return real ? product<T>(a, b) : integer_product(a, b);
            case Op::div: return quotient<T>(a, b);
            case Op::floordiv: return real ? floor_of<T>(quotient<T>(a, b)) : integer_floordiv(a, b);
            case Op::mod: return real ? mod<T>(a, b) : integer_mod(a, b);
            case Op::min: return {std::min(a.lo, b.lo), std::min(a.hi, b.hi), a.maybe_nan || b.maybe_nan};
            case Op::max: return {std::max(a.lo, b.lo), std::max(a.hi, b.hi), a.maybe_nan || b.maybe_nan};
            case Op::neg: return real ? negation(a) : integer_negation(a);
            case Op::abs: return real ? absolute<T>(a) : integer_abs(a);
            case Op::exp: return exponential<T>(a);
            case Op::log: return logarithm<T>(a);
            case Op::tanh: return hyperbolic_tangent<T>(a);
            case Op::sqrt: return square_root<T>(a);
            case Op::lt: return less(a, b);
            case Op::le: return less_or_equal(a, b);
            case Op::gt: return less(b, a);
            case Op::ge: return less_or_equal(b, a);
            case Op::eq: return equal(a, b);
            case Op::ne: return opposite(equal(a, b));
            case Op::logical_and: return {std::min(a.lo, b.lo), std::min(a.hi, b.hi)};
            case Op::logical_or: return {std::max(a.lo, b.lo), std::max(a.hi, b.hi)};
            case Op::logical_not: return opposite(a);
            case Op::where: {
                const Interval& otherwise = values_[node.args[2]];
                return a.lo == 1 ? b : a.hi == 0 ? otherwise : hull(b, otherwise);
            }
        }
        return kAnything;
    }

    static Interval point(double v) { return {v, v}; }
    static Interval integer(int64_t v) { return wrapped(v, v); }
    static Interval positions(Range range) { return wrapped(range.begin, range.end - 1); }

    Interval variable(Variable v) const {
        switch (v) {
            case Variable::x: return x_;
            case Variable::i: return positions(i_);
            case Variable::j: return positions(j_);
            case Variable::b: return integer(context_.b);
            case Variable::h: return integer(context_.h);
            case Variable::seqlen_q: return integer(context_.seqlen_q);
            case Variable::seqlen_kv: return integer(context_.seqlen_kv);
            case Variable::q_offset: return integer(context_.q_offset);
            case Variable::head_kv: return integer(context_.head_kv);
        }
        return kAllIntegers;
    }

    static Interval scalar(double v, bool real) {
        if (std::isnan(v)) return real ? kAnything : point(0);
        return real ? point(rounded<T>(v)) : point(std::trunc(std::clamp(v, kAllIntegers.lo, kAllIntegers.hi)));
    }

    Interval gather(const Node& node) const {
        const size_t array = static_cast<size_t>(node.index);
        if (array >= summaries_.size() || !summaries_[array]) {
            return node.kind == Kind::real ? kAnything : node.kind == Kind::integer ? kAllIntegers : kEitherBool;
        }
        std::array<Range, kMaxRank> index;
        for (size_t axis = 0; axis < node.num_args; ++axis) {
            const Interval& at = values_[node.args[axis]];
            index[axis] = {whole(at.lo), whole(at.hi) + 1};
        }
        const Interval range = summaries_[array].range({index.data(), node.num_args});
        return node.kind == Kind::real ? Interval{rounded<T>(range.lo), rounded<T>(range.hi), range.maybe_nan} : range;
    }

    std::span<const Node> nodes_;
    const ExprContext& context_;
    Range i_, j_;
    std::span<const ArraySummary> summaries_;
    Interval x_;
    Interval* values_ = nullptr;
};

}  // namespace

template <class T>
Truth truth(const Expr& mask_mod, const ExprContext& context, Range i, Range j,
            std::span<const ArraySummary> summaries) {
    if (i.empty() || j.empty()) return Truth::no;
    const Interval value = Walk<T>(mask_mod, context, i, j, summaries, kAnything).run(mask_mod.result());
    return value.lo == 1 ? Truth::yes : value.hi == 0 ? Truth::no : Truth::unknown;
}
template Truth truth<float>(const Expr&, const ExprContext&, Range, Range, std::span<const ArraySummary>);
template Truth truth<double>(const Expr&, const ExprContext&, Range, Range, std::span<const ArraySummary>);

template <class T>
Interval real_interval(const Expr& score_mod, const ExprContext& context, Range i, Range j,
                       std::span<const ArraySummary> summaries, Interval x) {
    if (i.empty() || j.empty()) return {-kInfinity, -kInfinity, false};
    return Walk<T>(score_mod, context, i, j, summaries, x).run(score_mod.result());
}
template Interval real_interval<float>(const Expr&, const ExprContext&, Range, Range, std::span<const ArraySummary>,
                                       Interval);
template Interval real_interval<double>(const Expr&, const ExprContext&, Range, Range, std::span<const ArraySummary>,
                                        Interval);

// ---------------------------------------------------------------------------------------------------------------------
// Summaries

namespace {

constexpr int64_t kBlock = 64;

// What gather gives for this element, before rounding to T: integers wrap to int32.
void include(Interval& sum, const Array& array, int64_t offset) {
    if (is_float(array.dtype)) {
        const double v = load_float(array.data, array.dtype, offset);
        if (std::isnan(v)) {
            sum.maybe_nan = true;
        } else {
            sum.lo = std::min(sum.lo, v);
            sum.hi = std::max(sum.hi, v);
        }
    } else {
        const double v = static_cast<int32_t>(load_int(array.data, array.dtype, offset));
        sum.lo = std::min(sum.lo, v);
        sum.hi = std::max(sum.hi, v);
    }
}

}  // namespace

ArraySummary::ArraySummary(const Array& array) : array_(array) {
    const int64_t size = array ? array.size() : 0;
    if (size <= 0) return;
    std::vector<Interval> level;
    level.reserve(static_cast<size_t>((size + kBlock - 1) / kBlock));
    for (int64_t first = 0; first < size; first += kBlock) {
        level.push_back(elements(first, std::min(first + kBlock, size)));
    }
    while (level.size() > 1) {
        std::vector<Interval> above((level.size() + 1) / 2, kOnlyNan);
        for (size_t k = 0; k < above.size(); ++k) {
            above[k] = 2 * k + 1 < level.size() ? hull(level[2 * k], level[2 * k + 1]) : level[2 * k];
        }
        levels_.push_back(std::move(level));
        level = std::move(above);
    }
    levels_.push_back(std::move(level));
}

// Elements [first, last) in row-major order, one by one.
Interval ArraySummary::elements(int64_t first, int64_t last) const {
    Interval sum{kInfinity, -kInfinity, false};
    const size_t rank = static_cast<size_t>(array_.rank);
    const int64_t row = rank ? array_.shape[rank - 1] : 1;
    const int64_t stride = rank ? array_.stride[rank - 1] : 0;
    while (first < last) {
        const int64_t column = first % row;
        int64_t offset = column * stride;
        int64_t line = first / row;
        for (size_t axis = rank; axis-- > 1;) {
            offset += line % array_.shape[axis - 1] * array_.stride[axis - 1];
            line /= array_.shape[axis - 1];
        }
        const int64_t count = std::min(last - first, row - column);
        for (int64_t k = 0; k < count; ++k, offset += stride) include(sum, array_, offset);
        first += count;
    }
    return sum;
}

// The same through the blocks: only the two ends are read.
Interval ArraySummary::run(int64_t first, int64_t last) const {
    int64_t left = (first + kBlock - 1) / kBlock;
    int64_t right = last == array_.size() ? (last + kBlock - 1) / kBlock : last / kBlock;
    if (left >= right) return elements(first, last);
    Interval sum = hull(elements(first, left * kBlock), elements(std::max(first, right * kBlock), last));
    for (const std::vector<Interval>& level : levels_) {
        if (left >= right) break;
        if (left % 2 == 1) sum = hull(sum, level[static_cast<size_t>(left++)]);
        if (right % 2 == 1) sum = hull(sum, level[static_cast<size_t>(--right)]);
        left /= 2;
        right /= 2;
    }
    return sum;
}

Interval ArraySummary::range(std::span<const Range> index) const {
    const size_t rank = static_cast<size_t>(array_.rank);
    bool outside = false;
    std::array<Range, kMaxRank> box{};
    for (size_t axis = 0; axis < rank; ++axis) {
        box[axis] = {std::max<int64_t>(index[axis].begin, 0), std::min(index[axis].end, array_.shape[axis])};
        if (box[axis].empty()) return {0, 0, false};
        outside = outside || box[axis].begin != index[axis].begin || box[axis].end != index[axis].end;
    }

    // The box is a number of runs in row-major order; axes that are covered completely join their run.
    size_t axis = rank ? rank - 1 : 0;
    int64_t length = rank ? box[axis].size() : 1;  // of a run
    int64_t below = 1;                             // elements per step of `axis`
    while (axis > 0 && box[axis].size() == array_.shape[axis]) {
        below *= array_.shape[axis];
        --axis;
        length = box[axis].size() * below;
    }
    int64_t runs = 1;
    for (size_t a = 0; a < axis; ++a) runs = std::min(runs * box[a].size(), kMaxRuns + 1);

    std::array<int64_t, kMaxRank> at{};
    const auto start = [&](bool last) {
        int64_t linear = 0;
        for (size_t a = 0; a <= axis && a < rank; ++a) {
            const int64_t v = a == axis ? box[a].begin : last ? box[a].end - 1 : at[a];
            linear = linear * array_.shape[a] + v;
        }
        return linear * below;
    };
    for (size_t a = 0; a < axis; ++a) at[a] = box[a].begin;

    Interval sum{kInfinity, -kInfinity, false};
    if (runs > kMaxRuns) {
        sum = run(start(false), start(true) + length);  // everything from the first run to the last
    } else {
        for (int64_t r = 0; r < runs; ++r) {
            const int64_t first = start(false);
            sum = hull(sum, run(first, first + length));
            for (size_t a = axis; a-- > 0;) {
                if (++at[a] < box[a].end) break;
                at[a] = box[a].begin;
            }
        }
    }
    if (sum.lo > sum.hi) return kAnything;  // only NaN
    return outside ? hull(sum, Interval{0, 0}) : sum;
}

}  // namespace tilewise::core
