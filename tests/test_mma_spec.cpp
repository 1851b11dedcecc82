// Tile choices of the tensor-core kernels: what every arch can run, whatever the head dim.
#include <gtest/gtest.h>

#include <cstring>

#include "core/problem.hpp"
#include "jit/mma_spec.hpp"

namespace tilewise {
namespace {

using core::Problem;

struct Sizes {
    int64_t batch = 2, head_dim = 64, seqlen_q = 2048, seqlen_kv = 2048, heads_q = 8, heads_kv = 8;
    int32_t dtype = TILEWISE_FLOAT16;
    bool causal = false;
    const char* mask = nullptr;
    double softmax_scale = 0.1;
};

Problem problem_of(const Sizes& sizes) {
    tilewise_problem raw;
    std::memset(&raw, 0, sizeof raw);
    raw.struct_size = sizeof raw, raw.abi_version = TILEWISE_ABI_VERSION;
    const auto tensor = [&](int64_t seqlen, int64_t heads) {
        tilewise_tensor t{};
        t.dtype = sizes.dtype, t.rank = 4;
        const int64_t shape[] = {sizes.batch, seqlen, heads, sizes.head_dim};
        int64_t stride = 1;
        for (int n = 3; n >= 0; --n) t.shape[n] = shape[n], t.strides[n] = stride, stride *= shape[n];
        return t;
    };
    raw.q = tensor(sizes.seqlen_q, sizes.heads_q);
    raw.k = raw.v = tensor(sizes.seqlen_kv, sizes.heads_kv);
    raw.causal = sizes.causal, raw.window_left = raw.window_right = -1;
    raw.mask = sizes.mask;
    raw.softmax_scale = sizes.softmax_scale, raw.has_softmax_scale = 1;
    raw.device_type = TILEWISE_CUDA;
    return core::make_problem(raw, false);
}

std::optional<jit::MmaForwardSpec> spec_of(const Sizes& sizes, const char* arch, std::string* why_not = nullptr) {
    const Problem p = problem_of(sizes);
    return jit::mma_forward_spec(p, jit::render_mask(p), jit::Arch::parse(arch), why_not);
}

TEST(MmaSpec, EveryArchRunsEveryHeadDimWithinItsSharedMemory) {
    const std::pair<const char*, int64_t> archs[] = {{"75", 64},  {"80", 163},  {"86", 99}, {"89", 99},
                                                     {"90", 227}, {"100", 227}, {"120", 99}};
    for (const auto& [arch, kilobytes] : archs) {
        for (int64_t head_dim = 1; head_dim <= 576; ++head_dim) {
            Sizes sizes;
            sizes.head_dim = head_dim;
            std::string why_not;
            const auto spec = spec_of(sizes, arch, &why_not);
            if (!spec) {  // only the smallest shared memory, only beyond what the issue of speed is about
                EXPECT_STREQ(arch, "75") << head_dim << ": " << why_not;
                EXPECT_GT(head_dim, 256);
                EXPECT_NE(why_not.find("shared memory"), std::string::npos) << why_not;
                continue;
            }
            EXPECT_LE(spec->shared_bytes(), kilobytes * 1024) << arch << " " << head_dim;
            EXPECT_GE(spec->dims_qk, head_dim);
            EXPECT_EQ(spec->dims_qk % 16 + spec->columns % 16 + spec->keys % 16, 0);
            EXPECT_GE(spec->warps, 1);
            EXPECT_LE(spec->read_ahead, spec->keys / 16) << arch << " " << head_dim;
        }
    }
}

TEST(MmaSpec, SaysWhyNot) {
    std::string why_not;
    Sizes sizes;
    sizes.dtype = TILEWISE_FLOAT32;
    EXPECT_FALSE(spec_of(sizes, "90", &why_not));
    EXPECT_NE(why_not.find("float32"), std::string::npos) << why_not;
    sizes.dtype = TILEWISE_BFLOAT16;
    EXPECT_FALSE(spec_of(sizes, "75", &why_not));
    EXPECT_NE(why_not.find("float16 works"), std::string::npos) << why_not;
    EXPECT_TRUE(spec_of(sizes, "80", &why_not));
    EXPECT_FALSE(spec_of(sizes, "70", &why_not));
    sizes.head_dim = 577;
    EXPECT_FALSE(spec_of(sizes, "90", &why_not));
    EXPECT_NE(why_not.find("577"), std::string::npos) << why_not;
}

TEST(MmaSpec, FewBlocksShareTheKeysOrTheQueries) {
    const auto layout_of = [](int64_t seqlen_q, int64_t seqlen_kv, int num_sms) {
        Sizes sizes;
        sizes.batch = 1, sizes.seqlen_q = seqlen_q, sizes.seqlen_kv = seqlen_kv, sizes.heads_q = sizes.heads_kv = 12;
        sizes.head_dim = 64;
        const Problem p = problem_of(sizes);
        const auto spec = spec_of(sizes, "90");
        return jit::mma_forward_layout(p, spec.value(), num_sms, jit::shared_limit(jit::Arch::parse("90")));
    };
    // 12 blocks of 126 queries: all SMs get some of the keys, every key once.
    const auto split = layout_of(126, 15360, 132);
    EXPECT_GE(split.splits * 12, 132);
    EXPECT_TRUE(split.spec.split);
    EXPECT_GE(split.splits * split.keys_per_split, 15360);
    EXPECT_LT((split.splits - 1) * split.keys_per_split, 15360);
    EXPECT_EQ(split.keys_per_split % split.spec.keys, 0);
    // Too few keys to split: blocks of half the queries.
    const auto full = layout_of(512, 512, 8), few = layout_of(512, 512, 132);
    EXPECT_EQ(few.splits, 1);
    EXPECT_EQ(few.spec.rows() * 2, full.spec.rows());
    EXPECT_EQ(few.q_tile, few.spec.rows());
    // Work enough: nothing changes.
    EXPECT_EQ(layout_of(16384, 16384, 132).splits, 1);
    EXPECT_EQ(layout_of(16384, 16384, 132).spec.rows(), full.spec.rows());
}

TEST(MmaSpec, FewQueriesOfAGroupShareATile) {
    Sizes decode;
    decode.seqlen_q = 1, decode.heads_q = 32;
    const auto packed = spec_of(decode, "90");
    ASSERT_TRUE(packed);
    EXPECT_TRUE(packed->pack_gqa);
    EXPECT_EQ(packed->rows(), 16);  // 4 heads, one fragment
    decode.seqlen_q = 2048;
    EXPECT_FALSE(spec_of(decode, "90")->pack_gqa);
}

TEST(MmaSpec, ProductsAreTakenAsTheyAreOnlyWithAPositiveScale) {
    Sizes sizes;
    EXPECT_TRUE(spec_of(sizes, "90")->raw);
    for (const double scale : {0.0, -0.1}) {
        sizes.softmax_scale = scale;
        EXPECT_FALSE(spec_of(sizes, "90")->raw) << scale;
    }
}

}  // namespace
}  // namespace tilewise
