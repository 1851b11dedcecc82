// tilewise.hpp: what its operators send as text, and that a program written with it computes what it says.
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "tilewise/tilewise.hpp"

namespace {

using tilewise::Expr;

struct Data {
    static constexpr int64_t kSeqlen = 12, kHeads = 2, kDim = 4;
    std::vector<float> q, k, v, o, lse;
    Data() : q(kSeqlen * kHeads * kDim), k(q.size()), v(q.size()), o(q.size()), lse(kHeads * kSeqlen) {
        for (size_t n = 0; n < q.size(); ++n) {
            q[n] = std::sin(0.7f * static_cast<float>(n)), k[n] = std::cos(1.3f * static_cast<float>(n));
            v[n] = std::sin(2.1f * static_cast<float>(n) + 1);
        }
    }
    tilewise::Tensor tensor(std::vector<float>& x) { return {x.data(), {1, kSeqlen, kHeads, kDim}}; }
    tilewise::Tensor lse_tensor() { return {lse.data(), {1, kHeads, kSeqlen}}; }
    void run(const tilewise::Options& options) {
        tilewise::attention(tensor(q), tensor(k), tensor(v), tensor(o), options, lse_tensor());
    }

    // The same, plainly.
    template <class Visible, class Score>
    double expected_lse(int64_t h, int64_t i, Visible visible, Score score) {
        double sum = 0;
        for (int64_t j = 0; j < kSeqlen; ++j) {
            if (!visible(i, j)) continue;
            double x = 0;
            for (int64_t d = 0; d < kDim; ++d)
                x += q[static_cast<size_t>((i * kHeads + h) * kDim + d)] *
                     double{k[static_cast<size_t>((j * kHeads + h) * kDim + d)]};
            sum += std::exp(score(x / 2, h, i, j));
        }
        return std::log(sum);
    }
};

TEST(CppApi, ScoreModAndMaskAsLambdas) {
    Data data;
    std::vector<float> table(Data::kHeads * 24);
    for (size_t n = 0; n < table.size(); ++n) table[n] = std::cos(static_cast<float>(n));
    const tilewise::Captured bias(tilewise::Tensor(table.data(), {Data::kHeads, 24}));
    const Expr strength = tilewise::scalar(0.5);
    tilewise::Options options;
    options.causal = true;
    options.mask = ~tilewise::mod([](auto, auto, auto i, auto j, auto) { return (i - j) % 3 == 1; });
    options.score_mod = [&](auto x, auto, auto h, auto i, auto j, auto) { return x + strength * bias(h, i - j); };
    data.run(options);
    for (int64_t h = 0; h < Data::kHeads; ++h) {
        for (int64_t i = 0; i < Data::kSeqlen; ++i) {
            const double want = data.expected_lse(
                h, i, [](int64_t row, int64_t j) { return j <= row && (row - j) % 3 != 1; },
                [&](double x, int64_t head, int64_t row, int64_t j) {
                    return x + 0.5 * table[static_cast<size_t>(head * 24 + row - j)];
                });
            EXPECT_NEAR(data.lse[static_cast<size_t>(h * Data::kSeqlen + i)], want, 1e-5) << h << " " << i;
        }
    }
}

TEST(CppApi, MasksCompose) {
    Data data;
    const std::vector<int32_t> ids{0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2};
    tilewise::Options options;
    options.mask = tilewise::documents(tilewise::Tensor(ids.data(), {Data::kSeqlen})) &
                   (tilewise::window(2, 0) | tilewise::prefix(1));
    data.run(options);
    const auto visible = [&](int64_t i, int64_t j) {
        return ids[static_cast<size_t>(i)] == ids[static_cast<size_t>(j)] &&
               ((j <= i && i - 2 <= j) || j < 1 || j <= i);
    };
    for (int64_t i = 0; i < Data::kSeqlen; ++i) {
        EXPECT_NEAR(data.lse[static_cast<size_t>(i)],
                    data.expected_lse(0, i, visible, [](double x, int64_t, int64_t, int64_t) { return x; }), 1e-5)
            << i;
    }
}

TEST(CppApi, PlanRunsWithAWorkspaceOfTheCaller) {
    Data data;
    tilewise::Options options;
    options.causal = true;
    data.run(options);
    const std::vector<float> once = data.o;
    data.o.assign(data.o.size(), 0.0f);
    const tilewise::Problem problem(data.tensor(data.q), data.tensor(data.k), data.tensor(data.v), options);
    const tilewise::Plan plan(problem);
    EXPECT_NE(plan.explain().find("causal"), std::string::npos) << plan.explain();
    std::vector<char> memory(plan.workspace_bytes() + 64);
    void* workspace = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    plan.forward(problem, data.tensor(data.o), data.lse_tensor(), workspace, plan.workspace_bytes());
    EXPECT_EQ(data.o, once);
}

TEST(CppApi, ErrorsAreExceptions) {
    Data data;
    tilewise::Options options;
    options.window_left = -5;
    try {
        data.run(options);
        FAIL();
    } catch (const tilewise::Error& error) {
        EXPECT_EQ(error.status(), TILEWISE_INVALID_ARGUMENT);
        EXPECT_NE(std::string(error.what()).find("-5"), std::string::npos);
    }
    EXPECT_THROW(tilewise::Tensor(data.q.data(), {2, 2}, {1}), tilewise::Error);
}

}  // namespace
