// Vectors of T = float or double on top of a room: memory access, reductions, 2^t and tanh. Everything else in this
// directory is written with these names and + - * / on vectors, for both types at once.

namespace tilewise::cpu::TILEWISE_ISA {

template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
    using type = f32v;
    using ints = i32v;
};
template <>
struct VectorOf<double> {
    using type = f64v;
    using ints = i64v;
};
template <class T>
using Vec = typename VectorOf<T>::type;
template <class T>
using Ints = typename VectorOf<T>::ints;

template <class T>
inline constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));
template <class T>
inline constexpr T kInf = static_cast<T>(__builtin_inf());

template <class T>
[[gnu::always_inline]] inline Vec<T> load(const T* p) {
    Vec<T> v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
template <class T>
[[gnu::always_inline]] inline void store(T* p, Vec<T> v) {
    __builtin_memcpy(p, &v, sizeof v);
}

// v with lanes n and n ^ kMask exchanged.
template <class T, int kMask, int... kLane>
[[gnu::always_inline]] inline Vec<T> exchange(Vec<T> v, std::integer_sequence<int, kLane...>) {
    return __builtin_shufflevector(v, v, (kLane ^ kMask)...);
}

// Sum and maximum over the lanes, always in the same order: halves first. max_of is for vectors without NaN.
template <class T>
inline T sum_of(Vec<T> v) {
    constexpr std::make_integer_sequence<int, kLanes<T>> kAll{};
    if constexpr (kLanes<T> >= 16) v += exchange<T, 8>(v, kAll);
    if constexpr (kLanes<T> >= 8) v += exchange<T, 4>(v, kAll);
    if constexpr (kLanes<T> >= 4) v += exchange<T, 2>(v, kAll);
    v += exchange<T, 1>(v, kAll);
    return v[0];
}
template <class T>
inline T max_of(Vec<T> v) {
    constexpr std::make_integer_sequence<int, kLanes<T>> kAll{};
    if constexpr (kLanes<T> >= 16) v = larger(v, exchange<T, 8>(v, kAll));
    if constexpr (kLanes<T> >= 8) v = larger(v, exchange<T, 4>(v, kAll));
    if constexpr (kLanes<T> >= 4) v = larger(v, exchange<T, 2>(v, kAll));
    v = larger(v, exchange<T, 1>(v, kAll));
    return v[0];
}

// Transposes kLanes vectors in place: log2(kLanes) rounds of merging row n with row n + kLanes / 2 element by element.
template <class T, int... kLane>
[[gnu::always_inline]] inline void transpose(Vec<T> (&row)[sizeof...(kLane)], std::integer_sequence<int, kLane...>) {
    constexpr int n = sizeof...(kLane);
#pragma GCC unroll 4
    for (int round = 1; round < n; round *= 2) {
        Vec<T> next[n];
#pragma GCC unroll 8
        for (int i = 0; i < n / 2; ++i) {
            next[2 * i] = __builtin_shufflevector(row[i], row[i + n / 2], (kLane / 2 + kLane % 2 * n)...);
            next[2 * i + 1] = __builtin_shufflevector(row[i], row[i + n / 2], (n / 2 + kLane / 2 + kLane % 2 * n)...);
        }
#pragma GCC unroll 16
        for (int i = 0; i < n; ++i) row[i] = next[i];
    }
}

// 2^t = 2^n * 2^r with n = round(t), |r| <= 1/2 (Cody and Waite; base 2 makes t - n exact, so no split of ln 2 is
// needed). 2^r = 1 + r * q(r) with q minimax (Remez): relative error 2.6e-9 (float), 1.8e-17 (double); measured over
// all floats: below 1 ulp. Adding 1.5 * 2^(mantissa bits) rounds t to an integer and leaves n + bias in the low bits of
// the sum; shifted into the exponent field that is 2^n, with n = -bias giving 0 and n = bias + 1 giving infinity.
//
// Guaranteed: 2^0 = 1 and 2^-inf = 0 exactly, NaN stays NaN. Results below 2^-126.5 (2^-1022.5) are 0 and above 2^127.5
// (2^1023.5) infinity: what underflows here is invisible next to the 1 of the row maximum.
template <class T>
struct Exp2;
template <>
struct Exp2<float> {
    static constexpr float kRound = 0x1.8p23f + 127.0f, kLow = -127.0f, kHigh = 128.0f;
    static constexpr int kMantissa = 23, kTerms = 6;
    static constexpr float kTerm[kTerms] = {0.000155946781613f, 0.00134066439024f, 0.00961769297299f,
                                            0.0555031055101f,   0.240226527829f,   0.693147214968f};
};
template <>
struct Exp2<double> {
    static constexpr double kRound = 0x1.8p52 + 1023.0, kLow = -1023.0, kHigh = 1024.0;
    static constexpr int kMantissa = 52, kTerms = 11;
    static constexpr double kTerm[kTerms] = {
        4.078071929588336665e-10,   7.0725704128144235096e-9, 1.0180647659234138888e-7, 1.3215442675329822143e-6,
        0.000015252727385193868197, 0.0001540353044157213033, 0.0013333558153439964747, 0.0096181291076070023796,
        0.055504108664790394552,    0.24022650695910098007,   0.69314718055994569675};
};

// 2^r * 2^n with n + bias in the low bits of `shifted`.
template <class T>
[[gnu::always_inline]] inline Vec<T> exp2_from(Vec<T> r, Vec<T> shifted) {
    using C = Exp2<T>;
    Vec<T> q = splat(C::kTerm[0]);
#pragma GCC unroll 16
    for (int n = 1; n < C::kTerms; ++n) q = fma(q, r, splat(C::kTerm[n]));
    const Vec<T> power = reinterpret_cast<Vec<T>>(reinterpret_cast<Ints<T>>(shifted) << C::kMantissa);
    return fma(q, r, splat(T{1})) * power;
}

template <class T>
[[gnu::always_inline]] inline Vec<T> exp2(Vec<T> t) {
    using C = Exp2<T>;
    t = smaller(splat(C::kHigh), larger(splat(C::kLow), t));  // this order keeps NaN
    const Vec<T> shifted = t + splat(C::kRound);
    return exp2_from<T>(t - (shifted - splat(C::kRound)), shifted);
}

// 2^(d * factor) for d <= 0 and factor of ordinary size (2^+-100): the inner loop of the softmax, two operations
// shorter. The product is never rounded on its own, so it is a little more exact as well.
template <class T>
struct Exp2Scaled {
    Vec<T> factor, low;
    explicit Exp2Scaled(T f) : factor(splat(f)), low(splat(Exp2<T>::kLow / f)) {}
    [[gnu::always_inline]] Vec<T> operator()(Vec<T> d) const {
        const Vec<T> round = splat(Exp2<T>::kRound);
        d = larger(low, d);
        const Vec<T> shifted = fma(d, factor, round);
        return exp2_from<T>(fma(d, factor, round - shifted), shifted);
    }
};

inline constexpr double kLog2E = 1.4426950408889634074, kLn2 = 0.69314718055994530942;

// tanh, relative error a few ulp also near 0, where 1 - 2 / (e^2x + 1) would cancel: below 0.625 the rational minimax
// approximations of Cephes (S. Moshier, tanhf.c and tanh.c).
template <class T>
inline Vec<T> tanh(Vec<T> x) {
    const Vec<T> size = x < splat(T{0}) ? -x : x;
    const Vec<T> z = x * x;
    Vec<T> correction;
    if constexpr (sizeof(T) == 4) {
        Vec<T> q = splat(-5.70498872745e-3f);
        q = fma(q, z, splat(2.06390887954e-2f));
        q = fma(q, z, splat(-5.37397155531e-2f));
        q = fma(q, z, splat(1.33314422036e-1f));
        correction = fma(q, z, splat(-3.33332819422e-1f));
    } else {
        Vec<T> p = splat(-9.64399179425052238628e-1), q = z + splat(1.12811678491632931402e2);
        p = fma(p, z, splat(-9.92877231001918586564e1));
        p = fma(p, z, splat(-1.61468768441708447952e3));
        q = fma(q, z, splat(2.23548839060100448583e3));
        q = fma(q, z, splat(4.84406305325125486048e3));
        correction = p / q;
    }
    const Vec<T> small = fma(x * z, correction, x);
    const Vec<T> large = splat(T{1}) - splat(T{2}) / (exp2<T>(size * splat(static_cast<T>(2 * kLog2E))) + splat(T{1}));
    const Vec<T> signed_large = x < splat(T{0}) ? -large : large;
    return size < splat(T{0.625}) ? small : signed_large;
}

}  // namespace tilewise::cpu::TILEWISE_ISA
