// Tile choices of the Hopper kernels, the text of their products, and what NVRTC makes of both.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "core/problem.hpp"
#include "cuda/compile_ahead.hpp"
#include "jit/cache.hpp"
#include "jit/nvrtc.hpp"
#include "jit/sm90_spec.hpp"
#include "jit/store.hpp"

namespace tilewise {
namespace {

namespace fs = std::filesystem;
using core::Problem;

constexpr int64_t kRows = 2048, kHeads = 8;

tilewise_tensor tensor(int32_t dtype, const std::vector<int64_t>& shape) {
    tilewise_tensor t{};
    t.dtype = dtype, t.rank = static_cast<int32_t>(shape.size());
    int64_t stride = 1;
    for (size_t d = shape.size(); d-- > 0; stride *= shape[d]) t.shape[d] = shape[d], t.strides[d] = stride;
    return t;
}

tilewise_problem problem_of(int64_t head_dim, int64_t head_dim_v, int32_t dtype = TILEWISE_BFLOAT16) {
    tilewise_problem raw;
    tilewise_problem_init(&raw);
    raw.q = raw.k = tensor(dtype, {2, kRows, kHeads, head_dim});
    raw.v = tensor(dtype, {2, kRows, kHeads, head_dim_v});
    raw.device_type = TILEWISE_CUDA;
    return raw;
}

// Tokens of documents: a list of visible tiles stands in shared memory.
struct Documents {
    std::vector<tilewise_tensor> arrays{2, tensor(TILEWISE_INT32, {kRows})};
    void on(tilewise_problem& raw) const {
        raw.mask = "documents(@0,@1)", raw.arrays = arrays.data(), raw.num_arrays = 2;
    }
};

std::optional<jit::Sm90ForwardSpec> spec_of(const tilewise_problem& raw, std::string* why_not = nullptr,
                                            const char* arch = "90") {
    const Problem p = core::make_problem(raw, false);
    return jit::sm90_forward_spec(p, jit::render_mask(p), jit::Arch::parse(arch), why_not);
}

TEST(Sm90Spec, EveryHeadDimHasItsTiles) {
    for (int64_t dim = 8; dim <= 256; dim += 8) {
        for (const int64_t dim_v : {dim, int64_t{8}, int64_t{64}, int64_t{128}, int64_t{192}, int64_t{256}}) {
            for (const bool documents : {false, true}) {
                tilewise_problem raw = problem_of(dim, dim_v);
                const Documents of_tokens;
                if (documents) of_tokens.on(raw);
                std::string why_not;
                const auto spec = spec_of(raw, &why_not);
                ASSERT_TRUE(spec) << dim << " " << dim_v << ": " << why_not;
                SCOPED_TRACE(std::to_string(dim) + " " + std::to_string(dim_v) + (documents ? ", documents: " : ": ") +
                             std::to_string(spec->consumers) + " warpgroups, " + std::to_string(spec->keys) + " keys");
                EXPECT_LE(spec->shared_bytes(), 227 * 1024);
                EXPECT_GE(spec->dims_qk, dim);
                EXPECT_GE(spec->columns, dim_v);
                EXPECT_EQ(spec->dims_qk % 16 + spec->columns % 16 + spec->keys % 16, 0);
                EXPECT_LE(spec->keys, 256);                  // of one wgmma
                EXPECT_GE(spec->keys, documents ? 32 : 64);  // smaller tiles wait more than they compute

                const auto value = [constants = spec->constants()](const char* name) {
                    for (const jit::Constant& each : constants) {
                        if (std::strcmp(each.name, name) == 0) return each.value;
                    }
                    ADD_FAILURE() << "no " << name;
                    return 0;
                };
                EXPECT_EQ(value("kSharedBytes"), spec->shared_bytes());
                EXPECT_EQ(value("kThreads"), 128 * (spec->consumers + 1));
                EXPECT_EQ(value("kSigns"), spec->consumers == 2);
                // All registers of an SM, in the steps of setmaxnreg; and S, P and o have room in a consumer's.
                const int consumer = value("kConsumerRegisters"), producer = value("kProducerRegisters");
                EXPECT_EQ(consumer % 8 + producer % 8, 0);
                EXPECT_GE(producer, 24);
                EXPECT_LE(128 * (spec->consumers * consumer + producer), 65536);
                EXPECT_LT(spec->keys / 2 + spec->keys / 4 + spec->columns / 2, consumer);
            }
        }
    }
}

TEST(Sm90Spec, MasksAreRunTimeValuesAndProductsAreTakenAsTheyAreWithAPositiveScale) {
    tilewise_problem raw = problem_of(128, 128);
    const auto text = [&] {
        const auto spec = spec_of(raw).value();
        return jit::text_of(spec, spec.constants()) + jit::render_mask(core::make_problem(raw, false)).text;
    };
    const std::string full = text();
    EXPECT_TRUE(spec_of(raw)->raw);
    raw.causal = 1;
    EXPECT_EQ(text(), full);
    raw.window_left = 100;
    EXPECT_EQ(text(), full);
    raw.has_softmax_scale = 1;
    for (const double scale : {0.0, -0.1}) {
        raw.softmax_scale = scale;
        EXPECT_FALSE(spec_of(raw)->raw) << scale;
    }
    raw.softmax_scale = 0.1, raw.softcap = 30;
    EXPECT_FALSE(spec_of(raw)->raw);
}

TEST(Sm90Spec, SaysWhyNot) {
    struct Case {
        const char* words;
        std::function<void(tilewise_problem&)> change;
    };
    Documents documents;
    std::string long_mask = "or(chunk(8)";
    for (int n = 0; n < 52; ++n) long_mask += ",window(3,3)";
    long_mask += ")";
    const std::vector<Case> cases = {
        {"dtype float32", [](auto& raw) { raw = problem_of(64, 64, TILEWISE_FLOAT32); }},
        {"head dims 264 and 64", [](auto& raw) { raw = problem_of(264, 64); }},
        {"head dims 64 and 320; at most 256", [](auto& raw) { raw = problem_of(64, 320); }},
        {"a head dim of 0", [](auto& raw) { raw = problem_of(64, 0); }},
        {"a mask of 636 letters; at most 500", [&](auto& raw) { raw.mask = long_mask.c_str(); }},
        {"no bias and no score_mod",
         [](auto& raw) { raw.bias = tensor(TILEWISE_BFLOAT16, {1, kHeads, kRows, kRows}); }},
        {"no bias and no score_mod", [](auto& raw) { raw.score_mod = "mul(x,2)"; }},
        {"lists of visible tiles",
         [&](auto& raw) {
             documents.on(raw);
             raw.k.shape[1] = raw.v.shape[1] = 1 << 20;
             documents.arrays[1].shape[0] = 1 << 20;
         }},
        {"2^30", [](auto& raw) { raw.k.shape[1] = raw.v.shape[1] = int64_t{1} << 30; }},
        {"nothing to do", [](auto& raw) { raw.k.shape[1] = raw.v.shape[1] = 0; }},
        {"nothing to do", [](auto& raw) { raw.q.shape[0] = raw.k.shape[0] = raw.v.shape[0] = 0; }},
        // What the copy engine does not take.
        {"multiples of 16 bytes", [](auto& raw) { raw.q.strides[1] += 4; }},
        {"multiples of 16 bytes", [](auto& raw) { raw.k.strides[3] = 2; }},
        // NOLINTNEXTLINE(performance-no-int-to-ptr)
        {"multiples of 16 bytes", [](auto& raw) { raw.v.data = reinterpret_cast<void*>(uintptr_t{8}); }},
        {"multiples of 16 bytes", [](auto& raw) { raw = problem_of(20, 64); }},
        {"multiples of 16 bytes", [](auto& raw) { raw.k.strides[2] = 0; }},
        {"multiples of 16 bytes", [](auto& raw) { raw.v.strides[1] = -raw.v.strides[1]; }},
        {"multiples of 16 bytes", [](auto& raw) { raw.q.strides[0] = int64_t{1} << 38; }},
    };
    for (const Case& each : cases) {
        tilewise_problem raw = problem_of(64, 64);
        each.change(raw);
        std::string why_not = "it is taken";
        EXPECT_FALSE(spec_of(raw, &why_not)) << each.words;
        EXPECT_NE(why_not.find(each.words), std::string::npos) << each.words << " is not in: " << why_not;
    }
    for (const char* arch : {"75", "80", "89", "100", "120"}) {
        std::string why_not = "it is taken";
        EXPECT_FALSE(spec_of(problem_of(64, 64), &why_not, arch));
        EXPECT_NE(why_not.find("sm_90 alone"), std::string::npos) << arch << ": " << why_not;
    }
}

TEST(Sm90Spec, TakesWhatOnlyLooksLikeIt) {
    const Documents documents;
    const std::vector<std::function<void(tilewise_problem&)>> changes = {
        [](auto& raw) { raw.mask = "and(window(3,3),chunk(8))"; },
        [](auto& raw) { raw.chunk = 100, raw.causal = 1; },
        [](auto& raw) { raw.q_offset_mode = TILEWISE_OFFSET_VALUE, raw.q_offset_value = -3; },
        [](auto& raw) { raw.layout = TILEWISE_BHSD; },
        [&](auto& raw) { documents.on(raw); },
        [&](auto& raw) { raw.seqused_kv = raw.leftpad_kv = tensor(TILEWISE_INT32, {2}); },
        [](auto& raw) { raw.batch_invariant = 1; },
        [](auto& raw) { raw.alibi_slopes = tensor(TILEWISE_FLOAT32, {kHeads}); },
        [](auto& raw) { raw.sinks = tensor(TILEWISE_BFLOAT16, {kHeads}); },
        [](auto& raw) { raw.dropout_p = 0.5, raw.deterministic = 1; },
        // The distance between the only head and the next one is nobody's.
        [](auto& raw) {
            for (tilewise_tensor* t : {&raw.q, &raw.k, &raw.v}) t->shape[2] = 1, t->strides[2] = 0;
        },
        [](auto& raw) {
            for (tilewise_tensor* t : {&raw.q, &raw.k, &raw.v}) t->shape[0] = 1, t->strides[0] = 0;
        },
    };
    for (size_t n = 0; n < changes.size(); ++n) {
        tilewise_problem raw = problem_of(64, 64);
        changes[n](raw);
        std::string why_not;
        EXPECT_TRUE(spec_of(raw, &why_not)) << "number " << n << ": " << why_not;
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The text of the products

int count(const std::string& text, const std::string& part) {
    int n = 0;
    for (size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + part.size())) ++n;
    return n;
}
std::string between(const std::string& text, const std::string& from, const std::string& to) {
    const size_t begin = text.find(from);
    if (begin == std::string::npos) return "";
    return text.substr(begin, text.find(to, begin) - begin);
}
std::string registers(int from, int count) {
    std::string text;
    for (int n = from; n < from + count; ++n) text += (n > from ? ", %" : "{%") + std::to_string(n);
    return text + "}";
}

TEST(Sm90Spec, ProductsNameAsManyRegistersAsTheirShapesHave) {
    for (const auto& [dim, dim_v] : std::vector<std::pair<int64_t, int64_t>>{
             {16, 16}, {64, 64}, {80, 80}, {128, 128}, {192, 128}, {64, 256}, {256, 256}}) {
        for (const int32_t dtype : {TILEWISE_BFLOAT16, TILEWISE_FLOAT16}) {
            const jit::Sm90ForwardSpec spec = spec_of(problem_of(dim, dim_v, dtype)).value();
            SCOPED_TRACE(std::to_string(dim) + " " + std::to_string(dim_v));
            const std::string text = jit::render_wgmma(spec.dtype, spec.constants());
            const std::string types = dtype == TILEWISE_BFLOAT16 ? ".f32.bf16.bf16 " : ".f32.f16.f16 ";
            const int scores = spec.keys / 2, sums = spec.columns / 2, words = spec.keys / 4;

            // S: 64 queries x keys, one instruction for 16 numbers of the head dim. Then two descriptors.
            const std::string s = between(text, "void start_score_product", "\n}\n");
            EXPECT_EQ(count(s, "wgmma."), spec.dims_qk / 16);
            EXPECT_EQ(count(s, "m64n" + std::to_string(spec.keys) + "k16" + types + registers(0, scores) +
                                   ", q, k, sum, 1, 1, 0, 0;"),
                      spec.dims_qk / 16);
            EXPECT_EQ(count(s, "\"+f\"("), scores);
            EXPECT_EQ(count(s, "add.s64 q, %" + std::to_string(scores) + ","), spec.dims_qk / 16);
            EXPECT_EQ(count(s, "add.s64 k, %" + std::to_string(scores + 1) + ","), spec.dims_qk / 16);
            EXPECT_EQ(count(s, "\"l\"("), 2);
            // The first instruction overwrites, the others add.
            EXPECT_EQ(count(between(s, "{", "wgmma."), "setp.eq"), 0);
            EXPECT_EQ(count(s, "setp.eq"), spec.dims_qk > 16 ? 1 : 0);

            // o: 64 queries x columns, one instruction for 16 keys, with P in registers.
            const std::string o = between(text, "void start_output_product", "\n}\n");
            EXPECT_EQ(count(o, "m64n" + std::to_string(spec.columns) + "k16" + types + registers(0, sums) + ", {"),
                      spec.keys / 16);
            for (int j = 0; j < spec.keys / 16; ++j)
                EXPECT_EQ(count(o, registers(sums + 4 * j, 4) + ", v, sum, 1, 1, 1;"), 1) << j;
            EXPECT_EQ(count(o, "\"+f\"("), sums);
            EXPECT_EQ(count(o, "\"r\"("), words);
            EXPECT_EQ(count(o, "add.s64 v, %" + std::to_string(sums + words) + ","), spec.keys / 16);
            EXPECT_EQ(count(o, "\"l\"("), 1);

            // One type if both have one shape, and then one function.
            const std::string real = text.substr(0, text.find("#else"));
            EXPECT_EQ(count(real, "void hold("), spec.keys == spec.columns ? 1 : 2);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// NVRTC

// Where ./dev puts it.
std::vector<std::string> pip_folders() {
    std::vector<std::string> folders;
    std::error_code ignored;
    const fs::path venv = fs::path(__FILE__).parent_path().parent_path() / ".venv/lib";
    for (const auto& python : fs::directory_iterator(venv, ignored)) {
        for (const auto& package : fs::directory_iterator(python.path() / "site-packages/nvidia", ignored))
            folders.push_back((package.path() / "lib").string());
    }
    return folders;
}

class Sm90Compiler : public ::testing::TestWithParam<int64_t> {
protected:
    void SetUp() override {
        jit::set_search_path(pip_folders());
        if (jit::find_nvrtc(0) == nullptr) GTEST_SKIP() << "no NVRTC here: pip install nvidia-cuda-nvrtc";
        std::string name = (fs::temp_directory_path() / "tilewise-test-XXXXXX").string();
        ASSERT_NE(mkdtemp(name.data()), nullptr);
        folder_ = name;
    }
    void TearDown() override {
        jit::set_search_path({});
        if (!folder_.empty()) fs::remove_all(folder_);
    }

    void expect_clean(const tilewise_problem& raw) {
        const Problem p = core::make_problem(raw, false);
        const jit::MaskProgram mask = jit::render_mask(p);
        std::string why_not;
        const auto spec = jit::sm90_forward_spec(p, mask, {9, 0, false}, &why_not);
        ASSERT_TRUE(spec) << why_not;
        const jit::Source source = jit::attention_source("fwd_sm90.cu", *spec, spec->constants(), p, mask);
        EXPECT_TRUE(source.arch_specific);
        const jit::Compiled compiled = jit::compile_ahead(source, {9, 0, false}, false, 0, folder_);
        EXPECT_NE(compiled.image.about.find("sm_90a"), std::string::npos) << compiled.image.about;
        const cuda::CompilerLog log = cuda::parse_log(compiled.image.log);
        ASSERT_EQ(log.kernels.size(), 1u) << compiled.image.log;
        const cuda::KernelResources& kernel = log.kernels[0];
        EXPECT_EQ(kernel.entry, "fwd_sm90");
        EXPECT_EQ(kernel.spill_store_bytes + kernel.spill_load_bytes, 0) << compiled.image.log;
        EXPECT_EQ(kernel.stack_bytes + kernel.local_bytes, 0) << compiled.image.log;
        EXPECT_EQ(compiled.image.log.find("serialized"), std::string::npos) << compiled.image.log;
        EXPECT_EQ(compiled.image.log.find("setmaxnreg"), std::string::npos) << "ignored: " << compiled.image.log;
    }

    std::string folder_;
};

TEST_P(Sm90Compiler, Plain) { expect_clean(problem_of(GetParam(), GetParam())); }  // causal or full: one kernel

TEST_P(Sm90Compiler, AllOptions) {
    tilewise_problem raw = problem_of(GetParam(), GetParam());
    raw.causal = 1, raw.softcap = 30, raw.dropout_p = 0.1;
    raw.alibi_slopes = tensor(TILEWISE_FLOAT32, {kHeads}), raw.sinks = tensor(TILEWISE_FLOAT32, {kHeads});
    expect_clean(raw);
}

TEST_P(Sm90Compiler, OtherMasks) {
    tilewise_problem raw = problem_of(GetParam(), GetParam());
    const tilewise_tensor keep = tensor(TILEWISE_BOOL, {kRows});
    raw.arrays = &keep, raw.num_arrays = 1;
    for (const char* mask : {"and(prefix(100),key_padding(@0))", "mod(or(lt(mod(add(i,j),7),3),eq(h,1)))"}) {
        SCOPED_TRACE(mask);
        raw.mask = mask;
        expect_clean(raw);
    }
}

INSTANTIATE_TEST_SUITE_P(HeadDims, Sm90Compiler, ::testing::Values(64, 96, 128, 192, 256),
                         [](const auto& dim) { return "d" + std::to_string(dim.param); });

}  // namespace
}  // namespace tilewise
