// What rendered expressions (src/jit/render_expr.cpp) are made of: every operation of an expression as a function, once
// for values (bool, int, Real) and once for their bounds over a tile (Truth, Integers, Interval), under one name. The
// meaning of each, corner cases included, is that of src/core/expr.hpp; the bounds are those of expr_interval.cpp.
// Real is declared before this file is included.
#pragma once

#include "base.cuh"

namespace tilewise {
namespace expr {

// ---------------------------------------------------------------------------------------------------------------------
// Integers wrap around: their arithmetic is done on unsigned

TW_DEVICE int wrapped(Word x) { return static_cast<int>(x); }
TW_DEVICE Word bits(int x) { return static_cast<Word>(x); }

TW_DEVICE int add(int a, int b) { return wrapped(bits(a) + bits(b)); }
TW_DEVICE int sub(int a, int b) { return wrapped(bits(a) - bits(b)); }
TW_DEVICE int mul(int a, int b) { return wrapped(bits(a) * bits(b)); }
TW_DEVICE int neg(int a) { return wrapped(0u - bits(a)); }
TW_DEVICE int abs(int a) { return a < 0 ? neg(a) : a; }
TW_DEVICE int min(int a, int b) { return a <= b ? a : b; }
TW_DEVICE int max(int a, int b) { return a >= b ? a : b; }
TW_DEVICE int floordiv(int a, int b) {
    if (b == 0) return 0;
    if (b == -1) return neg(a);  // INT_MIN / -1 wraps
    return a / b - ((a % b != 0) & ((a < 0) != (b < 0)));
}
TW_DEVICE int mod(int a, int b) {
    if (b == 0 || b == -1) return 0;
    const int r = a % b;
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
// By 2^kShift, which compilers do not see through the above.
template <int kShift>
TW_DEVICE int floordiv_power(int a) {
    return a >> kShift;
}
template <int kShift>
TW_DEVICE int mod_power(int a) {
    return a & ((1 << kShift) - 1);
}
TW_DEVICE int to_integer(bool a) { return a; }
TW_DEVICE int integer_scalar(double v) {
    if (v != v) return 0;
    if (v <= -2147483648.0) return -2147483647 - 1;
    if (v >= 2147483647.0) return 2147483647;
    return static_cast<int>(v);
}

// ---------------------------------------------------------------------------------------------------------------------
// Reals

TW_DEVICE Real real(double v) { return static_cast<Real>(v); }
TW_DEVICE Real to_real(int a) { return static_cast<Real>(a); }
TW_DEVICE Real to_real(bool a) { return a ? Real(1) : Real(0); }

// A product that no compiler fuses with a sum: what decides something must be the same number everywhere. The renderer
// writes a * b where fusing is harmless.
TW_DEVICE float exact_product(float a, float b) { return __fmul_rn(a, b); }
TW_DEVICE double exact_product(double a, double b) { return __dmul_rn(a, b); }
TW_DEVICE float floor_of(float a) { return floorf(a); }
TW_DEVICE double floor_of(double a) { return floor(a); }
TW_DEVICE float remainder_of(float a, float b) { return fmodf(a, b); }
TW_DEVICE double remainder_of(double a, double b) { return fmod(a, b); }
TW_DEVICE float root_of(float a) { return sqrtf(a); }
TW_DEVICE double root_of(double a) { return ::sqrt(a); }

TW_DEVICE Real add(Real a, Real b) { return a + b; }
TW_DEVICE Real sub(Real a, Real b) { return a - b; }
TW_DEVICE Real mul(Real a, Real b) { return exact_product(a, b); }
TW_DEVICE Real div(Real a, Real b) { return a / b; }
TW_DEVICE Real neg(Real a) { return -a; }
TW_DEVICE Real abs(Real a) { return absolute(a); }
TW_DEVICE Real min(Real a, Real b) { return a <= b || a != a ? a : b; }
TW_DEVICE Real max(Real a, Real b) { return a >= b || a != a ? a : b; }
TW_DEVICE Real floordiv(Real a, Real b) { return floor_of(a / b); }
TW_DEVICE Real mod(Real a, Real b) {
    const Real r = remainder_of(a, b);
    return r != 0 && (r < 0) != (b < 0) ? r + b : r;
}
TW_DEVICE Real exp(Real a) { return exponential(a); }
TW_DEVICE Real log(Real a) { return logarithm(a); }
TW_DEVICE Real tanh(Real a) { return hyperbolic_tangent(a); }
TW_DEVICE Real sqrt(Real a) { return root_of(a); }

// ---------------------------------------------------------------------------------------------------------------------
// Bools and choices

TW_DEVICE bool lt(int a, int b) { return a < b; }
TW_DEVICE bool le(int a, int b) { return a <= b; }
TW_DEVICE bool gt(int a, int b) { return a > b; }
TW_DEVICE bool ge(int a, int b) { return a >= b; }
TW_DEVICE bool eq(int a, int b) { return a == b; }
TW_DEVICE bool ne(int a, int b) { return a != b; }
TW_DEVICE bool lt(Real a, Real b) { return a < b; }
TW_DEVICE bool le(Real a, Real b) { return a <= b; }
TW_DEVICE bool gt(Real a, Real b) { return a > b; }
TW_DEVICE bool ge(Real a, Real b) { return a >= b; }
TW_DEVICE bool eq(Real a, Real b) { return a == b; }
TW_DEVICE bool ne(Real a, Real b) { return a != b; }
TW_DEVICE bool logical_and(bool a, bool b) { return a & b; }
TW_DEVICE bool logical_or(bool a, bool b) { return a | b; }
TW_DEVICE bool logical_not(bool a) { return !a; }
template <class T>
TW_DEVICE T where(bool condition, T a, T b) {
    return condition ? a : b;
}

// ---------------------------------------------------------------------------------------------------------------------
// Captured arrays: one index per axis; an index outside gives 0

template <class... Index>
TW_DEVICE bool inside(const abi::Array& array, Int& offset, Index... index) {
    const int at[sizeof...(index) + 1] = {index..., 0};
    bool all = true;
    offset = 0;
#pragma unroll
    for (int d = 0; d < static_cast<int>(sizeof...(index)); ++d) {
        all = all && at[d] >= 0 && at[d] < array.shape[d];
        offset += at[d] * array.stride[d];
    }
    return all;
}
template <int kDType, class... Index>
TW_DEVICE Real gather_real(const abi::Array& array, Index... index) {
    Int offset;
    return inside(array, offset, index...) ? load_float<kDType, Real>(array.data, offset) : Real(0);
}
template <int kDType, class... Index>
TW_DEVICE int gather_integer(const abi::Array& array, Index... index) {
    Int offset;
    return inside(array, offset, index...) ? static_cast<int>(load_integer(array.data, kDType, offset)) : 0;
}
template <int kDType, class... Index>
TW_DEVICE bool gather_bool(const abi::Array& array, Index... index) {
    Int offset;
    return inside(array, offset, index...) && load_integer(array.data, kDType, offset) != 0;
}

// The other way: a gradient into its element of an array of Real.
TW_DEVICE void add_to(Real* sum, Real x) { atomicAdd(sum, x); }
template <class... Index>
TW_DEVICE void add_gradient(const abi::Array& sums, Real x, Index... index) {
    Int offset;
    if (!sums.data || x == 0 || !inside(sums, offset, index...)) return;
    add_to(static_cast<Real*>(sums.data) + offset, x);
}

// ---------------------------------------------------------------------------------------------------------------------
// Bounds. Real ones are computed with the rounding of the evaluation: rounding is monotone, so the rounded operation at
// the ends of its operands bounds the rounded operation in between.

struct Truth {
    bool always, possible;  // true everywhere; true somewhere, perhaps
};
struct Integers {
    Int lo, hi;  // within int32
};
struct Interval {
    Real lo, hi;  // of the values that are not NaN
    bool maybe_nan;
};

template <class T>
struct Format;
template <>
struct Format<float> {
    TW_DEVICE float largest() { return __uint_as_float(0x7f7fffffu); }
    TW_DEVICE float smallest() { return __uint_as_float(0x00800000u); }  // that is normal
    TW_DEVICE float epsilon() { return __uint_as_float(0x34000000u); }
};
template <>
struct Format<double> {
    TW_DEVICE double largest() { return __longlong_as_double(0x7fefffffffffffffll); }
    TW_DEVICE double smallest() { return __longlong_as_double(0x0010000000000000ll); }
    TW_DEVICE double epsilon() { return __longlong_as_double(0x3cb0000000000000ll); }
};
TW_DEVICE Real infinity() { return Limits<Real>::infinity(); }
TW_DEVICE Real lower(Real a, Real b) { return a < b ? a : b; }  // of numbers
TW_DEVICE Real upper(Real a, Real b) { return a > b ? a : b; }
TW_DEVICE bool finite(Real a) { return absolute(a) <= Format<Real>::largest(); }
TW_DEVICE bool contains(const Interval& a, Real v) { return a.lo <= v && v <= a.hi; }
TW_DEVICE bool has_infinity(const Interval& a) { return a.lo == -infinity() || a.hi == infinity(); }

TW_DEVICE Interval anything() { return {-infinity(), infinity(), true}; }
TW_DEVICE Integers all_integers() { return {-2147483648ll, 2147483647ll}; }
TW_DEVICE Truth point(bool v) { return {v, v}; }
TW_DEVICE Integers point(int v) { return {v, v}; }
TW_DEVICE Interval point(Real v) { return {v, v, false}; }
TW_DEVICE Interval scalar(double v) { return v != v ? anything() : point(real(v)); }

TW_DEVICE Truth hull(const Truth& a, const Truth& b) { return {a.always && b.always, a.possible || b.possible}; }
TW_DEVICE Integers hull(const Integers& a, const Integers& b) { return {minimum(a.lo, b.lo), maximum(a.hi, b.hi)}; }
TW_DEVICE Interval hull(const Interval& a, const Interval& b) {
    return {lower(a.lo, b.lo), upper(a.hi, b.hi), a.maybe_nan || b.maybe_nan};
}
template <class T>
TW_DEVICE T where(const Truth& condition, const T& a, const T& b) {
    return condition.always ? a : !condition.possible ? b : hull(a, b);
}

// Integers: exact values, wrapped. A run of values that does not cross a wrap-around stays a run.
TW_DEVICE Integers wrapped(Int lo, Int hi) {
    const int low = static_cast<int>(lo), high = static_cast<int>(hi);
    if (hi - lo <= 0xffffffffll && low <= high) return {low, high};
    return all_integers();
}
TW_DEVICE Integers positions(Int begin, Int end) { return wrapped(begin, end - 1); }
TW_DEVICE Integers to_integer(const Truth& a) { return {a.always, a.possible}; }

TW_DEVICE Integers add(const Integers& a, const Integers& b) { return wrapped(a.lo + b.lo, a.hi + b.hi); }
TW_DEVICE Integers sub(const Integers& a, const Integers& b) { return wrapped(a.lo - b.hi, a.hi - b.lo); }
TW_DEVICE Integers mul(const Integers& a, const Integers& b) {
    const Int p = a.lo * b.lo, q = a.lo * b.hi, r = a.hi * b.lo, s = a.hi * b.hi;
    return wrapped(minimum(minimum(p, q), minimum(r, s)), maximum(maximum(p, q), maximum(r, s)));
}
TW_DEVICE Integers neg(const Integers& a) { return wrapped(-a.hi, -a.lo); }
TW_DEVICE Integers abs(const Integers& a) {
    if (a.lo >= 0) return a;
    if (a.hi <= 0) return neg(a);
    return wrapped(0, maximum(-a.lo, a.hi));
}
TW_DEVICE Integers min(const Integers& a, const Integers& b) { return {minimum(a.lo, b.lo), minimum(a.hi, b.hi)}; }
TW_DEVICE Integers max(const Integers& a, const Integers& b) { return {maximum(a.lo, b.lo), maximum(a.hi, b.hi)}; }

template <bool kModulo>
TW_DEVICE Integers by_positive(const Integers& n, const Integers& d) {
    if (!kModulo) return {floor_div(n.lo, n.lo < 0 ? d.lo : d.hi), floor_div(n.hi, n.hi < 0 ? d.hi : d.lo)};
    if (n.lo >= 0 && n.hi < d.lo) return n;
    if (d.lo == d.hi) {
        const Int first = floor_div(n.lo, d.lo) * d.lo;
        if (n.hi < first + d.lo) return {n.lo - first, n.hi - first};  // one period
    }
    return {0, n.lo >= 0 ? minimum(n.hi, d.hi - 1) : d.hi - 1};
}
// The parts of b: positive, zero (where the result is 0) and negative, which mirrors the positive one.
template <bool kModulo>
TW_DEVICE Integers by_sign(const Integers& a, const Integers& b) {
    Integers sum{1ll << 40, -(1ll << 40)};
    if (b.hi >= 1) sum = hull(sum, by_positive<kModulo>(a, {maximum(b.lo, 1), b.hi}));
    if (b.lo <= 0 && b.hi >= 0) sum = hull(sum, {0, 0});
    if (b.lo <= -1) {
        const Integers part = by_positive<kModulo>({-a.hi, -a.lo}, {-minimum(b.hi, -1), -b.lo});
        sum = hull(sum, kModulo ? Integers{-part.hi, -part.lo} : part);
    }
    return wrapped(sum.lo, sum.hi);
}
TW_DEVICE Integers floordiv(const Integers& a, const Integers& b) { return by_sign<false>(a, b); }
TW_DEVICE Integers mod(const Integers& a, const Integers& b) { return by_sign<true>(a, b); }

// Reals. Where operands are finite an infinity is the work of rounding, which a fused product avoids: it is no certain
// bound.
TW_DEVICE Real certain_lo(Real v) { return lower(v, Format<Real>::largest()); }
TW_DEVICE Real certain_hi(Real v) { return upper(v, -Format<Real>::largest()); }

TW_DEVICE Interval to_real(const Truth& a) { return {to_real(a.always), to_real(a.possible), false}; }
TW_DEVICE Interval to_real(const Integers& a) { return {static_cast<Real>(a.lo), static_cast<Real>(a.hi), false}; }

TW_DEVICE Interval add(const Interval& a, const Interval& b) {
    Interval out{a.lo + b.lo, a.hi + b.hi, a.maybe_nan || b.maybe_nan};
    if ((a.lo == -infinity() && b.hi == infinity()) || (a.hi == infinity() && b.lo == -infinity())) {
        out.maybe_nan = true;
    }
    // inf + -inf at one end: apart from that NaN, the sum is the infinity that every value of one operand has.
    if (out.lo != out.lo) out.lo = infinity();
    else if (finite(a.lo) && finite(b.lo)) out.lo = certain_lo(out.lo);
    if (out.hi != out.hi) out.hi = -infinity();
    else if (finite(a.hi) && finite(b.hi)) out.hi = certain_hi(out.hi);
    return out.lo <= out.hi ? out : anything();
}
TW_DEVICE Interval neg(const Interval& a) { return {-a.hi, -a.lo, a.maybe_nan}; }
TW_DEVICE Interval sub(const Interval& a, const Interval& b) { return add(a, neg(b)); }

TW_DEVICE void include_product(Interval& out, Real u, Real v) {
    const Real p = u == 0 || v == 0 ? Real(0) : exact_product(u, v);  // 0 * inf is the NaN that the caller has seen
    const bool rounded = finite(u) && finite(v);
    out.lo = lower(out.lo, rounded ? certain_lo(p) : p);
    out.hi = upper(out.hi, rounded ? certain_hi(p) : p);
}
TW_DEVICE Interval mul(const Interval& a, const Interval& b) {
    Interval out{infinity(), -infinity(), a.maybe_nan || b.maybe_nan};
    if ((contains(a, 0) && has_infinity(b)) || (has_infinity(a) && contains(b, 0))) out.maybe_nan = true;
    include_product(out, a.lo, b.lo), include_product(out, a.lo, b.hi);
    include_product(out, a.hi, b.lo), include_product(out, a.hi, b.hi);
    return out;
}
TW_DEVICE void include_quotient(Interval& out, Real u, Real v) {
    const Real q = u / v;
    out.lo = lower(out.lo, q), out.hi = upper(out.hi, q);
}
TW_DEVICE Interval div(const Interval& a, const Interval& b) {
    if (has_infinity(a) && has_infinity(b)) return anything();
    const bool nan = a.maybe_nan || b.maybe_nan;
    if (contains(b, 0)) return {-infinity(), infinity(), nan || contains(a, 0)};
    Interval out{infinity(), -infinity(), nan};
    include_quotient(out, a.lo, b.lo), include_quotient(out, a.lo, b.hi);
    include_quotient(out, a.hi, b.lo), include_quotient(out, a.hi, b.hi);
    return out;
}
TW_DEVICE Interval floordiv(const Interval& a, const Interval& b) {
    const Interval q = div(a, b);
    return {floor_of(q.lo), floor_of(q.hi), q.maybe_nan};
}
TW_DEVICE Interval mod(const Interval& a, const Interval& b) {
    const bool nan = a.maybe_nan || b.maybe_nan || has_infinity(a) || contains(b, 0);
    if (b.lo <= 0) return {lower(b.lo, 0), upper(b.hi, 0), nan};
    if (a.lo >= 0 && a.hi < b.lo) return {a.lo, a.hi, nan};
    if (b.lo == b.hi && !has_infinity(a) && !has_infinity(b)) {
        // Ends less than a period apart whose remainders are in order lie in one period, where mod is monotone.
        const Real lo = mod(a.lo, b.lo), hi = mod(a.hi, b.lo);
        if (a.lo == a.hi || (a.hi - a.lo < b.lo && lo < hi)) return {lo, hi, nan};
    }
    return {0, b.hi, nan};  // b.hi: a tiny negative remainder plus b rounds to b
}
TW_DEVICE Interval abs(const Interval& a) {
    if (a.lo >= 0) return a;
    if (a.hi <= 0) return neg(a);
    return {0, upper(-a.lo, a.hi), a.maybe_nan};
}
TW_DEVICE Interval min(const Interval& a, const Interval& b) {
    return {lower(a.lo, b.lo), lower(a.hi, b.hi), a.maybe_nan || b.maybe_nan};
}
TW_DEVICE Interval max(const Interval& a, const Interval& b) {
    return {upper(a.lo, b.lo), upper(a.hi, b.hi), a.maybe_nan || b.maybe_nan};
}

// Room for functions that are neither correctly rounded nor monotone: 2 ulp at the end and 2 in between, doubled.
TW_DEVICE Real slack(Real v) { return absolute(v) * (8 * Format<Real>::epsilon()); }
TW_DEVICE Real below(Real v) { return finite(v) ? v - slack(v) : v; }
TW_DEVICE Real above(Real v) { return finite(v) ? v + slack(v) : v; }

TW_DEVICE Interval exp(const Interval& a) {
    constexpr int kFew = 2;
    const Real smallest = Format<Real>::smallest(), lo = exponential(a.lo), hi = exponential(a.hi);
    return {lo < kFew * smallest ? Real(0) : below(certain_lo(lo)),
            a.hi == -infinity() ? Real(0) : above(hi + smallest), a.maybe_nan};
}
TW_DEVICE Interval log(const Interval& a) {
    if (a.hi < 0) return anything();  // only NaN
    const Real near_one = 8 * Format<Real>::epsilon();
    return {below(logarithm(upper(a.lo, 0))) - near_one, above(logarithm(a.hi)) + near_one, a.maybe_nan || a.lo < 0};
}
TW_DEVICE Interval tanh(const Interval& a) {
    return {upper(-1, below(hyperbolic_tangent(a.lo))), lower(1, above(hyperbolic_tangent(a.hi))), a.maybe_nan};
}
TW_DEVICE Interval sqrt(const Interval& a) {
    if (a.hi < 0) return anything();
    return {root_of(upper(a.lo, 0)), root_of(a.hi), a.maybe_nan || a.lo < 0};
}

// NaN makes every comparison false, except ne.
TW_DEVICE Truth logical_and(const Truth& a, const Truth& b) { return {a.always && b.always, a.possible && b.possible}; }
TW_DEVICE Truth logical_or(const Truth& a, const Truth& b) { return {a.always || b.always, a.possible || b.possible}; }
TW_DEVICE Truth logical_not(const Truth& a) { return {!a.possible, !a.always}; }

TW_DEVICE Truth lt(const Integers& a, const Integers& b) { return {a.hi < b.lo, a.lo < b.hi}; }
TW_DEVICE Truth le(const Integers& a, const Integers& b) { return {a.hi <= b.lo, a.lo <= b.hi}; }
TW_DEVICE Truth eq(const Integers& a, const Integers& b) {
    return {a.lo == a.hi && b.lo == b.hi && a.lo == b.lo, a.lo <= b.hi && b.lo <= a.hi};
}
TW_DEVICE bool numbers(const Interval& a, const Interval& b) { return !a.maybe_nan && !b.maybe_nan; }
TW_DEVICE Truth lt(const Interval& a, const Interval& b) { return {a.hi < b.lo && numbers(a, b), a.lo < b.hi}; }
TW_DEVICE Truth le(const Interval& a, const Interval& b) { return {a.hi <= b.lo && numbers(a, b), a.lo <= b.hi}; }
TW_DEVICE Truth eq(const Interval& a, const Interval& b) {
    return {a.lo == a.hi && b.lo == b.hi && a.lo == b.lo && numbers(a, b), a.lo <= b.hi && b.lo <= a.hi};
}
template <class T>
TW_DEVICE Truth gt(const T& a, const T& b) {
    return lt(b, a);
}
template <class T>
TW_DEVICE Truth ge(const T& a, const T& b) {
    return le(b, a);
}
template <class T>
TW_DEVICE Truth ne(const T& a, const T& b) {
    return logical_not(eq(a, b));
}

TW_DEVICE int decided(const Truth& a) { return a.always ? 2 : a.possible ? 1 : 0; }
TW_DEVICE bool only_minus_infinity(const Interval& a) { return a.hi == -infinity() && !a.maybe_nan; }

// ---------------------------------------------------------------------------------------------------------------------
// Contents of captured arrays: smallest, largest and whether a NaN is among them, for every 64 elements in row-major
// order of their indices, whatever the strides. smallest > largest: only NaN.

constexpr Int kSummaryRun = 64, kSummaryValues = 3;
constexpr int kMaxRuns = 8, kMaxRunBlocks = 16;

TW_DEVICE void summarise_block(const abi::Array& array, Int dtype, Int rank, Int block, double* out) {
    double lo = Limits<double>::infinity(), hi = -lo;
    bool nan = false;
    Int size = 1;
    for (int d = 0; d < rank; ++d) size *= array.shape[d];
    for (Int k = block * kSummaryRun; k < minimum((block + 1) * kSummaryRun, size); ++k) {
        Int rest = k, offset = 0;
        for (int d = static_cast<int>(rank) - 1; d >= 0; --d) {
            offset += rest % array.shape[d] * array.stride[d];
            rest /= array.shape[d];
        }
        const bool real_values = dtype >= kF64 && dtype <= kBF16;
        const double v = real_values ? load_any<double>(array.data, dtype, offset)
                                     : static_cast<double>(static_cast<int>(load_integer(array.data, dtype, offset)));
        if (v != v) nan = true;
        lo = v < lo ? v : lo, hi = v > hi ? v : hi;
    }
    out[0] = lo, out[1] = hi, out[2] = nan;
}

struct Contents {
    double lo, hi;
    bool maybe_nan, known;
};

// Every value that gather can give in a box of indices.
template <class... Index>
TW_DEVICE Contents contents(const abi::Array& array, const abi::GatherSummary& summary, const Index&... index) {
    constexpr int kRank = sizeof...(index);
    const Integers box[kRank + 1] = {index..., {0, 0}};
    Int step[kRank + 1];        // elements per index of an axis, in row-major order
    unsigned count[kRank + 1];  // runs along an axis
    Int first = 0, length = 1, below_axis = 1;
    unsigned runs = 1;
    bool outside = false, covered = true;
    // The box is a number of runs; axes that are covered completely join their run.
#pragma unroll
    for (int d = kRank - 1; d >= 0; --d) {
        const Int begin = maximum(box[d].lo, 0), n = minimum(box[d].hi + 1, array.shape[d]) - begin;
        if (n <= 0) return {0, 0, false, true};
        outside = outside || n != box[d].hi + 1 - box[d].lo;
        first += begin * below_axis;
        count[d] = covered ? 1 : static_cast<unsigned>(minimum(n, kMaxRuns + 1));
        if (covered) length = n * below_axis;
        runs = runs > kMaxRuns ? runs : runs * count[d];
        covered = covered && n == array.shape[d];
        step[d] = below_axis;
        below_axis *= array.shape[d];
    }
    const Contents unknown{0, 0, true, false};
    if (!summary.data || runs > kMaxRuns) return unknown;

    Contents all{Limits<double>::infinity(), -Limits<double>::infinity(), false, true};
    for (unsigned run = 0; run < runs; ++run) {
        Int start = first;
        unsigned rest = run;
#pragma unroll
        for (int d = kRank - 2; d >= 0; --d) {  // the last axis lies within a run
            start += rest % count[d] * step[d];
            rest /= count[d];
        }
        const Int begin = start / kSummaryRun, end = (start + length - 1) / kSummaryRun + 1;
        if (end - begin > kMaxRunBlocks) return unknown;
        for (Int block = begin; block < end; ++block) {
            const double* const values = summary.data + block * kSummaryValues;
            all.lo = values[0] < all.lo ? values[0] : all.lo;
            all.hi = values[1] > all.hi ? values[1] : all.hi;
            all.maybe_nan = all.maybe_nan || values[2] != 0;
        }
    }
    if (all.lo > all.hi) return unknown;
    if (outside) all.lo = all.lo < 0 ? all.lo : 0, all.hi = all.hi > 0 ? all.hi : 0;
    return all;
}

template <int kDType, class... Index>
TW_DEVICE Interval real_bounds(const abi::Array& array, const abi::GatherSummary& summary, const Index&... index) {
    const Contents all = contents(array, summary, index...);
    if (!all.known) return anything();
    return {static_cast<Real>(all.lo), static_cast<Real>(all.hi), all.maybe_nan};
}
template <int kDType, class... Index>
TW_DEVICE Integers integer_bounds(const abi::Array& array, const abi::GatherSummary& summary, const Index&... index) {
    const Contents all = contents(array, summary, index...);
    if (all.known) return {static_cast<Int>(all.lo), static_cast<Int>(all.hi)};
    switch (kDType) {
        case kI16: return {-32768, 32767};
        case kI8: return {-128, 127};
        case kU8: return {0, 255};
        default: return all_integers();
    }
}
template <int kDType, class... Index>
TW_DEVICE Truth truth_bounds(const abi::Array& array, const abi::GatherSummary& summary, const Index&... index) {
    const Contents all = contents(array, summary, index...);
    if (!all.known) return {false, true};
    return {all.lo >= 1, all.hi >= 1};
}

}  // namespace expr
}  // namespace tilewise
