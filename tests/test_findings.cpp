// What the fuzz targets and the injected failures found, each as a call that went wrong once.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "harness.hpp"

namespace tilewise::test {
namespace {

struct Findings : testing::Test {
    Buffer q{DType::f32, {2, 5, 2, 8}}, k{DType::f32, {2, 7, 2, 8}}, v{DType::f32, {2, 7, 2, 8}},
        o{DType::f32, {2, 5, 2, 8}}, lse{DType::f32, {2, 2, 5}};
    tilewise_problem problem;
    tilewise_forward_args forward;

    Findings() {
        for (Buffer* buffer : {&q, &k, &v}) {
            for (int64_t n = 0; n < buffer->size(); ++n) buffer->set(n, static_cast<double>(n % 5) - 2);
        }
        tilewise_problem_init(&problem);
        problem.q = q.view(), problem.k = k.view(), problem.v = v.view();
        tilewise_forward_args_init(&forward);
        forward.o = o.view(), forward.lse = lse.view();
    }
    static void refused(tilewise_status status, tilewise_status expected, const std::vector<std::string>& parts) {
        EXPECT_EQ(status, expected);
        for (const std::string& part : parts)
            EXPECT_NE(std::string(tilewise_last_error()).find(part), std::string::npos) << tilewise_last_error();
    }
};

// cpu_tiled left it as it was where the problem has no score_mod.
TEST_F(Findings, GradientOfAnArrayThatNothingReadsIsZero) {
    Buffer ids(DType::f64, {3, 4}), gradient(DType::f64, {3, 4}, {1, 0}, 2, 1);
    const tilewise_tensor arrays[] = {ids.view()}, darrays[] = {gradient.view()};
    problem.arrays = arrays, problem.num_arrays = 1;
    tilewise_backward_args backward;
    tilewise_backward_args_init(&backward);
    backward.d_o = q.view(), backward.o = o.view(), backward.lse = lse.view(), backward.darrays = darrays;
    for (const char* backend : {"cpu_tiled", "reference"}) {
        for (const char* score_mod : {"", "mul(x,0.5)"}) {
            problem.backend = backend, problem.score_mod = score_mod;
            gradient.poison();
            ASSERT_EQ(tilewise_forward(&problem, &forward), TILEWISE_OK) << tilewise_last_error();
            ASSERT_EQ(tilewise_backward(&problem, &backward), TILEWISE_OK) << tilewise_last_error();
            for (int64_t n = 0; n < gradient.size(); ++n) ASSERT_EQ(gradient.get(n), 0) << backend << " " << score_mod;
            ASSERT_TRUE(gradient.margins_intact());
        }
    }
}

// Rows that no sequence uses were looked for in an o without memory (seen with UndefinedBehaviorSanitizer).
TEST_F(Findings, UnusedRowsOfAnEmptyOutput) {
    Buffer used(DType::i64, {2}), none_v(DType::f32, {2, 7, 2, 0}), none_o(DType::f32, {2, 5, 2, 0});
    used.set(0, 3), used.set(1, 5);
    problem.backend = "cpu_tiled", problem.seqused_q = used.view(), problem.v = none_v.view();
    forward.o = none_o.view();
    problem.v.data = forward.o.data = nullptr;
    lse.poison();
    ASSERT_EQ(tilewise_forward(&problem, &forward), TILEWISE_OK) << tilewise_last_error();
    for (int64_t row = 0; row < 5; ++row) EXPECT_EQ(std::isinf(lse.get(row)), row >= 3) << row;
}

// i + q_offset overflowed.
TEST_F(Findings, OffsetsThatPositionsCannotBeAddedTo) {
    Buffer offsets(DType::i64, {2});
    offsets.set(0, 3);
    problem.q_offset_mode = TILEWISE_OFFSET_ARRAY, problem.q_offset = offsets.view();
    for (const int64_t value : {INT64_MIN, INT64_MAX, (int64_t{1} << 52) + 1}) {
        static_cast<int64_t*>(problem.q_offset.data)[1] = value;
        refused(tilewise_forward(&problem, &forward), TILEWISE_INVALID_ARGUMENT,
                {"q_offset", "entry 1", std::to_string(value), "2^52"});
    }
    offsets.set(1, 1e15);
    EXPECT_EQ(tilewise_forward(&problem, &forward), TILEWISE_OK) << tilewise_last_error();
}

// float32 has no such numbers: a softcap of 1e300 was infinite, and every score NaN.
TEST_F(Findings, NumbersThatScoresCannotHold) {
    for (const double softcap : {1e300, 1e39, 1e-39, 5e-324}) {
        problem.softcap = softcap;
        refused(tilewise_forward(&problem, &forward), TILEWISE_INVALID_ARGUMENT, {"softcap", "float32", "3.4e38"});
    }
    for (const double softcap : {3e38, 1.2e-38, 0.0}) {
        problem.softcap = softcap;
        ASSERT_EQ(tilewise_forward(&problem, &forward), TILEWISE_OK) << tilewise_last_error();
        for (int64_t n = 0; n < o.size(); ++n) ASSERT_TRUE(std::isfinite(o.get(n))) << softcap;
    }
    problem.has_softmax_scale = 1, problem.softmax_scale = -1e39;
    refused(tilewise_forward(&problem, &forward), TILEWISE_INVALID_ARGUMENT, {"softmax_scale", "float32", "3.4e38"});
}

// The stride of an axis of one is never followed, so it may be anything; it was multiplied.
TEST_F(Findings, StridesOfAxesOfOne) {
    ASSERT_EQ(tilewise_forward(&problem, &forward), TILEWISE_OK) << tilewise_last_error();
    const double usual = o.get(3);
    for (const int64_t stride : {INT64_MAX, INT64_MIN, INT64_MAX / 2}) {
        tilewise_problem one = problem;
        for (tilewise_tensor* t : {&one.q, &one.k, &one.v}) {
            t->shape[0] = t->shape[2] = 1;
            t->strides[0] = t->strides[2] = stride;
        }
        tilewise_forward_args args = forward;
        args.o.shape[0] = args.o.shape[2] = 1, args.o.strides[0] = args.o.strides[2] = stride;
        args.lse.shape[0] = args.lse.shape[1] = 1, args.lse.strides[0] = args.lse.strides[1] = stride;
        ASSERT_EQ(tilewise_forward(&one, &args), TILEWISE_OK) << tilewise_last_error();
        EXPECT_EQ(o.get(3), usual);
        for (tilewise_tensor* t : {&one.q, &one.k, &one.v, &args.o}) t->shape[1] = 1, t->strides[1] = stride;
        args.lse.shape[2] = 1, args.lse.strides[2] = stride;
        EXPECT_EQ(tilewise_forward(&one, &args), TILEWISE_OK) << tilewise_last_error();
    }
}

// Rounding the number of tiles up overflowed.
TEST_F(Findings, TilesOfAnySize) {
    size_t count = 0;
    uint8_t classes[4] = {9, 9, 9, 9};
    ASSERT_EQ(tilewise_mask_tiles(&problem, 0, 0, INT64_MAX, 4, classes, 4, &count), TILEWISE_OK)
        << tilewise_last_error();
    EXPECT_EQ(count, 2u);
    EXPECT_EQ(classes[0], 2);
    EXPECT_EQ(classes[1], 2);
    EXPECT_EQ(classes[2], 9);
}

// With a single query, rows of V are asked for while those of K are read: of a V without memory, too, past its first 64
// bytes (seen with UndefinedBehaviorSanitizer). Without lse there would be nothing to do.
TEST_F(Findings, RowsAheadOfAnEmptyV) {
    Buffer one_q(DType::f32, {2, 1, 2, 32}), wide_k(DType::f32, {2, 7, 2, 32}), one_lse(DType::f32, {2, 2, 1}),
        none_o(DType::f32, {2, 1, 2, 0});
    problem.backend = "cpu_tiled", problem.q = one_q.view(), problem.k = wide_k.view();
    problem.v.data = nullptr, problem.v.shape[3] = 0;
    forward.o = none_o.view(), forward.lse = one_lse.view();
    EXPECT_EQ(tilewise_forward(&problem, &forward), TILEWISE_OK) << tilewise_last_error();
}

// Those that make no plan looked at a problem of any size.
TEST_F(Findings, EveryFunctionLooksAtTheSizeOfAProblem) {
    problem.struct_size = 40;
    size_t count = 0;
    const int64_t zero = 0;
    const std::vector<std::string> parts{"problem.struct_size", "40", std::to_string(sizeof problem)};
    refused(tilewise_mask_tiles(&problem, 0, 0, 8, 8, nullptr, 0, &count), TILEWISE_VERSION_MISMATCH, parts);
    refused(tilewise_attn_probs(&problem, nullptr, &zero, 1, &zero, 1, &o.view()), TILEWISE_VERSION_MISMATCH, parts);
    refused(tilewise_compile(&problem, TILEWISE_FORWARD, "80", "", nullptr, 0, &count), TILEWISE_VERSION_MISMATCH,
            parts);
}

}  // namespace
}  // namespace tilewise::test
