// Masks of the library's, a mask and a score function of one's own, and the gradient of the array that it reads.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include <tilewise/tilewise.hpp>

int main() {
    constexpr int64_t kSeqlen = 48, kHeads = 2, kHeadDim = 16, kDocument = 20;
    constexpr int kReach = 8;
    std::mt19937 generator(0);
    std::normal_distribution<float> normal;
    const auto random = [&](int64_t n) {
        std::vector<float> values(static_cast<size_t>(n));
        for (float& value : values) value = normal(generator);
        return values;
    };
    std::vector<float> q = random(kSeqlen * kHeads * kHeadDim), k = random(kSeqlen * kHeads * kHeadDim);
    std::vector<float> v = random(kSeqlen * kHeads * kHeadDim), o(q.size()), lse(kHeads * kSeqlen);
    std::array<float, kHeads> slopes = {0.5f, 0.1f}, dslopes{};
    std::vector<int32_t> document(kSeqlen);
    for (int64_t i = 0; i < kSeqlen; ++i) document[static_cast<size_t>(i)] = static_cast<int32_t>(i / kDocument);
    const auto view = [&](std::vector<float>& x) { return tilewise::Tensor(x.data(), {1, kSeqlen, kHeads, kHeadDim}); };

    // Earlier keys of the same document, and of those the near ones and every third.
    tilewise::Options options;
    options.mask = tilewise::causal() & tilewise::documents(tilewise::Tensor(document.data(), {1, kSeqlen})) &
                   tilewise::mod([](auto, auto, auto i, auto j, auto) { return i - j < kReach || j % 3 == 0; });
    // Scores fall with the distance, at a slope that each head learns.
    const tilewise::Captured slope{tilewise::Tensor(slopes.data(), {kHeads})};
    options.score_mod = [&](auto x, auto, auto h, auto i, auto j, auto) { return x - slope(h) * tilewise::abs(i - j); };

    const tilewise::Tensor tlse(lse.data(), {1, kHeads, kSeqlen});
    tilewise::attention(view(q), view(k), view(v), view(o), options, tlse);

    std::vector<float> ones(o.size(), 1.0f);  // the gradient of the sum of o
    tilewise::Gradients gradients;
    gradients.arrays = {{}, tilewise::Tensor(dslopes.data(), {kHeads})};  // document numbers have none
    tilewise::attention_backward(view(ones), view(q), view(k), view(v), view(o), tlse, gradients, options);

    // The same by the textbook: o, and what its sum owes to each slope.
    double error = 0;
    for (int h = 0; h < kHeads; ++h) {
        const double slope_h = slopes.at(h);
        double dslope = 0;
        for (int64_t i = 0; i < kSeqlen; ++i) {
            const auto row = [&](const std::vector<float>& x, int64_t token) {
                return x.data() + (token * kHeads + h) * kHeadDim;
            };
            std::array<double, kHeadDim> mean{};
            double sum = 0, distances = 0, products = 0;
            for (int64_t j = 0; j <= i; ++j) {
                const auto distance = static_cast<double>(i - j);
                if (i / kDocument != j / kDocument || (i - j >= kReach && j % 3 != 0)) continue;
                double score = 0, total = 0;
                for (int d = 0; d < kHeadDim; ++d) {
                    score += static_cast<double>(row(q, i)[d]) * row(k, j)[d];
                    total += row(v, j)[d];
                }
                const double p = std::exp(score / std::sqrt(double{kHeadDim}) - slope_h * distance);
                for (int d = 0; d < kHeadDim; ++d) mean.at(d) += p * row(v, j)[d];
                sum += p, distances += p * distance, products += p * distance * total;
            }
            double total = 0;
            for (int d = 0; d < kHeadDim; ++d) {
                error = std::max(error, std::abs(mean.at(d) / sum - row(o, i)[d]));
                total += mean.at(d) / sum;
            }
            dslope += total * distances / sum - products / sum;
        }
        error = std::max(error, std::abs(dslope - dslopes.at(h)) / 10);
        std::printf("gradient of slope %d: %.4f, by the textbook %.4f\n", h, dslopes.at(h), dslope);
    }
    std::printf("largest error %.1e\n", error);
    return error < 1e-5 ? EXIT_SUCCESS : EXIT_FAILURE;
}
