// The C ABI as a stranger meets it: every bad input gets one clear error, and nothing is written.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "tilewise/tilewise.h"

namespace {

struct CApi : testing::Test {
    std::vector<float> q = std::vector<float>(2 * 5 * 4 * 8, 0.5f), k = std::vector<float>(2 * 7 * 2 * 8, 0.25f), v = k;
    std::vector<float> o = std::vector<float>(q.size(), -7.0f), lse = std::vector<float>(2 * 4 * 5, -7.0f);
    tilewise_problem problem;
    tilewise_forward_args args;

    static tilewise_tensor tensor(void* data, tilewise_dtype dtype, std::vector<int64_t> shape) {
        tilewise_tensor t{};
        t.data = data;
        t.dtype = dtype;
        t.rank = static_cast<int32_t>(shape.size());
        int64_t stride = 1;
        for (size_t d = shape.size(); d-- > 0;) {
            t.shape[d] = shape[d], t.strides[d] = stride;
            stride *= shape[d];
        }
        return t;
    }

    void SetUp() override {
        tilewise_problem_init(&problem);
        tilewise_forward_args_init(&args);
        problem.q = tensor(q.data(), TILEWISE_FLOAT32, {2, 5, 4, 8});
        problem.k = tensor(k.data(), TILEWISE_FLOAT32, {2, 7, 2, 8});
        problem.v = tensor(v.data(), TILEWISE_FLOAT32, {2, 7, 2, 8});
        args.o = tensor(o.data(), TILEWISE_FLOAT32, {2, 5, 4, 8});
        args.lse = tensor(lse.data(), TILEWISE_FLOAT32, {2, 4, 5});
    }

