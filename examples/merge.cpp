// Keys in several places, as on several machines: attention over each part, and the parts merged into the exact whole.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include <tilewise/tilewise.hpp>

int main() {
    constexpr int64_t kHeads = 4, kSeqlenQ = 32, kKeys = 100, kParts = 3, kHeadDim = 64, kRows = kHeads * kSeqlenQ;
    std::mt19937 generator(0);
    std::normal_distribution<float> normal;
    const auto random = [&](int64_t n) {
        std::vector<float> values(static_cast<size_t>(n));
        for (float& value : values) value = normal(generator);
        return values;
    };
    std::vector<float> q = random(kRows * kHeadDim), k = random(kHeads * kParts * kKeys * kHeadDim);
    std::vector<float> v = random(kHeads * kParts * kKeys * kHeadDim);
    std::vector<float> o_parts(kParts * kRows * kHeadDim), lse_parts(kParts * kRows);
    std::vector<float> o(kRows * kHeadDim), lse(kRows), whole(o.size()), whole_lse(lse.size());

    // [batch, heads, tokens, head_dim]: rows of o in the order of lse.
    tilewise::Options options;
    options.layout = tilewise::Layout::bhsd;
    const auto rows = [](float* o_rows) { return tilewise::Tensor(o_rows, {1, kHeads, kSeqlenQ, kHeadDim}); };
    const auto sums = [](float* lse_rows) { return tilewise::Tensor(lse_rows, {1, kHeads, kSeqlenQ}); };
    const auto keys = [](std::vector<float>& x, int64_t first, int64_t count) {
        constexpr int64_t kAll = kParts * kKeys * kHeadDim;
        return tilewise::Tensor(x.data() + first * kHeadDim, {1, kHeads, count, kHeadDim},
                                {kHeads * kAll, kAll, kHeadDim, 1});
    };

    for (int64_t part = 0; part < kParts; ++part) {
        tilewise::attention(rows(q.data()), keys(k, part * kKeys, kKeys), keys(v, part * kKeys, kKeys),
                            rows(&o_parts[static_cast<size_t>(part * kRows * kHeadDim)]), options,
                            sums(&lse_parts[static_cast<size_t>(part * kRows)]));
    }
    const tilewise::Tensor to_parts(o_parts.data(), {kParts, kRows, kHeadDim}), to(o.data(), {kRows, kHeadDim});
    const tilewise::Tensor tlse_parts(lse_parts.data(), {kParts, kRows}), tlse(lse.data(), {kRows});
    if (tilewise_merge(&to_parts.c(), &tlse_parts.c(), &to.c(), &tlse.c()) != TILEWISE_OK) {
        std::fprintf(stderr, "%s\n", tilewise_last_error());
        return EXIT_FAILURE;
    }

    tilewise::attention(rows(q.data()), keys(k, 0, kParts * kKeys), keys(v, 0, kParts * kKeys), rows(whole.data()),
                        options, sums(whole_lse.data()));
    float error = 0;
    for (size_t n = 0; n < o.size(); ++n) error = std::max(error, std::abs(o[n] - whole[n]));
    for (size_t n = 0; n < lse.size(); ++n) error = std::max(error, std::abs(lse[n] - whole_lse[n]));
    std::printf("%ld parts of %ld keys, merged: largest difference from the whole %.1e\n", static_cast<long>(kParts),
                static_cast<long>(kKeys), static_cast<double>(error));
    return error < 1e-5f ? EXIT_SUCCESS : EXIT_FAILURE;
}
