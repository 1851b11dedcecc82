// What the tiled backward pass promises beyond values (those are compared in test_backends.cpp): values that are not
// finite go where the formula sends them and nowhere else, hidden data changes no bit, outputs that are not wanted
// change nothing, and lse and o of a merged result give the gradients of the merged result.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

#include "cpu/cpu_tiled.hpp"
#include "cpu/reference.hpp"
#include "reference_case.hpp"

namespace tilewise::test::oracle {
namespace {

using core::DType;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<std::pair<const char*, const Tensor*>> outputs_of(const Gradients& g) {
    std::vector<std::pair<const char*, const Tensor*>> all{
        {"dq", &g.dq},        {"dk", &g.dk}, {"dv", &g.dv}, {"dbias", &g.dbias}, {"dalibi_slopes", &g.dalibi_slopes},
        {"dsinks", &g.dsinks}};
    for (const Tensor& array : g.darrays) all.emplace_back("darray", &array);
    std::erase_if(all, [](const auto& entry) { return !*entry.second; });
    return all;
}

Gradients run(Case& c, const core::Implementation& implementation, uint64_t seed, bool with_dlse,
              const std::function<void(Gradients&)>& change = {}) {
    const Outputs out = run_forward(c, implementation);
    Gradients g = make_gradients(c, out, seed, with_dlse);
    if (change) change(g);
    run_backward(c, out, g, implementation);
    return g;
}

bool same_value(double a, double b, double tolerance) {
    if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
    if (std::isinf(a) || std::isinf(b)) return a == b;
    return std::abs(a - b) <= tolerance;
}

void spoil(Tensor& tensor, std::mt19937_64& random, double value, int count) {
    for (int n = 0; tensor && tensor.size() > 0 && n < count; ++n) {
        tensor.set(std::uniform_int_distribution<int64_t>(0, tensor.size() - 1)(random), value);
    }
}

// NaN and inf anywhere in q, k, v, do and dlse, any options: the same elements are spoilt as in the reference, and all
// others agree.
TEST(Backward, OddValuesGoWhereTheFormulaSays) {
    for (uint64_t seed = 0; seed < 120; ++seed) {
        CaseSpace space;
        space.dtype = seed % 2 ? DType::f32 : DType::f64;
        space.max_seqlen = seed % 3 == 0 ? 260 : 40;
        const auto c = random_case(seed, space);
        std::mt19937_64 random(seed);
        const double bad = seed % 4 < 2 ? kNan : seed % 8 < 4 ? kInf : -kInf;
        Tensor* const inputs[] = {&c->q, &c->k, &c->v};
        spoil(*inputs[seed % 3], random, bad, 1 + static_cast<int>(seed % 3));
        const auto change = [&](Gradients& g) {
            std::mt19937_64 again(seed + 1);
            if (seed % 5 == 0) spoil(g.d_o, again, bad, 2);
            if (seed % 7 == 0) spoil(g.dlse, again, bad, 1);
        };
        const Gradients expected = run(*c, cpu::kReference, seed, seed % 2 == 0, change);
        const Gradients got = run(*c, cpu::kCpuTiled, seed, seed % 2 == 0, change);
        const auto a = outputs_of(expected), b = outputs_of(got);
        for (size_t n = 0; n < a.size(); ++n) {
            int64_t wrong = 0;
            for (int64_t k = 0; k < a[n].second->size(); ++k) {
                const double x = a[n].second->at(k), y = b[n].second->at(k);
                if (same_value(x, y, 2e-3 * (1 + std::abs(x)))) continue;
                if (wrong++ < 3) ADD_FAILURE() << a[n].first << "[" << k << "] " << y << " instead of " << x;
            }
            ASSERT_EQ(wrong, 0) << "seed " << seed << ": " << c->describe();
        }
    }
}

// Two runs that differ only in data that nobody sees.
TEST(Backward, HiddenDataChangesNoBit) {
    for (uint64_t seed = 0; seed < 40; ++seed) {
        // Causal from the top left with fewer queries than keys: the last keys are hidden from all, in a partial tile.
        Case c;
        std::mt19937_64 random(seed);
        const int64_t rows = 20 + static_cast<int64_t>(seed) * 7, keys = rows + 5,
                      d = 5 + static_cast<int64_t>(seed % 30);
        c.q = Tensor(DType::f32, {1, rows, 4, d});
        c.k = Tensor(DType::f32, {1, keys, 2, d});
        c.v = Tensor(DType::f32, {1, keys, 2, d});
        for (Tensor* t : {&c.q, &c.k, &c.v}) fill_normal(*t, random);
        c.raw.causal = 1, c.raw.q_offset_mode = TILEWISE_TOP_LEFT;
        // Queries whose row the mask hides altogether: their q and do are hidden, too.
        c.mask = "mod(ne(mod(i,5),3))";
        if (seed % 2) c.raw.softcap = 3;
        const auto set_hidden = [&](double value, Gradients* g) {
            for (int64_t n = rows * 2 * d; n < keys * 2 * d; ++n) c.k.set(n, value), c.v.set(n, value);
            for (int64_t i = 3; i < rows; i += 5) {
                for (int64_t n = i * 4 * d; n < (i + 1) * 4 * d; ++n) {
                    c.q.set(n, value);
                    if (g) g->d_o.set(n, value);
                }
            }
        };
        const auto with = [&](double value) {
            set_hidden(value, nullptr);
            return run(c, cpu::kCpuTiled, seed, true, [&](Gradients& g) { set_hidden(value, &g); });
        };
        const Gradients plain = with(1.0), nan = with(kNan), inf = with(-kInf);
        for (const Gradients* other : {&nan, &inf}) {
            const auto a = outputs_of(plain), b = outputs_of(*other);
            for (size_t n = 0; n < a.size(); ++n) {
                for (int64_t k = 0; k < a[n].second->size(); ++k) {
                    ASSERT_EQ(a[n].second->at(k), b[n].second->at(k)) << a[n].first << "[" << k << "], seed " << seed;
                }
            }
        }
    }
}

TEST(Backward, OutputsThatAreNotWantedChangeNothing) {
    for (uint64_t seed = 0; seed < 60; ++seed) {
        CaseSpace space;
        space.max_seqlen = 150;
        const auto c = random_case(seed, space);
        const Gradients all = run(*c, cpu::kCpuTiled, seed, true);
        const auto names = outputs_of(all);
        for (size_t keep = 0; keep < names.size(); ++keep) {
            const Gradients one = run(*c, cpu::kCpuTiled, seed, true, [&](Gradients& g) {
                auto entries = outputs_of(g);
                for (size_t n = 0; n < entries.size(); ++n) {
                    if (n != keep) *const_cast<Tensor*>(entries[n].second) = Tensor();
                }
            });
            const Tensor& got = *outputs_of(one)[0].second;
            for (int64_t k = 0; k < got.size(); ++k) {
                ASSERT_EQ(got.at(k), names[keep].second->at(k))
                    << names[keep].first << "[" << k << "] alone, seed " << seed << ": " << c->describe();
            }
        }
    }
}

// As ring attention does it: each set of keys on its own, with o and lse of the whole.
TEST(Backward, MergedStatisticsGiveTheGradientsOfTheWhole) {
    for (const DType dtype : {DType::f64, DType::f32}) {
        for (const int64_t split : {1, 60, 128, 200}) {
            constexpr int64_t kRows = 50, kKeys = 230, kHeads = 2, kDim = 16;
            std::mt19937_64 random(7);
            Case whole;
            whole.q = Tensor(dtype, {1, kRows, kHeads, kDim});
            whole.k = Tensor(dtype, {1, kKeys, kHeads, kDim});
            whole.v = Tensor(dtype, {1, kKeys, kHeads, kDim});
            for (Tensor* t : {&whole.q, &whole.k, &whole.v}) fill_normal(*t, random);
            const Outputs out = run_forward(whole, cpu::kCpuTiled);
            Gradients expected = make_gradients(whole, out, 3, true);
            run_backward(whole, out, expected, cpu::kCpuTiled);

            Tensor dq_sum(DType::f64, {1, kRows, kHeads, kDim});
            dq_sum.fill(0);
            for (const core::Range keys : {core::Range{0, split}, core::Range{split, kKeys}}) {
                Case part;
                part.q = whole.q.copy();
                part.k = Tensor(dtype, {1, keys.size(), kHeads, kDim});
                part.v = Tensor(dtype, {1, keys.size(), kHeads, kDim});
                const int64_t first = keys.begin * kHeads * kDim;
                for (int64_t n = 0; n < part.k.size(); ++n) {
                    part.k.set(n, whole.k.at(first + n));
                    part.v.set(n, whole.v.at(first + n));
                }
                part.raw.q_offset_mode = TILEWISE_TOP_LEFT;
                // dlse reaches every key through lse of the whole: each part gets all of it.
                Gradients g = make_gradients(part, out, 3, true);
                run_backward(part, out, g, cpu::kCpuTiled);
                const double tolerance = dtype == DType::f64 ? 1e-12 : 1e-4;
                for (int64_t n = 0; n < part.k.size(); ++n) {
                    ASSERT_NEAR(g.dk.at(n), expected.dk.at(first + n), tolerance) << split;
                    ASSERT_NEAR(g.dv.at(n), expected.dv.at(first + n), tolerance) << split;
                }
                for (int64_t n = 0; n < dq_sum.size(); ++n) dq_sum.set(n, dq_sum.at(n) + g.dq.at(n));
            }
            for (int64_t n = 0; n < dq_sum.size(); ++n) {
                ASSERT_NEAR(dq_sum.at(n), expected.dq.at(n), dtype == DType::f64 ? 1e-12 : 1e-4) << split;
            }
        }
    }
}

// One key: p = 1 whatever q and k are, so dq = dk = 0 exactly and dv = do.
TEST(Backward, OneKeyHasNoScoreGradient) {
    for (const DType dtype : {DType::f64, DType::f32, DType::f16, DType::bf16}) {
        Case c;
        std::mt19937_64 random(5);
        for (Tensor* t : {&c.q, &c.k, &c.v}) *t = Tensor(dtype, {1, 1, 1, 16}), fill_normal(*t, random);
        const Gradients g = run(c, cpu::kCpuTiled, 1, false, [](Gradients& x) { x.d_o.fill(1); });
        for (int64_t n = 0; n < 16; ++n) {
            EXPECT_EQ(g.dq.at(n), 0.0);
            EXPECT_EQ(g.dk.at(n), 0.0);
            EXPECT_EQ(g.dv.at(n), 1.0);
        }
    }
}

}  // namespace
}  // namespace tilewise::test::oracle