    // Refused with a message that has all these parts, outputs untouched.
    void refused(std::vector<std::string> parts, tilewise_status status = TILEWISE_INVALID_ARGUMENT) {
        EXPECT_EQ(tilewise_forward(&problem, &args), status);
        const std::string message = tilewise_last_error();
        for (const std::string& part : parts)
            EXPECT_NE(message.find(part), std::string::npos) << part << " not in: " << message;
        for (const float x : o) ASSERT_EQ(x, -7.0f) << message;
        for (const float x : lse) ASSERT_EQ(x, -7.0f) << message;
    }
};

TEST_F(CApi, RunsAndClearsTheError) {
    EXPECT_EQ(tilewise_forward(nullptr, &args), TILEWISE_INVALID_ARGUMENT);
    EXPECT_STRNE(tilewise_last_error(), "");
    ASSERT_EQ(tilewise_forward(&problem, &args), TILEWISE_OK) << tilewise_last_error();
    EXPECT_STREQ(tilewise_last_error(), "");
    for (const float x : o) EXPECT_NEAR(x, 0.25f, 1e-6);  // all values equal: any average of them is 0.25
}

TEST_F(CApi, NullPointers) {
    EXPECT_EQ(tilewise_forward(&problem, nullptr), TILEWISE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(tilewise_last_error()).find("args"), std::string::npos);
    EXPECT_EQ(tilewise_plan_create(&problem, TILEWISE_FORWARD, nullptr), TILEWISE_INVALID_ARGUMENT);
    EXPECT_EQ(tilewise_plan_forward(nullptr, &problem, &args, nullptr, 0, nullptr), TILEWISE_INVALID_ARGUMENT);
    size_t bytes = 0;
    EXPECT_EQ(tilewise_plan_workspace_size(nullptr, &bytes), TILEWISE_INVALID_ARGUMENT);
    EXPECT_EQ(tilewise_merge(nullptr, nullptr, nullptr, nullptr), TILEWISE_INVALID_ARGUMENT);
    EXPECT_EQ(tilewise_dropout_mask(0, 0, 0.5, nullptr), TILEWISE_INVALID_ARGUMENT);
    tilewise_plan_destroy(nullptr);
    problem.q.data = nullptr;
    refused({"q", "null"});
}

TEST_F(CApi, StructSizeAndVersion) {
    problem.struct_size = 8;
    refused({"struct_size", "8"}, TILEWISE_VERSION_MISMATCH);
    tilewise_problem_init(&problem);
    problem.abi_version = 99;
    refused({"abi_version", "99", "1"}, TILEWISE_VERSION_MISMATCH);
    SetUp();
    args.struct_size = 0;
    refused({"struct_size"}, TILEWISE_VERSION_MISMATCH);
}

TEST_F(CApi, RankAndShape) {
    problem.q.rank = 3;
    refused({"q", "rank 3", "rank 4", "cu_seqlens"});
    SetUp();
    problem.k.shape[3] = 4;
    refused({"k", "head_dim 4", "8"});
    SetUp();
    problem.v.shape[1] = 6;
    refused({"v", "6 rows", "7"});
    SetUp();
    problem.q.shape[1] = -1;
    refused({"q", "-1"});
    SetUp();
    args.o.shape[3] = 7;
    refused({"o", "[2, 5, 4, 7]", "[2, 5, 4, 8]"});
    SetUp();
    args.lse.shape[2] = 4;
    refused({"lse", "[2, 4, 4]", "[2, 4, 5]"});
}

TEST_F(CApi, MixedDtypesNameAllThree) {
    problem.k.dtype = TILEWISE_FLOAT64;
    problem.v.dtype = TILEWISE_BFLOAT16;
    refused({"float32", "float64", "bfloat16"});
    SetUp();
    problem.q.dtype = problem.k.dtype = problem.v.dtype = TILEWISE_INT32;
    refused({"int32"});
    SetUp();
    problem.q.dtype = 77;
    refused({"q", "77"});
}

TEST_F(CApi, HeadRatio) {
    problem.q.shape[2] = 3;
    args.o.shape[2] = 3;
    refused({"3 heads", "2 heads", "multiple"});
}

TEST_F(CApi, OptionValues) {
    problem.window_left = -2;
    refused({"window left", "-2", "-1"});
    SetUp();
    problem.has_softmax_scale = 1;
    problem.softmax_scale = std::numeric_limits<double>::quiet_NaN();
    refused({"softmax_scale", "nan"});
    SetUp();
    problem.softcap = -1;
    refused({"softcap", "-1"});
    for (const double p : {-0.1, 1.0, 1.5, std::numeric_limits<double>::quiet_NaN(), 0.9999999}) {
        SetUp();
        problem.dropout_p = p;
        refused({"dropout_p"});
    }
    SetUp();
    problem.chunk = -3;
    refused({"chunk", "-3"});
    SetUp();
    problem.causal = 2;
    refused({"causal", "2"});
    SetUp();
    problem.backend = "fast_please";
    refused({"backend", "fast_please", "cpu_tiled", "reference"});
    SetUp();
    problem.page_size = 16;
    refused({"page_size", "reserved"});
}

TEST_F(CApi, CumulativeLengths) {
    std::vector<int32_t> cu{0, 3, 2};
    problem.q = tensor(q.data(), TILEWISE_FLOAT32, {5, 4, 8});
    args.o = tensor(o.data(), TILEWISE_FLOAT32, {5, 4, 8});
    args.lse = tensor(lse.data(), TILEWISE_FLOAT32, {4, 5});
    problem.cu_seqlens_q = tensor(cu.data(), TILEWISE_INT32, {3});
    refused({"cu_seqlens_q", "entry 2", "decrease"});
    cu = {0, 3, 6};
    refused({"cu_seqlens_q", "6", "5"});
    cu = {-1, 3, 5};
    refused({"cu_seqlens_q", "-1"});
    cu = {0, 3, 5};
    EXPECT_EQ(tilewise_forward(&problem, &args), TILEWISE_OK) << tilewise_last_error();
}

TEST_F(CApi, LengthsBeyondTheTensor) {
    std::vector<int32_t> used{3, 8};
    problem.seqused_kv = tensor(used.data(), TILEWISE_INT32, {2});
    refused({"seqused_kv", "8", "7"});
    problem.seqused_kv.dtype = TILEWISE_FLOAT32;
    refused({"seqused_kv", "float32"});
}

TEST_F(CApi, MaskAndScoreMod) {
    problem.mask = "nonsense(@0)";
    refused({"nonsense"});
    SetUp();
    problem.mask = "documents(@0,@1)";
    refused({"@0"});
    SetUp();
    std::vector<uint8_t> dense(5 * 6, 1);
    tilewise_tensor array = tensor(dense.data(), TILEWISE_BOOL, {5, 6});
    problem.arrays = &array;
    problem.num_arrays = 1;
    problem.mask = "dense(@0)";
    refused({"dense", "[5, 6]"});
    SetUp();
    problem.causal = 1;
    problem.mask = "prefix(3)";
    refused({"prefix", "causal"});
    SetUp();
    problem.score_mod = "add(x,";
    refused({"score_mod"});
    SetUp();
    problem.mask = "";
    problem.score_mod = "";
    EXPECT_EQ(tilewise_forward(&problem, &args), TILEWISE_OK);
}

TEST_F(CApi, OverlappingOutput) {
    args.o.data = problem.q.data;
    EXPECT_EQ(tilewise_forward(&problem, &args), TILEWISE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(tilewise_last_error()).find("shared with the input q"), std::string::npos)
        << tilewise_last_error();
    // Slots of one fused buffer interleave in memory without sharing elements: that is fine.
    std::vector<float> fused(2 * 5 * 8 * 8, 1.0f);
    const auto slot = [&](int64_t head, int64_t heads) {
        tilewise_tensor t = tensor(fused.data() + head * 8, TILEWISE_FLOAT32, {2, 5, heads, 8});
        t.strides[1] = 64, t.strides[0] = 320;
        return t;
    };
    problem.q = slot(0, 2), problem.k = slot(2, 2), problem.v = slot(4, 2);
    args.o = slot(6, 2);
    args.lse = tensor(lse.data(), TILEWISE_FLOAT32, {2, 2, 5});
    EXPECT_EQ(tilewise_forward(&problem, &args), TILEWISE_OK) << tilewise_last_error();
    EXPECT_EQ(fused[0], 1.0f);
}

TEST_F(CApi, OutputsThatShareMemory) {
    ASSERT_EQ(tilewise_forward(&problem, &args), TILEWISE_OK) << tilewise_last_error();
    std::vector<float> d_o(o.size(), 1.0f), dk(k.size(), -7.0f), dv(v.size(), -7.0f);
    tilewise_backward_args backward;
    tilewise_backward_args_init(&backward);
    backward.d_o = tensor(d_o.data(), TILEWISE_FLOAT32, {2, 5, 4, 8});
    backward.o = args.o, backward.lse = args.lse;
    backward.dk = tensor(dk.data(), TILEWISE_FLOAT32, {2, 7, 2, 8});
    backward.dv = backward.dk;
    EXPECT_EQ(tilewise_backward(&problem, &backward), TILEWISE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(tilewise_last_error()).find("shared with the output dk"), std::string::npos)
        << tilewise_last_error();
    for (const float x : dk) ASSERT_EQ(x, -7.0f);
    backward.dv = tensor(dv.data(), TILEWISE_FLOAT32, {2, 7, 2, 8});
    EXPECT_EQ(tilewise_backward(&problem, &backward), TILEWISE_OK) << tilewise_last_error();
}

TEST_F(CApi, PlanRefusesWhatItWasNotMadeFor) {
    tilewise_plan* plan = nullptr;
    ASSERT_EQ(tilewise_plan_create(&problem, TILEWISE_FORWARD, &plan), TILEWISE_OK) << tilewise_last_error();
    size_t bytes = 0;
    ASSERT_EQ(tilewise_plan_workspace_size(plan, &bytes), TILEWISE_OK);
    EXPECT_GT(tilewise_plan_explain(plan, nullptr, 0), 20u);
    if (bytes > 0) {
        EXPECT_EQ(tilewise_plan_forward(plan, &problem, &args, nullptr, 0, nullptr), TILEWISE_INVALID_ARGUMENT);
        EXPECT_NE(std::string(tilewise_last_error()).find("workspace"), std::string::npos);
    }
    std::vector<char> memory(bytes + 64);
    void* workspace = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64) % 64;
    EXPECT_EQ(tilewise_plan_forward(plan, &problem, &args, workspace, bytes, nullptr), TILEWISE_OK)
        << tilewise_last_error();
    problem.softcap = 3;
    EXPECT_EQ(tilewise_plan_forward(plan, &problem, &args, workspace, bytes, nullptr), TILEWISE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(tilewise_last_error()).find("softcap"), std::string::npos);
    problem.softcap = 0;
    tilewise_backward_args backward;
    tilewise_backward_args_init(&backward);
    EXPECT_EQ(tilewise_plan_backward(plan, &problem, &backward, workspace, bytes, nullptr), TILEWISE_INVALID_ARGUMENT);
    int stream = 0;
    EXPECT_EQ(tilewise_plan_forward(plan, &problem, &args, workspace, bytes, &stream), TILEWISE_INVALID_ARGUMENT);
    tilewise_plan_destroy(plan);
}

