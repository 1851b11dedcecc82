// The building blocks of the tiled CPU kernels, for every instruction set that this machine has: matrix product, 2^x,
// tanh, 16-bit conversions; and the forward pass as a whole against a plain double loop, with the promises that are
// easy to break: same bits for any number of threads, chunking, or padding, and hidden data that never shows.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/dropout.hpp"
#include "core/problem.hpp"
#include "cpu/cpu_tiled.hpp"
#include "cpu/isa.hpp"
#include "cpu/parallel.hpp"

namespace tilewise {
namespace {

using core::DType;
using cpu::Isa;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

std::vector<Isa> isas() {
    std::vector<Isa> here;
    for (const Isa isa : {Isa::scalar, Isa::avx2, Isa::avx512}) {
        if (cpu::available(isa)) here.push_back(isa);
    }
    return here;
}

class EachIsa : public testing::TestWithParam<Isa> {
protected:
    void SetUp() override { setenv("TILEWISE_CPU_ISA", cpu::name(GetParam()), 1); }
    void TearDown() override {
        unsetenv("TILEWISE_CPU_ISA");
        cpu::set_num_threads(0);
    }
    static const cpu::Kernels& kernels() { return cpu::kernels(GetParam()); }
};
INSTANTIATE_TEST_SUITE_P(CpuKernels, EachIsa, testing::ValuesIn(isas()),
                         [](const auto& test) { return std::string(cpu::name(test.param)); });

// ---------------------------------------------------------------------------------------------------------------------
// Matrix product

template <class T>
void check_multiply(const cpu::Kernels& kernels) {
    std::mt19937 random(1);
    std::uniform_real_distribution<T> draw(-1, 1);
    std::vector<T> scratch(static_cast<size_t>(cpu::kTileN * cpu::kTileN));
    for (const bool by_columns : {false, true}) {
        for (const int m : {1, 2, 5, 6, 7, 11, 12, 13, 23, 47, 48}) {
            for (const int n : {1, 3, 8, 16, 17, 31, 40, 64, 72, 128}) {
                for (const int k : {0, 1, 2, 3, 4, 5, 63, 128}) {
                    // A in a buffer of whole tiles: by columns the row length is m.
                    std::vector<T> a(static_cast<size_t>(cpu::kTileM * cpu::kTileN)), b(static_cast<size_t>(n * k));
                    std::vector<T> c(static_cast<size_t>(m * cpu::kTileN), T{7});
                    for (T& x : a) x = draw(random);
                    for (T& x : b) x = draw(random);
                    kernels.of<T>().test_multiply(a.data(), by_columns, b.data(), c.data(), m, n, k, scratch.data());
                    for (int i = 0; i < m; ++i) {
                        for (int j = 0; j < n; ++j) {
                            double sum = 0, size = 0;
                            for (int q = 0; q < k; ++q) {
                                const double term =
                                    double(by_columns ? a[q * m + i] : a[i * cpu::kTileN + q]) * double(b[q * n + j]);
                                sum += term, size += std::fabs(term);
                            }
                            const double bound = (k + 2) * double(std::numeric_limits<T>::epsilon()) * size;
                            ASSERT_NEAR(c[i * cpu::kTileN + j], sum, bound)
                                << m << "x" << n << "x" << k << " at " << i << "," << j;
                        }
                    }
                }
            }
        }
    }
}

TEST_P(EachIsa, MultiplyFloat) { check_multiply<float>(kernels()); }
TEST_P(EachIsa, MultiplyDouble) { check_multiply<double>(kernels()); }

// Bits of a row must not depend on how many rows there are.
TEST_P(EachIsa, MultiplyRowsAreIndependent) {
    std::mt19937 random(2);
    std::uniform_real_distribution<float> draw(-1, 1);
    const int n = 72, k = 100;
    std::vector<float> a(static_cast<size_t>(cpu::kTileM * cpu::kTileN)), b(static_cast<size_t>(n * k)),
        scratch(cpu::kTileN * cpu::kTileN);
    for (float& x : a) x = draw(random);
    for (float& x : b) x = draw(random);
    std::vector<float> all(static_cast<size_t>(cpu::kTileM * cpu::kTileN));
    kernels().f32.test_multiply(a.data(), false, b.data(), all.data(), cpu::kTileM, n, k, scratch.data());
    for (int m = 1; m < cpu::kTileM; ++m) {
        std::vector<float> some(all.size());
        kernels().f32.test_multiply(a.data(), false, b.data(), some.data(), m, n, k, scratch.data());
        for (int i = 0; i < m; ++i)
            ASSERT_EQ(0, std::memcmp(&some[i * cpu::kTileN], &all[i * cpu::kTileN], n * sizeof(float)));
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Functions

template <class T>
double worst_ulps(const std::vector<T>& x, const std::vector<T>& y, long double (*truth)(long double)) {
    double worst = 0;
    for (size_t n = 0; n < x.size(); ++n) {
        const long double want = truth(x[n]);
        const T rounded = static_cast<T>(want);
        const T next = std::nextafter(std::fabs(rounded), std::numeric_limits<T>::infinity());
        worst = std::max(worst, double(std::fabs((long double)(y[n]) - want) / (next - std::fabs(rounded))));
    }
    return worst;
}

template <class T>
std::vector<T> spread(T from, T to, int count) {
    std::mt19937_64 random(3);
    std::uniform_real_distribution<T> draw(from, to);
    std::vector<T> x(static_cast<size_t>(count));
    for (T& v : x) v = draw(random);
    return x;
}

template <class T>
void check_functions(const cpu::Kernels& kernels) {
    const auto run = [&](int which, const std::vector<T>& x) {
        std::vector<T> y(x.size());
        kernels.of<T>().test_function(which, x.data(), y.data(), static_cast<int64_t>(x.size()));
        return y;
    };
    const T normal = sizeof(T) == 4 ? -126 : -1022;
    for (const auto& x : {spread<T>(-1, 1, 1 << 16), spread<T>(-40, 0, 1 << 16), spread<T>(normal, -normal, 1 << 16)}) {
        EXPECT_LT(worst_ulps<T>(x, run(0, x), [](long double v) { return std::exp2(v); }), 1.5);
    }
    for (const auto& x :
         {spread<T>(-1, 1, 1 << 16), spread<T>(T(-1e-3), T(1e-3), 1 << 16), spread<T>(-12, 12, 1 << 16)}) {
        EXPECT_LT(worst_ulps<T>(x, run(1, x), [](long double v) { return std::tanh(v); }), 4);
    }
    const T inf = std::numeric_limits<T>::infinity(), nan = std::numeric_limits<T>::quiet_NaN();
    const std::vector<T> special{0,
                                 -T{0},
                                 -inf,
                                 inf,
                                 nan,
                                 T(1e30),
                                 T(-1e30),
                                 std::numeric_limits<T>::max(),
                                 std::numeric_limits<T>::lowest(),
                                 1,
                                 -1,
                                 2 * normal,
                                 -2 * normal,
                                 3,
                                 T(0.5),
                                 -nan};
    const std::vector<T> e = run(0, special), t = run(1, special);
    const auto same = [](T a, T b) { return a == b || (std::isnan(a) && std::isnan(b)); };
    const std::vector<T> exp2_of{1, 1, 0, inf, nan, inf, 0, inf, 0, 2, T(0.5), 0, inf, 8, T(std::sqrt(2.0L)), nan};
    for (size_t n = 0; n < special.size(); ++n) {
        EXPECT_TRUE(special[n] == T(0.5) || same(e[n], exp2_of[n])) << special[n] << " -> " << e[n];
        const T tanh = std::tanh(special[n]);
        if (std::fabs(tanh) == 0 || std::fabs(tanh) == 1 || std::isnan(tanh)) {
            EXPECT_TRUE(same(t[n], tanh)) << special[n] << " -> " << t[n];
        }
    }
}

TEST_P(EachIsa, FunctionsFloat) { check_functions<float>(kernels()); }
TEST_P(EachIsa, FunctionsDouble) { check_functions<double>(kernels()); }

TEST_P(EachIsa, SixteenBitFloats) {
    for (const DType dtype : {DType::f16, DType::bf16}) {
        std::vector<uint16_t> all(65536), back(65536);
        for (size_t n = 0; n < all.size(); ++n) all[n] = static_cast<uint16_t>(n);
        std::vector<float> wide(65536);
        kernels().test_load16(dtype, all.data(), wide.data(), 65536);
        kernels().test_store16(dtype, wide.data(), back.data(), 65536);
        for (size_t n = 0; n < all.size(); ++n) {
            const float want = dtype == DType::f16 ? core::half_to_float(all[n]) : core::bfloat_to_float(all[n]);
            if (std::isnan(want)) {
                const float again = dtype == DType::f16 ? core::half_to_float(back[n]) : core::bfloat_to_float(back[n]);
                ASSERT_TRUE(std::isnan(wide[n]) && std::isnan(again)) << n;
            } else {
                ASSERT_EQ(want, wide[n]) << n;
                ASSERT_EQ(all[n], back[n]) << n;
            }
        }
        // Rounding: random bits, and exact ties of all patterns.
        std::mt19937 random(4);
        std::vector<float> x(1 << 16);
        for (size_t n = 0; n < x.size(); ++n) {
            uint32_t bits = random();
            if (n % 4 == 1) bits = (bits & 0xffff0000u) | 0x8000u;
            if (n % 4 == 2) bits = (bits & 0xffffe000u) | 0x1000u;
            if (n % 4 == 3)
                bits = (bits & 0x80ffffffu) | (0x33000000u + ((bits >> 7) & 0x0f000000u));  // near half's range
            std::memcpy(&x[n], &bits, 4);
        }
        std::vector<uint16_t> y(x.size());
        kernels().test_store16(dtype, x.data(), y.data(), static_cast<int64_t>(x.size()));
        for (size_t n = 0; n < x.size(); ++n) {
            if (std::isnan(x[n])) continue;
            ASSERT_EQ(y[n], dtype == DType::f16 ? core::float_to_half(x[n]) : core::float_to_bfloat(x[n])) << x[n];
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The forward pass

struct Case {
    DType dtype = DType::f32;
    int64_t batch = 1, heads = 2, heads_kv = 1, seqlen_q = 1, seqlen_kv = 1, dim_qk = 8, dim_v = 8;
    bool causal = false, batch_invariant = false;
    int64_t window_left = -1, window_right = -1;
    double softcap = 0, scale = 0, dropout = 0;
    bool bias = false, slopes = false, sinks = false, strided = false;
};

// Arrays of a case, and the problem that views them.
struct Trial {
    Case c;
    std::vector<double> q, k, v;  // values as the kernel sees them, [b][h][s][d]
    std::vector<uint8_t> q_bytes, k_bytes, v_bytes, o_bytes;
    std::vector<float> bias, slopes, sinks;
    std::vector<double> lse64;
    std::vector<float> lse32;
    std::vector<double> o, lse;  // results

    explicit Trial(const Case& wanted, unsigned seed = 5) : c(wanted) {
        std::mt19937 random(seed);
        std::normal_distribution<double> draw;
        const auto fill = [&](std::vector<double>& x, int64_t heads, int64_t rows, int64_t dim) {
            x.resize(static_cast<size_t>(c.batch * heads * rows * dim));
            for (double& value : x) {
                value = draw(random);
                uint64_t box = 0;
                core::store_float(&box, c.dtype, 0, value);
                value = core::load_float(&box, c.dtype, 0);
            }
        };
        fill(q, c.heads, c.seqlen_q, c.dim_qk), fill(k, c.heads_kv, c.seqlen_kv, c.dim_qk),
            fill(v, c.heads_kv, c.seqlen_kv, c.dim_v);
        const auto fill32 = [&](std::vector<float>& x, int64_t n) {
            x.resize(static_cast<size_t>(n));
            for (float& value : x) value = static_cast<float>(draw(random));
        };
        if (c.bias) fill32(bias, c.heads * c.seqlen_q * c.seqlen_kv);
        if (c.slopes) fill32(slopes, c.heads);
        for (float& slope : slopes) slope = std::fabs(slope) / 16;
        if (c.sinks) fill32(sinks, c.heads);
    }

    // [b][s][h][d], or with every second element unused if `strided`.
    static tilewise_tensor view(std::vector<uint8_t>& bytes, const std::vector<double>& values, const Case& c,
                                int64_t heads, int64_t rows, int64_t dim) {
        const int64_t step = c.strided ? 2 : 1, space = std::max<int64_t>(dim, 1);
        tilewise_tensor t{};
        bytes.assign(static_cast<size_t>(c.batch * heads * rows * dim * step * core::size_of(c.dtype)), 0xff);
        t.data = bytes.data();
        t.dtype = static_cast<int32_t>(c.dtype);
        t.rank = 4;
        const int64_t shape[4] = {c.batch, rows, heads, dim},
                      stride[4] = {std::max<int64_t>(rows, 1) * heads * space * step, heads * space * step,
                                   space * step, step};
        std::copy_n(shape, 4, t.shape), std::copy_n(stride, 4, t.strides);
        size_t n = 0;
        for (int64_t b = 0; b < c.batch; ++b) {
            for (int64_t h = 0; h < heads; ++h) {
                for (int64_t s = 0; s < rows; ++s) {
                    for (int64_t d = 0; d < dim; ++d, ++n) {
                        const int64_t at = b * stride[0] + s * stride[1] + h * stride[2] + d * stride[3];
                        core::store_float(t.data, c.dtype, at, n < values.size() ? values[n] : 0);
                    }
                }
            }
        }
        return t;
    }

    tilewise_problem raw() {
        tilewise_problem p{};
        p.struct_size = sizeof p, p.abi_version = TILEWISE_ABI_VERSION;
        p.q = view(q_bytes, q, c, c.heads, c.seqlen_q, c.dim_qk);
        p.k = view(k_bytes, k, c, c.heads_kv, c.seqlen_kv, c.dim_qk);
        p.v = view(v_bytes, v, c, c.heads_kv, c.seqlen_kv, c.dim_v);
        p.causal = c.causal, p.batch_invariant = c.batch_invariant;
        p.window_left = c.window_left, p.window_right = c.window_right;
        p.softcap = c.softcap, p.dropout_p = c.dropout, p.seed = 42;
        p.has_softmax_scale = c.scale != 0, p.softmax_scale = c.scale;
        const auto tensor32 = [](std::vector<float>& x, std::vector<int64_t> shape) {
            tilewise_tensor t{};
            t.data = x.data(), t.dtype = TILEWISE_FLOAT32, t.rank = static_cast<int32_t>(shape.size());
            int64_t stride = 1;
            for (size_t d = shape.size(); d-- > 0; stride *= shape[d]) t.shape[d] = shape[d], t.strides[d] = stride;
            return t;
        };
        if (c.bias) p.bias = tensor32(bias, {c.heads, c.seqlen_q, c.seqlen_kv});
        if (c.slopes) p.alibi_slopes = tensor32(slopes, {c.heads});
        if (c.sinks) p.sinks = tensor32(sinks, {c.heads});
        return p;
    }

    void run() { run(raw()); }
    void run(const tilewise_problem& raw) {
        const core::Problem problem = core::make_problem(raw);
        tilewise_forward_args args{};
        args.struct_size = sizeof args;
        args.o = view(o_bytes, {}, c, c.heads, c.seqlen_q, c.dim_v);
        const size_t rows = static_cast<size_t>(c.batch * c.heads * c.seqlen_q);
        lse32.assign(rows, 7), lse64.assign(rows, 7);
        args.lse.rank = 3, args.lse.dtype = c.dtype == DType::f64 ? TILEWISE_FLOAT64 : TILEWISE_FLOAT32;
        args.lse.data = c.dtype == DType::f64 ? static_cast<void*>(lse64.data()) : lse32.data();
        const int64_t shape[3] = {c.batch, c.heads, c.seqlen_q},
                      stride[3] = {c.heads * c.seqlen_q, std::max<int64_t>(c.seqlen_q, 1), 1};
        std::copy_n(shape, 3, args.lse.shape), std::copy_n(stride, 3, args.lse.strides);
        const core::ForwardArgs forward = core::make_forward_args(problem, raw, args);
        const size_t bytes = cpu::kCpuTiled.workspace_bytes(problem, core::Pass::forward);
        void* const memory = std::aligned_alloc(64, (bytes + 127) / 64 * 64);
        std::memset(memory, 0xff, bytes + 64);  // NaN everywhere
        cpu::kCpuTiled.forward(problem, forward, {memory, bytes});
        for (size_t n = bytes; n < bytes + 64 && n < (bytes + 127) / 64 * 64; ++n) {
            EXPECT_EQ(static_cast<uint8_t*>(memory)[n], 0xff) << "written past the workspace";
        }
        std::free(memory);
        o.clear(), lse.clear();
        for (int64_t b = 0; b < c.batch; ++b) {
            for (int64_t h = 0; h < c.heads; ++h) {
                for (int64_t i = 0; i < c.seqlen_q; ++i) {
                    for (int64_t d = 0; d < c.dim_v; ++d) {
                        o.push_back(core::load_float(forward.o.data, c.dtype,
                                                     forward.o.offset(b, i, h) + d * forward.o.dim_stride));
                    }
                    lse.push_back(core::load_float(forward.lse.data, forward.lse.dtype, forward.lse.offset(b, h, i)));
                }
            }
        }
    }

    // The formula, in double. `hidden`: keys that nobody sees.
    void reference(std::vector<double>& o_out, std::vector<double>& lse_out, int64_t hidden = 0) const {
        const double scale = c.scale != 0 ? c.scale : 1 / std::sqrt(double(c.dim_qk));
        const uint32_t threshold = core::dropout_threshold(c.dropout);
        const double keep_prob = (65536.0 - threshold) / 65536.0, inf = std::numeric_limits<double>::infinity();
        for (int64_t b = 0; b < c.batch; ++b) {
            for (int64_t h = 0; h < c.heads; ++h) {
                const int64_t g = h / (c.heads / c.heads_kv), keys = c.seqlen_kv - hidden;
                for (int64_t i = 0; i < c.seqlen_q; ++i) {
                    std::vector<double> x(static_cast<size_t>(keys)), out(static_cast<size_t>(c.dim_v));
                    const int64_t t = i + keys - c.seqlen_q;
                    double m = c.sinks ? sinks[h] : -inf, l = 0;
                    for (int64_t j = 0; j < keys; ++j) {
                        double s = 0;
                        for (int64_t d = 0; d < c.dim_qk; ++d) {
                            s += q[((b * c.heads + h) * c.seqlen_q + i) * c.dim_qk + d] *
                                 k[((b * c.heads_kv + g) * c.seqlen_kv + j) * c.dim_qk + d];
                        }
                        s *= c.dim_qk ? scale : 0;
                        if (c.softcap > 0) s = c.softcap * std::tanh(s / c.softcap);
                        if (c.bias) s += bias[(h * c.seqlen_q + i) * c.seqlen_kv + j];
                        if (c.slopes) s -= double(slopes[h]) * std::fabs(double(t - j));
                        if ((c.causal && j > t) || (c.window_left >= 0 && t - j > c.window_left) ||
                            (c.window_right >= 0 && j - t > c.window_right)) {
                            s = -inf;
                        }
                        x[j] = s;
                        m = std::max(m, s);
                    }
                    if (m == -inf) {
                        o_out.insert(o_out.end(), out.begin(), out.end()), lse_out.push_back(-inf);
                        continue;
                    }
                    if (c.sinks) l += std::exp(double(sinks[h]) - m);
                    for (double s : x) l += std::exp(s - m);
                    for (int64_t j = 0; j < keys; ++j) {
                        if (x[j] == -inf || !core::dropout_keep(42, 0, b * c.heads + h, i, j, threshold)) continue;
                        const double p = std::exp(x[j] - m) / l / keep_prob;
                        for (int64_t d = 0; d < c.dim_v; ++d)
                            out[d] += p * v[((b * c.heads_kv + g) * c.seqlen_kv + j) * c.dim_v + d];
                    }
                    o_out.insert(o_out.end(), out.begin(), out.end()), lse_out.push_back(m + std::log(l));
                }
            }
        }
    }
};

double tolerance(DType dtype) {
    switch (dtype) {
        case DType::f64: return 1e-13;
        case DType::f32: return 1e-5;
        case DType::f16: return 2e-3;
        default: return 1.6e-2;
    }
}

void expect_close(const std::vector<double>& got, const std::vector<double>& want, double bound,
                  const std::string& what) {
    ASSERT_EQ(got.size(), want.size());
    for (size_t n = 0; n < got.size(); ++n) {
        if (std::isinf(want[n])) ASSERT_EQ(got[n], want[n]) << what << " " << n;
        else ASSERT_NEAR(got[n], want[n], bound * std::max(1.0, std::fabs(want[n]))) << what << " " << n;
    }
}

void check_forward(const Case& c) {
    Trial trial(c);
    trial.run();
    std::vector<double> o, lse;
    trial.reference(o, lse);
    expect_close(trial.o, o, tolerance(c.dtype), "o");
    expect_close(trial.lse, lse, c.dtype == DType::f64 ? 1e-13 : 1e-5, "lse");
}

std::vector<Case> cases() {
    std::vector<Case> all;
    const auto with = [](std::function<void(Case&)> change) {
        Case c;
        c.seqlen_q = 70, c.seqlen_kv = 150, c.dim_qk = c.dim_v = 32;
        change(c);
        return c;
    };
    for (const DType dtype : {DType::f32, DType::f64, DType::f16, DType::bf16}) {
        for (const auto& [dim_qk, dim_v] :
             {std::pair{1, 1}, {8, 24}, {40, 72}, {64, 64}, {128, 128}, {100, 33}, {0, 16}, {16, 0}}) {
            all.push_back(with([&](Case& c) { c.dtype = dtype, c.dim_qk = dim_qk, c.dim_v = dim_v; }));
            all.push_back(with([&](Case& c) {
                c.dtype = dtype, c.dim_qk = dim_qk, c.dim_v = dim_v, c.causal = true, c.seqlen_q = 1;
            }));
        }
        all.push_back(with([&](Case& c) { c.dtype = dtype, c.strided = true, c.dim_v = 20; }));
        all.push_back(with([&](Case& c) { c.dtype = dtype, c.strided = true, c.seqlen_q = 1, c.dim_v = 20; }));
    }
    all.push_back(with([](Case& c) { c.dim_qk = 576, c.dim_v = 512, c.heads = 4; }));
    for (const int seqlen_q : {1, 2, 3, 5, 24, 47, 48, 49, 97, 300}) {
        for (const int seqlen_kv : {1, 2, 127, 128, 129, 1024, 1025, 2500}) {
            all.push_back(with([&](Case& c) {
                c.seqlen_q = seqlen_q, c.seqlen_kv = seqlen_kv, c.heads = 6, c.heads_kv = 2, c.dim_qk = c.dim_v = 16;
            }));
            all.push_back(all.back());
            all.back().causal = true;
            all.back().batch_invariant = true;
        }
    }
    for (const int seqlen_q : {1, 70}) {
        all.push_back(with([&](Case& c) { c.seqlen_q = seqlen_q, c.window_left = 20; }));
        all.push_back(
            with([&](Case& c) { c.seqlen_q = seqlen_q, c.window_left = 130, c.window_right = 3, c.seqlen_kv = 1200; }));
        all.push_back(with([&](Case& c) { c.seqlen_q = seqlen_q, c.softcap = 3; }));
        all.push_back(with([&](Case& c) { c.seqlen_q = seqlen_q, c.bias = true; }));
        all.push_back(with([&](Case& c) { c.seqlen_q = seqlen_q, c.slopes = true; }));
        all.push_back(with([&](Case& c) { c.seqlen_q = seqlen_q, c.sinks = true, c.causal = true; }));
        all.push_back(with([&](Case& c) { c.seqlen_q = seqlen_q, c.dropout = 0.3; }));
        all.push_back(with([&](Case& c) { c.seqlen_q = seqlen_q, c.scale = -0.3; }));
        all.push_back(with([&](Case& c) {
            c.seqlen_q = seqlen_q, c.softcap = 5, c.bias = c.slopes = c.sinks = c.causal = true, c.dropout = 0.1,
            c.batch = 2, c.heads = 4, c.heads_kv = 2;
        }));
    }
    all.push_back(with([](Case& c) { c.seqlen_q = 150, c.seqlen_kv = 70, c.causal = true; }));  // empty rows
    all.push_back(with([](Case& c) { c.seqlen_q = 150, c.seqlen_kv = 70, c.causal = c.sinks = true; }));
    all.push_back(with([](Case& c) { c.seqlen_kv = 0; }));
    all.push_back(with([](Case& c) { c.seqlen_kv = 0, c.sinks = true, c.seqlen_q = 1; }));
    all.push_back(with([](Case& c) { c.seqlen_q = 0; }));
    all.push_back(with([](Case& c) { c.batch = 0; }));
    all.push_back(with([](Case& c) { c.heads = 8, c.heads_kv = 1, c.seqlen_q = 3, c.seqlen_kv = 3000; }));
    all.push_back(with([](Case& c) { c.heads = 64, c.heads_kv = 1, c.seqlen_q = 1, c.seqlen_kv = 3000; }));
    return all;
}

TEST_P(EachIsa, Forward) {
    int n = 0;
    for (const Case& c : cases()) {
        SCOPED_TRACE("case " + std::to_string(n++) + ": " + core::name(c.dtype) + " sq " + std::to_string(c.seqlen_q) +
                     " skv " + std::to_string(c.seqlen_kv) + " d " + std::to_string(c.dim_qk) + "/" +
                     std::to_string(c.dim_v));
        check_forward(c);
        if (HasFatalFailure()) return;
    }
}

TEST_P(EachIsa, SameBitsForAnyThreads) {
    for (const int seqlen_q : {1, 8, 100}) {
        Case c;
        c.seqlen_q = seqlen_q, c.seqlen_kv = 5000, c.heads = 4, c.dim_qk = c.dim_v = 64, c.causal = true;
        Trial trial(c);
        std::vector<double> first;
        for (const int threads : {1, 2, 5}) {
            cpu::set_num_threads(threads);
            trial.run();
            if (first.empty()) first = trial.o;
            EXPECT_EQ(first, trial.o) << threads << " threads";
        }
    }
}

// A long prefill, and its last queries on their own: the same bits.
TEST_P(EachIsa, BatchInvariant) {
    Case c;
    c.seqlen_q = c.seqlen_kv = 2200, c.heads = 2, c.dim_qk = c.dim_v = 40, c.causal = c.batch_invariant = true;
    Trial whole(c);
    whole.run();
    for (const int64_t last : {1, 2, 30, 500}) {
        Case d = c;
        d.seqlen_q = last;
        Trial part(d);
        part.k = whole.k, part.v = whole.v;
        for (int64_t h = 0; h < c.heads; ++h) {
            const int64_t dims = last * c.dim_qk;
            std::copy_n(whole.q.begin() + (h * c.seqlen_q + c.seqlen_q - last) * c.dim_qk, dims,
                        part.q.begin() + h * dims);
        }
        part.run();
        for (int64_t h = 0; h < c.heads; ++h) {
            for (int64_t n = 0; n < last * c.dim_v; ++n) {
                ASSERT_EQ(part.o[h * last * c.dim_v + n], whole.o[((h + 1) * c.seqlen_q - last) * c.dim_v + n]) << last;
            }
            for (int64_t i = 0; i < last; ++i)
                ASSERT_EQ(part.lse[h * last + i], whole.lse[(h + 1) * c.seqlen_q - last + i]);
        }
    }
}

// NaN and infinity in keys and values that a row does not see change nothing; where it sees them, they show.
TEST_P(EachIsa, HiddenDataNeverShows) {
    for (const int64_t seqlen_q : {1, 2, 64, 150}) {
        for (const float poison : {kNaN, kInf, -kInf}) {
            Case c;
            c.seqlen_q = seqlen_q, c.seqlen_kv = 150, c.heads = 1, c.dim_qk = c.dim_v = 24, c.causal = true;
            Trial clean(c);
            clean.run();
            Trial dirty(c);
            const int64_t from = 100;  // keys from here on are poisoned
            for (int64_t j = from; j < c.seqlen_kv; ++j) {
                dirty.k[j * c.dim_qk + j % c.dim_qk] = poison;
                dirty.v[j * c.dim_v + j % c.dim_v] = poison;
            }
            dirty.run();
            for (int64_t i = 0; i < seqlen_q; ++i) {
                const bool sees = i + c.seqlen_kv - seqlen_q >= from;
                for (int64_t d = 0; d < c.dim_v; ++d) {
                    if (!sees) ASSERT_EQ(clean.o[i * c.dim_v + d], dirty.o[i * c.dim_v + d]) << i;
                }
                if (sees && std::isnan(poison)) ASSERT_TRUE(std::isnan(dirty.o[i * c.dim_v])) << i;
            }
        }
    }
}

// Values only: a visible NaN in V reaches its own column and nothing else of the rows that see it.
TEST_P(EachIsa, VisibleNanInValues) {
    for (const int64_t seqlen_q : {1, 60}) {
        Case c;
        c.seqlen_q = seqlen_q, c.seqlen_kv = 60, c.heads = 1, c.dim_qk = c.dim_v = 24, c.causal = true;
        Trial clean(c);
        clean.run();
        Trial dirty(c);
        const int64_t j = 30, column = 5;
        dirty.v[j * c.dim_v + column] = kNaN;
        dirty.run();
        for (int64_t i = 0; i < seqlen_q; ++i) {
            const bool sees = i + c.seqlen_kv - seqlen_q >= j;
            for (int64_t d = 0; d < c.dim_v; ++d) {
                const double got = dirty.o[i * c.dim_v + d];
                if (sees && d == column) EXPECT_TRUE(std::isnan(got));
                else EXPECT_NEAR(got, clean.o[i * c.dim_v + d], 1e-5);
            }
        }
    }
}

// A NaN or infinite score makes its own row NaN and leaves the others as they were.
TEST_P(EachIsa, NanScoreStaysInItsRow) {
    for (const float poison : {kNaN, kInf}) {
        Case c;
        c.seqlen_q = 30, c.seqlen_kv = 1500, c.heads = 1, c.dim_qk = c.dim_v = 16, c.bias = true;
        Trial clean(c), dirty(c);
        dirty.bias[7 * c.seqlen_kv + 200] = poison;
        clean.run(), dirty.run();
        for (int64_t i = 0; i < c.seqlen_q; ++i) {
            for (int64_t d = 0; d < c.dim_v; ++d) {
                if (i == 7) EXPECT_TRUE(std::isnan(dirty.o[i * c.dim_v + d]));
                else EXPECT_EQ(dirty.o[i * c.dim_v + d], clean.o[i * c.dim_v + d]);
            }
            EXPECT_EQ(std::isnan(dirty.lse[i]), i == 7);
        }
    }
}

// A bias of -FLT_MAX everywhere is not -inf: such a row is the mean of the values.
TEST_P(EachIsa, LargeFiniteScores) {
    Case c;
    c.seqlen_q = 3, c.seqlen_kv = 300, c.heads = 1, c.dim_qk = c.dim_v = 16, c.bias = true;
    Trial trial(c);
    for (float& x : trial.bias) x = std::numeric_limits<float>::lowest();
    trial.run();
    for (int64_t d = 0; d < c.dim_v; ++d) {
        double mean = 0;
        for (int64_t j = 0; j < c.seqlen_kv; ++j) mean += trial.v[j * c.dim_v + d] / double(c.seqlen_kv);
        EXPECT_NEAR(trial.o[d], mean, 1e-5);
    }
}

}  // namespace
}  // namespace tilewise
