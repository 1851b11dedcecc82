// The oracle itself: hand-computed cases, finite differences of every gradient, and the promises about empty rows, NaN
// and hidden data.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "cpu/reference.hpp"
#include "reference_case.hpp"

namespace tilewise::test::oracle {
namespace {

using core::DType;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Tensor make(DType dtype, std::vector<int64_t> shape, std::initializer_list<double> values) {
    Tensor tensor(dtype, std::move(shape));
    int64_t n = 0;
    for (double value : values) tensor.set(n++, value);
    return tensor;
}

// One head, dims 1, scale 1: queries and keys are numbers.
std::unique_ptr<Case> scalar_case(std::initializer_list<double> q, std::initializer_list<double> k,
                                  std::initializer_list<double> v, DType dtype = DType::f64) {
    auto c = std::make_unique<Case>();
    c->q = make(dtype, {1, static_cast<int64_t>(q.size()), 1, 1}, q);
    c->k = make(dtype, {1, static_cast<int64_t>(k.size()), 1, 1}, k);
    c->v = make(dtype, {1, static_cast<int64_t>(v.size()), 1, 1}, v);
    return c;
}

Gradients backward(Case& c, const Outputs& out, std::initializer_list<double> d_o,
                   std::initializer_list<double> dlse = {}) {
    Gradients g = make_gradients(c, out, 0, dlse.size() > 0);
    int64_t n = 0;
    for (double value : d_o) g.d_o.set(n++, value);
    n = 0;
    for (double value : dlse) g.dlse.set(n++, value);
    run_backward(c, out, g, cpu::kReference);
    return g;
}

TEST(Reference, TwoKeysByHand) {
    const auto c = scalar_case({1.0}, {0.0, std::log(3.0)}, {10.0, 20.0});
    const Outputs out = run_forward(*c, cpu::kReference);
    EXPECT_NEAR(out.o.at(0), 17.5, 1e-14);  // p = 1/4, 3/4
    EXPECT_NEAR(out.lse.at(0), std::log(4.0), 1e-15);

    // dS_j = p_j (v_j - o + dlse) with do = 1: 1/4 (-7.5 + 2), 3/4 (2.5 + 2)
    const Gradients g = backward(*c, out, {1.0}, {2.0});
    EXPECT_NEAR(g.dv.at(0), 0.25, 1e-15);
    EXPECT_NEAR(g.dv.at(1), 0.75, 1e-15);
    EXPECT_NEAR(g.dk.at(0), -1.375, 1e-14);
    EXPECT_NEAR(g.dk.at(1), 3.375, 1e-14);
    EXPECT_NEAR(g.dq.at(0), 3.375 * std::log(3.0), 1e-14);
}

TEST(Reference, SinkTakesItsShare) {
    const auto c = scalar_case({1.0}, {0.0, std::log(3.0)}, {10.0, 20.0});
    c->sinks = make(DType::f64, {1}, {std::log(4.0)});  // p = 1/8, 3/8, sink 1/2
    const Outputs out = run_forward(*c, cpu::kReference);
    EXPECT_NEAR(out.o.at(0), 8.75, 1e-14);
    EXPECT_NEAR(out.lse.at(0), std::log(8.0), 1e-15);
    const Gradients g = backward(*c, out, {1.0}, {2.0});
    EXPECT_NEAR(g.dsinks.at(0), 0.5 * (2.0 - 8.75), 1e-14);
}

TEST(Reference, OptionsApplyInTheOrderOfTheFormula) {
    const auto c = scalar_case({2.0}, {3.0}, {1.0});
    c->raw.softcap = 4.0;
    c->raw.q_offset_mode = TILEWISE_OFFSET_VALUE, c->raw.q_offset_value = 5;
    c->bias = make(DType::f64, {1, 1}, {0.25});
    c->alibi_slopes = make(DType::f64, {1}, {0.5});
    c->score_mod = "mul(x,x)";
    const Outputs out = run_forward(*c, cpu::kReference);
    const double x = 4.0 * std::tanh(6.0 / 4.0) + 0.25 - 0.5 * 5;
    EXPECT_NEAR(out.lse.at(0), x * x, 1e-14);
}

TEST(Reference, BandsCountFromThePosition) {
    // 2 queries, 4 keys, bottom right: positions 2 and 3. All scores 0, so lse = ln(number of visible keys).
    const auto count = [](const std::function<void(tilewise_problem&)>& set) {
        const auto c = scalar_case({0, 0}, {0, 0, 0, 0}, {0, 0, 0, 0});
        set(c->raw);
        const Outputs out = run_forward(*c, cpu::kReference);
        return std::pair{std::lround(std::exp(out.lse.at(0))), std::lround(std::exp(out.lse.at(1)))};
    };
    EXPECT_EQ(count([](auto&) {}), (std::pair{4L, 4L}));
    EXPECT_EQ(count([](auto& p) { p.causal = 1; }), (std::pair{3L, 4L}));
    EXPECT_EQ(count([](auto& p) { p.window_left = 1; }), (std::pair{3L, 2L}));
    EXPECT_EQ(count([](auto& p) { p.window_left = 0, p.window_right = 0; }), (std::pair{1L, 1L}));
    EXPECT_EQ(count([](auto& p) { p.chunk = 3; }), (std::pair{3L, 1L}));
    EXPECT_EQ(count([](auto& p) { p.causal = 1, p.q_offset_mode = TILEWISE_TOP_LEFT; }), (std::pair{1L, 2L}));
    EXPECT_EQ(count([](auto& p) {
                  p.chunk = 2, p.q_offset_mode = TILEWISE_OFFSET_VALUE, p.q_offset_value = -1;  // chunk -1, chunk 0
              }),
              (std::pair{0L, 2L}));
}

TEST(Reference, EmptyRows) {
    for (const bool with_sink : {false, true}) {
        const auto c = scalar_case({1.0, 2.0}, {1.0}, {kNan});
        c->raw.causal = 1, c->raw.q_offset_mode = TILEWISE_OFFSET_VALUE, c->raw.q_offset_value = -5;
        if (with_sink) c->sinks = make(DType::f64, {1}, {0.5});
        const Outputs out = run_forward(*c, cpu::kReference);
        const Gradients g = backward(*c, out, {kNan, 1.0}, {with_sink ? 3.0 : kNan, 4.0});
        for (int64_t i = 0; i < 2; ++i) {
            EXPECT_EQ(out.o.at(i), 0.0);
            EXPECT_EQ(out.lse.at(i), with_sink ? 0.5 : -kInf);
            EXPECT_EQ(g.dq.at(i), 0.0);
        }
        EXPECT_EQ(g.dk.at(0), 0.0);
        EXPECT_EQ(g.dv.at(0), 0.0);
        EXPECT_TRUE(!with_sink || g.dsinks.at(0) == 7.0);
    }
}

TEST(Reference, ScoreOfMinusInfinityHides) {
    const auto c = scalar_case({1.0}, {1.0, 5.0}, {3.0, kNan});
    c->bias = make(DType::f32, {1, 2}, {0.0, -kInf});
    const Outputs out = run_forward(*c, cpu::kReference);
    EXPECT_EQ(out.o.at(0), 3.0);
    const Gradients g = backward(*c, out, {1.0});
    EXPECT_EQ(g.dv.at(1), 0.0);
    EXPECT_EQ(g.dbias.at(1), 0.0);
    EXPECT_EQ(g.dk.at(0), 0.0);  // one visible key: p does not depend on anything
}

TEST(Reference, HiddenDataIsNotRead) {
    const auto c = scalar_case({1.0, 1.0}, {1.0, 2.0, kNan}, {1.0, 2.0, kInf});
    c->raw.causal = 1, c->raw.q_offset_mode = TILEWISE_TOP_LEFT;
    const Outputs out = run_forward(*c, cpu::kReference);
    const Gradients g = backward(*c, out, {1.0, 1.0});
    for (const Tensor* t : {&out.o, &out.lse, &g.dq, &g.dk, &g.dv}) {
        for (int64_t n = 0; n < t->size(); ++n) EXPECT_TRUE(std::isfinite(t->at(n)));
    }
    EXPECT_EQ(g.dk.at(2), 0.0);
}

TEST(Reference, NanStaysInItsRow) {
    for (const double bad : {kNan, kInf}) {
        const auto c = scalar_case({bad, 1.0}, {1.0, 2.0, 3.0}, {1.0, 2.0, 3.0});
        c->raw.causal = 1;  // query 0 sees keys 0 and 1
        const Outputs out = run_forward(*c, cpu::kReference);
        EXPECT_TRUE(std::isnan(out.o.at(0)) && std::isnan(out.lse.at(0)));
        EXPECT_TRUE(std::isfinite(out.o.at(1)) && std::isfinite(out.lse.at(1)));
        const Gradients g = backward(*c, out, {1.0, 1.0});
        EXPECT_TRUE(std::isnan(g.dq.at(0)) && std::isnan(g.dk.at(0)) && std::isnan(g.dv.at(1)));
        EXPECT_TRUE(std::isfinite(g.dq.at(1)) && std::isfinite(g.dk.at(2)) && std::isfinite(g.dv.at(2)));
    }
}

TEST(Reference, ZeroSizes) {
    const auto run = [](std::vector<int64_t> q, std::vector<int64_t> k, std::vector<int64_t> v) {
        auto c = std::make_unique<Case>();
        std::mt19937_64 random(1);
        for (auto [tensor, shape] : {std::pair{&c->q, &q}, {&c->k, &k}, {&c->v, &v}}) {
            *tensor = Tensor(DType::f32, *shape);
            fill_normal(*tensor, random);
        }
        Outputs out = run_forward(*c, cpu::kReference);
        Gradients g = make_gradients(*c, out, 1, false);
        run_backward(*c, out, g, cpu::kReference);
        return std::pair{out, g};
    };
    run({0, 3, 2, 4}, {0, 3, 2, 4}, {0, 3, 2, 4});
    run({1, 3, 0, 4}, {1, 3, 0, 4}, {1, 3, 0, 4});
    run({1, 0, 2, 4}, {1, 3, 2, 4}, {1, 3, 2, 4});
    run({1, 3, 2, 4}, {1, 3, 2, 4}, {1, 3, 2, 0});
    const auto [no_keys, g0] = run({1, 3, 2, 4}, {1, 0, 2, 4}, {1, 0, 2, 4});
    for (int64_t n = 0; n < no_keys.o.size(); ++n) EXPECT_EQ(no_keys.o.at(n), 0.0);
    for (int64_t n = 0; n < no_keys.lse.size(); ++n) EXPECT_EQ(no_keys.lse.at(n), -kInf);
    for (int64_t n = 0; n < g0.dq.size(); ++n) EXPECT_EQ(g0.dq.at(n), 0.0);
    const auto [no_dims, g1] = run({1, 3, 2, 0}, {1, 5, 2, 0}, {1, 5, 2, 4});
    for (int64_t n = 0; n < no_dims.lse.size(); ++n) EXPECT_FLOAT_EQ(no_dims.lse.at(n), std::log(5.0f));
}

// ---------------------------------------------------------------------------------------------------------------------
// Finite differences

// Loss = sum o * do + sum of finite lse * dlse.
double loss(Case& c, const Gradients& g) {
    const Outputs out = run_forward(c, cpu::kReference);
    double sum = 0;
    for (int64_t n = 0; n < out.o.size(); ++n) sum += out.o.at(n) * g.d_o.at(n);
    for (int64_t n = 0; g.dlse && n < out.lse.size(); ++n) {
        if (std::isfinite(out.lse.at(n))) sum += out.lse.at(n) * g.dlse.at(n);
    }
    return sum;
}

// The derivative along a random direction, and of three single elements, against the gradient.
void check_gradient(Case& c, Tensor& input, const Tensor& gradient, const Gradients& g, const char* name,
                    std::mt19937_64& random) {
    if (!input || input.size() == 0 || !core::is_float(input.dtype())) return;
    ASSERT_EQ(input.dtype(), DType::f64);
    Tensor direction(DType::f64, {input.size()});
    for (int trial = 0; trial < 4; ++trial) {
        if (trial == 0) {
            fill_normal(direction, random);
        } else {
            direction.fill(0);
            direction.set(std::uniform_int_distribution<int64_t>(0, input.size() - 1)(random), 1.0);
        }
        const Tensor saved = input.copy();
        const auto moved = [&](double step) {
            for (int64_t n = 0; n < input.size(); ++n) {
                if (direction.at(n) != 0) input.set(n, saved.at(n) + step * direction.at(n));
            }
            const double value = loss(c, g);
            for (int64_t n = 0; n < input.size(); ++n) input.set(n, saved.at(n));
            return value;
        };
        // Fourth-order central difference: error about step^4 and 1e-16 / step.
        const double step = 1e-3;
        const double numeric = (8 * (moved(step) - moved(-step)) - (moved(2 * step) - moved(-2 * step))) / (12 * step);
        double analytic = 0, size = 0;
        for (int64_t n = 0; n < input.size(); ++n) {
            if (direction.at(n) == 0) continue;
            analytic += direction.at(n) * gradient.at(n);
            size += std::abs(direction.at(n) * gradient.at(n));
        }
        EXPECT_NEAR(analytic, numeric, 2e-7 * (1 + size)) << name << (trial ? ", one element" : ", random direction");
    }
}

TEST(Reference, FiniteDifferences) {
    CaseSpace space;
    space.dtype = DType::f64;
    space.max_seqlen = 12, space.max_head_dim = 5, space.smooth = true;
    for (uint64_t seed = 0; seed < 300; ++seed) {
        const auto c = random_case(seed, space);
        SCOPED_TRACE("seed " + std::to_string(seed) + ": " + c->describe());
        const Outputs out = run_forward(*c, cpu::kReference);
        Gradients g = make_gradients(*c, out, seed, seed % 2 == 0);
        run_backward(*c, out, g, cpu::kReference);
        std::mt19937_64 random(seed);
        check_gradient(*c, c->q, g.dq, g, "dq", random);
        check_gradient(*c, c->k, g.dk, g, "dk", random);
        check_gradient(*c, c->v, g.dv, g, "dv", random);
        check_gradient(*c, c->bias, g.dbias, g, "dbias", random);
        check_gradient(*c, c->alibi_slopes, g.dalibi_slopes, g, "dalibi_slopes", random);
        check_gradient(*c, c->sinks, g.dsinks, g, "dsinks", random);
        for (size_t n = 0; n < c->arrays.size(); ++n)
            check_gradient(*c, c->arrays[n], g.darrays[n], g, "darray", random);
        if (HasFailure()) break;
    }
}

TEST(Reference, UnusedRowsAreZero) {
    const auto c = std::make_unique<Case>();
    std::mt19937_64 random(3);
    for (Tensor* tensor : {&c->q, &c->k, &c->v}) {
        *tensor = Tensor(DType::f32, {9, 2, 4});
        fill_normal(*tensor, random);
    }
    c->cu_seqlens_q = make(DType::i32, {3}, {1, 4, 7});
    c->cu_seqlens_kv = make(DType::i32, {3}, {0, 4, 8});
    c->seqused_q = make(DType::i32, {2}, {2, 3});
    c->seqused_kv = make(DType::i32, {2}, {3, 4});
    c->leftpad_kv = make(DType::i32, {2}, {1, 0});
    const Outputs out = run_forward(*c, cpu::kReference);
    Gradients g = make_gradients(*c, out, 1, false);
    run_backward(*c, out, g, cpu::kReference);
    const auto row_is_zero = [](const Tensor& tensor, int64_t row) {
        for (int64_t n = 0; n < 8; ++n) {
            if (tensor.at(row * 8 + n) != 0) return false;
        }
        return true;
    };
    for (int64_t row = 0; row < 9; ++row) {
        const bool q_used = row == 1 || row == 2 || (row >= 4 && row < 7);
        const bool kv_used = row == 1 || row == 2 || (row >= 4 && row < 8);
        EXPECT_EQ(row_is_zero(out.o, row), !q_used) << row;
        EXPECT_EQ(row_is_zero(g.dq, row), !q_used) << row;
        EXPECT_EQ(row_is_zero(g.dk, row), !kv_used) << row;
        EXPECT_EQ(row_is_zero(g.dv, row), !kv_used) << row;
        EXPECT_EQ(out.lse.at(row) == -kInf, !q_used) << row;
    }
}

TEST(Reference, ProbabilitiesOfChosenRows) {
    const auto c = scalar_case({1.0, 0.0}, {0.0, std::log(3.0), 7.0}, {0, 0, 0});
    c->raw.causal = 1;
    const core::Problem p = c->problem();
    Tensor out(DType::f64, {1, 1, 2, 3});
    const int64_t rows[] = {1, 0}, heads[] = {0};
    cpu::attn_probs(p, {}, rows, heads, core::make_array(out.view(), "out"));
    const double expected[] = {1.0 / 3, 1.0 / 3, 1.0 / 3, 0.25, 0.75, 0.0};
    for (int64_t n = 0; n < 6; ++n) EXPECT_NEAR(out.at(n), expected[n], 1e-15);
}

}  // namespace
}  // namespace tilewise::test::oracle
