// The shortest useful program: causal attention with grouped heads, forward and backward.
#include <cstdio>
#include <random>
#include <vector>

#include <tilewise/tilewise.hpp>

int main() {
    constexpr int64_t kBatch = 2, kSeqlen = 512, kHeadsQ = 8, kHeadsKv = 2, kHeadDim = 64;
    std::mt19937 generator(0);
    std::normal_distribution<float> normal;
    const auto random = [&](int64_t n) {
        std::vector<float> values(static_cast<size_t>(n));
        for (float& value : values) value = normal(generator);
        return values;
    };
    std::vector<float> q = random(kBatch * kSeqlen * kHeadsQ * kHeadDim),
                       k = random(kBatch * kSeqlen * kHeadsKv * kHeadDim);
    std::vector<float> v = random(kBatch * kSeqlen * kHeadsKv * kHeadDim),
                       d_o = random(kBatch * kSeqlen * kHeadsQ * kHeadDim);
    std::vector<float> o(q.size()), lse(kBatch * kHeadsQ * kSeqlen), dq(q.size()), dk(k.size()), dv(v.size());

    const tilewise::Tensor tq(q.data(), {kBatch, kSeqlen, kHeadsQ, kHeadDim}),
        tk(k.data(), {kBatch, kSeqlen, kHeadsKv, kHeadDim});
    const tilewise::Tensor tv(v.data(), {kBatch, kSeqlen, kHeadsKv, kHeadDim}),
        to(o.data(), {kBatch, kSeqlen, kHeadsQ, kHeadDim});
    const tilewise::Tensor tlse(lse.data(), {kBatch, kHeadsQ, kSeqlen});

    tilewise::Options options;
    options.causal = true;
    options.score_mod = [](auto x, auto, auto, auto i, auto j, auto) { return x - 0.01 * tilewise::abs(i - j); };
    tilewise::attention(tq, tk, tv, to, options, tlse);

    tilewise::Gradients gradients;
    gradients.dq = tilewise::Tensor(dq.data(), {kBatch, kSeqlen, kHeadsQ, kHeadDim});
    gradients.dk = tilewise::Tensor(dk.data(), {kBatch, kSeqlen, kHeadsKv, kHeadDim});
    gradients.dv = tilewise::Tensor(dv.data(), {kBatch, kSeqlen, kHeadsKv, kHeadDim});
    const tilewise::Tensor tdo(d_o.data(), {kBatch, kSeqlen, kHeadsQ, kHeadDim});
    tilewise::attention_backward(tdo, tq, tk, tv, to, tlse, gradients, options);

    std::printf("o[0] = %.6f  lse[0] = %.6f  dq[0] = %.6f\n", o[0], lse[0], dq[0]);
    const tilewise::Plan plan(tilewise::Problem(tq, tk, tv, options));
    std::printf("%s", plan.explain().c_str());
}