TEST_F(CApi, ZeroSizesAreResults) {
    problem.k.shape[1] = problem.v.shape[1] = 0;
    ASSERT_EQ(tilewise_forward(&problem, &args), TILEWISE_OK) << tilewise_last_error();
    for (const float x : o) EXPECT_EQ(x, 0.0f);
    for (const float x : lse) EXPECT_EQ(x, -std::numeric_limits<float>::infinity());
    SetUp();
    problem.q.shape[0] = problem.k.shape[0] = problem.v.shape[0] = args.o.shape[0] = args.lse.shape[0] = 0;
    EXPECT_EQ(tilewise_forward(&problem, &args), TILEWISE_OK) << tilewise_last_error();
}

TEST_F(CApi, MergeIsTheWhole) {
    std::vector<float> parts{1, 2, 3, 4}, lse_parts{0, -std::numeric_limits<float>::infinity()}, merged(2),
        merged_lse(1);
    parts[2] = std::numeric_limits<float>::quiet_NaN();  // of an empty part: must not matter
    tilewise_tensor o_parts = tensor(parts.data(), TILEWISE_FLOAT32, {2, 1, 2}),
                    l = tensor(lse_parts.data(), TILEWISE_FLOAT32, {2, 1});
    tilewise_tensor out = tensor(merged.data(), TILEWISE_FLOAT32, {1, 2}),
                    out_lse = tensor(merged_lse.data(), TILEWISE_FLOAT32, {1});
    ASSERT_EQ(tilewise_merge(&o_parts, &l, &out, &out_lse), TILEWISE_OK) << tilewise_last_error();
    EXPECT_EQ(merged, (std::vector<float>{1, 2}));
    EXPECT_EQ(merged_lse[0], 0.0f);
    out.shape[1] = 3;
    EXPECT_EQ(tilewise_merge(&o_parts, &l, &out, &out_lse), TILEWISE_INVALID_ARGUMENT);
}

}  // namespace
